"""Compute time of experts and other kernels: measured curves, or FLOPs and bytes.

A call computes all local experts. Its time is interpolated between numbers of rows; below the
smallest it stays, as the weights are read whatever the rows.

By a GPU's datasheet: a matrix of [rows_in, rows_out] on t tokens takes 2 t rows_in rows_out FLOPs,
and reads and writes t rows_in + rows_in rows_out + t rows_out values. Its backward pass is two such
products. Everything else reads and writes memory.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from monta_megatron.common.rules import NonNegativeFloat, PositiveFloat, PositiveInt, Text, require
from monta_megatron.planner.assumptions import Assumptions, assumptions_of, named_gpu
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import Kind, Sizes

KernelKind = Literal["gemm", "attention", "memory"]
VALUE_BYTES = 2
# Times of the forward pass that the backward pass takes.
BACKWARD: dict[KernelKind, float] = {"gemm": 2.0, "attention": 2.5, "memory": 2.0}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Some kernels of one kind in a forward pass.

    Attributes:
        kind: of the kernels.
        flops: that they make.
        num_bytes: that they read and write.
    """

    kind: KernelKind
    flops: float = 0.0
    num_bytes: float = 0.0

    def forward_us(self, assumed: Assumptions, memory_gbytes_per_s: float) -> float:
        """The longer of the time for the FLOPs and the time for the bytes.

        Args:
            assumed: peak and efficiencies.
            memory_gbytes_per_s: of the GPU, by its datasheet.
        """
        bytes_per_us = memory_gbytes_per_s * 1e3 * assumed["memory_efficiency"]
        memory_us = self.num_bytes / bytes_per_us
        if self.kind == "memory":
            return memory_us
        flops_per_us = assumed.peak_flops_per_us * assumed[f"{self.kind}_efficiency"]
        return max(self.flops / flops_per_us, memory_us)


def matrix(tokens: float, rows_in: float, rows_out: float, copies: float = 1) -> Work:
    """A product of [tokens, rows_in] and [rows_in, rows_out].

    Args:
        tokens: of all copies together.
        rows_in: of one weight.
        rows_out: likewise.
        copies: weights that share the tokens.
    """
    values = tokens * (rows_in + rows_out) + copies * rows_in * rows_out
    return Work(kind="gemm", flops=2 * tokens * rows_in * rows_out, num_bytes=VALUE_BYTES * values)


def experts_work(
    tokens: float, hidden_size: float, ffn_size: float, num_experts: float, assumed: Assumptions
) -> tuple[Work, ...]:
    """Gated feed-forward layers that share some tokens.

    Args:
        tokens: rows of all of them.
        hidden_size: H.
        ffn_size: of each, its part on the rank.
        num_experts: their number.
        assumed: holds the passes of the activation function.
    """
    return (
        matrix(tokens, hidden_size, 2 * ffn_size, num_experts),
        matrix(tokens, ffn_size, hidden_size, num_experts),
        passes(tokens, ffn_size, assumed["activation_passes"]),
    )


def times_us(
    works: Iterable[Work], assumed: Assumptions, memory_gbytes_per_s: float
) -> tuple[float, float]:
    """(forward, backward) of some works, one after the other."""
    forward = backward = 0.0
    for work in works:
        time_us = work.forward_us(assumed, memory_gbytes_per_s)
        forward += time_us
        backward += BACKWARD[work.kind] * time_us
    return forward, backward


def passes(tokens: float, size: float, passes: float) -> Work:
    """Kernels that read or write [tokens, size] values so many times."""
    return Work(kind="memory", num_bytes=VALUE_BYTES * tokens * size * passes)


