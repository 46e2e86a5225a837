"""From which contention on a serial exchange is as fast as a pipelined one."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from options_page import table
from studies.common import DPI, WIDTH_INCHES, bullets, ms, paragraph, workload_of

from monta_megatron.chains import CHAINS
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster, Contention
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools import pictures

CHAIN = CHAINS["alltoall_allgather"]
CHUNKS = (2, 4, 8)
FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5)
PAIRS: Mapping[str, tuple[Any, ...]] = {
    "AllGather and copies": (("intra", "memory"),),
    "network and copies": (("inter", "memory"),),
    "AllGather and network": (("inter", "intra"),),
    "all three": (("intra", "memory"), ("inter", "memory"), ("inter", "intra")),
}
# Preset, NICs of a node, length of the sequence that TP 8 shares.
SETTINGS = (
    ("a800_2x8_ib200", 8, 8192),
    ("a800_2x8_ib200", 2, 8192),
    ("a800_2x8_ib200", 8, 65536),
    ("h100_8x_ndr", 8, 65536),
)


def with_contention(cluster: Cluster, pairs: tuple[Any, ...], factor: float) -> Cluster:
    """The cluster with one factor for these pairs, and 1 for all others."""
    entries = (Contention(pair=p, factor=factor, kind="datasheet", source="swept") for p in pairs)
    none = set(PAIRS["all three"]) - set(pairs)
    others = (Contention(pair=p, factor=1.0, kind="datasheet", source="swept") for p in none)
    return replace(cluster, contention=(*entries, *others))


def prices(
    setting: tuple[str, int, int], pairs: tuple[Any, ...], factor: float
) -> tuple[ChainPrice, ChainPrice]:
    """The serial exchange, and the pipelined one in its best number of chunks."""
    preset, nics, seq_length = setting
    cluster = replace(load_cluster(preset), nics_per_node=nics)
    workload = workload_of("monta_2x70b", cluster, seq_length, 8, 2, 8)
    cluster = with_contention(cluster, pairs, factor)
    serial, *pipelined = (
        price_chain(workload, cluster, CHAIN, chunks, "forward_backward") for chunks in (1, *CHUNKS)
    )
    return serial, min(pipelined, key=lambda price: price.total_us)


def ratios(setting: tuple[str, int, int], pairs: tuple[Any, ...]) -> list[float]:
    """Pipelined over serial time, by `FACTORS`."""
    both = [prices(setting, pairs, factor) for factor in FACTORS]
    return [pipelined.total_us / serial.total_us for serial, pipelined in both]


def break_even(of: list[float]) -> float | None:
    """The factor from which on serial wins, between two of `FACTORS`; None if it never does."""
    for number, ratio in enumerate(of):
        if ratio >= 1:
            if number == 0:
                return 1.0
            before = of[number - 1]
            part = (1 - before) / (ratio - before)
            return FACTORS[number - 1] + part * (FACTORS[number] - FACTORS[number - 1])
    return None


def name_of(setting: tuple[str, int, int]) -> str:
    """A800, 8 NICs, 64K sequence."""
    preset, nics, seq_length = setting
    return f"{preset.split('_')[0].upper()}, {nics} NICs per node, {seq_length // 1024}K sequence"


def section() -> str:
    """The whole section."""
    parts = ["## How much contention pipelining can bear\n\n"]
    parts += [
        paragraph(
            "MoNTA's layout, EP 2 x ETP 8 on 2 nodes of 8 (MoNTA-2x70B, TP 8), dispatch and "
            "combine, forward and backward. Where two operations run at once, each takes `factor` "
            "times as long, for the named pairs; all other pairs have factor 1. No schedule is "
            "slower than one after the other: two operations at once never take more than twice "
            "as long each, three never more than three times. Shown is the time in 2, 4 or 8 "
            "chunks, whichever is the fastest, over that in one: below 1 pipelining wins."
        ),
        "\n![Time of the pipelined exchange over the serial one](pictures/contention.png)\n",
    ]
    wins: dict[str, dict[str, float | None]] = {}
    for setting in SETTINGS:
        name = name_of(setting)
        serial, _ = prices(setting, (), 1.0)
        rows = []
        for pairs_name, pairs in PAIRS.items():
            of = ratios(setting, pairs)
            at = break_even(of)
            wins.setdefault(name, {})[pairs_name] = at
            rows.append(
                (
                    pairs_name,
                    *(f"{ratio:.2f}" for ratio in of),
                    "never" if at is None else "always" if at == 1 else f"from {at:.2f}",
                )
            )
        head = ("factor for", *(f"{factor:g}" for factor in FACTORS), "serial wins")
        parts += [f"\n### {name}: {ms(serial.total_us)} ms in one chunk\n\n", table(head, rows)]
    parts.append("\n### What follows\n\n" + bullets(findings(wins)))
    return "".join(parts)


def findings(wins: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """What the tables say, in words; the numbers are theirs."""
    short = wins[name_of(SETTINGS[0])]
    lost = all(at == 1 for at in short.values())
    all_three = [at for of in wins.values() if (at := of["all three"]) not in (None, 1)]
    pairwise = [
        at
        for of in wins.values()
        for name, at in of.items()
        if name != "all three" and at not in (None, 1)
    ]
    lines = [
        "The paper's own sequence of 8K with 8 NICs per node is "
        + (
            "too short: what the host takes to start more chunks is more than they overlap, so "
            "serial wins without any contention."
            if lost
            else "long enough to gain where nothing contends."
        ),
        f"Where there is something to overlap, one pair alone ends it from {min(pairwise):.2f} on "
        "at the earliest, and never where that pair has little to share."
        if pairwise
        else "One pair alone never ends it.",
    ]
    if all_three:
        lines.append(
            f"All three pairs at once end it between {min(all_three):.2f} and "
            f"{max(all_three):.2f}. The presets have 1.36 for AllGather and copies, 1.03 for "
            "network and copies, and 1 for AllGather and network (`docs/calibration.md`)."
        )
    return lines


def draw(path: Path) -> None:
    """A panel for each setting, a line for each pair."""
    with pictures.figure(path, (WIDTH_INCHES, 6.4), DPI) as figure:
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        for axis, setting in zip(axes.flat, SETTINGS, strict=True):
            for number, (name, pairs) in enumerate(PAIRS.items()):
                axis.plot(
                    FACTORS,
                    ratios(setting, pairs),
                    color=pictures.COLOURS[number],
                    linewidth=2.5 - 0.4 * number,
                    label=name,
                )
            axis.axhline(1, color="#404040", linewidth=1, linestyle="--")
            axis.set_title(name_of(setting), fontsize=10)
            axis.grid()
        for axis in axes[1]:
            axis.set_xlabel("slowdown of each while both run")
        for axis in axes[:, 0]:
            axis.set_ylabel("pipelined / serial time")
        figure.suptitle(
            "MoNTA-2x70B, EP 2 x ETP 8, predicted; below the dashed line pipelining wins"
        )
        axes[0, 0].legend(fontsize=9, loc="lower right")
