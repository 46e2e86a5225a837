"""What the experts of a rank take by the number of their rows: measured, or by their FLOPs.

A call computes all local experts. Its time is interpolated between numbers of rows; below the
smallest it stays, as the weights are read whatever the rows.
"""

from bisect import bisect_right
from dataclasses import dataclass

from monta_megatron.planner.assumptions import assumptions_of, gpu_names, gpu_of
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.expert_curve import ExpertCurve, experts_on, with_experts
from monta_megatron.planner.kernel_work import VALUE_BYTES, experts_work, times_us

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
        ffn_hidden_size: of each, as far as it lies on the rank.
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
    """What a call of the experts takes.

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
    """What a cluster's file says of these experts, or what their FLOPs say.

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
    name = next((name for name in gpu_names() if name in where), None)
    name = USUAL_GPU if name is None else gpu_of(where, None)
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
    return with_experts(cluster, [curve])
