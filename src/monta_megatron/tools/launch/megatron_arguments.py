"""Check a run's arguments with Megatron's own parser, before anything starts.

    WORLD_SIZE=N python -m monta_megatron.tools.launch.megatron_arguments FOLDER

FOLDER holds the run's script: a Megatron next to it takes precedence over an installed one, as
when Python runs the script. Standard input is a JSON list with the words of each argument, standard
output a JSON `Answer`. This is a process of its own so that it uses the run's Megatron in the run's
environment, and nothing that Megatron prints meanwhile gets in the way.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from monta_megatron.common.text import nearest

Words = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of the parser.

    Attributes:
        megatron: version of Megatron-Core, or None where there is none.
        unchecked: why nothing was checked, or None.
        problem: the first thing that is wrong, or None.
        position: position of the argument that the problem is about, or None.
        doubt: what Megatron's validation refuses, or None. It looks for devices and optional
            libraries, which the run may find where this process does not.
    """

    megatron: str | None = None
    unchecked: str | None = None
    problem: str | None = None
    position: int | None = None
    doubt: str | None = None


def check(arguments: Sequence[Words]) -> Answer:
    """Parse as the training script will.

    Args:
        arguments: the words of each argument, such as ["--lr", "1e-4"].
    """
    try:
        from megatron.core.package_info import __version__ as version
    except ImportError as error:
        return Answer(unchecked=f"Megatron-Core cannot be imported: {error}")
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        return Answer(
            megatron=version,
            unchecked=f"Megatron-Core {version} has no megatron.training to check them: {error}",
        )
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_megatron_arguments(parser)
    for position, words in enumerate(arguments):
        problem = _problem(parser, words, version)
        if problem is not None:
            return Answer(megatron=version, problem=problem, position=position)
    command_line = [word for words in arguments for word in words]
    answer = _check_options(parser.parse_args(command_line), arguments, version)
    return answer if answer.problem else replace(answer, doubt=_doubt(command_line))


def _check_options(parsed: argparse.Namespace, arguments: Sequence[Words], version: str) -> Answer:
    """Problems of the arguments taken together, found by this package."""
    from monta_megatron.integration.arguments import check_arguments

    try:
        check_arguments(parsed)
    except ValueError as error:
        field = str(error).partition(":")[0]
        names = [words[0].lstrip("-").replace("-", "_") for words in arguments]
        if field not in names:
            return Answer(megatron=version, problem=str(error))
        text = str(error).removeprefix(f"{field}: ")
        return Answer(megatron=version, problem=text, position=names.index(field))
    return Answer(megatron=version)


def _doubt(command_line: list[str]) -> str | None:
    """The first thing that Megatron's validation refuses at the environment's world size."""
    from megatron.training.arguments import parse_args, validate_args

    sys.argv[1:] = command_line
    try:
        validate_args(parse_args())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it refuses in many ways
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


class _ParserError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _ParserError(message)


def _problem(parser: argparse.ArgumentParser, words: Words, version: str) -> str | None:
    """Problem of one argument by itself, in argparse's words."""
    known = [
        name.removeprefix("--") for action in parser._actions for name in action.option_strings
    ]
    name = words[0].removeprefix("--")
    if name not in known:
        meant = nearest(name, known)
        advice = "" if meant is None else f"; did you mean {meant}?"
        return f"no argument of Megatron-Core {version}{advice}"
    try:
        _, rest = parser.parse_known_args(words)
    except _ParserError as error:
        return str(error).removeprefix(f"argument {words[0]}: ")
    except Exception as error:  # noqa: BLE001 - a converter of Megatron's fails in its own way
        return f"got {' '.join(words[1:])!r}: {type(error).__name__}: {error}"
    return f"got {' '.join(rest)!r}, which it does not take" if rest else None


def main(folder: str) -> None:
    """Check the arguments on standard input, and answer on standard output."""
    # This replaces the folder that `python -m` puts there, which is on no script's path.
    sys.path[0] = folder
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    import torch  # noqa: F401 - switches the CPU ranks on, which set the variable

    if connections is None:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    answer = check(json.load(sys.stdin))
    json.dump(asdict(answer), answers)
    answers.close()


if __name__ == "__main__":
    main(sys.argv[1])
