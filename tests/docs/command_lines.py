"""Shell commands as people copy them: which arguments of `monta` they hold, and whether they parse.

MONTA_CPU_RANKS=1 torchrun --nproc-per-node 4 -m monta_megatron bench --experts 16 ...
monta emulate --nodes 2 ... -- -m monta_megatron bench ...
monta emulate --nodes 2 ... -- monta bench ...
monta emulate --nodes 2 ... -- benchmarks/ablation.py ...
"""

import shlex

import sweep

from monta_megatron.cli import build_parser

MODULE = ["-m", "monta_megatron"]


def monta_arguments(command: str) -> list[list[str]]:
    """The arguments of every `monta` in one command: its own, and that of ranks it starts.

    What follows a pipe, a redirection or a comment is not monta's.
    """
    words = shlex.split(command, comments=True)
    for position, word in enumerate(words):
        if word in ("|", ">"):
            words = words[:position]
            break
    starts = [place for place, word in enumerate(words) if word == "monta"]
    starts = [place for place in starts if place == starts[0] or words[place - 1] == "--"]
    starts += [place + 1 for place in range(len(words) - 1) if words[place : place + 2] == MODULE]
    scripts = [place for place, word in enumerate(words) if word.startswith("benchmarks/")]
    return [words[start + 1 :] for start in starts] + [words[place:] for place in scripts]


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
