"""Shared by the studies: exchanges of a model, and texts of numbers."""

import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from monta_megatron.common import presets
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout, workloads_of
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import with_batch
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.estimate.layers import (
    Architecture,
    TrainingSettings,
    architecture_of,
    settings_of,
)
from monta_megatron.tools.launch.prepare import read_run

# A README shows a picture 830 pixels wide: two dots for each.
WIDTH_INCHES, DPI = 8.3, 200
WIDTH = 100
DOCS = Path(__file__).parents[2] / "docs"


class Section(NamedTuple):
    """A part of the page of claims.

    Attributes:
        text: the section.
        rows: [claims] (claim, claimed, predicted, measured on the emulated cluster, difference of
            prediction and claim, constants).
    """

    text: str
    rows: tuple[tuple[str, ...], ...]


def paragraph(text: str) -> str:
    """Lines of a paragraph."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "".join(
        textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ",
                      break_long_words=False, break_on_hyphens=False) + "\n"
        for line in lines
    )  # fmt: skip


def workload_of(
    model_name: str, cluster: Cluster, seq_length: int, tp: int, ep: int, etp: int = 1
) -> Workload:
    """The exchange of a preset with sequences of this length, one in a micro-batch."""
    model = with_batch(load_model(model_name), seq_length, 1)
    layout = ParallelLayout(world_size=max(tp, ep * etp), tp=tp, ep=ep, etp=etp)
    return workloads_of(model, layout, cluster.ranks_per_node)[0]


def of_chunks(price: ChainPrice) -> str:
    """`hierarchical_alltoall` x2."""
    return f"`{price.chain.name}` x{price.num_chunks}"


def ms(time_us: float) -> str:
    """5.23 of 5,230 us."""
    return f"{time_us / 1e3:,.3g}" if time_us < 1e6 else f"{time_us / 1e3:,.0f}"


@cache
def run(name: str) -> tuple[Architecture, TrainingSettings]:
    """A run preset."""
    file = str(presets.find("runs", name))
    merged = read_run(file, ())[1]
    settings = settings_of(merged.arguments, merged.config.layout.parallel)
    return architecture_of(merged.arguments, file), settings
