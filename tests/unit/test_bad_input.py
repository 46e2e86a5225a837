"""Bad input to any sub-command: exit status 2, one line that says what is wrong, nothing written.

Each case runs as a process of its own, forked from one that has imported what takes long.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from preloaded import Preloaded

from monta_megatron.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL, CLUSTER = (
    CONFIGS / "models" / "mixtral_8x7b.yaml",
    CONFIGS / "clusters" / "a800_2x8_ib200.yaml",
)
RUN = CONFIGS / "runs" / "mixtral_8x7b.yaml"
PLAN = f"plan --model {MODEL} --cluster {CLUSTER}"
BENCH = "bench --experts 8 --top-k 2 --hidden 32 --tokens 16"
CALIBRATE = "calibrate --out c.yaml"
EMULATE = "emulate --nodes 2 --ranks-per-node 2 --inter-mbit 500"

# What is typed, and words of the line that answers it: where, what was given, what is allowed.
CASES = [
    # No abbreviations or other spellings.
    (f"{PLAN} --World_Size 8", ["unrecognized", "did you mean --world-size?"]),
    (f"{EMULATE} --nnodes 2 -- x.py", ["unrecognized", "did you mean --nodes?"]),
    (f"{PLAN} --tokens 4kk", ["--tokens", "'4kk'", "4k for 4096"]),
    (f"{PLAN} --ep 8 --chain fast", ["--chain", "'fast'", "one of"]),
    ("launch dbrx dbrx", ["unrecognized arguments: dbrx"]),
    ("", ["COMMAND", "required"]),
    ("plann", ["'plann'", "plan", "choose from"]),
    (f"{PLAN} --world-sise=2", ["unrecognized", "did you mean --world-size?"]),
    ("plan", ["--model: not given, must be a file or a preset"]),
    (f"plan --model . --cluster {CLUSTER}", [".: cannot be read", "without config.json"]),
    (f"plan --model {MODEL} --cluster .", [".: cannot be read: is a folder"]),
    (
        f"plan --model {CLUSTER} --cluster {CLUSTER}",
        ["a800_2x8_ib200.yaml: hidden-size", "missing"],
    ),
    (f"plan --model {MODEL} --cluster {MODEL}", ["mixtral_8x7b.yaml", "unknown key"]),
    (f"{PLAN} --ep 3", ["world_size", "got 16", "multiple of etp * ep * pp (3)"]),
    (f"{PLAN} --world-size 5000", ["world_size", "5000", "at most the 16 ranks"]),
    (f"{PLAN} --world-size 1", ["world_size", "got 1", "more ranks"]),
    (f"{PLAN} --ep 8 --tp 8 --seq-length 4100", ["tp: got 8, must divide seq-length", "4100"]),
    (f"{PLAN} --tokens -1", ["--tokens", "'-1'", ">= 1"]),
    ("bench", ["--experts", "not given"]),
    (f"{BENCH} --chains fastest", ["--chains", "'fastest'", "alltoall_dedup"]),
    (f"{BENCH} --tune-steps -1", ["--tune-steps", "'-1'", ">= 0"]),
    (f"{BENCH} --chains alltoall --tune-steps 5", ["--tune-steps", "got 5", "--chains auto"]),
    (f"{BENCH} --overlap-experts", ["--overlap-experts", "with --layer"]),
    (f"{BENCH} --expert-ms 5", ["--expert-ms", "with --layer"]),
    (f"{BENCH} --layer --expert-ms 0", ["--expert-ms", "'0'", "> 0"]),
    (f"{BENCH} --layer --overlap-experts --chains alltoall", ["--overlap-experts", "of tokens"]),
    (f"{BENCH} --num-chunk-count 2", ["monta bench", "did you mean --num-chunks?"]),
    ("place", ["--trace", "--apply", "required"]),
    (f"place --trace {CONFIGS}", ["--model", "must be with --trace"]),
    (f"place --trace {CONFIGS} --apply {CONFIGS}", ["--apply", "not allowed with", "--trace"]),
    (f"place --apply {CONFIGS} --placement {MODEL} --out o", ["mixtral", "is no JSON"]),
    ("calibrate", ["--out", "required"]),
    ("calibrate --out nowhere/c.yaml", ["--out", "nowhere/c.yaml", "folder that can be written"]),
    (f"{CALIBRATE} --budget-seconds nan", ["--budget-seconds", "'nan'", "> 0"]),
    (f"{CALIBRATE} --budget-second=s", ["unrecognized", "did you mean --budget-seconds?"]),
    (f"{CALIBRATE} --nics-per-node 0", ["--nics-per-node", "'0'", ">= 1"]),
    ("emulate", ["--ranks-per-node", "required"]),
    (EMULATE, ["CMD", "got ''", "-m MODULE"]),
    (f"{EMULATE} -- monta bench --experts none", ["--experts", "'none'", ">= 1"]),
    (
        "emulate --nodes 9 --ranks-per-node 50 --inter-mbit 9 -- monta doctor",
        ["got 9 of 50", "of 400 ranks"],
    ),
    ("launch", ["FILE", "required"]),
    ("launch nowhere.yaml", ["nowhere.yaml", "No such file"]),
    (f"launch {RUN} --start sbach", ["--start", "'sbach'", "sbatch"]),
    (f"launch {MODEL} --start here", ["--start", "'here'", "torchrun"]),
    ("compare", ["FILE", "required"]),
    (f"compare {RUN} --iterations 2", ["--iterations", "2", ">= 3"]),
    (f"compare {RUN} --pairs 0", ["--pairs", "0", ">= 1"]),
    (f"compare {RUN} --start srun", ["unrecognized", "--start"]),
    (
        f"compare {RUN} -- --moe-token-dispatcher-type flex",
        ["--moe-token-dispatcher-type", "must be left out"],
    ),
    ("timeline", ["--model", "not given"]),
    (f"timeline {MODEL}", ["mixtral_8x7b.yaml", "monta bench --trace"]),
    (f"timeline {MODEL} --ep 2", ["--ep", "got 2", "left out with TRACE"]),
    (f"timeline --model {MODEL}", ["--cluster", "not given"]),
    (f"timeline --model {MODEL} --cluster {CLUSTER} --chain alltoal", ["did you mean alltoall?"]),
    ("doctor --fix", ["unrecognized", "--fix"]),
    ("place --apply . --placement p.json --ep 8", ["--out: not given, must be with --apply"]),
]

IMPORTED_ONCE = (
    "tools.bench.settings",
    "planner.plan",
    "planner.ranking",
    "calibration.command",
)

Monta = Callable[[Path, str], tuple[int, str, str]]


def short(words: str) -> str:
    """A command line without the files that most of them name."""
    return words.replace(f" --model {MODEL} --cluster {CLUSTER}", "").replace(f"{CONFIGS}/", "")


def monta_on_a_rank(folder: Path, words: list[str]) -> None:
    """One of 4 ranks, for the commands that a launcher starts."""
    os.chdir(folder)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    sys.argv[1:] = words
    sys.exit(main())


@pytest.fixture(scope="module")
def monta() -> Iterator[Monta]:
    """Runs one command line in a folder: exit status, standard output, standard error."""
    process = Preloaded("torch", *(f"monta_megatron.{name}" for name in IMPORTED_ONCE))

    def run(folder: Path, words: str) -> tuple[int, str, str]:
        result = process.run(monta_on_a_rank, folder, words.split())
        return result.returncode, result.stdout, result.stderr

    yield run
    process.close()


@pytest.mark.parametrize(("words", "expected"), CASES, ids=[short(words) for words, _ in CASES])
def test_one_line_and_status_2(
    monta: Monta, tmp_path: Path, words: str, expected: list[str]
) -> None:
    status, stdout, stderr = monta(tmp_path, words)
    assert (status, stdout) == (2, ""), stderr
    (line,) = stderr.splitlines()
    assert line.startswith("monta"), line
    for word in expected:
        assert word in line, line
    assert list(tmp_path.iterdir()) == []


def test_good_input_passes_the_same_way(monta: Monta, tmp_path: Path) -> None:
    status, stdout, stderr = monta(tmp_path, f"{PLAN} --ep 8 --json")
    assert (status, stderr) == (0, "")
    assert json.loads(stdout)["shape"]["layout"]["ep"] == 8


def test_every_command_is_tried() -> None:
    from monta_megatron.cli import build_parser, sub_parsers

    tried = [words.split()[0] for words, _ in CASES if words]
    assert {name.split()[0] for name in sub_parsers(build_parser())} <= set(tried)
