"""What papers claim, and what the cost model predicts of it under what they leave open."""

from dataclasses import replace

from options_page import table
from studies.common import Section, paragraph, run
from studies.monta_claims import draw, saving, speedup

from monta_megatron.planner.assumptions import assumptions_of
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.tools.estimate.exchange import exchange_time
from monta_megatron.tools.estimate.iteration import (
    EXCHANGE,
    HIDDEN,
    HOST,
    estimate_iteration,
    moe_layer,
)
from monta_megatron.tools.estimate.layers import Architecture, Dispatcher, TrainingSettings

__all__ = ["draw", "section"]

# Parts of a layer that are neither computation nor what other ranks wait for.
NO_COMPUTATION = (EXCHANGE, HIDDEN, HOST)
CLAIMED_HYBRID_PCT = 14
# Copies of a token, and seconds of the matching: OLMoE, 64 experts, top-8, 4 GPUs.
OCCULT = {
    "uniform": (3.68, 15.93),
    "placed": (3.02, 12.53),
    "pruned to 2 devices": (1.98, 9.22),
    "pruned to 1 device": (1.0, 5.82),
}


def section() -> str:
    """The whole section."""
    sections = (speedup(), saving(), _occult(), _shares())
    head = ("claim", "claimed", "predicted", "measured, emulated", "difference", "constants")
    parts = [
        "## What papers claim, and what is predicted of it\n\n",
        paragraph(
            "Published figures are the papers' own and stand under **claimed**; what the cost "
            "model gives stands under **predicted**; what ran stands under **measured**, on CPU "
            "ranks of an emulated cluster. Where a paper leaves something open, the prediction is "
            "a range."
        ),
        "\n",
        table(head, [row for section in sections for row in section.rows]),
        *(section.text for section in sections),
    ]
    return "".join(parts)


def _occult() -> Section:
    groups = 4
    uniform = UniformRouting(num_experts=64, topk=8)
    predicted: dict[str, float | None] = {
        "uniform": float(uniform.hits(groups).sum()),
        # It depends on the trace, which was not published.
        "placed": None,
        "pruned to 2 devices": _copies_of_groups(2),
        "pruned to 1 device": _copies_of_groups(1),
    }
    (most, most_s), (least, least_s) = OCCULT["uniform"], OCCULT["pruned to 1 device"]
    slope = (most_s - least_s) / (most - least)
    rows = []
    for name, (copies, seconds) in OCCULT.items():
        of, line = predicted[name], least_s + slope * (copies - least)
        is_end = name in ("uniform", "pruned to 1 device")
        rows.append(
            (
                name,
                f"{copies:.2f}",
                "-" if of is None else f"{of:.2f}",
                "-" if of is None else f"{of / copies - 1:+.1%}",
                f"{seconds:.2f}",
                "taken" if is_end else f"{line:.2f}",
                "-" if is_end else f"{line / seconds - 1:+.1%}",
            )
        )
    head = ("experts of a token", "copies, claimed", "predicted", "difference", "s, claimed",
            "predicted", "difference")  # fmt: skip
    text = "".join(
        [
            "\n### Occult: copies of a token\n\n",
            paragraph(
                "**Claimed** for OLMoE on 4 GPUs (64 experts, top-8; digests of arXiv 2505.13345). "
                "**Predicted**: copies, by the planner's formula of expected distinct devices; "
                "seconds, by a line through the two ends in copies, as the size of what was timed "
                "was not found."
            ),
            "\n",
            table(head, rows),
            "\n",
            paragraph(
                f"By that line {least_s - slope * least:.1f} s are there without any copy and each "
                f"costs {slope:.1f} s: time follows copies, with a share that is no exchange. What "
                "placement gains depends on the trace, and nothing is predicted of it. "
                "`alltoall_dedup` sends these copies; pruning changes the model and is not offered."
            ),
        ]
    )
    claims = [
        (
            f"Occult, copies of a token: {row[0]}",
            *row[1:3],
            "-",
            row[3],
            "none" if row[2] != "-" else "the trace is not public",
        )
        for row in rows
    ]
    claims += [
        (
            f"Occult, time: {row[0]}",
            f"{row[4]} s",
            f"{row[5]} s",
            "-",
            row[6],
            "the other two times",
        )
        for row in rows
        if row[6] != "-"
    ]
    return Section(text, tuple(claims))


def _copies_of_groups(topk: int) -> float:
    routing = UniformRouting(num_experts=64, topk=8, num_groups=4, group_topk=topk)
    return float(routing.hits(4).sum())


