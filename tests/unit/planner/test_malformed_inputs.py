"""Whatever is wrong with a file: one line with file, key, value and rule; status 2."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import CONFIGS

from monta_megatron.cli import main

MODEL = yaml.safe_load((CONFIGS / "models" / "deepseek_v3.yaml").read_text())
CLUSTER = yaml.safe_load((CONFIGS / "clusters" / "a800_2x8_ib200.yaml").read_text())
DATA = {"model": MODEL, "cluster": CLUSTER}

MISSING = object()


def edited(data: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A deep copy with one value changed, or one key left out."""
    copy: Any = yaml.safe_load(yaml.safe_dump(data))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return dict(copy)


def run(tmp_path: Path, **files: object) -> int:
    """`monta plan` on the good files, but for those that are given: data, text or bytes."""
    arguments = ["plan", "--world-size", "16", "--ep", "16"]
    for name, data in {**DATA, **files}.items():
        path = tmp_path / f"{name}.yaml"
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
        arguments += [f"--{name}", str(path)]
    return main(arguments)


def assert_one_line(capsys: pytest.CaptureFixture[str], status: int, words: list[str]) -> None:
    captured = capsys.readouterr()
    assert status == 2, captured
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("monta")
    assert len(lines[0]) < 1_000
    for word in words:
        assert word in lines[0], lines[0]


def test_the_good_files_are_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    assert "choice" in capsys.readouterr().out


VALUES: list[tuple[str, tuple[str | int, ...], object, list[str]]] = [
    # Missing and unknown keys.
    ("model", ("hidden-size",), MISSING, ["hidden-size: missing", "must be given"]),
    ("model", ("hiden-size",), 1, ["hiden-size: unknown; did you mean hidden-size?"]),
    ("cluster", ("network", "source"), MISSING, ["network.source: missing"]),
    ("cluster", ("host", "sped"), 1.0, ["host.sped: unknown key", "speed?"]),
    ("cluster", ("memory",), MISSING, ["memory: missing, must be given"]),
    # Wrong types and units.
    ("model", ("hidden-size",), True, ["hidden-size: got True", "an integer >= 1"]),
    ("cluster", ("network",), [1], ["network: got [1]", "mapping with the keys rate"]),
    # Rates: the unit is part of the value, and bits are not bytes.
    *(
        ("cluster", ("network", "rate"), text, [f"network.rate: got {text!r}", "100 Gb/s (b"])
        for text in (
            *("100", "100 GBps", "100 gbps", "100 GByte/s", "12.5 GiB/s", "12.5 gb/s", "12.5 g"),
            *("-100 Gb/s", "0 Gb/s", "nan GB/s", "1,5 GB/s", ".5 GB/s"),
            *("100 b/s", "100 Gb", "Gb/s", "100 Gb/s each"),
        )
    ),
    (
        "cluster",
        ("network",),
        {"rate": "2 TB/s", "source": "x"},
        ["network.rate: got 2,000 GB/s (16,000 Gb/s)", "must be at most"],
    ),
    ("cluster", ("node_link", "curves"), "H10", ["curves: got H10", "A100-SXM4-80GB"]),
    ("cluster", ("contention",), ["memory network"], ["contention[0]: got 'memory network'"]),
    ("cluster", ("contention",), [["memory", "network", 0.5]], ["contention: got 0.5", ">= 1"]),
    ("cluster", ("contention",), [["memory", "disk", 2]], ["contention[0][1]: got 'disk'"]),
    ("cluster", ("curves",), ["alltoall network 8 5:6"], ["curves[0]: got", "at least 2 bytes:us"]),
    ("cluster", ("curves",), ["alltoall network 8 5:6 4:7"], ["curves[0]: got", "ascending"]),
    # A number that YAML 1.1 takes for 8.
    ("cluster", ("num_nodes",), "010", ["num_nodes: got '010'", "an integer"]),
    # Negative, zero, NaN, infinite.
    ("cluster", ("network", "start_us"), -1, ["network.start_us: got -1", "a number >= 0"]),
    ("cluster", ("host", "speed"), 0, ["host.speed: got 0", "> 0"]),
]


@pytest.mark.parametrize(("file", "path", "value", "words"), VALUES)
def test_a_bad_value(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    path: tuple[str | int, ...],
    value: object,
    words: list[str],
) -> None:
    status = run(tmp_path, **{file: edited(DATA[file], path, value)})
    assert_one_line(capsys, status, [str(tmp_path / f"{file}.yaml"), *words])


FILES: list[tuple[str, object, list[str]]] = [
    ("model", "name: [1, 2", ["model.yaml:1: is no plain YAML"]),
    ("model", "a: 1\na: 2\n", ["model.yaml:2: is no plain YAML", "the key a is written twice"]),
    ("model", "name: !!python/object/apply:os.getcwd []\n", ["is no plain YAML", "tag"]),
    ("model", "name: x\n---\nname: y\n", ["is no plain YAML"]),
    ("model", b"\x7fELF\x02\x01\x01\x00\xff\xfe", ["is no text file"]),
    # Keys that YAML would read in silence.
    (
        "model",
        "a: {b: 1, c: 2,\n b: 3}",
        ["model.yaml:2: is no plain YAML", "the key b is written twice"],
    ),
    ("model", "[1, 2]: a\n", ["model.yaml:1: is no plain YAML", "unhashable key"]),
    # Several keys at once, and where a value stands.
    ("cluster", {"name": "x"}, ["source, num_nodes, ", "host: missing, must be given"]),
    ("cluster", "name: x\n\nnum_nodes: 0\nhosts: {}\n", ["cluster.yaml:4: hosts: unknown key"]),
]


@pytest.mark.parametrize(("file", "data", "words"), FILES, ids=[each[2][0] for each in FILES])
def test_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, data: object, words: list[str]
) -> None:
    status = run(tmp_path, **{file: data})
    assert_one_line(capsys, status, [str(tmp_path), *words])
