"""The figures that predictions are held against: configs/estimate/published.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.rules import NonNegativeInt, PositiveInt, Rule, Text

FILE = presets.FOLDER / "estimate" / "published.yaml"
MOST_TOLERANCE_PCT = 25
Tolerance = Annotated[
    float,
    Rule(
        f"above 0 and at most {MOST_TOLERANCE_PCT}",
        lambda value: 0 < value <= MOST_TOLERANCE_PCT,
    ),
]
Unit = Literal["s", "ms", "TFLOP/s per GPU", "tokens/s per GPU"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Rows of one model on one cluster.

    Attributes:
        family: its name.
        judged: whether its rows judge; constants are fitted on the others only.
        tolerance_pct: that no row may exceed.
        source: where it was published.
        cluster: a preset.
    """

    family: Text
    judged: bool
    tolerance_pct: Tolerance
    source: Text
    cluster: Text


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        id: of the row.
        published: the figure.
    """

    id: Text
    published: float


@dataclass(frozen=True, kw_only=True)
class IterationRow(Row):
    """An iteration.

    Attributes:
        settings: fields of `TrainingSettings`, over those of the family.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class IterationFamily(Family):
    """Iterations.

    Attributes:
        unit: of the figures.
        model: a run of configs/runs, whose arguments give the architecture.
        changes: fields of `Architecture` in place of those.
        gpu: of the cluster.
        settings: fields of `TrainingSettings`.
        rows: the figures.
    """

    unit: Unit
    model: Text
    changes: Mapping[str, Any] = field(default_factory=dict)
    gpu: Text
    settings: Mapping[str, Any]
    rows: tuple[IterationRow, ...]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What is exchanged; the fields as in `Architecture`, tokens of one exchange."""

    tokens_per_rank: PositiveInt
    hidden_size: PositiveInt
    router_topk: PositiveInt
    router_num_groups: PositiveInt = 1
    router_group_topk: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class Layer(Exchange):
    """One MoE layer.

    Attributes:
        expert_ffn_size, num_experts: as in `Architecture`.
        ep: ranks of the exchange.
    """

    expert_ffn_size: PositiveInt
    num_experts: PositiveInt
    ep: PositiveInt


@dataclass(frozen=True, kw_only=True)
class LayerRow(Row):
    """What a backend saves over alltoall.

    Attributes:
        dispatcher: the backend.
    """

    dispatcher: Literal["deepep", "hybridep"]


@dataclass(frozen=True, kw_only=True)
class LayerFamily(Family):
    """Layers.

    Attributes:
        gpu: of the cluster.
        layer: what runs.
        rows: the figures.
    """

    gpu: Text
    layer: Layer
    rows: tuple[LayerRow, ...]


@dataclass(frozen=True, kw_only=True)
class BandwidthExchange(Exchange):
    """What a backend's benchmark exchanges.

    Attributes:
        experts_per_rank: or
        num_experts: of all ranks.
    """

    experts_per_rank: NonNegativeInt = 0
    num_experts: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class BandwidthRow(Row):
    """One pass.

    Attributes:
        pass_name: which.
        ranks: that exchange.
        value_bytes: of a value.
    """

    pass_name: Literal["dispatch", "combine"]
    ranks: PositiveInt
    value_bytes: PositiveInt = 2


@dataclass(frozen=True, kw_only=True)
class BandwidthFamily(Family):
    """Bandwidths.

    Attributes:
        backend: whose.
        exchange: what runs.
        rows: the figures.
    """

    backend: Literal["deepep", "hybridep"]
    exchange: BandwidthExchange
    rows: tuple[BandwidthRow, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredExchange:
    """An exchange of 64 experts in fp32.

    Attributes:
        ep, etp: ranks.
        router_topk: experts of a token.
        tokens_per_rank: that a rank brings.
        hidden_size: of a row.
    """

    ep: PositiveInt
    etp: PositiveInt = 1
    router_topk: PositiveInt
    tokens_per_rank: PositiveInt
    hidden_size: PositiveInt


@dataclass(frozen=True, kw_only=True)
class ExchangeRow(Row):
    """One chain.

    Attributes:
        chain: what ran.
        num_chunks: in how many chunks.
        exchange: what it moved.
    """

    chain: Text
    num_chunks: PositiveInt
    exchange: MeasuredExchange


@dataclass(frozen=True, kw_only=True)
class ExchangeFamily(Family):
    """Exchanges of the emulated cluster.

    Attributes:
        rows: the figures.
    """

    rows: tuple[ExchangeRow, ...]


@dataclass(frozen=True, kw_only=True)
class Published:
    """All rows."""

    iterations: tuple[IterationFamily, ...]
    layers: tuple[LayerFamily, ...]
    bandwidths: tuple[BandwidthFamily, ...]
    exchanges: tuple[ExchangeFamily, ...]


def read_published() -> Published:
    """The rows of the file."""
    return strict_yaml.load(Published, FILE)
