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
    print("parsed", args.moe_monta_chain, args.moe_monta_num_chunks)
    print("overlap", args.moe_monta_overlap_experts)


@contextmanager
def parser(**environment: str) -> Iterator[Parse]:
    """Parses command lines as the only rank."""
    environment |= {"MONTA_CPU_RANKS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    megatron = Preloaded("megatron.training.arguments", **environment)
    from monta_megatron.emulation.cpu_ranks_arguments import CPU_RANKS_ARGUMENTS

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


def test_good_input_is_parsed(parse: Parse) -> None:
    result = parse(f"{MOE} --moe-monta-chain alltoall_allgather --moe-monta-num-chunks 3")
    assert result.returncode == 0, result.stderr
    assert "parsed alltoall_allgather 3" in result.stdout
    assert "overlap None" in result.stdout
    result = parse(f"{MOE} {OVERLAP}")
    assert result.returncode == 0, result.stderr
    assert "parsed alltoall_dedup" in result.stdout and "overlap True" in result.stdout


def test_environment_variables_land_in_the_printed_arguments() -> None:
    with parser(MOE_MONTA_NUM_CHUNKS="5") as parse:
        result = parse(MOE)
    assert "parsed None 5" in result.stdout
    with parser(MOE_MONTA_OVERLAP_EXPERTS="1", MOE_MONTA_CHAIN="allgather") as parse:
        result = parse(MOE)
    assert "overlap True" in result.stdout
    with parser(MOE_MONTA_OVERLAP_EXPERTS="yes", MOE_MONTA_CHAIN="allgather") as parse:
        result = parse(MOE)
    assert "moe_monta_overlap_experts: got 'yes', must be a switch: 1 or 0" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"{MOE} --moe-monta-chain fastest", ["moe_monta_chain", "fastest", "alltoall_allgather"]),
        (f"{MOE} --moe-monta-num-chunks 0", ["moe_monta_num_chunks", "got 0", ">= 1"]),
        (f"{MOE} --moe-monta-check 2", ["moe_monta_check", "got 2", "0 or 1"]),
        (f"{MOE} --moe-monta-tune-steps -1", ["moe_monta_tune_steps", "got -1", ">= 6"]),
        ("--moe-token-dispatcher-type monta", ["moe_token_dispatcher_type", "--num-experts"]),
        (
            "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-monta-num-chunks 2",
            ["moe_monta_num_chunks", "alltoall"],
        ),
        (f"{MOE} --cuda-graph-impl local", ["cuda_graph_impl: not supported", "leave 'moe'"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(parse: Parse, arguments: str, words: list[str]) -> None:
    result = parse(arguments)
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("monta: error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0]


def test_bad_environment_is_one_line_and_status_2() -> None:
    with parser(MOE_MONTA_NUM_CHUNKS="many") as parse:
        result = parse(MOE)
    assert result.returncode == 2, result.stderr
    assert "moe_monta_num_chunks: got 'many'" in result.stderr


NEWER = "0.21.0"


def test_megatron_outside_the_range_is_refused_by_version(parse: Parse) -> None:
    result = parse(MOE, NEWER)
    assert result.returncode == 2, result.stderr
    assert "version 0.21.0 found, monta-megatron 0.1.0 supports >= 0.16 and < 0.21" in result.stderr


def test_megatron_outside_the_range_goes_on_if_asked(parse: Parse) -> None:
    result = parse(MOE, NEWER, MONTA_ALLOW_ANY_MEGATRON="1")
    assert result.returncode == 0, result.stderr


def test_megatron_outside_the_range_is_no_matter_without_us(parse: Parse) -> None:
    result = parse("--num-experts 4 --moe-token-dispatcher-type alltoall", NEWER)
    assert result.returncode == 0, result.stderr
