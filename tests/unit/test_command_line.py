"""Bad input on Megatron's command line: one clear line, exit status 2, nothing started."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
MOE = "--num-experts 4 --moe-token-dispatcher-type monta"
OVERLAP = "--moe-monta-overlap-experts --moe-monta-chain alltoall_dedup"

Parse = Callable[..., subprocess.CompletedProcess[str]]


def print_parsed(words: list[str], environment: dict[str, str], version: str | None) -> None:
    """Parse a command line as a training script does, perhaps on another release."""
    import megatron.core.package_info
    from megatron.training.arguments import parse_and_validate_args

    os.environ.update(environment)
    if version is not None:
        megatron.core.package_info.__version__ = version
    sys.argv[1:] = words
    args = parse_and_validate_args()
    values = args.moe_monta_chain, args.moe_monta_num_chunks, args.moe_monta_overlap_experts
    print("parsed", *values)


@contextmanager
def parser(**environment: str) -> Iterator[Parse]:
    """Parses command lines as the only rank."""
    environment |= {"MONTA_CPU_RANKS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    megatron = Preloaded("megatron.training.arguments", **environment)
    from monta_megatron.emulation import CPU_RANKS_ARGUMENTS

    def parse(
        arguments: str, version: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        words = [*BASE.split(), *CPU_RANKS_ARGUMENTS, *arguments.split()]
        return megatron.run(print_parsed, words, environment, version)

    try:
        yield parse
    finally:
        megatron.close()


@pytest.fixture(scope="module")
def parse() -> Iterator[Parse]:
    with parser() as parse:
        yield parse


NEWER = "0.21.0"
STOCK = "--num-experts 4 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("arguments", "environment", "version", "printed"),
    [
        (
            f"{MOE} --moe-monta-chain alltoall_allgather --moe-monta-num-chunks 3",
            {},
            None,
            "parsed alltoall_allgather 3 None",
        ),
        (f"{MOE} {OVERLAP}", {}, None, "parsed alltoall_dedup None True"),
        # A release that is outside of the range, if it is asked for, or without us.
        (MOE, {"MONTA_ALLOW_ANY_MEGATRON": "1"}, NEWER, "parsed None None None"),
        (STOCK, {}, NEWER, "parsed None None None"),
    ],
)
def test_good_input_is_parsed(
    parse: Parse,
    arguments: str,
    environment: dict[str, str],
    version: str | None,
    printed: str,
) -> None:
    result = parse(arguments, version, **environment)
    assert result.returncode == 0, result.stderr
    assert printed in result.stdout


@pytest.mark.parametrize(
    ("environment", "printed"),
    [
        ({"NUM_CHUNKS": "5"}, "parsed None 5 None"),
        ({"OVERLAP_EXPERTS": "1", "CHAIN": "allgather"}, "parsed allgather None True"),
        (
            {"OVERLAP_EXPERTS": "yes", "CHAIN": "allgather"},
            "moe_monta_overlap_experts: got 'yes', must be a switch: 1 or 0",
        ),
        ({"NUM_CHUNKS": "many"}, "moe_monta_num_chunks: got 'many'"),
    ],
)
def test_environment_variables_land_in_the_arguments(
    environment: dict[str, str], printed: str
) -> None:
    with parser(**{f"MOE_MONTA_{name}": value for name, value in environment.items()}) as parse:
        result = parse(MOE)
    is_good = printed.startswith("parsed")
    assert result.returncode == (0 if is_good else 2), result.stderr
    assert printed in (result.stdout if is_good else one_line(result.stderr))


def one_line(errors: str) -> str:
    """The line of ours, and no traceback."""
    assert "Traceback" not in errors, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("monta: error: ")]
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"{MOE} --moe-monta-chain fastest", ["moe_monta_chain", "fastest", "alltoall_allgather"]),
        (f"{MOE} --moe-monta-num-chunks 0", ["moe_monta_num_chunks", "got 0", ">= 1"]),
        (f"{MOE} --moe-monta-check 2", ["moe_monta_check", "got 2", "0 or 1"]),
        (f"{MOE} --moe-monta-tune-steps -1", ["moe_monta_tune_steps", "got -1", ">= 6"]),
        ("--moe-token-dispatcher-type monta", ["moe_token_dispatcher_type", "--num-experts"]),
        (f"{STOCK} --moe-monta-num-chunks 2", ["moe_monta_num_chunks", "alltoall"]),
        (f"{MOE} --cuda-graph-impl local", ["cuda_graph_impl: not supported", "leave 'moe'"]),
        (MOE, [f"version {NEWER} found, monta-megatron 0.1.0 supports >= 0.16 and < 0.21"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(parse: Parse, arguments: str, words: list[str]) -> None:
    result = parse(arguments, NEWER if arguments == MOE else None)
    assert result.returncode == 2, result.stderr
    assert [word for word in words if word not in one_line(result.stderr)] == []
