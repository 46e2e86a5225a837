"""An iteration of a training, read from the files that its ranks have left.

The exchange of the lowest rank is shown. A pass runs once for every micro-batch: the run of median
time is drawn, since a picture of a disturbed run says nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from monta_megatron.common import strict_yaml
from monta_megatron.common.units import counted
from monta_megatron.exchange.recording import RANK_FORMAT, RankRecording, name_of
from monta_megatron.tools.timeline.recording import read_document
from monta_megatron.tools.timeline.spans import Timeline, Track, pipeline_name

ADVICE = "must be of a training with --moe-monta-record DIR"
# What all ranks of an exchange have in common.
SHARED = ("iteration", "exchange", "nodes", "chain", "num_chunks")


def load_training(folder: Path) -> list[RankRecording]:
    """What the ranks of one exchange have recorded, in the order of the exchange.

    Raises:
        ValueError: a file is missing, wrong, or of another run.
    """
    paths = sorted(folder.glob("rank_*.json"))
    if not paths:
        raise ValueError(f"{folder}: holds no rank_*.json, {ADVICE}")
    first = _load(paths[0])
    ranks = [_load(folder / name_of(rank)) for rank in first.exchange]
    for rank, other in zip(first.exchange, ranks, strict=True):
        for name in SHARED:
            here, there = getattr(other, name), getattr(first, name)
            if here != there:
                raise ValueError(
                    f"{folder / name_of(rank)}: {name}: got {here}, must be {there} as in "
                    f"{paths[0].name}"
                )
    return ranks


def about(ranks: Sequence[RankRecording]) -> tuple[str, str]:
    """Where it ran, and what: two lines."""
    first = ranks[0]
    devices = first.device if first.device == "CPU ranks" else f"x {first.device}"
    rate = "" if first.inter_mbit is None else f" at {first.inter_mbit:g} Mbit/s"
    return (
        f"recorded in iteration {first.iteration} of a training: an exchange of {len(ranks)} "
        f"{devices} on {counted(len(set(first.nodes)), 'node')}{rate}",
        f"TP {first.tp}, EP {first.ep}, ETP {first.etp}, top-{first.topk} of {first.num_experts} "
        f"experts, H {first.hidden_size}, {counted(first.tokens, 'token')} each, {first.dtype}",
    )


def median_timeline(ranks: Sequence[RankRecording]) -> Timeline:
    """Every pass once: the run of it that took the median time, the same on all ranks."""
    ends_us: dict[str, dict[int, tuple[float, float]]] = {}
    for rank in ranks:
        for run in rank.passes:
            runs = ends_us.setdefault(run.spans[0].pass_name, {})
            start_us, end_us = runs.get(run.turn, (run.spans[0].start_us, run.spans[0].end_us))
            runs[run.turn] = (
                min(start_us, *(span.start_us for span in run.spans)),
                max(end_us, *(span.end_us for span in run.spans)),
            )
    turns = {}
    for name, runs in ends_us.items():
        by_time = sorted(runs, key=lambda turn: runs[turn][1] - runs[turn][0])
        turns[name] = by_time[len(by_time) // 2]
    return _timeline(ranks, turns)


def whole_timeline(ranks: Sequence[RankRecording]) -> Timeline:
    """All micro-batches."""
    return _timeline(ranks, None)


def _timeline(ranks: Sequence[RankRecording], turns: dict[str, int] | None) -> Timeline:
    """The runs of passes with these turns, from the first span on; all of them for None."""
    by_rank = [
        [
            span
            for run in rank.passes
            if turns is None or turns[run.spans[0].pass_name] == run.turn
            for span in run.spans
        ]
        for rank in ranks
    ]
    start_us = min(span.start_us for spans in by_rank for span in spans)
    return Timeline(
        source="recorded",
        name=pipeline_name(ranks[0].chain, ranks[0].num_chunks),
        tracks=tuple(
            Track(
                name=f"rank {rank.rank} (node {node})",
                spans=tuple(span.shifted(-start_us) for span in spans),
            )
            for rank, node, spans in zip(ranks, ranks[0].nodes, by_rank, strict=True)
        ),
    )


def _load(path: Path) -> RankRecording:
    return strict_yaml.build(RankRecording, read_document(path, RANK_FORMAT, ADVICE), str(path))
