"""Four models on 16 to 16,384 GPUs: the best layout, its chain, and where the gain ends."""

from itertools import product
from pathlib import Path

from options_page import table
from studies.common import DPI, WIDTH_INCHES, bullets, paragraph
from studies.scale_points import (
    EPS,
    GLOBAL_BATCH,
    POD_RANKS,
    PPS,
    SEQ_LENGTH,
    TPS,
    Point,
    best,
    gain_pct,
    over_nodes,
    percent,
    points,
)

from monta_megatron.tools import pictures
from monta_megatron.tools.estimate.iteration import EXCHANGE

MODELS = {
    "DeepSeek-V3": "deepseek_v3",
    "Qwen3-235B": "qwen3_235b_a22b",
    "Mixtral 8x22B": "mixtral_8x22b",
    "gpt-oss-120b": "gpt_oss_120b",
}
SIZES = (16, 64, 256, 1024, 4096, 16384)
OVERSUBSCRIPTIONS = (1, 4)
# Of an iteration; below it no one would notice.
LEAST_GAIN_PCT = 1.0
OTHERS = ("TP communication", "pipeline communication", "gradient reduction")


def section() -> str:
    """The whole section."""
    parts = ["## Four models on 16 to 16,384 GPUs\n\n"]
    num = sum(len(points(name, size, over)) for name in MODELS.values() for size in SIZES
              for over in OVERSUBSCRIPTIONS)  # fmt: skip
    parts += [
        paragraph(
            f"Nodes of 8 H100 with 8 x InfiniBand NDR. {GLOBAL_BATCH:,} sequences of "
            f"{SEQ_LENGTH:,} tokens in an iteration at every size, micro-batches of 1, selective "
            f"recompute, uniform routing. Every TP of {_list(TPS)}, PP of {_list(PPS)}, EP of "
            f"{_list(EPS)} as far as there are experts, ETP 1, with TP {max(TPS)} also {max(TPS)}; "
            f"the rest is data parallel: {num:,} points in all. For `alltoall` and for the "
            "planner's choice the fastest layout that fits each; what fits is weights, optimizer, "
            "layer inputs and exchange, the least that training holds. Shares are of the "
            "iteration with the choice."
        ),
        "\n",
        bullets(
            (
                "`gain`: what the best layout with the choice saves of the best with `alltoall`.",
                f"`4:1`: pods of {POD_RANKS} GPUs, the links between which carry a quarter of what "
                "their GPUs could send. An AllToAll over n pods sends 1 - 1/n of its bytes "
                "through them; of the rings of the gradient reduction only those of the experts "
                "have enough neighbours in other pods to be slowed.",
                "`over nodes`: the gain among layouts whose exchange spans nodes, as a training "
                "has that needs the memory for something else.",
                "`+1F1B`: both with Megatron's overlap of two micro-batches.",
            )
        ),
        "\n![Gain by number of GPUs](pictures/scale.png)\n",
    ]
    head = (
        "GPUs",
        "TP, PP, EP, ETP",
        "choice",
        "iteration s",
        "exchange",
        "other communication",
        "gain",
        "4:1",
        "over nodes",
        "+1F1B",
        "+1F1B, 4:1",
    )
    lines = []
    for title, name in MODELS.items():
        rows = []
        for size in SIZES:
            plain, oversubscribed = (points(name, size, over) for over in OVERSUBSCRIPTIONS)
            point = best(plain, "chosen")
            of, parts_ms = point.settings, point.chosen.parts_ms
            total = point.chosen.total_ms
            fits = any(each.fits for each in plain)
            others = sum(parts_ms.get(part, 0.0) for part in OTHERS)
            rows.append(
                (
                    f"{size:,}",
                    f"{of.tp}, {of.pp}, {of.ep}, {of.etp}",
                    f"`{point.price.chain.name}` x{point.price.num_chunks}",
                    f"{total / 1e3:.3g}",
                    f"{parts_ms[EXCHANGE] / total:.0%}",
                    f"{others / total:.0%}",
                    percent(plain),
                    percent(oversubscribed),
                    percent(over_nodes(plain)),
                    percent(plain, "_overlapped"),
                    percent(oversubscribed, "_overlapped"),
                )
                if fits
                else (f"{size:,}", _does_not_fit(point), *[""] * 9)
            )
        parts += [f"\n### {title}\n\n", table(head, rows)]
        lines.append(finding(title, name))
    parts.append("\n### Where the gain ends\n\n" + bullets(lines))
    parts += ["\n", paragraph(LEFT_OUT)]
    return "".join(parts)


LEFT_OUT = (
    "**Left out**: starting a message to each of many peers (a preset has one start for a "
    "collective, whatever its group), the latency of long rings, congestion, load imbalance, "
    "failures."
)


def _does_not_fit(point: Point) -> str:
    return f"does not fit: {point.needed_bytes / 1e9:,.0f} GB of a GPU at the least"


def finding(title: str, name: str) -> str:
    """One model's gains in a sentence."""
    sizes = [size for size in SIZES if any(each.fits for each in points(name, size, 1))]
    gains = {size: gain_pct(points(name, size, 1)) for size in sizes}
    overlapped = max(gain_pct(points(name, size, 1), "_overlapped") for size in sizes)
    most = max(gains, key=lambda size: gains[size])
    if max(gains[most], overlapped) < LEAST_GAIN_PCT:
        return f"**{title}**: no gain at any size; plain `alltoall` is as good."
    text = f"**{title}**: up to {gains[most]:.0f}% of an iteration, on {most:,} GPUs"
    ended = [f"{size:,}" for size, gain in gains.items() if gain < LEAST_GAIN_PCT]
    if ended:
        text += f"; less than {LEAST_GAIN_PCT:.0f}% on {' and '.join(ended)}"
    moved = max(
        abs(gain_pct(points(name, size, over), kind) - gain_pct(points(name, size, 1), kind))
        for size, kind, over in product(sizes, ("", "_overlapped"), OVERSUBSCRIPTIONS)
    )
    return text + (
        f". Beside another micro-batch at most {overlapped:.0f}%. Oversubscription of 4:1 changes "
        f"this by at most {moved:.1f} points."
    )


def _list(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"


def draw(path: Path) -> None:
    """A panel for each model: gains by size."""
    with pictures.figure(path, (WIDTH_INCHES, 6.0), DPI) as figure:
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        for axis, (title, name) in zip(axes.flat, MODELS.items(), strict=True):
            for layouts_of, kind, colour, style, label in (
                (over_nodes, "", pictures.COLOURS[2], "-", "gain, exchange over nodes"),
                (tuple, "", pictures.PICK_COLOUR, "--", "gain"),
                (
                    tuple,
                    "_overlapped",
                    pictures.COLOURS[0],
                    "-",
                    "gain beside another micro-batch (1F1B)",
                ),
            ):
                found = {size: layouts_of(points(name, size, 1)) for size in SIZES}
                at = [size for size, of in found.items() if any(point.fits for point in of)]
                gains = [gain_pct(found[size], kind) for size in at]
                axis.plot(at, gains, style, marker="o", markersize=4, color=colour, label=label)
            axis.set_xscale("log", base=2)
            axis.set_xticks(SIZES, [f"{size:,}" for size in SIZES], fontsize=9)
            axis.set_title(title, fontsize=10)
            axis.grid()
        for axis in axes[1]:
            axis.set_xlabel("H100 GPUs")
        for axis in axes[:, 0]:
            axis.set_ylabel("% of an iteration saved")
        axes[1, 0].legend(fontsize=9)
        figure.suptitle(
            "predicted: the best layout with the planner's choice against that with alltoall"
        )
