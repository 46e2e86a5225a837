"""What this machine has: GPUs by nvidia-smi, network interfaces by /sys, nodes by Slurm."""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
LIMIT_S = 30
MIB_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of this machine.

    Attributes:
        model: what the driver calls most of them, without the vendor.
        number: how many have that name.
        memory_gb: 1e9 bytes of each; None where the driver does not say.
    """

    model: str
    number: int
    memory_gb: float | None


@dataclass(frozen=True, kw_only=True)
class Interfaces:
    """The fastest network interfaces of this machine.

    Attributes:
        names: of those with the highest rate.
        gbit_per_s: the line rate of each.
        source: where it was read.
        slower: how many others are up.
    """

    names: tuple[str, ...]
    gbit_per_s: float
    source: str
    slower: int


def find_gpus() -> Gpus | None:
    """What nvidia-smi lists; None without it, or without a GPU."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [line.rpartition(",") for line in result.stdout.splitlines() if "," in line]
    if result.returncode != 0 or not rows:
        return None
    (name, number), *_ = Counter(name for name, _, _ in rows).most_common(1)
    memory_gb = None
    with suppress(ValueError):
        mib = next(float(mib) for other, _, mib in rows if other == name)
        memory_gb = round(mib * MIB_BYTES / 1e9, 1)
    return Gpus(model=name.strip().removeprefix("NVIDIA "), number=number, memory_gb=memory_gb)


def find_interfaces(sys: Path) -> Interfaces | None:
    """The ports of InfiniBand and RoCE, or else the network cards; None where none is up.

    Args:
        sys: where the kernel shows them: `SYS`.
    """
    for folder, rates in (
        ("class/infiniband", dict(_ports(sys / "class" / "infiniband"))),
        ("class/net", dict(_cards(sys / "class" / "net"))),
    ):
        if rates:
            fastest = max(rates.values())
            names = tuple(sorted(name for name, rate in rates.items() if rate == fastest))
            return Interfaces(
                names=names,
                gbit_per_s=fastest,
                source=f"/sys/{folder}",
                slower=len(rates) - len(names),
            )
    return None


def find_num_nodes() -> int | None:
    """The nodes of the Slurm job that this is in; None outside one."""
    text = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or ""
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _ports(folder: Path) -> Iterator[tuple[str, float]]:
    """Ports that are up, by device; "400 Gb/sec (4X NDR)" is a rate."""
    for port in folder.glob("*/ports/*"):
        if "ACTIVE" in _read(port / "state"):
            with suppress(ValueError):
                rate = float(_read(port / "rate").partition(" Gb/sec")[0])
                yield f"{port.parents[1].name}:{port.name}", rate


def _cards(folder: Path) -> Iterator[tuple[str, float]]:
    """Network cards that are up and are no software; their speed is in Mbit/s."""
    for card in folder.glob("*"):
        if (card / "device").exists() and _read(card / "operstate") == "up":
            with suppress(ValueError):
                mbit_per_s = float(_read(card / "speed"))
                # -1 where the driver does not know.
                if mbit_per_s > 0:
                    yield card.name, mbit_per_s / 1e3


def _read(file: Path) -> str:
    # A card that is down refuses to tell its speed.
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
