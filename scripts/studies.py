#!/usr/bin/env python
"""Write docs/claims.md from the cost model: claims of papers, and predictions of open questions.

    python scripts/studies.py            # print the page
    python scripts/studies.py --write    # write it, and draw its pictures

Nothing is measured here. `studies.yaml` holds the points and the text; drawing needs matplotlib
(the `plot` extra).
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import yaml
from options_page import table

from monta_megatron.chains import CHAINS
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.chains.layout import Layout
from monta_megatron.common import presets
from monta_megatron.common.units import GB_BYTES
from monta_megatron.planner.assumptions import assumptions_of
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster, Contention
from monta_megatron.planner.cluster_file import load_cluster, with_inter_rate
from monta_megatron.planner.layout import ParallelLayout, workloads_of
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model, with_batch
from monta_megatron.planner.models.training_memory import training_memory
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.planner.select import Selection, select_chain
from monta_megatron.planner.workload import Workload
from monta_megatron.tools import pictures
from monta_megatron.tools.estimate.estimate import MFU_SETS, with_1f1b_overlap
from monta_megatron.tools.estimate.exchange import (
    NO_HOST,
    ExchangeTime,
    exchange_time,
    less_saved,
    of_price,
)
from monta_megatron.tools.estimate.iteration import (
    EXCHANGE,
    HIDDEN,
    HOST,
    Iteration,
    estimate_iteration,
    moe_layer,
)
from monta_megatron.tools.estimate.layers import (
    Architecture,
    TrainingSettings,
    architecture_of,
    settings_of,
)
from monta_megatron.tools.launch.prepare import read_run
from monta_megatron.tools.plan.request import PlanRequest, read_inputs
from monta_megatron.tools.plan.simulation import best_within, plan_at

SCRIPTS = Path(__file__).parent
DOCS = SCRIPTS.parent / "docs"
PAGE = DOCS / "claims.md"
DATA: dict[str, Any] = yaml.safe_load((SCRIPTS / "studies.yaml").read_text(encoding="utf-8"))
# Text or table -> its value in the page.
Values = dict[str, str]
# A README shows a picture 830 pixels wide: two dots for each.
WIDTH_INCHES, DPI = 8.3, 200
PHASE = "forward_backward"
MONTA_CHAIN = CHAINS["alltoall_allgather"]
MONTA = DATA["claims"]["monta"]


def workload_of(
    model_name: str, cluster: Cluster, seq_length: int, tp: int, ep: int, etp: int = 1
) -> Workload:
    """The exchange of a preset with sequences of this length, one in a micro-batch."""
    model = with_batch(load_model(model_name), seq_length, 1)
    layout = ParallelLayout(world_size=max(tp, ep * etp), tp=tp, ep=ep, etp=etp)
    return workloads_of(model, layout, cluster.ranks_per_node)[0]


def chunked(chain: str, num_chunks: int | None) -> str:
    """`hierarchical_alltoall` x2."""
    return f"`{chain}` x{num_chunks}"


def ms(time_us: float) -> str:
    """5.23 of 5,230 us."""
    return f"{time_us / 1e3:,.3g}" if time_us < 1e6 else f"{time_us / 1e3:,.0f}"


def spread(values: Iterable[float], digits: int, unit: str) -> str:
    """3.05 to 7.37x."""
    known = list(values)
    return f"{min(known):.{digits}f} to {max(known):.{digits}f}{unit}"


def fastest(prices: Iterable[ChainPrice]) -> ChainPrice:
    """The price of the shortest exchange."""
    return min(prices, key=lambda price: price.total_us)


@cache
def run(name: str) -> tuple[Architecture, TrainingSettings]:
    """A run preset."""
    file = str(presets.find("runs", name))
    merged = read_run(file, ())[1]
    settings = settings_of(merged.arguments, merged.config.layout.parallel)
    return architecture_of(merged.arguments, file), settings


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Step 0 of the MoNTA paper's ablation, and what it is compared with.

    Attributes:
        duplicated: every rank of a tensor parallel group sends the tokens of all.
        serial: duplicates dropped: AllToAll, then AllGather, then copies.
        pipelined: the chain in its best number of chunks.
    """

    duplicated: ChainPrice
    serial: ChainPrice
    pipelined: ChainPrice

    @property
    def speedups(self) -> tuple[float, float, float]:
        """Of AllToAll alone, of the serial exchange and of the pipelined one."""
        base_us = self.duplicated.total_us
        alone = network_us(self.duplicated) / network_us(self.serial)
        return alone, base_us / self.serial.total_us, base_us / self.pipelined.total_us


