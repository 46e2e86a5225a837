"""Check a run's arguments with Megatron itself, before anything starts.

    WORLD_SIZE=N python -m monta_megatron.tools.launch.megatron_arguments FOLDER

FOLDER holds the run's script: a Megatron next to it takes precedence over an installed one, as
when Python runs the script. Standard input is a JSON list of the words after the script, standard
output a JSON `Answer`. This is a process of its own so that it uses the run's Megatron in the run's
environment, and nothing that Megatron prints meanwhile gets in the way.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from monta_megatron.common.errors import UserError
from monta_megatron.common.text import nearest

# Arguments that TransformerConfig refuses where Transformer Engine is not installed.
NEED_TRANSFORMER_ENGINE = ("moe_permute_fusion", "apply_rope_fusion")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of Megatron.

    Attributes:
        megatron: version of the Megatron-Core that checked the arguments; None if none did.
        unchecked: what was not checked, and the reason; or None.
        problem: mistake in one argument, or in those of this package; None if there is none.
        refusal: reason why Megatron's validation or TransformerConfig refuses the arguments, or
            None. Both look for devices and libraries, which the run may have and this process not.
    """

    megatron: str | None = None
    unchecked: str | None = None
    problem: str | None = None
    refusal: str | None = None


def check(words: Sequence[str]) -> Answer:
    """Parse, validate and configure as the training script will.

    Args:
        words: Megatron's arguments, such as ["--lr", "1e-4"].
    """
    try:
        from megatron.core.package_info import __version__ as version
    except ImportError as error:
        return Answer(unchecked=f"arguments: Megatron-Core cannot be imported: {error}")
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        reason = f"arguments: Megatron-Core {version} has no megatron.training: {error}"
        return Answer(unchecked=reason)
    from monta_megatron.integration.arguments import check_arguments

    parser = _Parser(add_help=False, allow_abbrev=False)
    add_megatron_arguments(parser)
    try:
        parsed, unknown = parser.parse_known_args(words)
        if unknown:
            return Answer(megatron=version, problem=_unknown(unknown[0], parser, version))
        check_arguments(parsed)
    except UserError as error:
        return Answer(megatron=version, problem=str(error))
    except Exception as error:  # noqa: BLE001 - a converter of Megatron's fails in its own way
        return Answer(megatron=version, problem=f"{type(error).__name__}: {error}")
    refusal, skipped = _configure(words)
    why = f"{', '.join(skipped)}: Transformer Engine is not installed here" if skipped else None
    return Answer(megatron=version, refusal=refusal, unchecked=why)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def _unknown(word: str, parser: argparse.ArgumentParser, version: str) -> str:
    if not word.startswith("--"):
        return f"got {word!r}, a value of no argument"
    meant = nearest(word, parser._option_string_actions)
    return f"{word}: no argument of Megatron-Core {version}" + (
        "" if meant is None else f"; did you mean {meant}?"
    )


def _configure(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """First thing that Megatron refuses at the environment's world size, and unchecked settings."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training.arguments import (
        core_transformer_config_from_args,
        parse_args,
        validate_args,
    )

    sys.argv[1:] = words
    skipped = []
    try:
        args: Any = validate_args(parse_args())
        batch = (args.rampup_batch_size, args.global_batch_size, args.micro_batch_size)
        init_num_microbatches_calculator(0, *batch, args.data_parallel_size)
        for name in NEED_TRANSFORMER_ENGINE:
            if getattr(args, name, False) and not importlib.util.find_spec("transformer_engine"):
                setattr(args, name, False)
                skipped.append(name)
        core_transformer_config_from_args(args)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it refuses in many ways
        return " ".join(f"{type(error).__name__}: {error}".split()), skipped
    return None, skipped


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
    # They hide it; it is needed for versions and settings, and computes nothing here.
    sys.modules.pop("transformer_engine", None)
    answer = check(json.load(sys.stdin))
    json.dump(asdict(answer), answers)
    answers.close()


if __name__ == "__main__":
    main(sys.argv[1])
