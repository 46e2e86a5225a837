"""Collectives of Megatron's dispatchers, observed: their groups, their payload, and when they run.

Megatron calls functions of torch.distributed, which are replaced while its dispatcher runs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

Link: TypeAlias = Literal["inter", "intra"]
# Names of collectives, where Megatron finds them, and under which names.
FUNCTIONS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("alltoall", dist, ("all_to_all_single",)),
    ("allgather", dist, ("all_gather", "all_gather_into_tensor")),
    ("allgather", mappings, ("dist_all_gather_func",)),
    ("reduce_scatter", dist, ("reduce_scatter", "reduce_scatter_tensor")),
    ("reduce_scatter", mappings, ("dist_reduce_scatter_func",)),
    ("allreduce", dist, ("all_reduce",)),
)


class StockCollective(NamedTuple):
    """A collective that a dispatcher of Megatron calls.

    Attributes:
        name: name in `FUNCTIONS`.
        resource: "inter" if its group lies on several nodes, else "intra".
        sent_bytes: resource -> payload from this rank to others, as if it sent to each directly;
            row counts are no payload.
    """

    name: str
    resource: Link
    sent_bytes: Mapping[Link, int]


@contextmanager
def observed(
    nodes: Sequence[int], observe: Callable[[StockCollective, Callable[[], Any]], Any]
) -> Iterator[None]:
    """Observe the collectives that are called inside the context.

    Args:
        nodes: node of every rank of the launch.
        observe: called with each collective and the function that runs it, whose result it returns.
    """
    is_inside = False

    def replacement(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            nonlocal is_inside
            # One may call another.
            if is_inside:
                return function(*args, **settings)
            # An all-reduce has one tensor; the others have their output first.
            rows = settings.get("input_split_sizes")
            ranks = dist.get_process_group_ranks(settings.get("group"))
            sent_bytes = bytes_by_rank(name, args[-1], rows, len(ranks))
            collective = by_link(name, ranks, sent_bytes, nodes)
            is_inside = True
            try:
                return observe(collective, lambda: function(*args, **settings))
            finally:
                is_inside = False

        return call

    with ExitStack() as originals:
        for name, module, functions in FUNCTIONS:
            for function in functions:
                original = getattr(module, function)
                originals.callback(setattr, module, function, original)
                setattr(module, function, replacement(name, original))
        yield


def sent_by(run: Callable[[], object], nodes: Sequence[int]) -> Mapping[Link, int]:
    """Payload that this rank sends while a dispatcher of Megatron runs, as `observed` counts it."""
    total: Counter[Link] = Counter()

    def count(collective: StockCollective, run_collective: Callable[[], Any]) -> Any:
        total.update(collective.sent_bytes)
        return run_collective()

    with observed(nodes, count):
        run()
    return total


def by_link(
    name: str, ranks: Sequence[int], sent_bytes: Sequence[int], nodes: Sequence[int]
) -> StockCollective:
    """The collective of a group's ranks, from the bytes to each of them."""
    here, sent = dist.get_rank(), dict.fromkeys(get_args(Link), 0)
    for rank, num_bytes in zip(ranks, sent_bytes, strict=True):
        if rank != here:
            sent["intra" if nodes[rank] == nodes[here] else "inter"] += num_bytes
    crosses = len({nodes[rank] for rank in ranks}) > 1
    return StockCollective(name, "inter" if crosses else "intra", sent)


def bytes_by_rank(
    name: str, sent: torch.Tensor | Sequence[torch.Tensor], rows: Any, num_ranks: int
) -> list[int]:
    """Payload from one rank of a group to each rank.

    Args:
        name: name of the collective.
        sent: input of the collective: one tensor, or one per rank.
        rows: input rows for each rank, in an all-to-all of unequal parts.
        num_ranks: number of ranks of the group.
    """
    if not isinstance(sent, torch.Tensor):
        return [part.nbytes for part in sent]
    if sent.dtype == torch.int64:
        return [0] * num_ranks
    if rows is not None:
        row_bytes = sent.nbytes // max(len(sent), 1)
        return [int(number) * row_bytes for number in rows]
    if name == "allgather":
        return [sent.nbytes] * num_ranks
    # The sum of a share goes to its owner and, in an all-reduce, back to all.
    share_bytes = sent.nbytes // num_ranks
    return [share_bytes * (2 if name == "allreduce" else 1)] * num_ranks
