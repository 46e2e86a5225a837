"""Whatever is wrong with a file: one line with file, key, value and rule; status 2."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import CONFIGS

from monta_megatron.cli import main

MODEL = yaml.safe_load((CONFIGS / "models" / "deepseek_v3.yaml").read_text())
CLUSTER = yaml.safe_load((CONFIGS / "clusters" / "a800_2x8_ib200.yaml").read_text())
CURVE = "alltoall network 2 1000:10 2000:20"
LAYOUT = {"world_size": 16, "ep": 16}
DATA = {"model": MODEL, "cluster": CLUSTER, "layout": LAYOUT}

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


def run(tmp_path: Path, flags: tuple[str, ...] = (), **files: object) -> int:
    """`monta plan` on the good files, but for those that are given: data, text or bytes."""
    arguments = ["plan"]
    for name, data in {**DATA, **files}.items():
        path = tmp_path / f"{name}.yaml"
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
        arguments += [f"--{name}", str(path)]
    return main([*arguments, *flags])


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


def with_curves(*rows: str) -> dict[str, Any]:
    return {**CLUSTER, "curves": list(rows)}


VALUES: list[tuple[str, tuple[str | int, ...], object, list[str]]] = [
    # Missing and unknown keys.
    ("model", ("hidden-size",), MISSING, ["hidden-size: missing", "must be given"]),
    ("model", ("hiden-size",), 1, ["hiden-size: unknown; did you mean hidden-size?"]),
    ("cluster", ("host", "source"), MISSING, ["host.source: missing"]),
    ("cluster", ("host", "counts_ms"), 1.0, ["host.counts_ms: unknown key", "counts_us?"]),
    ("layout", ("tensor",), 2, ["tensor: unknown key", "known: world_size"]),
    # Wrong types and units.
    ("model", ("hidden-size",), True, ["hidden-size: got True", "an integer >= 1"]),
    ("cluster", ("network",), [1], ["network: got [1]", "mapping with the keys rate"]),
    ("cluster", ("netwrok",), {}, ["netwrok: unknown key", "network?"]),
    # Rates: the unit is part of the value, and bits are not bytes.
    *(
        ("cluster", ("network", "rate"), text, [f"network.rate: got {text!r}", "100 Gb/s (b"])
        for text in (
            *("100", "100 GBps", "100 gbps", "100 GByte/s", "12.5 GiB/s", "12.5 gb/s", "12.5 g"),
            *("-100 Gb/s", "0 Gb/s", "nan GB/s", "1,5 GB/s", ".5 GB/s"),
            *("100 b/s", "100 Gb", "Gb/s", "100 Gb/s each"),
        )
    ),
    ("cluster", ("network", "rate"), "2 TB/s", ["hold rate, 2,000 GB/s (16,000 Gb/s)"]),
    ("cluster", ("network", "range"), ["20 GB/s"], ["range: got ['20 GB/s']", "2 entries"]),
    ("cluster", ("node_link", "curves"), "A800", ["node_link.curves: got A800", "A100-SXM4-80GB"]),
    ("cluster", ("name",), "a\x1b[2J", [r"name: got 'a\x1b[2J'", "printable characters"]),
    # Numbers and times that YAML 1.1 takes for something else.
    ("cluster", ("num_nodes",), "010", ["num_nodes: got '010'", "an integer", "write 10"]),
    # Negative, zero, NaN, infinite.
    ("cluster", ("network", "start_us"), -1, ["network.start_us: got -1", "a number >= 0"]),
    (
        "cluster",
        ("contention",),
        ["network memory 0 1"],
        ["contention[0]: got 'network mem", ">= 1"],
    ),
    # Several keys that do not fit each other.
    ("cluster", ("network",), MISSING, ["network: missing, must be given, or alltoall of it"]),
    ("layout", ("ep",), 3, ["world_size: got 16", "etp * ep * pp (3)"]),
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


# Each line stands for ten times the values of the line before.
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)

FILES: list[tuple[str, object, list[str]]] = [
    ("model", "name: [1, 2", ["is no plain YAML in line 1"]),
    ("model", "a: 1\na: 2\n", ["is no plain YAML in line 2", "'a' is written twice"]),
    ("model", "name: !!python/object/apply:os.getcwd []\n", ["is no plain YAML", "tag"]),
    ("model", "name: x\n---\nname: y\n", ["is no plain YAML"]),
    ("model", "[" * 20_000, ["is no plain YAML"]),
    ("model", b"\x7fELF\x02\x01\x01\x00\xff\xfe", ["is no text file"]),
    ("model", f"hidden_size: 0x{'f' * 9_000}", ["in line 1", "an integer must have at most 63"]),
    # What would take long to read or to show.
    ("model", LAUGHS, ["is no plain YAML in line 4", "too many values", "10,000", "alias"]),
    ("model", f"a: [{'1,' * 10_000}]", ["too many values", "at most 10,000"]),
    ("model", "- " * 21 + "1", ["nested too deeply", "at most 20 levels"]),
    ("model", "#" * 250_001, ["is too large", "at most 250,000 bytes"]),
    # Keys that YAML would read in silence.
    ("model", "a: {b: 1, c: 2, b: 3}", ["is no plain YAML in line 1", "'b' is written twice"]),
    ("model", "[1, 2]: a\n", ["is no plain YAML in line 1", "a key must be a text"]),
    ("model", "a: &a {b: 1}\nc: {<<: *a}\n", ["in line 2", "<< is not known here"]),
    # Several keys at once, wherever they are missing.
    (
        "cluster",
        {"name": "x", "host": {"pass_us": 1.0}, "network": {"rate": "1 GB/s"}},
        ["source, num_nodes, ", "network.source", "host.source", ": missing, must be given"],
    ),
    *(
        ("cluster", with_curves(row), [f"curves[0]: got {row!r}", "such as alltoall network 8"])
        for row in (
            *("alltoall network 2 2000:1 1000:2", "alltoall network 2 1000:1", "alltoall"),
            *("alltoall memory 2 1000:1 2000:2", "alltoall network 2 1000:1 2000"),
        )
    ),
    ("cluster", with_curves(CURVE, CURVE), ["curves: got alltoall inter 2 twice"]),
    ("model", {**MODEL, "num-attention-heads": 9}, ["layout.yaml: tp", "num-attention-heads"]),
]


@pytest.mark.parametrize(("file", "data", "words"), FILES)
def test_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, data: object, words: list[str]
) -> None:
    # The last ones need tensor parallelism to go wrong.
    flags = ("--tp", "2") if file == "model" else ()
    begin_s = time.process_time()
    status = run(tmp_path, flags, **{file: data})
    assert time.process_time() - begin_s < 1
    assert_one_line(capsys, status, [str(tmp_path), *words])
