"""`monta simulate`: the plan at every value of a factor."""

import json
from pathlib import Path
from typing import Any

import pytest

from monta_megatron.chains import CHAINS
from monta_megatron.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
FLAGS = [
    *("--model", str(CONFIGS / "models/qwen3_235b_a22b.yaml")),
    *("--cluster", str(CONFIGS / "clusters/h100_8x_ndr.yaml")),
    *("--world-size", "128", "--tp", "2", "--pp", "4"),
]


def points(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["simulate", *FLAGS, *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    points: list[dict[str, Any]] = document["points"]
    return points


def test_each_point_is_the_plan_there(capsys: pytest.CaptureFixture[str]) -> None:
    for point in points(capsys, "--ep", "16", "--sweep", "tokens=512,4096"):
        assert main(["plan", *FLAGS, "--ep", "16", "--tokens", str(point["value"]), "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        for field in ("chain", "num_chunks", "predicted_us", "reason", "benefit"):
            assert point[field] == plan[field]
        assert set(point["best_us"]) == set(CHAINS)
        assert point["best_us"][plan["chain"]] == plan["predicted_us"]


@pytest.mark.parametrize(
    ("sweep", "grows"),
    [
        ("tokens=512,1024,2048", True),
        ("ranks=8,16,32,256", True),
        ("top-k=1,2,4", True),
        ("inter-rate-ratio=0.5,1,2", False),
    ],
)
def test_time_follows_the_factor(
    capsys: pytest.CaptureFixture[str], sweep: str, grows: bool
) -> None:
    if sweep.startswith("ranks"):
        # Twice the ranks of the longest exchange that 128 experts allow at ETP 1.
        times = [point["predicted_us"] for point in points(capsys, "--etp", "2", "--sweep", sweep)]
    else:
        times = [point["predicted_us"] for point in points(capsys, "--ep", "16", "--sweep", sweep)]
    assert times == sorted(times, reverse=not grows) and len(set(times)) == len(times)


def test_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    by_chunks = points(capsys, "--ep", "16", "--tokens", "16384", "--sweep", "chunks=1,2,4")
    assert [point["num_chunks"] for point in by_chunks] == [1, 2, 4]
    # In one chunk whatever is allowed; the exchange of counts has a block for each that is.
    serial_us = [point["best_us"]["alltoall"] for point in by_chunks]
    assert max(serial_us) - min(serial_us) < 1


def test_table_in_80_columns_and_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--ep", "16", "--sweep", "tokens=512,1024,2048,4096,8192,16384"]
    assert main(["simulate", *FLAGS, *flags, "--plot", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    # Two blocks: four values, and two more.
    assert sum(line.startswith("hierarchical_alltoall ") for line in lines) == 2
    assert sum("*" in line for line in lines) >= 2
    assert main(["simulate", *FLAGS, "--ep", "16", "--sweep", "chunks=1"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert (tmp_path / "simulate_tokens.png").read_bytes().startswith(b"\x89PNG")


def test_the_mark_stands_at_the_time_of_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    """At 2,048 tokens 4 chunks are faster than the 2 chosen, by less than the margin."""
    flags = ["--ep", "16", "--sweep", "tokens=512,1024,2048,4096"]
    planned = points(capsys, *flags)
    assert main(["simulate", *FLAGS, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    marked = [
        (line.split()[0], at, cell)
        for line in lines
        if line.split() and line.split()[0] in CHAINS
        for at, cell in enumerate(line.split()[1:])
        if cell.endswith("*")
    ]
    expected = [
        (point["chain"], at, f"{point['predicted_us']:,.0f}*") for at, point in enumerate(planned)
    ]
    assert sorted(marked) == sorted(expected)
    assert "plainer than hierarchical_alltoall in 4 chunks" in planned[2]["reason"]


def test_a_limit_ends_the_chains_that_hold_more(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ep", "16", "--sweep", "tokens=4096", "--memory-limit-gb"]
    (free,) = points(capsys, *flags, "100")
    # The chain that holds the least is left alone, at its own limit and below it.
    chain, least = min(free["least_bytes"].items(), key=lambda entry: entry[1])
    for limit_gb in (least / 1e9, least / 2e9):
        (limited,) = points(capsys, *flags, str(limit_gb))
        assert limited["chain"] == chain
        assert limited["memory"]["exchange_bytes"] == least
        assert ("over the limit" in limited["reason"]) == (limit_gb < least / 1e9)
    assert main(["simulate", *FLAGS, *flags, str(least / 1e9)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("over" in line.split() for line in lines) == len(CHAINS) - 1


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("ranks=7", "--sweep: ranks: got 7, must be ETP (1) times a divisor of the 128 experts"),
        ("top-k=200", "--sweep: top-k: got 200, must be at most the 128 experts"),
        ("depth=1", "got 'depth=1', must be FACTOR=V,V,... with one of tokens, ranks"),
        ("tokens=", "got 'tokens=', must be FACTOR=V,V,..."),
        ("tokens=1,x", "got 'x', must be an integer >= 1"),
        ("inter-rate-ratio=0", "got '0', must be a number > 0"),
    ],
)
def test_bad_sweeps_are_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], sweep: str, words: str
) -> None:
    try:
        status = main(["simulate", *FLAGS, "--ep", "16", "--sweep", sweep])
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("monta simulate: ") and words in line
