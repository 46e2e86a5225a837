"""Megatron's experts on this rank, as something that a calibration starts.

Notation: L = local experts, H = hidden size, N = rows of all of them.
"""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from monta_megatron.chains.calibration_tasks import Point, Task
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.exchange.calibration.memory_operations import Prepare
from monta_megatron.exchange.calibration.operations import Start
from monta_megatron.exchange.calibration.timer import Timer
from monta_megatron.planner.calibration.fitting import expert_curve, expert_points
from monta_megatron.planner.experts import ExpertCurve, ExpertSizes
from monta_megatron.tools.bench.layer import Experts
from monta_megatron.tools.bench.settings import LayerShape


def sizes_of(shape: LayerShape) -> ExpertSizes:
    """The experts of a rank of a layer."""
    return ExpertSizes(
        num_local_experts=shape.num_experts // shape.ep,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn_hidden // shape.etp,
        value_bytes=DTYPE_BYTES[shape.dtype],
    )


def expert_operations(experts: Experts, shape: LayerShape) -> Mapping[str, Prepare]:
    """The calls of `calibration_tasks.ExpertCall`, on rows that all experts have as many of."""
    num_local_experts = shape.num_experts // shape.ep

    def prepare(point: Point, device: torch.device, backward: bool) -> Callable[[], object]:
        # [N, H], [L], [N]
        dtype = getattr(torch, shape.dtype)
        rows = torch.randn(point.num_rows, shape.hidden, device=device).to(dtype)
        counts = torch.full((num_local_experts,), point.num_rows // num_local_experts)
        probs = torch.ones(point.num_rows, device=device)

        def call() -> torch.Tensor:
            inputs = rows.detach().requires_grad_(), counts, probs.detach().requires_grad_()
            with torch.enable_grad():
                outputs = experts(*inputs)
                if backward:
                    outputs.backward(rows)
            return outputs.detach()

        return call

    return {
        "experts": lambda point, device: prepare(point, device, backward=False),
        "experts_both": lambda point, device: prepare(point, device, backward=True),
    }


def time_experts(experts: Experts, shape: LayerShape, device: torch.device) -> ExpertCurve:
    """Time experts by a few runs of each call; all ranks of the launch call this."""
    sizes, operations = sizes_of(shape), expert_operations(experts, shape)
    world = dist.group.WORLD
    assert world is not None, "the ranks have joined"

    def start_of(task: Task) -> Start:
        assert isinstance(task, Point), task
        run = operations[task.operation](task, device)

        def start() -> Callable[[], object]:
            result = run()
            return lambda: result

        return start

    points = expert_points(sizes, device.type)
    timer = Timer(world, device, start_of, 1.0, time.perf_counter())
    times_us = timer.first_runs(points, {}, lambda point, us: None)
    return expert_curve(
        sizes,
        points,
        {point.name: us for point, us in times_us.items()},
        None,
        f"a few calls, torch {torch.__version__}",
    )
