"""Functions that run on the ranks of a pool: the exchange alone, without Megatron.

A `Case` is plain data, and every rank regenerates the data of all ranks from it, so that each can
compute what it should receive with `reference` and without communication. Where the world is
larger than a case's exchange, several exchanges of the same shape run side by side on data of
their own.

Notation: S = ranks of the exchange, T = tokens of a rank, H = hidden size, E = experts, W = length
of the lists, N = pairs or expert rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import reference
import torch
import torch.distributed as dist
import yaml
from equal import difference
from fake_world import bound_exchange

from monta_megatron.chains import CHAINS, Counts, TokenCounts
from monta_megatron.core import FLAT_GROUPS, Layout
from monta_megatron.exchange.collectives import PeerGroup, peer_groups
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.rows import expert_ids_of

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
# EP, ETP, ranks per node.
Shape = Sequence[int]
SHAPES: dict[int, list[Shape]] = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
# (dtype of the rows, dtype of the probabilities)
DTYPES = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float64", "float64"),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One exchange and its data.

    `routing`: "uniform" is top-k at random; "skewed" prefers the first experts;
    "expert0_empty" spares the first, if it can; "one_expert" is the last expert alone; "one_rank"
    is the last EP rank alone; "limited" is one or two EP ranks per token; "capacity" drops pairs,
    so that some tokens have fewer experts or none; "any_number" is 0 to E experts per token;
    "every_expert" is all of them. A serial chain has one chunk, whatever `num_chunks`.
    """

    chain: str
    ep: int = 4
    etp: int = 1
    ranks_per_node: int = 2
    num_local_experts: int = 2
    topk: int = 2
    tokens: Sequence[int] = (12, 12, 12, 12)
    hidden: int = 8
    dtype: str = "float32"
    probs_dtype: str = "float32"
    routing: str = "uniform"
    num_chunks: int = 1
    num_blocks: int = 1
    seed: int = 0

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


def cases_on(shapes: Iterable[Shape], kind: Callable[..., Any] = Case, **fields: Any) -> list[Any]:
    """A case of every chain on every shape that it accepts."""
    cases = [
        kind(chain=chain, ep=ep, etp=etp, ranks_per_node=ranks_per_node, **fields)
        for chain in CHAINS
        for ep, etp, ranks_per_node in shapes
    ]
    return [case for case in cases if CHAINS[case.chain].incompatibility(case.layout(0)) is None]


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


