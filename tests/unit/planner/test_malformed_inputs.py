"""Whatever is wrong with a file: one line with file, key, value and rule; status 2."""

from pathlib import Path
from typing import Any

import golden
import yaml
from clusters import CONFIGS
from commands import Monta

GOLDEN = Path(__file__).parent / "golden"
FILES = {"model": "models/deepseek_v3.yaml", "cluster": "clusters/a800_2x8_ib200.yaml"}
MISSING = object()


def command(folder: Path, **files: str | bytes) -> list[str]:
    """`monta plan` on the good files, but for those that are given."""
    words = ["plan", "--world-size", "16", "--ep", "16"]
    for name, good in FILES.items():
        path, content = folder / f"{name}.yaml", files.get(name, (CONFIGS / good).read_bytes())
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        words += [f"--{name}", str(path)]
    return words


def edited(file: str, keys: str, value: object) -> str:
    """A good file with one value changed, or one key left out."""
    data: Any = yaml.safe_load((CONFIGS / FILES[file]).read_text())
    inner, (*outer, last) = data, keys.split(".")
    for key in outer:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return yaml.safe_dump(data)


def test_the_good_files_are_good(tmp_path: Path, monta: Monta) -> None:
    status, printed, _ = monta(*command(tmp_path))
    assert status == 0 and "choice" in printed


VALUES: list[tuple[str, str, object]] = [
    # Missing and unknown keys.
    ("model", "hidden-size", MISSING),
    ("model", "hiden-size", 1),
    ("cluster", "network.source", MISSING),
    ("cluster", "host.sped", 1.0),
    ("cluster", "memory", MISSING),
    # Wrong types.
    ("model", "hidden-size", True),
    ("cluster", "network", [1]),
    # Rates: the unit is part of the value, and bits are not bytes.
    *(
        ("cluster", "network.rate", text)
        for text in (
            *("100", "100 GBps", "100 gbps", "100 GByte/s", "12.5 GiB/s", "12.5 gb/s", "12.5 g"),
            *("-100 Gb/s", "0 Gb/s", "nan GB/s", "1,5 GB/s", ".5 GB/s"),
            *("100 b/s", "100 Gb", "Gb/s", "100 Gb/s each"),
        )
    ),
    ("cluster", "network", {"rate": "2 TB/s", "source": "x"}),
    ("cluster", "node_link.curves", "H10"),
    ("cluster", "contention", ["memory network"]),
    ("cluster", "contention", [["memory", "network", 0.5]]),
    ("cluster", "contention", [["memory", "disk", 2]]),
    ("cluster", "curves", ["alltoall network 8 5:6"]),
    ("cluster", "curves", ["alltoall network 8 5:6 4:7"]),
    # A number that YAML 1.1 takes for 8.
    ("cluster", "num_nodes", "010"),
    # Negative, zero.
    ("cluster", "network.start_us", -1),
    ("cluster", "host.speed", 0),
]
TEXTS: list[tuple[str, str | bytes]] = [
    ("model", "name: [1, 2"),
    ("model", "a: 1\na: 2\n"),
    ("model", "name: !!python/object/apply:os.getcwd []\n"),
    ("model", "name: x\n---\nname: y\n"),
    ("model", b"\x7fELF\x02\x01\x01\x00\xff\xfe"),
    # Keys that YAML would read in silence.
    ("model", "a: {b: 1, c: 2,\n b: 3}"),
    ("model", "[1, 2]: a\n"),
    # Several keys at once, and where a value stands.
    ("cluster", "name: x"),
    ("cluster", "name: x\n\nnum_nodes: 0\nhosts: {}\n"),
]


def test_bad_values_and_texts(tmp_path: Path, monta: Monta) -> None:
    given: dict[str, tuple[str, str | bytes]] = {
        f"{file} {keys}: {'left out' if value is MISSING else repr(value)}": (
            file,
            edited(file, keys, value),
        )
        for file, keys, value in VALUES
    }
    given |= {f"{file}: {text!r}": (file, text) for file, text in TEXTS}
    lines = {
        name: monta.refusal(*command(tmp_path, **{file: text}))
        for name, (file, text) in given.items()
    }
    lines = {name: line.replace(f"{tmp_path}/", "") for name, line in lines.items()}
    golden.check_lines(GOLDEN / "malformed.txt", lines)