def _shares() -> Section:
    model, settings = run("deepseek_v3")
    cluster = load_cluster("h800_8x_ndr")
    assumed = assumptions_of("H800", cluster.name)
    rows = []
    for dispatcher in ("alltoall", "deepep", "hybridep"):
        how = replace(settings, dispatcher=dispatcher, recompute="none")
        exchange = exchange_time(model, how, cluster, assumed)
        parts = moe_layer(model, how, cluster, assumed, exchange).parts
        computed = sum(time for part, time in parts.items() if part not in NO_COMPUTATION)
        of = estimate_iteration(model, how, cluster, assumed, exchange)
        rows.append(
            (
                f"`{dispatcher}`",
                f"{computed / parts[EXCHANGE]:.2f} : 1",
                f"{of.parts_ms[EXCHANGE] / of.total_ms:.0%}",
                f"{of.total_ms / 1e3:.1f}",
            )
        )
    head = ("dispatcher", "computation : exchange in a layer", "exchange in an iteration", "s")
    gains = [_hybrid_gain_pct(model, settings, hosts) for hosts in (True, False)]
    nearer = (
        "first"
        if abs(gains[0] - CLAIMED_HYBRID_PCT) < abs(gains[1] - CLAIMED_HYBRID_PCT)
        else "second"
    )
    text = "".join(
        [
            "\n### DeepSeek-V3: the share of communication\n\n",
            paragraph(
                "**Claimed**: computation to communication of about 1 : 1 on H800 (arXiv "
                "2412.19437, section 3.2.1); communication above 50% of the training time where "
                "nothing is optimized, and 943 TFLOP/s per GPU with Hybrid-EP for 829 with "
                "DeepEP, 14%, on Grace Blackwell (NVIDIA's blog on Hybrid-EP)."
            ),
            "\n",
            paragraph(
                "**Predicted** on 1,024 H800 with EP 64, PP 16, bf16, micro-batches of one "
                "sequence of 4K, no recompute, no overlap:"
            ),
            "\n",
            table(head, rows),
            "\n",
            paragraph(
                "Hybrid-EP for DeepEP on 256 GB200 with EP 64, PP 4, without overlap: "
                f"{gains[0]:+.0f}% TFLOP/s if DeepEP knows only the 4 GPUs of a host and sends to "
                f"the others over the network, {gains[1]:+.0f}% if both use the rack's NVLink. "
                f"Claimed are 14%, to which the {nearer} reading is nearer; FP8, in which NVIDIA "
                "trained, is not modelled. What both print as bandwidths is held against "
                "predictions by `benchmarks/validate.py`."
            ),
            "\nConstants: the presets, `configs/estimate/assumptions.yaml`. Not measured.\n",
        ]
    )
    constants = "`h800_8x_ndr`, assumptions"
    balance = (
        "DeepSeek-V3, computation : communication",
        "1 : 1",
        f"{rows[0][1]} (`alltoall`), {rows[1][1]} (DeepEP)",
        "-",
        " and ".join(f"{float(row[1].split()[0]) - 1:+.0%}" for row in rows[:2]),
        constants,
    )
    share = (
        "Hybrid-EP, communication of an iteration that nothing optimizes",
        "above 50%",
        f"{rows[0][2]} (`alltoall`)",
        "-",
        f"{float(rows[0][2].rstrip('%')) - 50:+.0f} points",
        constants,
    )
    over_deepep = (
        "Hybrid-EP over DeepEP, TFLOP/s",
        f"{CLAIMED_HYBRID_PCT}%",
        f"{gains[1]:.0f}% or {gains[0]:.0f}%",
        "-",
        f"{min((gain - CLAIMED_HYBRID_PCT for gain in gains), key=abs):+.0f} points at the nearest",
        "`gb200_nvl72`, assumptions",
    )
    return Section(text, (balance, share, over_deepep))


def _hybrid_gain_pct(
    model: Architecture, settings: TrainingSettings, deepep_on_hosts: bool
) -> float:
    """TFLOP/s that Hybrid-EP gains over DeepEP on GB200."""
    rack = load_cluster("gb200_nvl72")
    host = replace(rack, num_nodes=64, ranks_per_node=4, nics_per_node=4)
    rack = replace(rack, ranks_per_node=64, nics_per_node=64)
    assumed = assumptions_of("GB200", rack.name)
    small = replace(settings, world_size=256, pp=4, global_batch_size=2048)

    def tflops(dispatcher: Dispatcher, cluster: Cluster) -> float:
        how = replace(small, dispatcher=dispatcher)
        # Everything but the exchange is as in the rack.
        exchange = exchange_time(model, how, cluster, assumed)
        return estimate_iteration(model, how, rack, assumed, exchange).tflops_per_gpu

    deepep = tflops("deepep", host if deepep_on_hosts else rack)
    return 100 * (tflops("hybridep", rack) / deepep - 1)
