"""Results of tuning windows as files, from which a requeued job pins the winner.

The launch names their folder in `FOLDER_VARIABLE`; without it nothing is written.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from monta_megatron.common import files, strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import PositiveInt

FOLDER_VARIABLE = "MONTA_TUNING_RESULTS"
_FILES = "rank_*_window_*.json"


@dataclass(frozen=True, kw_only=True)
class WindowResult:
    """Result of a tuning window.

    Attributes:
        ranks: the expert group, whose first rank writes the file.
        layers: hash of the ranks and the configuration of the layers that are tuned together.
        window: number of their window, from 1.
        step: first step of the window.
        flags: arguments that pin the winner; None if no candidate was measured.
    """

    ranks: tuple[int, ...]
    layers: int
    window: PositiveInt
    step: int
    flags: str | None


def write_result(result: WindowResult, environ: Mapping[str, str] = os.environ) -> str | None:
    """Write a result, whole, in place of an earlier one of the same layers and window.

    Returns:
        A line for the log if it cannot be written: the training goes on without it.
    """
    if FOLDER_VARIABLE not in environ:
        return None
    folder = Path(environ[FOLDER_VARIABLE])
    name = f"rank_{result.ranks[0]}_layers_{result.layers:08x}_window_{result.window}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_whole(folder / name, json.dumps(asdict(result)) + "\n")
    except (OSError, UserError) as error:
        return f"a requeued job will pin no flags, {FOLDER_VARIABLE}: {error}"
    return None


def read_results(folder: Path) -> list[WindowResult]:
    """The results in a folder; none if there is no such folder.

    Raises:
        UserError: a file holds something else; one line.
    """
    paths = sorted(folder.glob(_FILES))
    return [strict_yaml.build(WindowResult, files.read_json(path), str(path)) for path in paths]


def remove_results(folder: Path) -> None:
    """Remove the results in a folder.

    Raises:
        UserError: one cannot be removed; one line.
    """
    for path in folder.glob(_FILES):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be removed: {error.strerror}; a requeued job would pin the flags "
                f"of an earlier one, so set {FOLDER_VARIABLE} to another folder"
            ) from error
