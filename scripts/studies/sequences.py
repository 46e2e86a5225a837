"""Time, chunks and memory of an exchange with sequences of 4K to 1M tokens."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from options_page import table
from studies.common import DPI, WIDTH_INCHES, bullets, ms, paragraph

from monta_megatron.chains import CHAINS
from monta_megatron.common.units import GB_BYTES
from monta_megatron.planner.plan import Plan
from monta_megatron.tools import pictures
from monta_megatron.tools.plan.request import PlanRequest, read_inputs
from monta_megatron.tools.plan.simulation import best_within, plan_at

SEQUENCES = tuple(2**power for power in range(12, 21))
LIMIT_GB = 16


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where an exchange is.

    Attributes:
        title: of its table.
        model, cluster: presets.
        tp: that shares a sequence.
        ep, etp: of the exchange.
    """

    title: str
    model: str
    cluster: str
    tp: int
    ep: int
    etp: int


SETTINGS = (
    Setting(
        title="MoNTA-2x70B on 2 nodes of 8 A800, EP 2 x ETP 8, top-1 of 2 experts",
        model="monta_2x70b",
        cluster="a800_2x8_ib200",
        tp=8,
        ep=2,
        etp=8,
    ),
    Setting(
        title="Qwen3-235B on 2 nodes of 8 H100, EP 16, top-8 of 128 experts",
        model="qwen3_235b_a22b",
        cluster="h100_8x_ndr",
        tp=8,
        ep=16,
        etp=1,
    ),
)


