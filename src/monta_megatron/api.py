"""The Python API of `import monta_megatron`: the commands' functions, and the ways in.

Nothing heavy is imported before a function is called. A wrong argument raises `UserError`, a
ValueError with the one line that the command line would print.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monta_megatron.integration.layer import LayerStatistics
    from monta_megatron.planner.cluster import Cluster
    from monta_megatron.planner.model import Model
    from monta_megatron.tools.plan.request import Planned


def plan(
    *,
    model: str | Path | Model,
    cluster: str | Path | Cluster,
    world_size: int | None = None,
    tp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    cp: int | None = None,
    pp: int | None = None,
    ranks_per_node: int | None = None,
    tokens: int | None = None,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
) -> Planned:
    """Choose layout, chain and number of chunks, as `monta plan` does. Needs no torch.

    Args:
        model: a file (ours, or a config.json of Hugging Face), a preset by its name, or a `Model`.
        cluster: a file, a preset by its name, or a `Cluster`.
        world_size: number of all ranks; None for those of the cluster.
        tp, ep, etp: tensor, expert and expert tensor parallel size. Without any of them all layouts
            that fit are ranked, and the best is planned.
        cp, pp: context and pipeline parallel size.
        ranks_per_node: ranks that the job uses of each node, or host; None for all of them.
        tokens: tokens per rank; None for those of the batch.
        seq_length, micro_batch_size: tokens per sequence, and sequences per micro-batch; None for
            the model's.
        global_batch_size: sequences of an iteration, for what an iteration gains.

    Returns:
        The best chain of ours beside stock, what is recommended, and `layout`, `memory`, `ranking`
        (None for a layout that was named) and `benefit`.

    Raises:
        ValueError: an argument is wrong, or no chain can run.
    """
    given = dict(locals())
    from monta_megatron.common import strict_yaml
    from monta_megatron.tools.plan.request import PlanRequest, plan_request

    # Checked as the command line checks its flags.
    return plan_request(strict_yaml.build(PlanRequest, given, ""))


def statistics() -> list[LayerStatistics]:
    """Statistics of the exchanges of this process's MoE layers, in the model's order.

    A layer has its choice, the bytes that left this rank between and inside nodes, and by how much
    the busiest rank is above the mean. It is there from when it is built, for as long as the model
    exists.
    """
    # Nothing has built a layer without this; then torch need not be there either.
    if "monta_megatron.integration.layer" not in sys.modules:
        return []
    from monta_megatron.integration.layer import layer_statistics

    return layer_statistics()


def forget_groups() -> None:
    """Close the process groups that are ours, to give their communicators' memory back.

    For frameworks that close Megatron's groups between phases and make them again: every rank calls
    this between steps, when no exchange is under way. The next exchange makes what it needs again.
    """
    from monta_megatron.exchange import collectives

    collectives.close_groups()


def register() -> None:
    """Make Megatron-Core accept `moe_token_dispatcher_type="monta"`.

    Needed only if autoload is switched off (MONTA_AUTOLOAD=0 or TORCH_DEVICE_BACKEND_AUTOLOAD=0) or
    this package is on the path but not installed. Calling it twice is harmless.

    Raises:
        ImportError: Megatron-Core is not installed.
        ValueError: its version is outside the range that this package was tested with.
    """
    from monta_megatron.integration import registration

    registration.register()


def with_monta(spec: Any) -> Any:
    """A copy of a spec in which every MoE layer uses our dispatcher.

    Pass the result where Megatron takes a spec, with `moe_token_dispatcher_type="alltoall"` in the
    configuration, whose class stays Megatron's own; so does MoELayer.

    Args:
        spec: of a layer, a block, or the stack of a HybridModel: a ModuleSpec, a partial, or the
            submodules of one.

    Raises:
        ImportError: Megatron-Core is not installed.
        ValueError: the spec holds no MoE layer.
    """
    from monta_megatron.integration import layer

    return layer.with_monta(spec)
