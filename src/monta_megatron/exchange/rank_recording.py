"""What one rank of a training has recorded, as a file. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from monta_megatron.common import strict_yaml
from monta_megatron.common.files import write_whole
from monta_megatron.common.rules import PositiveInt, Text, require
from monta_megatron.exchange.spans import Span

Format: TypeAlias = Literal["monta training 1"]
FORMAT: Format = get_args(Format)[0]


@dataclass(frozen=True, kw_only=True)
class RecordedPass:
    """One run of a pass.

    Attributes:
        turn: how often the pass had run before in the iteration: the micro-batch, where nothing is
            evaluated or recomputed.
        spans: what ran in it, by the clock of the exchange's first rank.
    """

    turn: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        require(len(self.spans) > 0, "spans", "none", "be at least one")


@dataclass(frozen=True, kw_only=True)
class RankRecording:
    """One rank's exchange in one iteration of a training, in its first MoE layer.

    Attributes:
        format: format of the file.
        iteration: the iteration, counted from the start of the run.
        rank: this rank among all of the training.
        exchange: the ranks of its exchange.
        nodes: the node of each of them.
        chain: the chain that ran.
        num_chunks: its number of chunks.
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        num_experts: experts of the layer.
        topk: experts of each token.
        hidden_size: hidden size of a row.
        tokens: tokens of this rank.
        dtype: of the rows.
        device: what ran it.
        inter_mbit: rate between nodes, where they are emulated; else None.
        clock: how the ranks' clocks were aligned.
        clock_error_us: how far apart two ranks' times may be for lack of a common clock.
        versions: of what ran.
        passes: everything that ran.
    """

    format: Format = FORMAT
    iteration: PositiveInt
    rank: int
    exchange: tuple[int, ...]
    nodes: tuple[int, ...]
    chain: Text
    num_chunks: PositiveInt
    tp: PositiveInt
    ep: PositiveInt
    etp: PositiveInt
    num_experts: PositiveInt
    topk: PositiveInt
    hidden_size: PositiveInt
    tokens: int
    dtype: Text
    device: Text
    inter_mbit: float | None
    clock: Text
    clock_error_us: float
    versions: Mapping[str, str | None]
    passes: tuple[RecordedPass, ...]

    def save(self, folder: Path) -> None:
        """Write the rank's file in a folder, whole or not at all.

        Raises:
            ValueError: it cannot be written.
        """
        write_whole(folder / name_of(self.rank), json.dumps(strict_yaml.plain(self)) + "\n")


def name_of(rank: int) -> str:
    """The name of a rank's file; in the order of their names they are in that of their ranks."""
    return f"rank_{rank:05}.json"
