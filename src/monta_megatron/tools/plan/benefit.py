"""What a plan gains over stock `alltoall` in an iteration of a request."""

import math
from dataclasses import replace

from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.layout import iteration_of
from monta_megatron.planner.plan import Plan
from monta_megatron.tools.plan.plan_request import PlanRequest
from monta_megatron.tools.plan.request import PlanInputs


def benefit_of_plan(request: PlanRequest, inputs: PlanInputs, plan: Plan) -> Benefit | None:
    """What a plan gains over stock in an iteration; None where stock's exchange was not priced.

    Raises:
        ValueError: the batch is no whole number of micro-batches.
    """
    num_micro_batches = _num_micro_batches(request, inputs)
    iteration = iteration_of(inputs.model, inputs.layout.pp, num_micro_batches)
    if plan.benefit is None or request.wire_dtype is not None:
        return None
    return replace(plan.benefit, iteration=iteration)


def _num_micro_batches(request: PlanRequest, inputs: PlanInputs) -> int | None:
    model, layout = inputs.model, inputs.layout
    if request.global_batch_size is None or request.tokens == 0:
        return None
    if request.tokens is not None:
        # As many as it takes, if a micro-batch has so many tokens.
        tokens = request.global_batch_size * model.seq_length // (layout.dp * layout.tp * layout.cp)
        return math.ceil(tokens / request.tokens)
    num_micro_batches, rest = divmod(request.global_batch_size, model.micro_batch_size * layout.dp)
    if rest:
        raise ValueError(
            f"--global-batch-size: got {request.global_batch_size}, must be a multiple of "
            f"{model.micro_batch_size * layout.dp}, which is micro_batch_size of {model.name} "
            f"({model.micro_batch_size}) times data parallel size ({layout.dp})"
        )
    return num_micro_batches