def network_us(price: ChainPrice) -> float:
    """How long the network is busy with rows."""
    works = (work for of_pass in price.passes for work in of_pass.pipeline)
    return sum(sum(work.times_us) for work in works if work.resource == "inter")


def steps(workload: Workload, cluster: Cluster) -> Steps:
    """Prices of an exchange at ETP = TP.

    In step 0 a rank exchanges with the rank of its position on the other node alone, but TP times
    the tokens, and has nothing to gather.
    """
    layout = workload.layout
    alone = Layout(
        ep=layout.ep,
        etp=1,
        num_local_experts=layout.num_local_experts,
        rank=0,
        nodes=layout.nodes[:: layout.etp],
    )
    tokens = workload.tokens_per_rank * layout.etp
    duplicated = replace(workload, layout=alone, tokens_per_rank=tokens)
    ours = [price_chain(workload, cluster, MONTA_CHAIN, n, PHASE) for n in MONTA["chunks"]]
    return Steps(
        duplicated=price_chain(duplicated, cluster, ALLTOALL, 1, PHASE),
        serial=ours[0],
        pipelined=fastest(ours),
    )


def monta_exchange(nics: int, nic_gbytes_per_s: float) -> tuple[Workload, Cluster]:
    """The paper's exchange, on its cluster as far as it says: 2 nodes of 8 A800."""
    preset = load_cluster(MONTA["cluster"])
    cluster = replace(preset, nics_per_node=nics)
    ratio = nic_gbytes_per_s / MONTA["nic_gbytes_per_s"][-1]
    cluster = replace(with_inter_rate(cluster, ratio), name=preset.name)
    tp = MONTA["tp"]
    return workload_of(MONTA["model"], cluster, MONTA["seq_length"], tp, 2, tp), cluster


@cache
def monta_steps(nics: int, nic_gbytes_per_s: float) -> Steps:
    """Of the paper's model and sequence."""
    return steps(*monta_exchange(nics, nic_gbytes_per_s))


def emulated_steps(rate_mbit: int) -> Steps:
    """The exchange of docs/results.md, by the preset of the emulated cluster."""
    of, tp = MONTA["emulated"], MONTA["tp"]
    cluster = with_inter_rate(load_cluster(of["cluster"]), rate_mbit / 500)
    workload = workload_of(MONTA["model"], cluster, of["tokens"] * tp, tp, 2, tp)
    workload = replace(
        workload,
        layout=replace(workload.layout, num_local_experts=of["num_experts"] // 2),
        routing=UniformRouting(num_experts=of["num_experts"], topk=of["topk"]),
        hidden_size=of["hidden_size"],
        value_bytes=4,
    )
    return steps(workload, cluster)


def measured_speedups(rate_mbit: int) -> tuple[float, float]:
    """Times as fast as step 0: steps 1 and 4, forward and backward, as docs/results.md has them."""
    start = f"| TP 8, EP 2, ETP 8 | {rate_mbit} | forward + backward |"
    lines = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(start))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return float(cells[4].rsplit(", ")[-1]), float(cells[7].rsplit(", ")[-1])


def monta_savings_pct(
    nics: int, nic_gbytes_per_s: float, mfu: float | None
) -> tuple[float, float, float]:
    """Exchange in an iteration with step 0; saved of it; saved without duplicates."""
    model, settings = run(MONTA["run"])
    workload, cluster = monta_exchange(nics, nic_gbytes_per_s)
    changes = {} if mfu is None else dict.fromkeys(MFU_SETS, mfu)
    assumed = assumptions_of("A800", cluster.name, changes)
    of = monta_steps(nics, nic_gbytes_per_s)
    stock = exchange_time(model, settings, cluster, assumed)
    # The host's time is a part of the layer's.
    duplicated = of_price(steps(workload, replace(cluster, launch=NO_HOST)).duplicated)
    times = (duplicated, stock, less_saved(stock, of.serial, of.pipelined))
    first, second, third = (
        estimate_iteration(model, settings, cluster, assumed, time) for time in times
    )
    share = first.parts_ms[EXCHANGE] / first.total_ms
    saved = (1 - third.total_ms / each.total_ms for each in (first, second))
    of_first, of_second = saved
    return 100 * share, 100 * of_first, 100 * of_second


