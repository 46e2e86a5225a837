"""The request that a training's log makes: its model, layout, batch and measured iteration."""

from dataclasses import replace
from typing import Any

from monta_megatron.integration.options import AUTO, DISPATCHER_TYPE
from monta_megatron.planner.models.model import Reader, model_of
from monta_megatron.tools.plan.request import PlanRequest
from monta_megatron.tools.plan.training_log import TrainingLog


def request_of(log: TrainingLog, request: PlanRequest) -> PlanRequest:
    """A request with what the log says; what the request says itself stays.

    Raises:
        ValueError: the log lacks an argument.
    """
    given: dict[str, Any] = {
        **log.sizes,
        "world_size": log.world_size,
        "global_batch_size": Reader(log.arguments, log.file).optional("global-batch-size"),
    }
    if log.world_size is None and request.world_size is None:
        raise ValueError(f"{log.file}: names no world size, must be given as --world-size")
    changes = {name: value for name, value in given.items() if getattr(request, name) is None}
    return replace(
        request, model=model_of(log.arguments, "the training of the log", log.file), **changes
    )


def questions_of(log: TrainingLog) -> dict[str, Any]:
    """Fields of `Questions` that the log answers."""
    # Megatron's own default.
    ran = str(log.arguments.get("moe-token-dispatcher-type", "allgather"))
    if ran == DISPATCHER_TYPE:
        ran = str(log.arguments.get("moe-monta-chain") or AUTO)
    return {"iteration_ms": log.iteration_ms, "ran": ran, "overlaps": log.overlaps}
