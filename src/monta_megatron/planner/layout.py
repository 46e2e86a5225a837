"""The layout: how ranks are divided into parallel groups, and on which nodes an exchange lies."""

import math
from dataclasses import dataclass

from monta_megatron.chains.layout import Layout
from monta_megatron.common.rules import PositiveInt, require
from monta_megatron.planner.model import Model


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of Megatron's parallel groups.

    Attributes:
        world_size: number of all ranks.
        tp: tensor parallel size of the attention, with sequence parallelism.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        cp: context parallel size.
        pp: pipeline parallel size.
    """

    world_size: PositiveInt
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    cp: PositiveInt = 1
    pp: PositiveInt = 1

    def __post_init__(self) -> None:
        for name, size in (
            ("tp * cp * pp", self.tp * self.cp * self.pp),
            ("etp * ep * pp", self.etp * self.ep * self.pp),
        ):
            rule = f"be a multiple of {name} ({size})"
            require(self.world_size % size == 0, "world_size", self.world_size, rule)

    @property
    def exchange_size(self) -> int:
        """Ranks of one exchange."""
        return self.ep * self.etp

    @property
    def dp(self) -> int:
        """Data parallel size of the attention."""
        return self.world_size // (self.tp * self.cp * self.pp)

    def incompatibility(self, model: Model) -> str | None:
        """Why this layout cannot train the model, or None if it can."""
        for field, size, name, whole in (
            ("ep", self.ep, "num_experts", model.num_experts),
            ("etp", self.etp, "moe_ffn_hidden_size", model.moe_ffn_hidden_size),
            ("tp", self.tp, "num_attention_heads", model.num_attention_heads),
        ):
            if whole % size != 0:
                return f"{field}: got {size}, must divide {name} of {model.name} ({whole})"
        if self.pp > model.num_layers:
            return (
                f"pp: got {self.pp}, must be at most num_layers of {model.name} "
                f"({model.num_layers})"
            )
        # Sequence parallelism divides the sequence; context parallelism gives each rank two pieces.
        parts = self.tp * self.cp * (2 if self.cp > 1 else 1)
        if model.seq_length % parts != 0:
            return (
                f"tp: got {self.tp}, must divide seq_length of {model.name} ({model.seq_length}) "
                f"together with cp ({self.cp})"
            )
        return None

    def tokens_per_rank(self, model: Model) -> int:
        """Tokens that one rank brings to an exchange."""
        return model.seq_length * model.micro_batch_size // (self.tp * self.cp)


def exchanges(layout: ParallelLayout, num_experts: int, ranks_per_node: int) -> tuple[Layout, ...]:
    """A layout's exchanges, one for each way they lie on the nodes, each as its first rank sees it.

    Megatron numbers the expert ranks of a pipeline stage with ETP fastest, then EP, so an exchange
    is a run of consecutive ranks. If its size fits the nodes, all of them lie in the same way.
    """
    size = layout.exchange_size
    # After this many exchanges the pattern repeats.
    period = math.lcm(size, ranks_per_node) // size
    patterns: dict[tuple[int, ...], None] = {}
    for index in range(min(period, layout.world_size // size)):
        first = index * size
        first_node = first // ranks_per_node
        nodes = tuple((first + rank) // ranks_per_node - first_node for rank in range(size))
        patterns.setdefault(nodes)
    return tuple(
        Layout(
            ep=layout.ep,
            etp=layout.etp,
            num_local_experts=num_experts // layout.ep,
            rank=0,
            nodes=nodes,
        )
        for nodes in patterns
    )