def claims_section() -> Values:
    """The table of claims, and the tables of MoNTA's two."""
    claimed = MONTA["claimed"]
    networks = list(product(MONTA["nics"], MONTA["nic_gbytes_per_s"]))
    all_steps = [monta_steps(*network) for network in networks]
    alone, _, pipelined = zip(*(of.speedups for of in all_steps), strict=True)
    speedup_rows = [
        (
            *(f"{number:.3g}" for number in network),
            f"{of.duplicated.total_us / 1e3:.1f}",
            *(f"{ratio:.2f}x" for ratio in of.speedups),
            f"{of.pipelined.num_chunks}",
        )
        for network, of in zip(networks, all_steps, strict=True)
    ]
    emulated_rows = []
    for rate in MONTA["emulated"]["rates_mbit"]:
        pairs = zip(emulated_steps(rate).speedups[1:], measured_speedups(rate), strict=True)
        for name, (value, seen) in zip(("serial", "pipelined"), pairs, strict=True):
            cells = (f"{value:.2f}x", f"{seen:.2f}x", f"{value / seen - 1:+.0%}")
            emulated_rows.append((f"{rate} Mbit/s", f"{name} exchange", *cells))

    savings = [[monta_savings_pct(*network, mfu) for mfu in MONTA["mfu"]] for network in networks]
    saving_rows = [
        (
            *(f"{number:.3g}" for number in network),
            *(cell for a, b, c in row for cell in (f"{a:.0f}%", f"{b:.1f}%", f"{c:.1f}%")),
        )
        for network, row in zip(networks, savings, strict=True)
    ]
    of_step_0 = [saved for row in savings for _, saved, _ in row]
    of_serial = [saved for row in savings for _, _, saved in row]

    def differences(values: Sequence[float]) -> str:
        low, high = (of(values) / claimed["speedup"] - 1 for of in (min, max))
        return f"{low:+.0%} to {high:+.0%}"

    def nearest(values: Sequence[float], claim: float) -> str:
        points = min((value - claim for value in values), key=abs)
        return f"{points:+.1f} points at the nearest"

    constants, pct = f"`{MONTA['cluster']}`", claimed["saving_pct"]
    seen = " and ".join(row[3] for row in emulated_rows if row[1].startswith("pipelined"))
    rows = [
        ("MoNTA, AllToAll at TP 8: AllToAll alone", f"{claimed['speedup']}x",
         spread(alone, 2, "x"), "-", differences(alone), constants),
        ("the same: the pipelined exchange", f"{claimed['speedup']}x",
         spread(pipelined, 2, "x"), seen, differences(pipelined), constants),
        ("MoNTA, an iteration of 2x70B: against step 0", f"{pct}%", spread(of_step_0, 1, "%"),
         "-", nearest(of_step_0, pct), f"{constants}, assumptions"),
        ("the same: against a serial exchange without duplicates", f"{pct}%",
         spread(of_serial, 1, "%"), "-", nearest(of_serial, pct), "the same"),
        *occult_rows(),
        *communication_rows(),
    ]  # fmt: skip
    hosts, rack = hybrid_gains_pct()
    columns = ("exchange in step 0", "saved of step 0", "saved of serial")
    head = ("NICs of a node", "GB/s of each")
    return {
        "claims": table(
            ("claim", "claimed", "predicted", "measured, emulated", "difference", "constants"), rows
        ),
        "monta_speedup": table(
            (*head, "step 0 ms", "AllToAll alone", "serial exchange", "pipelined exchange",
             "chunks"), speedup_rows,
        ),
        "monta_emulated": table(("rate", "what", "predicted", "measured", "difference"),
                                emulated_rows),
        "monta_saving": table((*head, *columns, *(f"{name}, 40%" for name in columns)),
                              saving_rows),
        "hybrid_host": f"{hosts:+.0f}% TFLOP/s",
        "hybrid_rack": f"{rack:+.0f}% TFLOP/s",
    }  # fmt: skip


