"""Shell commands as people copy them: which arguments of `monta` they hold, and whether they parse.

MONTA_CPU_RANKS=1 torchrun --nproc-per-node 4 -m monta_megatron bench --experts 16 ...
monta emulate --nodes 2 ... -- monta bench ...
monta emulate --nodes 2 ... -- benchmarks/ablation.py ...
"""

import shlex
from itertools import pairwise, takewhile

import sweep

from monta_megatron.cli import build_parser


def monta_arguments(command: str) -> list[list[str]]:
    """The arguments of every `monta` in one command: its own, and those of ranks that it starts.

    A script of benchmarks/ stands before its own. What follows a pipe is not monta's.
    """
    split = shlex.split(command, comments=True)
    words = list(takewhile(lambda word: word not in ("|", ">"), split))
    found: list[list[str]] = []
    for place, (before, word) in enumerate(pairwise(["", *words])):
        is_monta = word == "monta" and (not found or before == "--")
        if is_monta or (before, word) == ("-m", "monta_megatron"):
            found.append(words[place + 1 :])
        elif word.startswith("benchmarks/"):
            found.append(words[place:])
    return found


def check_arguments(command: str) -> None:
    """Parse the arguments of every `monta` in a command.

    Raises:
        AssertionError: there is none, or the parser refuses its arguments.
    """
    found = monta_arguments(command)
    assert found, f"no monta in: {command}"
    for arguments in found:
        try:
            if arguments[0].startswith("benchmarks/"):
                # They take the flags of `monta bench`, and some of their own.
                sweep.build_parser().parse_args(arguments[1:])
            else:
                build_parser().parse_args(arguments)
        except SystemExit as refused:
            raise AssertionError(f"refused: monta {shlex.join(arguments)}") from refused
