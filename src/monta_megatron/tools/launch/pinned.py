"""Start the ranks of a Slurm job with the flags that tuning windows before a requeue have pinned.

    python -m monta_megatron.tools.launch.pinned COMMAND...

start.sh calls it in every task of a step, so in the container of the ranks, and all tasks read the
same files. A job's first start removes the results of earlier jobs from the folder.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from monta_megatron.common.errors import UserError
from monta_megatron.integration.results import (
    FOLDER_VARIABLE,
    WindowResult,
    read_results,
    remove_results,
)

# What the flags of a winner replace: a named chain has no trials, and its experts are split only
# where the winner's were.
VALUE_OPTIONS = ("--moe-monta-chain", "--moe-monta-num-chunks", "--moe-monta-tune-steps")
SWITCH = "--moe-monta-overlap-experts"


def pinned_flags(results: Iterable[WindowResult]) -> str | None:
    """The flags of the winner of all second windows.

    Returns:
        None if second windows differ, or are missing where there was a first one.
    """
    first_windows, winners = set(), {}
    for result in results:
        layers = result.ranks, result.layers
        if result.window == 1:
            first_windows.add(layers)
        else:
            winners[layers] = result.flags
    flags = set(winners.values())
    if len(flags) != 1 or not first_windows <= winners.keys():
        return None
    return flags.pop()


def with_flags(words: Sequence[str], flags: str) -> list[str]:
    """The words of a command, with flags in place of the options that they replace."""
    kept = []
    remaining = iter(words)
    for word in remaining:
        name, has_value, _ = word.partition("=")
        if name in VALUE_OPTIONS:
            if not has_value:
                next(remaining, None)
        elif name != SWITCH:
            kept.append(word)
    return [*kept, *flags.split()]


def flags_and_reason(folder: Path) -> tuple[str | None, str]:
    """The flags that the results in a folder pin, or None; the line for the log."""
    try:
        flags = pinned_flags(read_results(folder))
    except UserError as error:
        return None, f"no flags are pinned: {error}"
    if flags is None:
        return None, f"no flags are pinned: no second tuning windows with one winner in {folder}"
    return flags, f"pinned by the second tuning windows: {flags}"


def main(command: list[str]) -> None:
    """Run the command in place of this process."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    is_first_start = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    is_first_task = os.environ.get("SLURM_PROCID", "0") == "0"
    if is_first_start:
        # No other task has a result yet: its ranks cannot train before those of this task.
        if is_first_task:
            remove_results(folder)
    else:
        flags, line = flags_and_reason(folder)
        if is_first_task:
            print(f"start.sh: {line}", file=sys.stderr, flush=True)
        if flags is not None:
            command = with_flags(command, flags)
            # Each option has a variable with its default.
            for option in (*VALUE_OPTIONS, SWITCH):
                os.environ.pop(option.removeprefix("--").replace("-", "_").upper(), None)
    os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"start.sh: {error}", file=sys.stderr)
        sys.exit(2)