def occult_rows() -> Iterator[tuple[str, ...]]:
    """Copies of a token by expected distinct devices; seconds by a line through the two ends."""
    claims = DATA["claims"]["occult"]
    (most, most_s, _), *_, (least, least_s, _) = claims.values()
    slope = (most_s - least_s) / (most - least)
    for name, (copies, _, devices) in claims.items():
        cells = ("-", "-", "-", "the trace is not public")
        if devices is not None:
            routing = UniformRouting(num_experts=64, topk=8, num_groups=4, group_topk=devices)
            of = float(routing.hits(4).sum())
            cells = (f"{of:.2f}", "-", f"{of / copies - 1:+.1%}", "none")
        yield (f"Occult, copies of a token: {name}", f"{copies:.2f}", *cells)
    for name, (copies, seconds, _) in list(claims.items())[1:-1]:
        of = least_s + slope * (copies - least)
        yield (f"Occult, time: {name}", f"{seconds:.2f} s", f"{of:.2f} s", "-",
               f"{of / seconds - 1:+.1%}", "the other two times")  # fmt: skip


def communication_rows() -> Iterator[tuple[str, ...]]:
    """Computation over communication of DeepSeek-V3, and Hybrid-EP over DeepEP."""
    of = DATA["claims"]["deepseek"]
    model, settings = run(of["run"])
    cluster = load_cluster(of["cluster"])
    assumed = assumptions_of(of["gpu"], cluster.name)
    ratios, shares = [], []
    for dispatcher in ("alltoall", "deepep"):
        how: TrainingSettings = replace(settings, dispatcher=dispatcher, recompute="none")  # type: ignore[arg-type]
        exchange = exchange_time(model, how, cluster, assumed)
        parts = moe_layer(model, how, cluster, assumed, exchange).parts
        # What is neither computation nor what other ranks wait for.
        computed = sum(us for part, us in parts.items() if part not in (EXCHANGE, HIDDEN, HOST))
        ratios.append(computed / parts[EXCHANGE])
        iteration = estimate_iteration(model, how, cluster, assumed, exchange)
        shares.append(100 * iteration.parts_ms[EXCHANGE] / iteration.total_ms)
    constants = f"`{of['cluster']}`, assumptions"
    yield (
        "DeepSeek-V3, computation : communication",
        "1 : 1",
        f"{ratios[0]:.2f} : 1 (`alltoall`), {ratios[1]:.2f} : 1 (DeepEP)",
        "-",
        " and ".join(f"{ratio - 1:+.0%}" for ratio in ratios),
        constants,
    )
    yield (
        "Hybrid-EP, communication of an iteration that nothing optimizes",
        "above 50%",
        f"{shares[0]:.0f}% (`alltoall`)",
        "-",
        f"{shares[0] - 50:+.0f} points",
        constants,
    )
    hybrid = DATA["claims"]["hybrid_ep"]
    hosts, rack = hybrid_gains_pct()
    points = min((gain - hybrid["claimed_pct"] for gain in (hosts, rack)), key=abs)
    yield (
        "Hybrid-EP over DeepEP, TFLOP/s",
        f"{hybrid['claimed_pct']}%",
        f"{rack:.0f}% or {hosts:.0f}%",
        "-",
        f"{points:+.0f} points at the nearest",
        f"`{hybrid['cluster']}`, assumptions",
    )


@cache
def hybrid_gains_pct() -> tuple[float, float]:
    """TFLOP/s that Hybrid-EP gains over DeepEP, which knows only a host's GPUs, or the rack's."""
    of = DATA["claims"]["hybrid_ep"]
    preset = load_cluster(of["cluster"])
    host = replace(preset, num_nodes=64, ranks_per_node=4, nics_per_node=4)
    rack = racks_of_64(preset)
    assumed = assumptions_of(of["gpu"], preset.name)
    model, settings = run(DATA["claims"]["deepseek"]["run"])
    sizes = {name: of[name] for name in ("world_size", "pp", "global_batch_size")}

    def tflops(dispatcher: Any, cluster: Cluster) -> float:
        how = replace(settings, **sizes, dispatcher=dispatcher)
        # Everything but the exchange is as in the rack.
        exchange = exchange_time(model, how, cluster, assumed)
        return estimate_iteration(model, how, rack, assumed, exchange).tflops_per_gpu

    on_host, on_rack = (100 * (tflops("hybridep", rack) / tflops("deepep", each) - 1)
                        for each in (host, rack))  # fmt: skip
    return on_host, on_rack


