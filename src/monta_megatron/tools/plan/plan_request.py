"""What is to be planned: a model on a cluster, in a layout, as commands and Python name them."""

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from monta_megatron.chains.program import Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.rules import NonNegativeInt, PositiveFloat, PositiveInt
from monta_megatron.common.text import check_printable, shown
from monta_megatron.planner.cluster import Cluster, KernelChoice
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.routing.names import routing_or_folder

# What may stand for a layout's file where Python calls.
LAYOUTS = ParallelLayout | Mapping | None


@dataclass(frozen=True, kw_only=True)
class LayoutSizes:
    """Sizes of a `ParallelLayout`, as far as they are given.

    Attributes:
        world_size: ranks of the training; None for those of the cluster.
        tp: tensor parallel size; where it, `ep`, `etp` and a layout's file are None, all layouts
            are ranked.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        cp: context parallel size.
        pp: pipeline parallel size.
    """

    world_size: PositiveInt | None = None
    tp: PositiveInt | None = None
    ep: PositiveInt | None = None
    etp: PositiveInt | None = None
    cp: PositiveInt | None = None
    pp: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What is exchanged, and by what to price it.

    Attributes:
        tokens: of a rank; None for the model's batch.
        seq_length: tokens of a sequence; None for the model file's.
        micro_batch_size: sequences of a micro-batch; likewise.
        routing: one of `routing_names.ROUTINGS`, or a folder of Megatron's router traces.
        phase: what has to be fast.
        inter_rate_ratio: rate of the network over the cluster file's; None for 1.
        ignore_memory: plan what does not fit into the memory of a rank, too.
        overlap_experts: plan a layer whose experts may run in the pipeline.
        kernels: what copies and sums rows; "auto" is "fused" where the ranks are GPUs.
        rail_ctas, node_ctas: budgets of these communicators; None for those of the cluster file.
        wire_dtype: "fp8" where tokens travel to their experts in eight bits, else None.
    """

    tokens: NonNegativeInt | None = None
    seq_length: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    routing: str = "uniform"
    phase: Phase = "forward_backward"
    inter_rate_ratio: PositiveFloat | None = None
    ignore_memory: bool = False
    overlap_experts: bool = False
    kernels: KernelChoice = "auto"
    rail_ctas: PositiveInt | None = None
    node_ctas: PositiveInt | None = None
    wire_dtype: Literal["fp8"] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRequest(LayoutSizes, PlanSettings):
    """A request, as the command line and the Python API make it.

    Attributes:
        model: a model, its file, or the name of a preset; see `model.load_model`.
        cluster: likewise.
        layout: file of a `ParallelLayout`, whose sizes those here override; None for none.
        global_batch_size: sequences of an iteration; None where they are not known.
    """

    model: str | Path | Model
    cluster: str | Path | Cluster
    layout: str | Path | None = None
    global_batch_size: int | None = None


def request_of(model: Any, cluster: Any, layout: Any, settings: Mapping[str, Any]) -> PlanRequest:
    """The request of a call from Python, checked as the command line checks its flags.

    Args:
        model, cluster: see `PlanRequest`.
        layout: a `ParallelLayout`, its sizes by name, or its file; None to rank all.
        settings: fields of `PlanSettings`.

    Raises:
        ValueError: one of them is of another type, or breaks its rule.
    """
    for name, given, kinds, rule in (
        ("model", model, Model, "a Model, a file, or a preset by its name"),
        ("cluster", cluster, Cluster, "a Cluster, a file, or a preset by its name"),
        ("layout", layout, LAYOUTS, "a ParallelLayout, a file, or its sizes by name"),
    ):
        if isinstance(given, str | Path):
            check_printable(str(given), name)
        elif not isinstance(given, kinds):
            raise ValueError(f"{name}: got {shown(repr(given))}, must be {rule}")
    sizes = LayoutSizes()
    if isinstance(layout, ParallelLayout | Mapping):
        given = layout if isinstance(layout, Mapping) else vars(layout)
        sizes, layout = strict_yaml.build(LayoutSizes, given, "layout"), None
    checked = strict_yaml.build(PlanSettings, settings, "")
    try:
        checked = replace(checked, routing=routing_or_folder(checked.routing))
    except ArgumentTypeError as error:
        raise ValueError(f"routing: {error}") from None
    return PlanRequest(model=model, cluster=cluster, layout=layout, **vars(sizes), **vars(checked))