@cache
def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Kept: every Gloo group has threads of its own, which end with the process alone."""
    return dist.new_group(list(ranks), use_local_synchronization=True)


def place_of(case: Case) -> tuple[int, int]:
    """Which of the exchanges side by side this rank is in, and its position there."""
    return divmod(dist.get_rank(), case.size)


def groups_of(case: Case) -> dict[str, PeerGroup]:
    """The groups of the chain's stages that this rank is in."""
    exchange_index, rank = place_of(case)
    layout, first = case.layout(rank), exchange_index * case.size
    flat = {
        str(name): _group_of(tuple(first + member for member in layout.members(name, rank)))
        for name in FLAT_GROUPS
    }
    return peer_groups((CHAINS[case.chain],), layout, flat)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One rank's side of the tokens: what a chain takes there, and back from it to tokens.

    Attributes:
        exchange: bound to the counts of the case.
        counts: those counts.
        rank: this rank's position in the exchange.
        token: [N] the token of each source row; 0, 1, ... where rows are tokens.
        ids: [T, W] the list of each token, filled up with E; None where rows are permuted tokens.
        probs: [N] or [T, W].
    """

    exchange: Exchange
    counts: Counts | TokenCounts
    rank: int
    token: torch.Tensor
    ids: torch.Tensor | None
    probs: torch.Tensor

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [N, H]: Megatron's permute, or the tokens themselves."""
        return tokens[self.token]

    def sum_of_rows(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[N, H] -> [T, H]: pairs are added in the order of their experts and rounded once."""
        dtype = torch.promote_types(self.exchange.sum_dtype, rows.dtype)
        total = torch.zeros(num_tokens, rows.shape[1], dtype=dtype)
        return total.index_add_(0, self.token, rows.to(dtype)).to(rows.dtype)


def make_source(
    case: Case, data: Data, place: tuple[int, dict[str, PeerGroup]] | None = None
) -> Source:
    """A rank's exchange, bound, and its input; as the dispatcher makes it.

    Args:
        case: the case.
        data: of all ranks.
        place: the rank and its groups; None for this process's.
    """
    rank, groups = (place_of(case)[1], groups_of(case)) if place is None else place
    routing_map, probs, ids = data.routing_maps[rank], data.probs[rank], None
    exchange, counts = bound_exchange(
        CHAINS[case.chain],
        case.layout(rank),
        data.routing_maps,
        case.num_chunks,
        case.num_blocks,
        groups=groups,
        sum_dtype=case.sum_dtype,
    )
    if CHAINS[case.chain].rows == "permuted tokens":
        # Megatron's permutation: [E, T] in order.
        expert, token = routing_map.T.nonzero(as_tuple=True)
        probs = probs[token, expert]
    else:
        token = torch.arange(len(routing_map))
        probs, ids = expert_ids_of(routing_map, probs, exchange.max_experts_per_token)
    return Source(exchange=exchange, counts=counts, rank=rank, token=token, ids=ids, probs=probs)


# What a rank sent, by pass, then by stage and resource.
BytesByPass = dict[str, dict[tuple[str, str], int]]


def run_passes(case: Case, data: Data) -> tuple[dict[str, torch.Tensor], BytesByPass]:
    """All four passes of one exchange.

    Returns:
        "expert_rows", "expert_probs" and "tokens_per_expert" of dispatch; "token_gradient" [T, H]
        and "prob_gradient" [T, E] of its backward pass; "output" [T, H] of combine, and
        "expert_gradient" [N, H] of its backward pass; and what each pass sent.
    """
    rank = place_of(case)[1]
    probs = data.probs[rank].requires_grad_()
    source, num_tokens = make_source(case, data), len(probs)
    exchange, sent = source.exchange, BytesByPass()

    def ended(name: str) -> None:
        sent[name] = {key: count for key, count in exchange.monitor.bytes_sent.items() if count}
        exchange.monitor.bytes_sent.clear()

    rows = source.rows(data.tokens[rank]).requires_grad_()
    arrived = dispatch(exchange, rows, source.probs, source.ids)
    ended("dispatch")
    given = data.expert_rows[rank], data.expert_probs[rank]
    row_gradient, prob_gradient = torch.autograd.grad(arrived, (rows, probs), given)
    ended("dispatch_backward")
    outputs = data.expert_rows[rank].clone().requires_grad_()
    combined = combine(exchange, outputs)
    ended("combine")
    gradient = source.rows(data.gradients[rank])
    (expert_gradient,) = torch.autograd.grad(combined, outputs, gradient)
    ended("combine_backward")
    results = {
        "expert_rows": arrived[0].detach(),
        "expert_probs": arrived[1].detach(),
        "tokens_per_expert": torch.from_numpy(exchange.bound_chain.rows_per_local_expert),
        "token_gradient": source.sum_of_rows(row_gradient, num_tokens),
        "prob_gradient": prob_gradient,
        "output": source.sum_of_rows(combined.detach(), num_tokens),
        "expert_gradient": expert_gradient,
    }
    return results, sent


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
    exchange_index, rank = place_of(case)
    data = make_data(case, exchange_index)
    with uninitialised_memory_is_nan():
        ours, _ = run_passes(case, data)
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
    for name, combine_values, values in (
        ("output", reference.combine, data.expert_rows),
        ("token_gradient", reference.combine, data.expert_rows),
        ("prob_gradient", reference.combine_probs, data.expert_probs),
    ):
        # The sum of each entry's terms, and of their absolute values.
        total, magnitude = (
            combine_values(each, *shape)[rank] for each in (values, [one.abs() for one in values])
        )
        # Rounding moves a sum by at most half an eps of its magnitude: 4 times at most on the wire,
        # for experts, node, rail, or ETP, then experts, and once for each term in the dtype of the
        # sum. 1%: errors on top of errors.
        dtype, num_terms = ours[name].dtype, case.num_experts * case.etp
        sum_eps = torch.finfo(torch.promote_types(case.sum_dtype, dtype)).eps
        bound = 1.01 / 2 * (4 * torch.finfo(dtype).eps + num_terms * sum_eps) * magnitude
        mismatches.append((name, difference(ours[name], total, bound)))
    where = f"rank {rank} of exchange {exchange_index}"
    return [f"{where}: {name}: {line}" for name, line in mismatches if line is not None]


def check_many(
    cases: list[Any], check: Callable[[Any], list[str]] = check
) -> list[tuple[int, str]]:
    """What `check` finds in many cases: the position of each that failed, and how.

    A failed comparison does not end the batch: it comes after all collectives of its case.
    """
    found = []
    for position, case in enumerate(cases):
        try:
            found += [(position, line) for line in check(case)]
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    return found
