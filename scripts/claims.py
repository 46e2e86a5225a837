#!/usr/bin/env python
"""Predict what the papers leave open, from the presets of configs/: the tables of docs/claims.md.

    python scripts/claims.py topologies     # which chain on which cluster
    python scripts/claims.py contention     # how much contention a pipelined exchange bears
    python scripts/claims.py sequences      # which chain for which sequence length
    python scripts/claims.py backends       # DeepEP and Hybrid-EP, by the rates that they publish

Times are of dispatch and combine, forward and backward, of one MoE layer and micro-batch.
"""

from dataclasses import replace
from itertools import permutations
from typing import Any, get_args

import monta_megatron
from monta_megatron.chains import CHAINS
from monta_megatron.cli.parser import Parser
from monta_megatron.common.text import size_text, table
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import ResourceName
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.price import price

QWEN = {"model": "qwen3_235b_a22b", "world_size": 128, "tp": 2, "ep": 16, "pp": 4}
MONTA = {"model": "monta_2x70b", "world_size": 16, "tp": 8, "ep": 2, "etp": 8}
TOPOLOGIES = {
    "Qwen3-235B, EP 16": (
        {**QWEN, "tokens": 4096},
        "a100_4x_hdr a100_hdr a100_pcie_hdr a800_4x200_roce gh200_4x_200g h100_8x_ndr h100_efa_p5",
    ),
    "MoNTA-2x70B, EP 2 x ETP 8": (
        {**MONTA, "seq_length": 32768},
        "a800_2x8_ib200 a100_hdr a100_pcie_hdr h100_8x_ndr h100_efa_p5",
    ),
}
PAIRS: dict[str, tuple[ResourceName, ...]] = {
    "node link, memory": ("node_link", "memory"),
    "network, memory": ("network", "memory"),
    "network, node link": ("network", "node_link"),
    "all three": get_args(ResourceName),
}
FACTORS = (1, 1.25, 1.5, 1.75, 2, 2.5)
CONTENDED = (("a800_2x8_ib200", 8), ("a800_2x8_ib200", 64), ("h100_8x_ndr", 64))
SEQUENCES = {"MoNTA-2x70B": (MONTA, "a800_2x8_ib200"), "Qwen3-235B": (QWEN, "h100_8x_ndr")}
# GB/s of dispatch and of combine, by EP. Rows to each node of a token count, its own among them.
PUBLISHED = {
    # DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md: H100, bf16, 16 SMs, Torch API.
    "Hybrid-EP": {16: (54.47, 53.35), 32: (47.36, 52.53), 64: (41.24, 46.57)},
    # DeepEP, docs/legacy.md: H800, ConnectX-7, dispatch in FP8, experts in at most 4 of 8 groups.
    "DeepEP V1": {16: (43, 43), 32: (58, 57), 64: (51, 50)},
    # DeepEP, README.md: SM90, ConnectX-7, dispatch in FP8.
    "DeepEP V2": {16: (90, 81), 32: (61, 61)},
}


def topologies() -> str:
    """Choice and speedup on each cluster."""
    rows = [
        [name, preset, *_times(monta_megatron.plan(cluster=preset, **layout))]
        for name, (layout, presets) in TOPOLOGIES.items()
        for preset in presets.split()
    ]
    return table(["of", "cluster", *TIMES], rows)


def contention() -> str:
    """Time of MoNTA's chain in the best of 2, 4 and 8 chunks over its time in one, by factor."""
    rows = []
    for preset, thousands in CONTENDED:
        shape = monta_megatron.plan(cluster=preset, seq_length=thousands * 1024, **MONTA).shape
        for name, resources in PAIRS.items():
            ratios = []
            for factor in FACTORS:
                pairs = permutations(get_args(ResourceName), 2)
                factors = tuple((a, b, factor if {a, b} <= {*resources} else 1) for a, b in pairs)
                cluster = replace(load_cluster(preset), contention=factors)
                serial, *pipelined = (
                    price(shape, cluster, CHAINS["alltoall_allgather"], chunks).total_us
                    for chunks in (1, 2, 4, 8)
                )
                ratios.append(f"{min(pipelined) / serial:.2f}")
            rows.append([preset, f"{thousands}K", name, *ratios])
    return table(["cluster", ">tokens", "factor for", *(f">{each}" for each in FACTORS)], rows)


def sequences() -> str:
    """Choice by the length of a sequence, one in a micro-batch."""
    rows = []
    for name, (layout, preset) in SEQUENCES.items():
        for thousands in (4, 8, 16, 32, 64, 128, 256, 512):
            plan = monta_megatron.plan(cluster=preset, seq_length=thousands * 1024, **layout)
            peak = size_text(plan.best[plan.chain].peak_bytes)
            rows.append([name, f"{thousands}K", *_times(plan), peak])
    return table(["of", ">tokens", *TIMES, ">peak"], rows)


def backends() -> str:
    """Four passes at the published rates, and copies into the experts' order and back."""
    rows = []
    cluster = load_cluster("h100_8x_ndr")
    for ep in (16, 32, 64):
        plan = monta_megatron.plan(cluster=cluster, **{**QWEN, "world_size": 8 * ep, "ep": ep})
        shape, routing = plan.shape, plan.shape.routing
        token_bytes = shape.tokens_per_rank * shape.hidden_size * shape.value_bytes
        to_nodes, to_ranks = (routing.hits(parts).sum() for parts in (ep // 8, ep))
        copied_bytes = token_bytes * (to_ranks + routing.max_experts_per_token)
        copies_us = 4 * cluster.time_us("copy", "memory", copied_bytes)
        rows.append([ep, f"monta: {_choice(plan)}", f"{plan.predicted_us:,.0f}", "1.00"])
        for backend, rates in PUBLISHED.items():
            if ep in rates:
                us = sum(2 * token_bytes * to_nodes / rate / 1e3 for rate in rates[ep]) + copies_us
                rows.append([ep, backend, f"{us:,.0f}", f"{plan.predicted_us / us:.2f}"])
    return table([">EP", "dispatcher", ">us", ">times as fast"], rows)


TIMES = (">alltoall us", ">allgather us", "choice", ">us", ">speedup over the faster")


def _times(plan: Plan) -> list[Any]:
    us, stock_us = plan.predicted_us, plan.stock_us
    times = [f"{plan.stock_times_us[name]:,.0f}" for name in ("alltoall", "allgather")]
    return [*times, _choice(plan), f"{us:,.0f}", f"{stock_us / us:.2f}x"]


def _choice(plan: Plan) -> str:
    return f"{plan.chain} x{plan.num_chunks}"


TOPICS = {each.__name__: each for each in (topologies, contention, sequences, backends)}

if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("topic", choices=TOPICS)
    print(TOPICS[parser.parse_args().topic]())
