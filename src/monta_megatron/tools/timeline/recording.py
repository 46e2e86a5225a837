"""Recorded runs as files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from monta_megatron.chains import CHAINS, check_chain, chunks_of
from monta_megatron.chains.program import Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import write_whole
from monta_megatron.common.rules import PositiveInt, Text
from monta_megatron.core import Layout
from monta_megatron.exchange.recording import Span
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import shape_of
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
            num_local_experts=settings.experts // settings.ep,
            rank=0,
            nodes=tuple(record.node for record in self.ranks[: settings.ep * settings.etp]),
        )
        # Every pass ran the first exchange of a routing that has several.
        shape = shape_of(replace(settings, repeats=1), layout)
        return predict(shape, cluster, CHAINS[self.chain], self.num_chunks, self.phase)

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
        return strict_yaml.build(cls, _read_document(Path(path)), str(path))


ADVICE = "must be a recording: monta timeline --record DIR makes one"


def _read_document(path: Path) -> dict[str, Any]:
    """The JSON object in a recording's file.

    Raises:
        ValueError: one line that names the file and what is wrong with it.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; {ADVICE}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no whole JSON file, {ADVICE}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else None
        raise ValueError(f"{path}: format: got {got!r}, must be {FORMAT!r}; {ADVICE}")
    return data
