"""Routing of one exchange given by its rows, or by the files of Megatron's RouterTracer.

Shares of tokens (`expected.ExpectedRouting`) are the same for every rank, and the mean of layers
that differ is more even than any of them. Here each rank has the rows of one real exchange.

With `--moe-routing-trace-path FOLDER` the tracer writes a file `router_trace_rank{r}.jsonl` per
rank, one line per step, micro-batch and layer:

    {"step": 0, "layer": 3, "num_tokens": 128, "topk": 8, "top_indices": [[12, 45, ...], ...], ...}

It is replayed as it was: an exchange is of one layer, its ranks have their own rows, and nothing is
drawn from them. Where an exchange has as many tokens as a line, it is a line of every rank;
otherwise the lines of a layer follow each other, and are cut into as many tokens as it has.

Notation: T = tokens of a rank, E = experts, S = source ranks, M = routing maps, B = token blocks,
L = local experts, P = parts of the experts, EP = expert parallel size, N = tokens of a layer in a
file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import Chain, ChainCounts, Counts, TokenCounts
from monta_megatron.chains.layout import Layout
from monta_megatron.common.units import counted
from monta_megatron.planner.models.model import Model

# The routing maps of one exchange: rank r has the one at r, modulo their number.
Exchange: TypeAlias = tuple[NDArray[np.bool_], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRouting:
    """One micro-batch of every rank of the exchange: integer counts, as the executor counts them.

    Attributes:
        name: for messages and plans.
        routing_maps: [M] of [T, E]; rank r has the one at r % M. Ranks may have different numbers
            of tokens, the most of them as many as the workload says.
    """

    name: str
    routing_maps: Exchange
    _counted: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict, repr=False)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.routing_maps[0].shape[1]

    # Needed for every program.
    @cached_property
    def max_experts_per_token(self) -> int:
        """The most experts of any token of any rank."""
        return max(
            max((int(rows.sum(axis=1).max(initial=0)) for rows in self.routing_maps), default=0), 1
        )

    def is_even(self, num_parts: int) -> bool:
        """Every rank has counts of its own."""
        return False

    def kinds(self, layout: Layout) -> range:
        """Likewise."""
        return range(len(layout.nodes))

    def counts(
        self, chain: Chain, layout: Layout, tokens_per_rank: int, num_blocks: int
    ) -> ChainCounts:
        """See `Routing`; the tokens are those of the maps."""
        local = slice(layout.first_expert, layout.first_expert + layout.num_local_experts)
        # [S]
        map_of = np.arange(len(layout.nodes)) % len(self.routing_maps)
        if chain.rows == "permuted tokens":
            # [M, E] -> [S, E] -> [EP, ETP, E] -> [ETP, EP, L]
            table = self._hits(1, self.num_experts)[:, 0][map_of]
            received = table.reshape(layout.ep, layout.etp, -1).transpose(1, 0, 2)[:, :, local]
            return Counts(sent=table[layout.rank].reshape(layout.ep, -1), received=received)

        lengths = np.array([_block_lengths(len(rows), num_blocks) for rows in self.routing_maps])
        fields: dict[str, Any] = {}
        for part in chain.parts:
            if part == "node":
                by_node = self._hits(num_blocks, layout.num_nodes)[map_of]
                fields["sent_to_nodes"] = by_node[layout.rank]
                fields["for_node"] = by_node[:, :, layout.node]
            elif part == "rank":
                by_rank = self._hits(num_blocks, layout.ep)[map_of]
                if "node" in chain.parts:
                    first = layout.node * layout.ranks_per_node
                    fields["for_node_ranks"] = by_rank[:, :, first : first + layout.ranks_per_node]
                else:
                    fields["sent_to_ranks"] = by_rank[layout.rank]
                    fields["for_rank"] = by_rank[:, :, layout.rank]
        by_expert = self._hits(num_blocks, self.num_experts)[map_of]
        return TokenCounts(tokens=lengths[map_of], experts=by_expert[:, :, local], **fields)

    def _hits(self, num_blocks: int, num_parts: int) -> NDArray[np.int64]:
        """[M, B, P] tokens with an expert in each of P equal parts of the experts."""
        key = (num_blocks, num_parts)
        if key not in self._counted:
            self._counted[key] = np.array(
                [
                    [block.sum(axis=0) for block in np.split(_parts(rows, num_parts), cuts)]
                    for rows in self.routing_maps
                    for cuts in [np.cumsum(_block_lengths(len(rows), num_blocks))[:-1]]
                ]
            )
        return self._counted[key]


def typical_exchange(exchanges: Sequence[Exchange], num_ranks: int, ep: int) -> Exchange:
    """The exchange whose busiest rank is in the middle: half of the others have a busier one.

    Args:
        exchanges: at least one.
        num_ranks: S.
        ep: EP.
    """

    def busiest(exchange: Exchange) -> int:
        """Token-expert pairs of the expert parallel rank that gets most."""
        times = np.bincount(np.arange(num_ranks) % len(exchange), minlength=len(exchange))
        pairs = sum(
            int(count) * rows.sum(axis=0) for count, rows in zip(times, exchange, strict=True)
        )
        return int(np.reshape(pairs, (ep, -1)).sum(axis=1).max())

    loads = [busiest(exchange) for exchange in exchanges]
    order = sorted(range(len(loads)), key=lambda number: (loads[number], number))
    return exchanges[order[(len(order) - 1) // 2]]


def _parts(routing_map: NDArray[np.bool_], num_parts: int) -> NDArray[np.bool_]:
    """[T, E] -> [T, P]: whether a token has an expert in each part."""
    parts: NDArray[np.bool_] = routing_map.reshape(
        len(routing_map), num_parts, routing_map.shape[1] // num_parts
    ).any(axis=2)
    return parts


def _block_lengths(num_tokens: int, num_blocks: int) -> list[int]:
    """[B] tokens of each block: full ones, then the rest, as the executor cuts them."""
    size = max(-(-num_tokens // num_blocks), 1)
    return [min(max(num_tokens - block * size, 0), size) for block in range(num_blocks)]


# Block, index of an MTP head, layer: as the tracer has them.
LayerName: TypeAlias = tuple[str, str, str]

# Enough for dozens of exchanges; the rest of a long trace is not read.
MAX_TOKENS_PER_FILE = 32768
# How often an expert has to be chosen, on average: its share is then known within about 10%.
LEAST_CHOICES = 100


@dataclass(frozen=True, kw_only=True)
class TracedRouter:
    """Router that a trace has to fit.

    Attributes:
        num_experts: experts of a layer.
        topk: experts of a token.
        topk_name: what `topk` is called where it comes from.
        owner: whose it is.
        hidden_size: of the hidden states, if the trace has to have them; None where it need not.
        num_layers: of the model; None where it may have any.
    """

    num_experts: int
    topk: int
    topk_name: str
    owner: str
    hidden_size: int | None = None
    num_layers: int | None = None

    @property
    def least_tokens(self) -> int:
        """Tokens without which a trace says too little about the experts."""
        return math.ceil(LEAST_CHOICES * self.num_experts / self.topk)


def router_of(model: Model) -> TracedRouter:
    """Router of a model, which its trace has to fit."""
    return TracedRouter(
        num_experts=model.num_experts,
        topk=model.moe_router_topk,
        topk_name="moe_router_topk",
        owner=model.name,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterTrace:
    """Content of a trace's files.

    Attributes:
        folder: where they are.
        rows: rank -> layer -> its rows in the order of the steps, [N, E] bool.
    """

    folder: str
    rows: Mapping[int, Mapping[LayerName, NDArray[np.bool_]]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks and layers."""
        return sum(len(rows) for layers in self.rows.values() for rows in layers.values())

    def exchanges(self, num_ranks: int, num_tokens: int) -> list[Exchange]:
        """All exchanges: step by step, and in each of them layer by layer.

        A rank without a file has the rows of another one. A layer with fewer than `num_tokens`
        gives one exchange, in which its rows are repeated.

        Args:
            num_ranks: ranks of the exchange, or of several that follow each other.
            num_tokens: T of each of them.
        """
        # [num_ranks] the layers of each rank; those of another pipeline stage have other names.
        layers = [list(self.rows[self._file_of(rank)].values()) for rank in range(num_ranks)]
        size = max(num_tokens, 1)

        def rows_of(layer: int, rank: int) -> NDArray[np.bool_]:
            return layers[rank][layer % len(layers[rank])]

        num_steps = [
            max(min(len(rows_of(layer, rank)) for rank in range(num_ranks)) // size, 1)
            for layer in range(len(layers[0]))
        ]
        return [
            tuple(
                _window(rows_of(layer, rank), step * size, num_tokens) for rank in range(num_ranks)
            )
            for step in range(max(num_steps))
            for layer, steps in enumerate(num_steps)
            if step < steps
        ]

    def name(self, num_ranks: int, num_tokens: int) -> str:
        """Name for messages and plans: the folder, and the parts that the trace lacks."""
        missing = []
        num_traced = sum(rank in self.rows for rank in range(num_ranks))
        if num_traced < num_ranks:
            missing.append(f"{num_traced} of {num_ranks} ranks traced, the others as those")
        fewest = min(len(rows) for layers in self.rows.values() for rows in layers.values())
        if fewest < num_tokens:
            missing.append(f"{fewest:,} tokens of a layer, repeated")
        return f"trace {self.folder}" + (f" ({'; '.join(missing)})" if missing else "")

    def _file_of(self, rank: int) -> int:
        traced = list(self.rows)
        return rank if rank in self.rows else traced[rank % len(traced)]


def traced_routing(
    folder: str | Path, model: Model, num_tokens: int, num_ranks: int, ep: int
) -> RecordedRouting:
    """Routing of a trace's typical exchange.

    Args:
        folder: the folder with the tracer's files.
        model: the model that was traced.
        num_tokens: tokens of a rank.
        num_ranks: ranks of the exchange.
        ep: its expert parallel size.

    Raises:
        ValueError: one line that names the folder, or the file and its line, and the rule.
    """
    router = router_of(model)
    trace = read_trace(str(folder), router, num_tokens)
    if trace.num_tokens < router.least_tokens:
        raise ValueError(_too_few(str(folder), trace.num_tokens, router))
    return RecordedRouting(
        name=trace.name(num_ranks, num_tokens),
        routing_maps=typical_exchange(trace.exchanges(num_ranks, num_tokens), num_ranks, ep),
    )


def read_trace(folder: str, router: TracedRouter, num_tokens: int) -> RouterTrace:
    """Read a trace.

    Args:
        folder: the folder with the tracer's files.
        router: what it has to fit.
        num_tokens: tokens of one exchange.

    Raises:
        ValueError: one line that names the folder, or the file and its line, and the rule.
    """
    return _read(folder, router, max(MAX_TOKENS_PER_FILE, router.least_tokens, num_tokens))


# A ranking asks for every layout, a benchmark at every point.
@lru_cache(maxsize=2)
def _read(folder: str, router: TracedRouter, most_tokens: int) -> RouterTrace:
    files = {
        int(digits): path
        for path in Path(folder).glob("router_trace_rank*.jsonl")
        if (digits := path.stem.removeprefix("router_trace_rank")).isdecimal()
    }
    rows = {}
    for rank, path in sorted(files.items()):
        try:
            rows[rank] = _rows(path, router, most_tokens)
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read: {error.strerror}; must be a file of the tracer"
            ) from error
    if not files:
        raise ValueError(
            f"{folder}: no router_trace_rank*.jsonl in it, must be a folder that Megatron wrote "
            "with --moe-routing-trace-path"
        )
    # A file may have no tokens, as that of a rank whose stage has no MoE layer.
    rows = {rank: layers for rank, layers in rows.items() if layers}
    if not rows:
        raise ValueError(_too_few(folder, 0, router))
    return RouterTrace(folder=folder, rows=rows)


