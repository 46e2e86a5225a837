"""Decisions of `auto`, stored beside Megatron's checkpoints and read when a training resumes.

    SAVE/monta/iter_0000100/rank_0.json     of the exchange whose first rank is 0

A file is written by the first rank of its exchange. It is read by that rank, and given to the
others, so that all have the same.
"""

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from monta_megatron.common import __version__, strict_yaml
from monta_megatron.common.files import make_folder, write_whole
from monta_megatron.common.units import counted
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.integration.controller import ChainController, deciding_controllers
from monta_megatron.planner.online.decision import DecisionState


def patch_checkpointing(checkpointing: Any) -> None:
    """Store with each checkpoint that Megatron saves, and read with the one that it loads.

    Args:
        checkpointing: the module megatron.training.checkpointing.
    """
    save, load = checkpointing.save_checkpoint, checkpointing.load_checkpoint
    parameters = inspect.signature(load)

    @functools.wraps(save)
    def save_checkpoint(iteration: int, *more: Any, **kwargs: Any) -> Any:
        result = save(iteration, *more, **kwargs)
        folder = checkpointing.get_args().save
        if folder is not None:
            store(Path(folder), iteration)
        return result

    @functools.wraps(load)
    def load_checkpoint(*arguments: Any, **kwargs: Any) -> Any:
        result = load(*arguments, **kwargs)
        given = parameters.bind(*arguments, **kwargs)
        given.apply_defaults()
        folder, iteration = (
            getattr(checkpointing.get_args(), given.arguments["load_arg"]),
            result[0],
        )
        if folder is not None and iteration > 0:
            resume(Path(folder), iteration)
        return result

    checkpointing.save_checkpoint, checkpointing.load_checkpoint = save_checkpoint, load_checkpoint


def store(folder: Path, iteration: int) -> None:
    """Store the decisions of all exchanges; each is written by its first rank.

    Args:
        folder: of the checkpoints.
        iteration: of Megatron.
    """
    for controller, name in _named_files():
        if dist.get_group_rank(controller.group, dist.get_rank()) != 0:
            continue
        path = _folder(folder, iteration) / name
        document = {
            "made_for": _made_for(controller),
            "decision": strict_yaml.plain(controller.state()),
        }
        try:
            make_folder(path.parent, "save")
            write_whole(path, json.dumps(document))
        except ValueError as error:
            # The checkpoint itself is there.
            controller.report(f"the decision of auto is not stored: {error}")


def resume(folder: Path, iteration: int) -> None:
    """Resume stored decisions that fit; all ranks call this.

    Args:
        folder: of the checkpoints.
        iteration: of Megatron.
    """
    for controller, name in _named_files():
        path = _folder(folder, iteration) / name
        is_first = dist.get_group_rank(controller.group, dist.get_rank()) == 0
        document = gather_objects(_read(path) if is_first else None, controller.group)[0]
        problem: str | None = None
        try:
            state = _state_of(document, controller, path)
        except ValueError as error:
            problem = str(error)
        problems = [problem]
        if controller.replicas is not None:
            # They end their tuning together, so none of them goes on by itself.
            problems = gather_objects(problem, controller.replicas)
        problem = next((each for each in problems if each is not None), None)
        if problem is None:
            controller.resume(state)
            done = counted(state.number, "iteration")
            controller.report(f"auto goes on with what it has decided after {done}")
        else:
            controller.report(f"auto starts anew: {problem}")


def _named_files() -> list[tuple[ChainController, str]]:
    """The decisions of this rank's exchanges, and the name of each one's file."""
    named, taken = [], set()
    for controller in deciding_controllers():
        first = dist.get_process_group_ranks(controller.group)[0]
        name, number = f"rank_{first}.json", 1
        while name in taken:
            # Layers of another shape on the same exchange.
            name, number = f"rank_{first}_{number}.json", number + 1
        taken.add(name)
        named.append((controller, name))
    return named


def _folder(folder: Path, iteration: int) -> Path:
    return folder / "monta" / f"iter_{iteration:07d}"


def _made_for(controller: ChainController) -> dict[str, Any]:
    """Values that have to be equal where a decision is resumed."""
    from megatron.core.package_info import __version__ as megatron_version

    layout = controller.layout
    rule = {
        "monta_megatron": __version__,
        "megatron_core": megatron_version,
        "ep": layout.ep,
        "etp": layout.etp,
        "num_local_experts": layout.num_local_experts,
        "nodes": [node - min(layout.nodes) for node in layout.nodes],
        **controller.agreed_config,
    }
    # Where a plan is written to changes no decision, and watching no tuning.
    for name in ("moe_monta_plan_out", "moe_monta_watch_steps"):
        rule.pop(name, None)
    # As a file has it.
    made_for: dict[str, Any] = json.loads(json.dumps(rule))
    return made_for


def _read(path: Path) -> dict[str, Any] | str:
    """Content of a file, or why it cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{path}: no such file, so nothing was decided beside this checkpoint"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    except ValueError:
        return f"{path}: is no JSON"
    if not isinstance(document, dict) or not isinstance(document.get("made_for"), dict):
        return f"{path}: holds no decision"
    return document


def _state_of(
    document: dict[str, Any] | str | None, controller: ChainController, path: Path
) -> DecisionState:
    """The state in a file.

    Raises:
        ValueError: it is none, or does not fit; names the file.
    """
    if not isinstance(document, dict):
        raise ValueError(document)
    stored, here = document["made_for"], _made_for(controller)
    for name in dict.fromkeys((*here, *stored)):
        if stored.get(name) != here.get(name):
            raise ValueError(
                f"{path}: {name}: decided for {stored.get(name)}, used with {here.get(name)}"
            )
    state = strict_yaml.build(DecisionState, document.get("decision"), str(path))
    try:
        controller.check_state(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return state