def without_rails(cluster: Cluster) -> Cluster:
    """As if every rank were on every rail."""
    return replace(
        cluster, links=tuple(replace(link, cross_rail_rate=None) for link in cluster.links)
    )


def racks_of_64(cluster: Cluster) -> Cluster:
    """16 hosts of each rack (`--segment=16`), so that all nodes have as many ranks."""
    return replace(cluster, ranks_per_node=64, nics_per_node=64)


CHANGES: Mapping[str, Callable[[Cluster], Cluster]] = {
    "without_rails": without_rails,
    "racks_of_64": racks_of_64,
}


def topologies_section() -> Values:
    """Rates of the clusters, and each exchange on each of them."""
    clusters: dict[str, Cluster] = {}
    rate_rows, rows = [], []
    for name, (preset, *changes) in DATA["topologies"]["clusters"].items():
        cluster = load_cluster(preset)
        for change in changes:
            cluster = CHANGES[change](cluster)
        clusters[name] = cluster
        rates = {link.resource: link.rate.gbytes_per_s for link in cluster.links}
        inter = rates["inter"] * cluster.nics_per_node / cluster.ranks_per_node
        cells = (f"{inter:.3g}", f"{rates['intra']:.3g}", f"{rates['intra'] / inter:.2g}")
        rate_rows.append((name, f"`{preset}`", *cells))
    for title, sizes in DATA["topologies"]["exchanges"].items():
        for number, (name, cluster) in enumerate(clusters.items()):
            selection = select_chain(workload_of(cluster=cluster, **sizes), cluster)
            chosen, stock_us = selection.price, alltoall_of(selection).total_us
            resource, busy_us = chosen.busiest()
            rows.append(
                (
                    "" if number else title,
                    name,
                    ms(stock_us),
                    chunked(chosen.chain.name, chosen.num_chunks),
                    ms(chosen.total_us),
                    f"{stock_us / chosen.total_us:.2f}x",
                    f"{resource}, {busy_us / chosen.total_us:.0%}",
                )
            )
    head = ("of", "topology", "`alltoall` ms", "choice", "ms", "gain", "busiest")
    return {
        "rates": table(
            ("topology", "preset", "network GB/s", "node link GB/s", "ratio"), rate_rows
        ),
        "topologies": table(head, rows),
    }


def alltoall_of(selection: Selection) -> ChainPrice:
    """Plain alltoall's price."""
    return next(price for price in selection.prices if price.chain.name == "alltoall")


@cache
def contention_ratios(title: str, pairs_name: str) -> tuple[float, ...]:
    """Pipelined over serial time of a setting, by factor."""
    serial_and_best = partial(_contended, title, pairs_name)
    return tuple(
        best.total_us / serial.total_us
        for serial, best in map(serial_and_best, DATA["contention"]["factors"])
    )


def _contended(title: str, pairs_name: str, factor: float) -> tuple[ChainPrice, ChainPrice]:
    of = DATA["contention"]
    preset, nics, seq_length = of["settings"][title]
    cluster = replace(load_cluster(preset), nics_per_node=nics)
    workload = workload_of("monta_2x70b", cluster, seq_length, 8, 2, 8)
    slowed = of["pairs"][pairs_name]
    contention = tuple(
        Contention(
            pair=tuple(pair),
            factor=factor if pair in slowed else 1.0,
            kind="datasheet",
            source="swept",
        )
        for pair in of["pairs"]["all three"]
    )
    cluster = replace(cluster, contention=contention)
    serial, *pipelined = (
        price_chain(workload, cluster, MONTA_CHAIN, n, PHASE) for n in (1, *of["chunks"])
    )
    return serial, fastest(pipelined)


def break_even(ratios: Sequence[float]) -> float | None:
    """The factor from which on serial wins, between two that were tried; None if it never does."""
    factors = DATA["contention"]["factors"]
    if ratios[0] >= 1:
        return float(factors[0])
    for (low, before), (high, ratio) in pairwise(zip(factors, ratios, strict=True)):
        if ratio >= 1:
            return float(low + (1 - before) / (ratio - before) * (high - low))
    return None


