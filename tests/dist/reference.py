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

Notation: S = ranks = EP * ETP, rank = EP rank * ETP + ETP rank; T_r = tokens of rank r, H = hidden
size, E = experts, L = E / EP = local experts, N_r = rows that the experts of rank r receive.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The pairs that the experts of one rank receive, in stock's order.

    Attributes:
        source: [N_r] the rank that each token comes from.
        token: [N_r] its position among that rank's tokens.
        expert: [N_r] the expert that takes it, numbered over all ranks.
        tokens_per_expert: [L] rows of each local expert.
    """

    source: torch.Tensor
    token: torch.Tensor
    expert: torch.Tensor
    tokens_per_expert: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertInputs:
    """What the experts of one rank receive.

    Attributes:
        rows: [N_r, H].
        probs: [N_r].
        tokens_per_expert: [L] int64.
    """

    rows: torch.Tensor
    probs: torch.Tensor
    tokens_per_expert: torch.Tensor


def arrivals(routing_maps: Sequence[torch.Tensor], ep: int, etp: int) -> list[Arrivals]:
    """The pairs that each rank's experts receive, by local expert, ETP rank, EP rank, token.

    The ETP ranks of an EP rank hold parts of the same experts, so all receive the same rows.

    Args:
        routing_maps: per rank [T_r, E] bool.
        ep: expert parallel size.
        etp: expert tensor parallel size.
    """
    assert len(routing_maps) == ep * etp, "not one map per rank"
    num_local_experts = routing_maps[0].shape[1] // ep
    # All tokens, by ETP rank, EP rank, token.
    order = [ep_rank * etp + etp_rank for etp_rank in range(etp) for ep_rank in range(ep)]
    counts = torch.tensor([len(routing_maps[source]) for source in order])
    source_of = torch.tensor(order).repeat_interleave(counts)
    token_of = torch.cat([torch.arange(count) for count in counts.tolist()])
    routed = torch.cat([routing_maps[source] for source in order])

    by_rank = []
    for rank in range(ep * etp):
        first_expert = rank // etp * num_local_experts
        # [sum T, E] -> [L, sum T] -> the pairs by expert, then in the order of the tokens
        local = routed[:, first_expert : first_expert + num_local_experts].T
        expert, place = local.nonzero(as_tuple=True)
        by_rank.append(
            Arrivals(
                source=source_of[place],
                token=token_of[place],
                expert=first_expert + expert,
                tokens_per_expert=local.sum(dim=1),
            )
        )
    return by_rank


def dispatch(
    tokens: Sequence[torch.Tensor],
    routing_maps: Sequence[torch.Tensor],
    probs: Sequence[torch.Tensor],
    ep: int,
    etp: int,
) -> list[ExpertInputs]:
    """What each rank's experts receive.

    Args:
        tokens: per rank [T_r, H].
        routing_maps: per rank [T_r, E] bool.
        probs: per rank [T_r, E].
        ep: expert parallel size.
        etp: expert tensor parallel size.

    Returns:
        per rank its rows [N_r, H] and probabilities [N_r], in the dtypes of the inputs, since they
        only move.
    """
    starts = _starts(routing_maps)
    all_tokens, all_probs = torch.cat(list(tokens)), torch.cat(list(probs))
    inputs = []
    for arrived in arrivals(routing_maps, ep, etp):
        token = starts[arrived.source] + arrived.token
        inputs.append(
            ExpertInputs(
                rows=all_tokens[token],
                probs=all_probs[token, arrived.expert],
                tokens_per_expert=arrived.tokens_per_expert,
            )
        )
    return inputs


def combine(
    expert_rows: Sequence[torch.Tensor], routing_maps: Sequence[torch.Tensor], ep: int, etp: int
) -> list[torch.Tensor]:
    """Sum the experts' outputs of each token: also the gradient of dispatch for the tokens.

    Args:
        expert_rows: per rank [N_r, H] in the order of `arrivals`; on each ETP rank its part.
        routing_maps: per rank [T_r, E] bool.
        ep: expert parallel size.
        etp: expert tensor parallel size.

    Returns:
        per rank [T_r, H] fp64; zero for a token that went to no expert.
    """
    starts = _starts(routing_maps)
    num_tokens = [routing_map.shape[0] for routing_map in routing_maps]
    total = torch.zeros(sum(num_tokens), expert_rows[0].shape[1], dtype=torch.float64)
    for rows, arrived in zip(expert_rows, arrivals(routing_maps, ep, etp), strict=True):
        total.index_add_(0, starts[arrived.source] + arrived.token, rows.double())
    return list(total.split(num_tokens))


def combine_probs(
    expert_probs: Sequence[torch.Tensor], routing_maps: Sequence[torch.Tensor], ep: int, etp: int
) -> list[torch.Tensor]:
    """The gradient of dispatch for the probabilities: a permutation, summed over ETP only.

    Args:
        expert_probs: per rank [N_r], the gradients of what `dispatch` returned.
        routing_maps: per rank [T_r, E] bool.
        ep: expert parallel size.
        etp: expert tensor parallel size.

    Returns:
        per rank [T_r, E] fp64; zero where a token was not routed.
    """
    gradients = [
        torch.zeros(routing_map.shape, dtype=torch.float64) for routing_map in routing_maps
    ]
    for probs, arrived in zip(expert_probs, arrivals(routing_maps, ep, etp), strict=True):
        for source, gradient in enumerate(gradients):
            here = arrived.source == source
            gradient[arrived.token[here], arrived.expert[here]] += probs[here].double()
    return gradients


def _starts(routing_maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """[S] the first token of each rank when all ranks' tokens lie one after the other."""
    num_tokens = torch.tensor([routing_map.shape[0] for routing_map in routing_maps])
    return num_tokens.cumsum(0) - num_tokens
