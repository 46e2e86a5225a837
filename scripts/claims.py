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
from monta_megatron.core import Shape
from monta_megatron.planner.cluster import Cluster
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
BACKENDS = "h100_8x_ndr"
# Tokens of a rank: half of a sequence of 2,048, 4,096 and 16,384 tokens, as TP is 2.
TOKENS = (1024, 2048, 8192)
# GB/s of dispatch and of combine, by EP. Rows to each node of a token count, its own among them.
PUBLISHED = {
    # DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md: H100, bf16, 4,096 tokens of 7,168 values.
    # The faster of 8 and 16 SMs: 8 at EP 16 and 64, 16 at EP 32.
    "Hybrid-EP": {16: (57.74, 56.96), 32: (47.36, 52.53), 64: (41.46, 47.68)},
    "Hybrid-EP, kernels": {16: (76.80, 68.00), 32: (57.69, 57.46), 64: (50.55, 51.03)},
    # DeepEP, docs/legacy.md: H800, ConnectX-7, dispatch in FP8, experts in at most 4 of 8 groups.
    "DeepEP V1": {16: (43, 43), 32: (58, 57), 64: (51, 50)},
    # DeepEP, README.md: SM90, ConnectX-7, dispatch in FP8.
    "DeepEP V2": {16: (90, 81), 32: (61, 61)},
}
# Backends that permute rows themselves; behind the others Megatron copies them into the experts'
# order and back.
PERMUTING = ("Hybrid-EP", "Hybrid-EP, kernels")


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
    """Time of four passes at the published rates, and how many times as fast that is as monta."""
    cluster = load_cluster(BACKENDS)
    rows = []
    for ep in (16, 32, 64):
        layout = {**QWEN, "world_size": 8 * ep, "ep": ep}
        plans = [monta_megatron.plan(cluster=cluster, tokens=tokens, **layout) for tokens in TOKENS]
        rows.append([ep, "monta", *(f"{plan.predicted_us:,.0f}{_ends(plan, 1)}" for plan in plans)])
        for backend, rates in PUBLISHED.items():
            if ep in rates:
                times = [_backend_us(plan.shape, cluster, backend, rates[ep]) for plan in plans]
                cells = (
                    f"{us:,.0f}: {plan.predicted_us / us:.2f}x{_ends(plan, us)}"
                    for plan, us in zip(plans, times, strict=True)
                )
                rows.append([ep, backend, *cells])
    return table([">EP", "dispatcher", *(f"{tokens:,} tokens" for tokens in TOKENS)], rows)


def _backend_us(
    shape: Shape, cluster: Cluster, backend: str, gbytes_per_s: tuple[float, float]
) -> float:
    """Time of dispatch and combine, forward and backward, at the rates of dispatch and combine."""
    token_bytes = shape.tokens_per_rank * shape.hidden_size * shape.value_bytes
    num_ranks, num_nodes = len(shape.layout.nodes), shape.layout.num_nodes
    to_nodes, to_ranks = (shape.routing.hits(parts).sum() for parts in (num_nodes, num_ranks))
    us = sum(2 * token_bytes * to_nodes / rate / 1e3 for rate in gbytes_per_s)
    if backend not in PERMUTING:
        copied_bytes = token_bytes * (to_ranks + shape.routing.max_experts_per_token)
        us += 4 * cluster.time_us("copy", "memory", copied_bytes)
    return us


def _ends(plan: Plan, us: float) -> str:
    """The ends of a plan's range, in times of so many us."""
    if plan.range_us is None:
        return ""
    form = ",.0f" if us == 1 else ".2f"
    least, most = (format(end / us, form) for end in plan.range_us)
    return f" ({least} to {most})"


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