@dataclass(frozen=True, kw_only=True)
class ExpertCurve:
    """Time of a rank's experts, all of them with as many rows.

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


def with_expert_curves(cluster: Cluster, curves: Iterable[ExpertCurve]) -> ClusterWithExperts:
    """A cluster with these experts, in place of any others."""
    costs = {entry.name: getattr(cluster, entry.name) for entry in fields(Cluster)}
    return ClusterWithExperts(**costs, experts=tuple(curves))


def experts_on(cluster: Cluster) -> tuple[ExpertCurve, ...]:
    """Measured curves of experts."""
    return cluster.experts if isinstance(cluster, ClusterWithExperts) else ()


# By whose FLOPs experts are priced that nobody measured, on a GPU that nobody named.
USUAL_GPU = "H100"
# By which bytes are read where a copy of so many takes no more than its bytes.
LARGE_COPY_BYTES = 1e9
# Sizes at which experts are priced by their FLOPs.
ROWS_PER_EXPERT = tuple(1 << power for power in range(20))
# Operations that a call hands to the device: two grouped products, the activation function, the
# probabilities, and what Megatron does to the splits; assumed.
HOST_OPERATIONS = 12


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """The experts of a rank.

    Attributes:
        num_local_experts: how many.
        hidden_size: of their rows.
        ffn_hidden_size: of each, its part on the rank.
        value_bytes: bytes of one value.
    """

    num_local_experts: int
    hidden_size: int
    ffn_hidden_size: int
    value_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: three matrices of each expert, as gated ones have."""
        of_one = 3 * self.hidden_size * self.ffn_hidden_size
        return self.num_local_experts * of_one * self.value_bytes


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Time of a call of the experts.

    Attributes:
        rows: ascending numbers of rows of all local experts together.
        forward_us: the time for each of them.
        backward_us: likewise, of the backward pass.
        launch_us: host time to start a call or its backward pass.
        in_background: see `ExpertCurve`.
        note: where the figures come from.
        gradient_bytes: of the weights' gradients, which a layer in the pipeline holds from its
            first chunk's backward pass to the last; 0 where products add them to `main_grad`
            (gradient accumulation fusion, Megatron's default).
    """

    rows: tuple[float, ...]
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    launch_us: float
    in_background: bool
    note: str
    gradient_bytes: float = 0.0

    def time_us(self, rows: float, backward: bool = False) -> float:
        """Time of a call, or of its backward pass, without the host's time to start it."""
        sizes, times = self.rows, self.backward_us if backward else self.forward_us
        if rows <= sizes[0]:
            return times[0]
        above = min(bisect_right(sizes, rows), len(sizes) - 1)
        low, high = above - 1, above
        slope = max((times[high] - times[low]) / (sizes[high] - sizes[low]), 0.0)
        return times[low] + slope * (rows - sizes[low])


def experts_of(sizes: ExpertSizes, cluster: Cluster, gpu: str | None = None) -> Experts:
    """Experts' time by the cluster's file, or by their FLOPs.

    Args:
        sizes: the experts of a rank.
        cluster: the cluster.
        gpu: a text that may name its GPU; None for the cluster's name.
    """
    for curve in experts_on(cluster):
        if all(getattr(curve, name) == value for name, value in vars(sizes).items()):
            return Experts(
                rows=tuple(rows * sizes.num_local_experts for rows in curve.rows_per_expert),
                forward_us=curve.forward_us,
                backward_us=curve.backward_us,
                launch_us=curve.launch_us,
                in_background=curve.in_background,
                note=f"{curve.kind}: {curve.source}",
            )
    return _by_flops(sizes, cluster, gpu)


def _by_flops(sizes: ExpertSizes, cluster: Cluster, gpu: str | None) -> Experts:
    where = cluster.name if gpu is None else gpu
    name = named_gpu(where) or USUAL_GPU
    assumed = assumptions_of(name, where)
    large, half = (
        cluster.time_us("copy", "memory", size).us
        for size in (LARGE_COPY_BYTES, LARGE_COPY_BYTES / 2)
    )
    memory_gbytes_per_s = LARGE_COPY_BYTES / 2 / (large - half) / 1e3
    rows = tuple(float(each * sizes.num_local_experts) for each in ROWS_PER_EXPERT)
    times = [
        times_us(
            experts_work(
                of_all, sizes.hidden_size, sizes.ffn_hidden_size, sizes.num_local_experts, assumed
            ),
            assumed,
            memory_gbytes_per_s,
        )
        for of_all in rows
    ]
    # The figures are those of 16-bit values.
    wider = sizes.value_bytes / VALUE_BYTES
    return Experts(
        rows=rows,
        forward_us=tuple(wider * forward for forward, _ in times),
        backward_us=tuple(wider * backward for _, backward in times),
        launch_us=HOST_OPERATIONS * (cluster.host.operation_us or 0.0),
        in_background=False,
        note=f"by their FLOPs: {assumed['peak_tflops']:g} TFLOP/s of {name} at "
        f"{assumed['gemm_efficiency']:.0%}, not measured; `monta calibrate --model` measures them",
    )


def with_timer(
    cluster: Cluster, sizes: ExpertSizes, full_ms: float, rows_per_expert: int
) -> Cluster:
    """A cluster whose experts are a timer that takes no processor; see `bench.timed_experts`."""
    times = (full_ms * 1e3 / rows_per_expert, full_ms * 1e3)
    curve = ExpertCurve(
        **vars(sizes),
        rows_per_expert=(1, rows_per_expert),
        forward_us=times,
        backward_us=times,
        in_background=True,
        kind="datasheet",
        source="a timer",
    )
    return with_expert_curves(cluster, [curve])