def _too_few(folder: str, num_tokens: int, router: TracedRouter) -> str:
    return (
        f"{folder}: got {counted(num_tokens, 'token')}, must be at least "
        f"{router.least_tokens:,} for top-{router.topk} of {router.num_experts} experts, as "
        f"each has to be chosen about {LEAST_CHOICES} times; trace more steps"
    )


def _rows(path: Path, router: TracedRouter, most_tokens: int) -> dict[LayerName, NDArray[np.bool_]]:
    """Layer -> its rows, [N, E], in the order of the file."""
    num_tokens = 0
    by_layer: dict[LayerName, list[NDArray[np.bool_]]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if num_tokens >= most_tokens:
                break
            try:
                record = json.loads(line)
                indices = np.array(record["top_indices"], dtype=np.int64)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ValueError(
                    f"{path}: line {number}: is no record of the tracer ({_one_line(error)})"
                ) from error
            if indices.size == 0:
                continue
            incompatibility = _incompatibility(record, indices, router)
            if incompatibility is not None:
                raise ValueError(f"{path}: line {number}: {incompatibility}")
            routing_map = np.zeros((len(indices), router.num_experts), dtype=np.bool_)
            np.put_along_axis(routing_map, indices, True, axis=1)
            num_tokens += len(indices)
            layer = (str(record.get("block")), str(record.get("mtp_idx")), str(record.get("layer")))
            by_layer.setdefault(layer, []).append(routing_map)
    return {layer: np.concatenate(maps) for layer, maps in by_layer.items()}


def _window(rows: NDArray[np.bool_], first: int, num_tokens: int) -> NDArray[np.bool_]:
    """[T, E] rows from `first` on; from the beginning again where they end."""
    if first + num_tokens <= len(rows):
        return rows[first : first + num_tokens]
    return rows[np.arange(first, first + num_tokens) % len(rows)]


def _incompatibility(
    record: dict[str, Any], indices: NDArray[np.int64], router: TracedRouter
) -> str | None:
    """Why a record is not of this router, or None if it may be."""
    if indices.ndim != 2 or indices.min() < 0 or indices.max() >= router.num_experts:
        return (
            f"top_indices: must be a list of experts from 0 to {router.num_experts - 1} for every "
            "token"
        )
    # The tracer counts layers from 0 or from 1; the layers of MTP are no layers of the model.
    layer = record.get("layer") if record.get("block", "decoder") == "decoder" else None
    # The tracer's shape of the hidden states, where it keeps these too: [N, H].
    shape = record.get("hs_shape")
    hidden_size = shape[-1] if isinstance(shape, list) and shape else None
    fields = (
        ("topk", indices.shape[1], router.topk_name, router.topk),
        ("hs_shape", hidden_size, "hidden_size", router.hidden_size),
    )
    for name, value, flag, expected in fields:
        if None not in (value, expected) and value != expected:
            return (
                f"{name}: got {value}, must be {expected}, {flag} of {router.owner}; the trace is "
                "of another model"
            )
    most_layers = router.num_layers
    if isinstance(layer, int) and most_layers is not None and layer > most_layers:
        return (
            f"layer: got {layer}, must be at most {most_layers}, num_layers of {router.owner}; "
            "the trace is of another model"
        )
    return None


def _one_line(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:80]
