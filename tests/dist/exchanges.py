"""Functions that run on the ranks of a pool: the exchange alone, without Megatron.

A `Case` is plain data, and every rank regenerates the data of all ranks from it, so that each can
compute what it should receive with `reference` and without communication. Where the world is
larger than a case's exchange, several exchanges of the same shape run side by side on data of
their own.

Notation: S = ranks of the exchange, T = tokens of a rank, H = hidden size, E = experts, L = local
experts, W = length of the lists, N = pairs or expert rows, C = chunks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import reference
import torch
import torch.distributed as dist
from equal import difference
from fake_world import bound_exchange

from monta_megatron.chains import CHAINS, Counts, TokenCounts
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import PeerGroup, peer_groups
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor

C = TypeVar("C")

ROUTINGS = (
    "uniform",
    "skewed",
    "expert0_empty",
    "one_expert",
    "one_rank",
    "limited",
    "capacity",
    "any_number",
    "every_expert",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One exchange and its data.

    `routing`: "uniform" is top-k at random; "skewed" prefers the first experts;
    "expert0_empty" spares the first, if it can; "one_expert" is the last expert alone; "one_rank"
    is the last EP rank alone; "limited" is one or two EP ranks per token; "capacity" drops pairs,
    so that some tokens have fewer experts or none; "any_number" is 0 to E experts per token;
    "every_expert" is all of them.
    """

    chain: str
    ep: int = 4
    etp: int = 1
    ranks_per_node: int = 2
    num_local_experts: int = 2
    topk: int = 2
    tokens: tuple[int, ...] = (12, 12, 12, 12)
    hidden: int = 8
    dtype: str = "float32"
    probs_dtype: str = "float32"
    routing: str = "uniform"
    num_chunks: int = 1
    num_blocks: int = 1
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """EP, ETP and ranks per node."""
        return self.ep, self.etp, self.ranks_per_node

    @property
    def size(self) -> int:
        """S."""
        return self.ep * self.etp

    @property
    def num_experts(self) -> int:
        """E."""
        return self.ep * self.num_local_experts

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the rows."""
        return getattr(torch, self.dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of the sums, as the dispatcher chooses it."""
        if CHAINS[self.chain].rows == "tokens":
            return torch.float32
        return torch.promote_types(getattr(torch, self.probs_dtype), torch.float32)

    def layout(self, rank: int) -> Layout:
        """The place of one rank of the exchange."""
        return Layout(
            ep=self.ep,
            etp=self.etp,
            num_local_experts=self.num_local_experts,
            rank=rank,
            nodes=tuple(peer // self.ranks_per_node for peer in range(self.size)),
        )


@dataclass(frozen=True, kw_only=True)
class Data:
    """What goes in, of all ranks of an exchange.

    Attributes:
        tokens: per rank [T, H].
        routing_maps: per rank [T, E] bool.
        probs: per rank [T, E].
        expert_rows: per rank [N, H], what the experts hand back in either direction.
        expert_probs: per rank [N], gradients of the experts' probabilities.
        gradients: per rank [T, H], of the output.
    """

    tokens: list[torch.Tensor]
    routing_maps: list[torch.Tensor]
    probs: list[torch.Tensor]
    expert_rows: list[torch.Tensor]
    expert_probs: list[torch.Tensor]
    gradients: list[torch.Tensor]


def make_data(case: Case, exchange_index: int = 0) -> Data:
    """The data of all ranks: the same wherever it is made."""
    generator = torch.Generator().manual_seed(2 * case.seed + exchange_index)
    probs_dtype = getattr(torch, case.probs_dtype)
    counts = [case.tokens[rank % len(case.tokens)] for rank in range(case.size)]
    routing_maps = [make_routing(case, count, generator) for count in counts]
    rows = [
        int(arrived.tokens_per_expert.sum())
        for arrived in reference.arrivals(routing_maps, case.ep, case.etp)
    ]

    def normal(count: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)

    return Data(
        tokens=[normal(count, case.torch_dtype, case.hidden) for count in counts],
        routing_maps=routing_maps,
        probs=[normal(count, probs_dtype, case.num_experts) for count in counts],
        expert_rows=[normal(count, case.torch_dtype, case.hidden) for count in rows],
        expert_probs=[normal(count, probs_dtype) for count in rows],
        gradients=[normal(count, case.torch_dtype, case.hidden) for count in counts],
    )


def make_routing(case: Case, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[T, E] bool for one rank; see `Case`."""
    num_experts, num_local_experts = case.num_experts, case.num_local_experts
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk = min(case.topk, num_experts)
    if case.routing == "every_expert":
        return torch.ones(num_tokens, num_experts, dtype=torch.bool)
    if case.routing == "any_number":
        density = torch.rand(num_tokens, 1, generator=generator)
        return scores < density * density
    if case.routing == "skewed":
        scores += 2 * torch.exp(-torch.arange(num_experts) * 4 / num_experts)
    if case.routing == "expert0_empty":
        scores[:, 0] = -1.0
    if case.routing == "one_expert":
        topk = 1
        scores[:, -1] = 2.0
    if case.routing == "one_rank":
        topk = min(topk, num_local_experts)
        scores[:, -num_local_experts:] += 1.0
    if case.routing == "limited":
        topk = min(topk, num_local_experts)
        # Each token's one or two EP ranks.
        homes = torch.randint(case.ep, (num_tokens, 2), generator=generator)
        owner = torch.arange(num_experts) // num_local_experts
        scores += (owner[None, None] == homes[:, :, None]).any(dim=1)
    chosen = scores.topk(topk, dim=1).indices
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, chosen, True)
    if case.routing == "capacity":
        capacity = max(num_tokens * topk // (2 * num_experts), 1)
        return routing_map & (routing_map.cumsum(dim=0) <= capacity)
    return routing_map


# Kept, not made anew: every Gloo group has threads of its own, which nothing ends before the
# process does.
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _group_of(ranks: range) -> dist.ProcessGroup:
    key = tuple(ranks)
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _groups[key]


@cache
def find_groups(
    chain: str, ep: int, etp: int, ranks_per_node: int
) -> tuple[int, int, dist.ProcessGroup, dict[str, PeerGroup]]:
    """This rank's exchange of that shape.

    Returns:
        which of the exchanges side by side it is in, its position there, the group of the whole
        exchange, and the groups of the chain's stages.
    """
    case = Case(chain=chain, ep=ep, etp=etp, ranks_per_node=ranks_per_node)
    exchange_index, rank = divmod(dist.get_rank(), case.size)
    first = exchange_index * case.size
    ep_rank, etp_rank = divmod(rank, etp)
    whole = _group_of(range(first, first + case.size))
    groups = peer_groups(
        (CHAINS[chain],),
        case.layout(rank),
        {
            "ep": _group_of(range(first + etp_rank, first + case.size, etp)),
            "etp": _group_of(range(first + ep_rank * etp, first + (ep_rank + 1) * etp)),
            "tp_ep": whole,
        },
    )
    return exchange_index, rank, whole, groups


@dataclass(frozen=True, kw_only=True)
class Source:
    """One rank's side of the tokens: what a chain takes there, and back from it to tokens.

    Attributes:
        exchange: bound to the counts of the case.
        counts: those counts.
        rank: this rank's position in the exchange.
        token: [N] the token of each source row; 0, 1, ... where rows are tokens.
        expert: [N] the expert of each pair, or [T, W] the list of each token, filled up with E.
        probs: [N] or [T, W].
    """

    exchange: Exchange
    counts: Counts | TokenCounts
    rank: int
    token: torch.Tensor
    expert: torch.Tensor
    probs: torch.Tensor

    @property
    def has_lists(self) -> bool:
        """Whether rows are tokens."""
        return self.expert.dim() == 2

    @property
    def ids(self) -> torch.Tensor | None:
        """The lists as `dispatch` takes them."""
        return self.expert if self.has_lists else None

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [N, H]: Megatron's permute, or the tokens themselves."""
        return tokens[self.token]

    def sum_of_rows(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[N, H] -> [T, H]: pairs are added in the order of their experts and rounded once."""
        if self.has_lists:
            return rows
        total = torch.zeros(num_tokens, rows.shape[1], dtype=self.exchange.sum_dtype)
        for expert in self.expert.unique():
            here = self.expert == expert
            total[self.token[here]] += rows[here].to(total.dtype)
        return total.to(rows.dtype)

    def dense_probs(self, probs: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
        """[N] or [T, W] -> [T, E]."""
        dense = probs.new_zeros(num_tokens, num_experts + 1)
        if self.has_lists:
            dense.scatter_(1, self.expert.long(), probs)
        else:
            dense[self.token, self.expert] = probs
        return dense[:, :num_experts]


def make_source(
    case: Case, data: Data, place: tuple[int, dict[str, PeerGroup]] | None = None
) -> Source:
    """A rank's exchange, bound, and its input; as the dispatcher makes it.

    Args:
        case: the case.
        data: of all ranks.
        place: the rank and its groups; None for this process's.
    """
    if place is None:
        _, rank, _, groups = find_groups(case.chain, *case.shape)
    else:
        rank, groups = place
    chain, layout = CHAINS[case.chain], case.layout(rank)
    routing_map, probs = data.routing_maps[rank], data.probs[rank]
    num_tokens, num_experts = routing_map.shape

    exchange, counts = bound_exchange(
        chain,
        layout,
        data.routing_maps,
        case.num_chunks,
        case.num_blocks,
        groups=groups,
        sum_dtype=case.sum_dtype,
    )
    if chain.rows == "permuted tokens":
        # Megatron's permutation: [E, T] in order.
        expert, token = routing_map.T.nonzero(as_tuple=True)
        row_probs = probs[token, expert]
    else:
        token = torch.arange(num_tokens)
        descending = torch.arange(num_experts, 0, -1, dtype=torch.int32)
        scores = (routing_map * descending).topk(exchange.max_experts_per_token, dim=1).values
        expert = num_experts - scores
        row_probs = probs.gather(1, expert.clamp(max=num_experts - 1).long()) * (scores > 0)

    return Source(
        exchange=exchange, counts=counts, rank=rank, token=token, expert=expert, probs=row_probs
    )


def run_passes(
    case: Case, data: Data, ended: Callable[[str, Monitor], None] = lambda name, monitor: None
) -> dict[str, torch.Tensor]:
    """All four passes of one exchange; `ended` is called behind each.

    Returns:
        "expert_rows", "expert_probs" and "tokens_per_expert" of dispatch; "token_gradient" [T, H]
        and "prob_gradient" [T, E] of its backward pass; "output" [T, H] of combine, and
        "expert_gradient" [N, H] of its backward pass.
    """
    source = make_source(case, data)
    rank, exchange = source.rank, source.exchange
    num_tokens = data.tokens[rank].shape[0]

    rows = source.rows(data.tokens[rank]).requires_grad_()
    probs = source.probs.clone().requires_grad_()
    expert_rows, expert_probs = dispatch(exchange, rows, probs, source.ids)
    ended("dispatch", exchange.monitor)
    torch.autograd.backward(
        [expert_rows, expert_probs], [data.expert_rows[rank], data.expert_probs[rank]]
    )
    ended("dispatch_backward", exchange.monitor)
    assert rows.grad is not None and probs.grad is not None

    outputs = data.expert_rows[rank].clone().requires_grad_()
    combined = combine(exchange, outputs)
    ended("combine", exchange.monitor)
    torch.autograd.backward(combined, source.rows(data.gradients[rank]))
    ended("combine_backward", exchange.monitor)
    assert outputs.grad is not None
    return {
        "expert_rows": expert_rows.detach(),
        "expert_probs": expert_probs.detach(),
        "tokens_per_expert": torch.from_numpy(exchange.bound_chain.rows_per_local_expert),
        "token_gradient": source.sum_of_rows(rows.grad, num_tokens),
        "prob_gradient": source.dense_probs(probs.grad, num_tokens, case.num_experts),
        "output": source.sum_of_rows(combined.detach(), num_tokens),
        "expert_gradient": outputs.grad,
    }


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """What nobody writes is NaN (bytes: 255, a NaN in every float), so that it is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(case: Case) -> list[str]:
    """Our four passes against the reference: what differs, one line each."""
    exchange_index, rank, _, _ = find_groups(case.chain, *case.shape)
    data = make_data(case, exchange_index)
    with uninitialised_memory_is_nan():
        ours = run_passes(case, data)
    shape = data.routing_maps, case.ep, case.etp

    # Step 1: what only moves is equal to the bit.
    exact = {
        "expert_rows": reference.dispatch(data.tokens, *shape)[rank],
        "expert_probs": reference.dispatch_probs(data.probs, *shape)[rank],
        "tokens_per_expert": reference.arrivals(*shape)[rank].tokens_per_expert,
        "expert_gradient": reference.dispatch(data.gradients, *shape)[rank],
    }
    mismatches = [(name, difference(ours[name], expected)) for name, expected in exact.items()]

    # Step 2: sums are within their roundings.
    # The sum of each entry's terms, and of their absolute values.
    total, magnitude = (
        reference.combine(rows, *shape)[rank]
        for rows in (data.expert_rows, [rows.abs() for rows in data.expert_rows])
    )
    prob_total, prob_magnitude = (
        reference.combine_probs(probs, *shape)[rank]
        for probs in (data.expert_probs, [probs.abs() for probs in data.expert_probs])
    )
    for name, expected, largest in (
        ("output", total, magnitude),
        ("token_gradient", total, magnitude),
        ("prob_gradient", prob_total, prob_magnitude),
    ):
        bound = rounding_bound(case, ours[name], largest)
        mismatches.append((name, difference(ours[name], expected, bound)))
    where = f"rank {rank} of exchange {exchange_index}"
    return [f"{where}: {name}: {line}" for name, line in mismatches if line is not None]


def rounding_bound(case: Case, result: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """The most that rounding can do to a sum whose terms have absolute values of that sum.

    Every partial sum is at most `magnitude`, and a rounding moves it by at most half an eps. A
    partial sum is rounded to the wire's dtype at most 4 times (experts, node, rail; or ETP, then
    experts), and each addition rounds once in the sum's dtype.
    """
    num_terms = case.num_experts * case.etp
    sum_dtype = torch.promote_types(case.sum_dtype, result.dtype)
    units = 4 * torch.finfo(result.dtype).eps / 2 + num_terms * torch.finfo(sum_dtype).eps / 2
    # 1%: errors on top of errors.
    return 1.01 * units * magnitude


def check_many(cases: list[Case]) -> list[tuple[int, str]]:
    """`check` for many cases in one call: the position of each case that failed, and how."""
    return each_checked(check, cases)


def each_checked(check: Callable[[C], list[str]], cases: list[C]) -> list[tuple[int, str]]:
    """What `check` finds: the position of each case that failed, and how.

    A failed comparison does not end the batch: it comes after all collectives of its case.
    """
    found = []
    for position, case in enumerate(cases):
        try:
            found += [(position, line) for line in check(case)]
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    return found


# By pass, then by stage and resource.
BytesByPass = dict[str, dict[tuple[str, str], int]]


def bytes_of_passes(cases: list[Case]) -> list[BytesByPass]:
    """What a rank sent in each case."""
    found: list[BytesByPass] = []

    def ended(pass_name: str, monitor: Monitor) -> None:
        sent = {key: count for key, count in monitor.bytes_sent.items() if count}
        found[-1][pass_name] = sent
        monitor.bytes_sent.clear()

    for case in cases:
        found.append({})
        exchange_index, *_ = find_groups(case.chain, *case.shape)
        run_passes(case, make_data(case, exchange_index), ended)
    return found