@cache
def plans(setting: Setting) -> tuple[Plan, ...]:
    """By length of the sequence, as `monta simulate --sweep tokens=...` makes them."""
    request = PlanRequest(
        model=setting.model,
        cluster=setting.cluster,
        world_size=16,
        tp=setting.tp,
        ep=setting.ep,
        etp=setting.etp,
        ignore_memory=True,
    )
    inputs, limit = read_inputs(request), LIMIT_GB * GB_BYTES
    return tuple(
        plan_at(request, inputs, "tokens", length // setting.tp, limit)[0] for length in SEQUENCES
    )


def section() -> str:
    """The whole section."""
    parts = ["## Sequences of 4K to 1M tokens\n\n"]
    parts += [
        paragraph(
            "One sequence in a micro-batch, which TP 8 shares, so a rank has an eighth of its "
            "tokens. Dispatch and combine of one layer, forward and backward, in bf16; what else "
            "training holds is not looked at: of the GPU's 80 GB the exchange may have "
            f"{LIMIT_GB}. A chain ends where it holds more in any of 1, 2, 4 and 8 chunks. "
            f"`monta simulate --sweep tokens=... --memory-limit-gb {LIMIT_GB} --ignore-memory` "
            "prints such a table for any setting."
        ),
        "\n![Time and memory against the sequence](pictures/sequences.png)\n",
    ]
    lines = []
    for setting in SETTINGS:
        parts.append(f"\n### {setting.title}\n\n")
        rows = []
        for length, plan in zip(SEQUENCES, plans(setting), strict=True):
            rows.append(
                (
                    _kilo(length),
                    *(_cell(plan, chain) for chain in CHAINS),
                    "none"
                    if _ends(plan, plan.chain)
                    else f"`{plan.chain}` x{plan.num_chunks}, {_held_gb(plan):.2g} GB",
                )
            )
        head = ("tokens", *(f"`{chain}`" for chain in CHAINS), "choice")
        parts.append(table(head, rows))
        lines += findings(setting)
    parts.append("\nms; bold: the choice; over: the least that the chain holds, in GB.\n")
    parts.append("\n### What follows\n\n" + bullets(lines))
    return "".join(parts)


def findings(setting: Setting) -> list[str]:
    """What the tables say, in words; the numbers are theirs."""
    by_length = dict(zip(SEQUENCES, plans(setting), strict=True))
    chunks = [
        f"{plan.num_chunks} at {_kilo(length)}"
        for length, plan in by_length.items()
        if not _ends(plan, plan.chain)
    ]
    last: dict[str, list[str]] = {}
    for chain in CHAINS:
        ended = [_kilo(length) for length, plan in by_length.items() if not _ends(plan, chain)]
        last.setdefault(ended[-1] if ended else "none", []).append(f"`{chain}`")
    ends = "; ".join(f"{at}: {', '.join(chains)}" for at, chains in last.items())
    name = setting.title.split(" on ")[0]
    gains = {length: plan.benefit for length, plan in by_length.items()}
    most = max((gain.ratio, length) for length, gain in gains.items() if gain is not None)
    return [
        f"**{name}**: the longest sequence that each chain can hold is {ends}.",
        f"{name}, chunks of the choice: {', '.join(chunks)}; the largest gain over `alltoall` is "
        f"{most[0]:.2f}x, at {_kilo(most[1])}.",
    ]


def _ends(plan: Plan, chain: str) -> bool:
    return best_within(plan, chain, LIMIT_GB * GB_BYTES)[0] is None


def _cell(plan: Plan, chain: str) -> str:
    best_us, least_bytes = best_within(plan, chain, LIMIT_GB * GB_BYTES)
    if least_bytes is None:
        return "-"
    if best_us is None:
        return f"over, {least_bytes / GB_BYTES:.3g}"
    return f"**{ms(best_us)}**" if plan.chain == chain else ms(best_us)


def _held_gb(plan: Plan) -> float:
    assert plan.chosen is not None and plan.chosen.peak_bytes is not None
    return plan.chosen.peak_bytes / GB_BYTES


def _kilo(length: int) -> str:
    return f"{length // 1024}K" if length < 2**20 else "1M"


def draw(path: Path) -> None:
    """For each setting the time of a token, and the least that a chain holds."""
    with pictures.figure(path, (WIDTH_INCHES, 6.8), DPI) as figure:
        axes = figure.subplots(2, 2, sharex=True)
        for column, setting in enumerate(SETTINGS):
            of = plans(setting)
            time_axis, memory_axis = axes[:, column]
            for number, (chain, colour) in enumerate(pictures.CHAIN_COLOURS.items()):
                best = [best_within(plan, chain, LIMIT_GB * GB_BYTES) for plan in of]
                if all(least is None for _, least in best):
                    continue
                per_token = [
                    math.nan if time_us is None else time_us / length * 1e3
                    for length, (time_us, _) in zip(SEQUENCES, best, strict=True)
                ]
                held = [(least or math.nan) / GB_BYTES for _, least in best]
                style = {"color": colour, "linewidth": 3 - 0.4 * number, "markersize": 4}
                time_axis.plot(SEQUENCES, per_token, "o-", label=chain, **style)
                memory_axis.plot(SEQUENCES, held, "o-", label=chain, **style)
            memory_axis.axhline(LIMIT_GB, color="#404040", linestyle="--", linewidth=1)
            memory_axis.annotate(
                f"{LIMIT_GB} GB", (SEQUENCES[0], LIMIT_GB), (0, 3), textcoords="offset points"
            )
            for axis in (time_axis, memory_axis):
                pictures.log_ticks(axis)
                axis.set_xticks(SEQUENCES, [_kilo(length) for length in SEQUENCES], fontsize=9)
                axis.set_xticks([], minor=True)
                axis.grid()
            time_axis.set_title(setting.title.replace(", ", "\n", 1), fontsize=10)
            memory_axis.set_xlabel("tokens of the sequence")
        axes[0, 0].set_ylabel("us per 1,000 tokens")
        axes[1, 0].set_ylabel("GB that the exchange holds, at the least")
        axes[0, 1].legend(fontsize=9)
        figure.suptitle("predicted; a line ends where the chain holds more than 16 GB")
