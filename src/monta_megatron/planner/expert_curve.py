"""What experts take on a cluster, measured; a training that splits none needs none of it."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from monta_megatron.common.rules import NonNegativeFloat, PositiveFloat, PositiveInt, Text, require
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import Kind, Sizes


@dataclass(frozen=True, kw_only=True)
class ExpertCurve:
    """What the experts of a rank take, all of them with as many rows.

    Attributes:
        num_local_experts: of a rank.
        hidden_size: of a row.
        ffn_hidden_size: of an expert, as far as it lies on the rank.
        value_bytes: bytes of one value.
        rows_per_expert: ascending.
        forward_us: the time of a call for each of them.
        backward_us: likewise, of its backward pass.
        launch_us: host time to start a call, or its backward pass; they take it besides.
        in_background: whether they take no time of a host that copies itself.
        kind: whether it was measured on this cluster.
        source: what it was measured with.
    """

    num_local_experts: PositiveInt
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    value_bytes: PositiveInt
    rows_per_expert: Sizes
    forward_us: tuple[PositiveFloat, ...]
    backward_us: tuple[PositiveFloat, ...]
    launch_us: NonNegativeFloat = 0.0
    in_background: bool = False
    kind: Kind
    source: Text

    def __post_init__(self) -> None:
        rule = f"be as many as rows_per_expert ({len(self.rows_per_expert)})"
        for name in ("forward_us", "backward_us"):
            num_times = len(getattr(self, name))
            require(num_times == len(self.rows_per_expert), name, f"{num_times} times", rule)


@dataclass(frozen=True, kw_only=True)
class ClusterWithExperts(Cluster):
    """A cluster on which experts were measured.

    Attributes:
        experts: what those of each size take.
    """

    experts: tuple[ExpertCurve, ...] = ()


def with_experts(cluster: Cluster, curves: Iterable[ExpertCurve]) -> ClusterWithExperts:
    """A cluster with these experts, in place of any others."""
    costs = {entry.name: getattr(cluster, entry.name) for entry in fields(Cluster)}
    return ClusterWithExperts(**costs, experts=tuple(curves))


def experts_on(cluster: Cluster) -> tuple[ExpertCurve, ...]:
    """Those that were measured."""
    return cluster.experts if isinstance(cluster, ClusterWithExperts) else ()
