"""Megatron's command line: options are parsed, bad input is one line and exit status 2."""

import importlib.util
import os
import sys
from contextlib import closing
from pathlib import Path

import golden
import pytest
from preloaded import Preloaded

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip(
        "megatron.training is not installed: pip install 'megatron-core[training]>=0.19'",
        allow_module_level=True,
    )

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 16 --mock-data"
)


def print_parsed(words: list[str], variables: dict[str, str]) -> None:
    """Parse a command line as a training script does, perhaps on another release."""
    os.environ.update(variables)
    import megatron.core.package_info
    from megatron.training.arguments import parse_and_validate_args

    if version := variables.get("MEGATRON"):
        megatron.core.package_info.__version__ = version
    sys.argv[1:] = words
    args = parse_and_validate_args()
    values = args.moe_monta_chain, args.moe_monta_num_chunks, args.moe_monta_overlap_experts
    print("parsed", *values)


def on_a_rank(*modules: str) -> Preloaded:
    """The only rank, which has imported them."""
    variables = {"MONTA_CPU_RANKS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    return Preloaded(*modules, **variables)


def test_arguments() -> None:
    """A case is variables, of which MEGATRON is the release that is found, then arguments."""
    from monta_megatron.emulation import CPU_RANKS_ARGUMENTS

    def answer(case: str) -> str:
        given = [word for word in case.split() if word[0] != "-" and "=" in word]
        variables = dict(word.split("=") for word in given)
        words = [*BASE.split(), *CPU_RANKS_ARGUMENTS, *case.split()[len(given) :]]
        # They are read when Megatron is imported.
        is_early = any(name.startswith("MOE_MONTA_") for name in variables)
        process = without_megatron if is_early else with_megatron
        result = process.run(print_parsed, words, variables)
        is_good = result.returncode == 0
        assert is_good or (result.returncode == 2 and "Traceback" not in result.stderr), (
            result.stderr
        )
        lines = (result.stdout if is_good else result.stderr).splitlines()
        (line,) = [each for each in lines if each.startswith(("parsed ", "monta: error: "))]
        return line

    megatron = "megatron.training.arguments", "megatron.core.tokenizers.text"
    with (
        closing(on_a_rank("torch")) as without_megatron,
        closing(on_a_rank(*megatron)) as with_megatron,
    ):
        golden.check_cases(Path(__file__).parent / "golden" / "command_line.txt", answer)
