"""How a model is trained, as far as an estimate asks: layout, batch, recompute, overlap."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from monta_megatron.common.flags import whole
from monta_megatron.common.rules import NonNegativeInt, PositiveInt, require
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.tools.launch.arguments import SIZE, Arguments
from monta_megatron.tools.launch.iteration import LAST_STAGE

Recompute = Literal["none", "selective", "full"]
# alltoall is stock's; deepep and hybridep are backends of stock's `flex`.
Dispatcher = Literal["alltoall", "deepep", "hybridep"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """One training.

    Attributes:
        world_size: all ranks.
        tp, cp, pp, ep, etp: sizes of Megatron's parallel groups.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a micro-batch.
        global_batch_size: sequences of an iteration.
        virtual_stages: parts that each pipeline stage is cut into.
        last_stage_layers: of the last pipeline stage, which has the loss too; None for as many as
            of the others, rounded down.
        recompute: selective computes norms and activation functions again, full whole layers.
        overlap: whether the exchange of one micro-batch runs beside another one's computation
            (Megatron's 1F1B overlap).
        graphs: whether CUDA graphs start most of a layer.
        permute_fusion: whether stock's permutation is one kernel.
        dispatcher: who exchanges the tokens.
        device_connections: CUDA_DEVICE_MAX_CONNECTIONS; kept for the record, it has no price.
    """

    world_size: PositiveInt
    tp: PositiveInt = 1
    cp: PositiveInt = 1
    pp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    seq_length: PositiveInt = 4096
    micro_batch_size: PositiveInt = 1
    global_batch_size: PositiveInt
    virtual_stages: PositiveInt = 1
    last_stage_layers: NonNegativeInt | None = None
    recompute: Recompute = "none"
    overlap: bool = False
    graphs: bool = False
    permute_fusion: bool = True
    dispatcher: Dispatcher = "alltoall"
    device_connections: PositiveInt | None = None

    def __post_init__(self) -> None:
        step = self.micro_batch_size * self.layout.dp
        require(
            self.global_batch_size % step == 0,
            "global_batch_size",
            self.global_batch_size,
            f"be a multiple of micro_batch_size x data parallel size ({step})",
        )

    @property
    def layout(self) -> ParallelLayout:
        """The layout in the planner's form."""
        return ParallelLayout(
            world_size=self.world_size,
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp,
        )

    @property
    def num_micro_batches(self) -> int:
        """Of an iteration, on every data parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.layout.dp)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that a rank brings to an exchange."""
        return self.seq_length * self.micro_batch_size // (self.tp * self.cp)


def settings_of(
    arguments: Arguments, layout: ParallelLayout, batch: Mapping[str, int] | None = None
) -> TrainingSettings:
    """What Megatron's arguments set.

    Args:
        arguments: of a run.
        layout: how its ranks are grouped.
        batch: sizes of the batch in place of those of the arguments, by their fields.

    Raises:
        ValueError: an argument is no number.
    """

    changes = {} if batch is None else batch

    def size(name: str, default: int) -> int:
        if name.replace("-", "_") in changes:
            return changes[name.replace("-", "_")]
        return arguments[name].read(SIZE) if name in arguments else default

    micro_batch_size = size("micro-batch-size", 1)
    granularity = arguments.get("recompute-granularity")
    recompute: Recompute = "none"
    if granularity is not None:
        recompute = "full" if granularity.value == "full" else "selective"
    virtual = size("num-virtual-stages-per-pipeline-rank", 1)
    if "num-layers-per-virtual-pipeline-stage" in arguments:
        slots = size("num-layers", 1) // layout.pp
        virtual = max(slots // size("num-layers-per-virtual-pipeline-stage", 1), 1)
    return TrainingSettings(
        world_size=layout.world_size,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp,
        seq_length=size("seq-length", 4096),
        micro_batch_size=micro_batch_size,
        global_batch_size=size("global-batch-size", micro_batch_size * layout.dp),
        virtual_stages=virtual,
        last_stage_layers=arguments[LAST_STAGE].read(whole(0)) if LAST_STAGE in arguments else None,
        recompute=recompute,
        overlap="overlap-moe-expert-parallel-comm" in arguments,
        graphs="enable-cuda-graph" in arguments or "cuda-graph-impl" in arguments,
        permute_fusion="moe-permute-fusion" in arguments,
    )
