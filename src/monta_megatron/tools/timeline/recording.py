"""Recorded runs as files, and an iteration of a training from the files of its ranks.

Of a training the exchange of the lowest rank is shown. A pass runs once for every micro-batch: the
run of median time is drawn, since a picture of a disturbed run says nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from monta_megatron.chains import CHAINS, check_chain, chunks_of
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.program import Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import write_whole
from monta_megatron.common.rules import PositiveInt, Text
from monta_megatron.common.units import counted
from monta_megatron.exchange.recording import RANK_FORMAT, RankRecording, Span, name_of
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import workload_of
from monta_megatron.tools.timeline.predicted import predict
from monta_megatron.tools.timeline.spans import Timeline, Track, pipeline_name

Format: TypeAlias = Literal["monta timeline 1"]
FORMAT: Format = get_args(Format)[0]


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank.

    Attributes:
        node: the node that it runs on.
        spans: its spans in the recorded pass.
    """

    node: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One pass of a layer's exchange on every rank.

    Attributes:
        format: format of the file.
        title: what ran, and on what, in one line.
        chain: the chain that ran.
        num_chunks: its number of chunks.
        phase: forward, or forward and backward.
        settings: settings of the layer and its data.
        clock: how the ranks' clocks were aligned.
        clock_error_us: how far apart two ranks' times may be for lack of a common clock.
        meta: versions, machine, command, layout, as in a report of `monta bench`.
        ranks: all ranks of the launch.
    """

    format: Format = FORMAT
    title: Text
    chain: Text
    num_chunks: PositiveInt
    phase: Phase
    settings: Settings
    clock: Text
    clock_error_us: float
    meta: Mapping[str, Any]
    ranks: tuple[RankRecord, ...]

    def __post_init__(self) -> None:
        check_chain(self.chain, "chain")
        chunks_of(CHAINS[self.chain], self.num_chunks, "num_chunks")
        size = self.settings.ep * self.settings.etp
        if len(self.ranks) < size:
            raise ValueError(f"ranks: got {len(self.ranks)}, must be at least ep * etp ({size})")

    @property
    def timeline(self) -> Timeline:
        """The spans of all ranks."""
        return Timeline(
            source="recorded",
            name=pipeline_name(self.chain, self.num_chunks),
            tracks=tuple(
                Track(name=f"rank {rank} (node {record.node})", spans=record.spans)
                for rank, record in enumerate(self.ranks)
            ),
        )

    def predicted(self, cluster: Cluster) -> Timeline:
        """Predicted timeline of the same exchange."""
        settings = self.settings
        layout = Layout(
            ep=settings.ep,
            etp=settings.etp,
            num_local_experts=settings.num_experts // settings.ep,
            rank=0,
            nodes=tuple(record.node for record in self.ranks[: settings.ep * settings.etp]),
        )
        # Every pass ran the first exchange of a routing that has several.
        workload = workload_of(replace(settings, repeats=1), layout)
        return predict(workload, cluster, CHAINS[self.chain], self.num_chunks, self.phase)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ValueError: it cannot be written.
        """
        write_whole(path, json.dumps(strict_yaml.plain(self)) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Recording":
        """Read a file of `save`.

        Raises:
            ValueError: one line that names the file and what is wrong with it.
        """
        advice = "must be a recording: monta timeline --record DIR makes one"
        return strict_yaml.build(cls, read_document(Path(path), FORMAT, advice), str(path))


def read_document(path: Path, file_format: str, advice: str) -> dict[str, Any]:
    """The JSON object in a file of a format.

    Args:
        path: the file.
        file_format: what its `format` has to be.
        advice: what to do if it is none.

    Raises:
        ValueError: one line that names the file and what is wrong with it.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no whole JSON file, {advice}") from error
    if not isinstance(data, dict) or data.get("format") != file_format:
        got = data.get("format") if isinstance(data, dict) else None
        raise ValueError(f"{path}: format: got {got!r}, must be {file_format!r}; {advice}")
    return data


ADVICE = "must be of a training with --moe-monta-record DIR"
# Keys that all ranks of an exchange have in common.
SHARED = ("iteration", "exchange", "nodes", "chain", "num_chunks")


def load_training(folder: Path) -> list[RankRecording]:
    """Load the recordings of one exchange's ranks, in the order of the exchange.

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


def about_training(ranks: Sequence[RankRecording]) -> tuple[str, str]:
    """Machine and exchange of a recording: two lines."""
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
