"""Slow, obvious dispatch and combine: what every chain is tested against.

Nothing here communicates and nothing knows of chains: each function takes the data of all ranks
at once. Dispatch is a 0/1 matrix on tokens, one row for each pair that a rank's experts receive;
combine is its transpose; the backward pass of each is the other. Sums are fp64.

Hand-worked: EP 2, ETP 1, one expert per rank (expert 0 on rank 0, expert 1 on rank 1); rank 0 has
the tokens a, b, rank 1 has c.

    routing     a -> 0, 1     b -> 1     c -> 0
    rank 0      expert 0 receives [a c]          tokens_per_expert [2]
    rank 1      expert 1 receives [a b]          tokens_per_expert [2]
    combine     of the outputs [a0 c0] and [a1 b1]: rank 0 gets [a0 + a1, b1], rank 1 gets [c0]

With ETP 2 instead of EP 2 (experts 0 and 1 in halves on both ranks) both ranks receive
[a c | a b], and each sum runs over both halves.

Notation: S = ranks = EP * ETP, rank = EP rank * ETP + ETP rank; T_r = tokens of rank r, T = tokens
of all ranks, one rank's after the other's, H = hidden size, E = experts, L = E / EP = local
experts, N_r = rows that the experts of rank r receive. Every function takes per rank:

    routing_maps    [T_r, E] bool
    tokens, probs   [T_r, H] and [T_r, E]
    rows, row_probs [N_r, H] and [N_r], in the order of `arrivals`; on each ETP rank its part
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PerRank = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The pairs that the experts of one rank receive, in stock's order.

    Attributes:
        token: [N_r] which of all T tokens comes.
        expert: [N_r] the expert that takes it, numbered over all ranks.
        tokens_per_expert: [L] rows of each local expert.
    """

    token: torch.Tensor
    expert: torch.Tensor
    tokens_per_expert: torch.Tensor


def arrivals(routing_maps: PerRank, ep: int, etp: int) -> list[Arrivals]:
    """The pairs that each rank's experts receive, by local expert, ETP rank, EP rank, token.

    The ETP ranks of an EP rank hold parts of the same experts, so all receive the same rows.
    """
    assert len(routing_maps) == ep * etp, "not one map per rank"
    num_local_experts = routing_maps[0].shape[1] // ep
    tokens_of = torch.arange(sum(map(len, routing_maps))).split([*map(len, routing_maps)])
    # All tokens, by ETP rank, EP rank, token.
    order = torch.cat([each for etp_rank in range(etp) for each in tokens_of[etp_rank::etp]])
    routed = torch.cat(list(routing_maps))[order]

    by_rank = []
    for rank in range(ep * etp):
        first_expert = rank // etp * num_local_experts
        # [T, E] -> [L, T] -> the pairs by expert, then in the order of the tokens
        local = routed[:, first_expert : first_expert + num_local_experts].T
        expert, place = local.nonzero(as_tuple=True)
        by_rank.append(
            Arrivals(
                token=order[place],
                expert=first_expert + expert,
                tokens_per_expert=local.sum(dim=1),
            )
        )
    return by_rank


def dispatch(tokens: PerRank, routing_maps: PerRank, ep: int, etp: int) -> list[torch.Tensor]:
    """Per rank the rows [N_r, H] that its experts receive."""
    return [torch.cat(list(tokens))[each.token] for each in arrivals(routing_maps, ep, etp)]


def dispatch_probs(probs: PerRank, routing_maps: PerRank, ep: int, etp: int) -> list[torch.Tensor]:
    """Per rank the probabilities [N_r] of those rows."""
    return [
        torch.cat(list(probs))[each.token, each.expert] for each in arrivals(routing_maps, ep, etp)
    ]


def combine(rows: PerRank, routing_maps: PerRank, ep: int, etp: int) -> list[torch.Tensor]:
    """Sum the experts' outputs of each token: also the gradient of dispatch for the tokens.

    Returns:
        per rank [T_r, H] fp64; zero for a token that went to no expert.
    """
    num_tokens = [len(each) for each in routing_maps]
    total = torch.zeros(sum(num_tokens), rows[0].shape[1], dtype=torch.float64)
    for values, each in zip(rows, arrivals(routing_maps, ep, etp), strict=True):
        total.index_add_(0, each.token, values.double())
    return list(total.split(num_tokens))


def combine_probs(
    row_probs: PerRank, routing_maps: PerRank, ep: int, etp: int
) -> list[torch.Tensor]:
    """The gradient of dispatch for the probabilities: a permutation, summed over ETP only.

    Returns:
        per rank [T_r, E] fp64; zero where a token was not routed.
    """
    num_tokens = [len(each) for each in routing_maps]
    total = torch.zeros(sum(num_tokens), routing_maps[0].shape[1], dtype=torch.float64)
    for values, each in zip(row_probs, arrivals(routing_maps, ep, etp), strict=True):
        # No pair comes twice to a rank.
        total[each.token, each.expert] += values.double()
    return list(total.split(num_tokens))