def contention_section() -> Values:
    """Ratios by setting and pairs, and from where on serial wins."""
    of = DATA["contention"]
    rows, wins = [], dict[str, list[float]]()
    for title in of["settings"]:
        serial, _ = _contended(title, "all three", 1.0)
        for number, name in enumerate(of["pairs"]):
            ratios = contention_ratios(title, name)
            at = break_even(ratios)
            if at is not None:
                wins.setdefault("all" if name == "all three" else "pair", []).append(at)
            rows.append(
                (
                    "" if number else f"{title}: {ms(serial.total_us)} ms in one chunk",
                    name,
                    *(f"{ratio:.2f}" for ratio in ratios),
                    "never" if at is None else f"from {at:.2f}",
                )
            )
    head = ("of", "factor for", *(f"{factor:g}" for factor in of["factors"]), "serial wins")
    return {
        "contention": table(head, rows),
        "least_pair": f"{min(wins['pair']):.2f}",
        "least_all": f"{min(wins['all']):.2f}",
        "most_all": f"{max(wins['all']):.2f}",
    }


@cache
def sequence_plans(title: str) -> tuple[Plan, ...]:
    """By length of the sequence, as `monta simulate --sweep tokens=...` makes them."""
    of = DATA["sequences"]
    request = PlanRequest(world_size=16, ignore_memory=True, **of["settings"][title])
    inputs, tp = read_inputs(request), of["settings"][title]["tp"]
    return tuple(
        plan_at(request, inputs, "tokens", length // tp, of["limit_gb"] * GB_BYTES)[0]
        for length in of["lengths"]
    )


def within(plan: Plan, chain: str) -> tuple[float | None, float | None]:
    """Time of a chain that keeps to the limit, and the least that it holds, if it can run."""
    return best_within(plan, chain, DATA["sequences"]["limit_gb"] * GB_BYTES)


def kilo(length: int) -> str:
    """4K of 4,096."""
    return f"{length // 1024}K" if length < 2**20 else "1M"


def sequences_section() -> Values:
    """Times by length and chain."""
    of = DATA["sequences"]
    rows = []
    for title in of["settings"]:
        for number, plan in enumerate(sequence_plans(title)):
            choice = "none"
            if within(plan, plan.chain)[0] is not None:
                assert plan.chosen is not None and plan.chosen.peak_bytes is not None
                held = f"{plan.chosen.peak_bytes / GB_BYTES:.2g} GB"
                choice = f"{chunked(plan.chain, plan.num_chunks)}, {held}"
            cells = (_sequence_cell(plan, chain) for chain in CHAINS)
            length = kilo(of["lengths"][number])
            rows.append(("" if number else title, length, *cells, choice))
    head = ("of", "tokens", *(f"`{chain}`" for chain in CHAINS), "choice")
    return {"sequences": table(head, rows), "limit_gb": str(of["limit_gb"])}


def _sequence_cell(plan: Plan, chain: str) -> str:
    best_us, least_bytes = within(plan, chain)
    if least_bytes is None:
        return "-"
    if best_us is None:
        return f"over, {least_bytes / GB_BYTES:.3g}"
    return f"**{ms(best_us)}**" if plan.chain == chain else ms(best_us)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A layout of a model on so many GPUs.

    Attributes:
        settings: the training.
        needed_bytes: of a rank, with the planner's choice.
        fits: whether they are at most what it has.
        price: the planner's choice.
        iterations: "alltoall", "chosen", and both with "1F1B" after the name.
    """

    settings: TrainingSettings
    needed_bytes: float
    fits: bool
    price: ChainPrice
    iterations: Mapping[str, Iteration]

    @property
    def is_over_nodes(self) -> bool:
        """Whether its exchange spans nodes."""
        return self.settings.ep * self.settings.etp > 8


def layouts(model: Model, world_size: int) -> Iterator[TrainingSettings]:
    """All that fit the model and its batch; exchanges of up to experts x ETP ranks."""
    of = DATA["scale"]
    for tp, pp, ep in product(of["tp"], of["pp"], of["ep"]):
        for etp in (1, tp) if tp == max(of["tp"]) else (1,):
            if world_size % (tp * pp) or world_size % (ep * etp * pp) or model.num_experts % ep:
                continue
            try:
                settings = TrainingSettings(
                    world_size=world_size,
                    tp=tp,
                    pp=pp,
                    ep=ep,
                    etp=etp,
                    seq_length=of["seq_length"],
                    global_batch_size=of["global_batch_size"],
                    recompute="selective",
                )
            except ValueError:
                # More data parallel ranks than sequences.
                continue
            if settings.layout.incompatibility(model) is None:
                yield settings


@cache
def points(name: str, world_size: int) -> tuple[Point, ...]:
    """Every layout of a model at a size."""
    of = DATA["scale"]
    model = with_batch(load_model(name), of["seq_length"], 1)
    preset = load_cluster(of["cluster"])
    cluster = replace(preset, num_nodes=world_size // preset.ranks_per_node)
    return tuple(_point(name, model, each, cluster) for each in layouts(model, world_size))


@cache
def _exchange(
    name: str, model: Model, alone: TrainingSettings, cluster: Cluster
) -> tuple[Workload, Selection, ExchangeTime]:
    """The exchange of a layout, priced once for all sizes of the job and all pipelines."""
    workload = workloads_of(model, alone.layout, cluster.ranks_per_node)[0]
    assumed = assumptions_of(DATA["scale"]["gpu"], cluster.name)
    stock = exchange_time(run(name)[0], alone, cluster, assumed)
    return workload, select_chain(workload, cluster), stock


def _point(name: str, model: Model, settings: TrainingSettings, cluster: Cluster) -> Point:
    # Step 1: the exchange, on as many nodes as it needs.
    ranks = settings.ep * settings.etp
    small = replace(cluster, num_nodes=max(2, ranks // cluster.ranks_per_node))
    alone = replace(settings, world_size=ranks * settings.tp, pp=1)
    workload, selection, stock = _exchange(name, model, alone, small)

    # Step 2: the fastest chain that the memory has room for.
    memory = training_memory(model, cluster, settings.layout, [workload])
    left = memory.left_bytes or 0.0
    fitting = [price for price in (selection.price, *selection.prices) if price.peak_bytes <= left]
    price = (*fitting, min(selection.prices, key=lambda each: each.peak_bytes))[0]

    # Step 3: the iterations.
    architecture = run(name)[0]
    assumed = assumptions_of(DATA["scale"]["gpu"], cluster.name)
    times = {"alltoall": stock, "chosen": less_saved(stock, alltoall_of(selection), price)}
    kinds = {"": settings, " 1F1B": with_1f1b_overlap(settings)[0]}
    return Point(
        settings=settings,
        needed_bytes=memory.needed_bytes + price.peak_bytes,
        fits=bool(fitting),
        price=price,
        iterations={
            which + kind: estimate_iteration(architecture, how, cluster, assumed, time)
            for (which, time), (kind, how) in product(times.items(), kinds.items())
        },
    )


def best(of: Sequence[Point], which: str) -> Point:
    """The fastest of these."""
    return min(of, key=lambda point: point.iterations[which].total_ms)


def gain_pct(of: Sequence[Point], kind: str = "") -> float:
    """What the best layout with the planner's choice saves of the best one with `alltoall`."""
    stock, chosen = (
        best(of, which + kind).iterations[which + kind].total_ms for which in ("alltoall", "chosen")
    )
    # Rounded, so that no rounding error is a loss.
    return round(100 * (stock - chosen) / stock, 6) + 0.0


def scale_section() -> Values:
    """The best layout by model and size, and gains."""
    of = DATA["scale"]
    rows, num_points = [], 0
    for title, name in of["models"].items():
        for number, size in enumerate(of["sizes"]):
            every = points(name, size)
            num_points += len(every)
            fitting = [point for point in every if point.fits]
            cells: tuple[str, ...]
            if fitting:
                point = best(fitting, "chosen")
                layout, iteration = point.settings, point.iterations["chosen"]
                over_nodes = [point for point in fitting if point.is_over_nodes]
                cells = (
                    f"{layout.tp}, {layout.pp}, {layout.ep}, {layout.etp}",
                    chunked(point.price.chain.name, point.price.num_chunks),
                    f"{iteration.total_ms / 1e3:.3g}",
                    f"{iteration.parts_ms[EXCHANGE] / iteration.total_ms:.0%}",
                    f"{gain_pct(fitting):.0f}%",
                    f"{gain_pct(over_nodes):.0f}%" if over_nodes else "-",
                    f"{gain_pct(fitting, ' 1F1B'):.0f}%",
                )
            else:
                least = min(point.needed_bytes for point in every)
                cells = (f"does not fit: {least / 1e9:,.0f} GB of a GPU at the least", *[""] * 6)
            rows.append(("" if number else title, f"{size:,}", *cells))
    head = ("of", "GPUs", "TP, PP, EP, ETP", "choice", "iteration s", "exchange", "gain",
            "over nodes", "1F1B")  # fmt: skip
    return {"scale": table(head, rows), "num_points": f"{num_points:,}"}


def page() -> str:
    """The whole page."""
    values: Values = {}
    for section in (claims_section, topologies_section, contention_section, sequences_section,
                    scale_section):  # fmt: skip
        values |= section()
    return str(DATA["page"]).format_map(values)


Lines = Mapping[str, Sequence[float]]


def draw(
    path: Path, panels: Mapping[str, tuple[Sequence[float], Lines]], labels: tuple[str, str],
    ticks: Callable[[Any], str] | None = None, shares_y: bool = True, level: float | None = None,
) -> None:  # fmt: skip
    """Draw a panel of lines for each title; with `ticks` the x axis is logarithmic."""
    num_rows = math.ceil(len(panels) / 2)
    names = list(dict.fromkeys(name for _, lines in panels.values() for name in lines))
    with pictures.figure(path, (WIDTH_INCHES, 3.2 * num_rows), DPI) as figure:
        axes = figure.subplots(num_rows, 2, sharex=True, sharey=shares_y, squeeze=False)
        for axis, (title, (xs, lines)) in zip(axes.flat, panels.items(), strict=True):
            for name, ys in lines.items():
                number = names.index(name)
                style = {"linewidth": 2.5 - 0.3 * number, "marker": "o", "markersize": 4}
                axis.plot(xs, ys, color=pictures.COLOURS[number], label=name, **style)
            if level is not None:
                axis.axhline(level, color="#404040", linewidth=1, linestyle="--")
            if ticks is not None:
                axis.set_xscale("log", base=2)
                axis.set_xticks(xs, [ticks(x) for x in xs], fontsize=9)
            axis.set_title(title.replace(", ", "\n", 1) if len(title) > 50 else title, fontsize=10)
            axis.grid()
        for axis in axes[-1]:
            axis.set_xlabel(labels[0])
        for axis in axes[:, 0]:
            axis.set_ylabel(labels[1])
        found = {
            name: line
            for axis in axes.flat
            for line, name in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(found.values(), found, loc="outside lower center", ncols=3, fontsize=9)
        figure.suptitle("predicted")


def draw_all(folder: Path) -> None:
    """Draw the pictures of the page."""
    of = DATA["contention"]
    panels: dict[str, Any] = {
        title: (of["factors"], {name: contention_ratios(title, name) for name in of["pairs"]})
        for title in of["settings"]
    }
    labels = ("slowdown of each while both run", "pipelined / serial time")
    draw(folder / "contention.png", panels, labels, level=1)

    of = DATA["sequences"]
    panels = {}
    for title in of["settings"]:
        lines = {}
        for chain in CHAINS:
            times = [within(plan, chain)[0] for plan in sequence_plans(title)]
            if any(times):
                pairs = zip(times, of["lengths"], strict=True)
                lines[chain] = [us / length * 1e3 if us else math.nan for us, length in pairs]
        panels[title] = of["lengths"], lines
    labels = ("tokens of the sequence", "us per 1,000 tokens")
    draw(folder / "sequences.png", panels, labels, kilo, shares_y=False)

    of = DATA["scale"]
    panels = {}
    for title, name in of["models"].items():
        lines = {"gain, exchange over nodes": [], "gain": [], "gain beside 1F1B overlap": []}
        for size in of["sizes"]:
            fitting = [point for point in points(name, size) if point.fits]
            over_nodes = [point for point in fitting if point.is_over_nodes]
            for line, (some, kind) in zip(
                lines.values(), ((over_nodes, ""), (fitting, ""), (fitting, " 1F1B")), strict=True
            ):
                line.append(gain_pct(some, kind) if some else math.nan)
        panels[title] = of["sizes"], lines
    labels = ("H100 GPUs", "% of an iteration saved")
    draw(folder / "scale.png", panels, labels, lambda size: f"{size:,}")


def main() -> None:
    """Print the page, or write it and its pictures."""
    parser = argparse.ArgumentParser(description="Write the page of claims and studies.")
    parser.add_argument("--write", action="store_true", help="write the page and its pictures")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
        draw_all(DOCS / "pictures")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
