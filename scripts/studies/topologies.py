"""Which chain on which topology: MoNTA's exchange, and one of many experts over nodes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from options_page import table
from studies.common import DPI, WIDTH_INCHES, bullets, ms, of_chunks, paragraph, workload_of

from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.select import Selection, select_chain
from monta_megatron.tools import pictures


def without_rails(cluster: Cluster) -> Cluster:
    """As if every rank were on every rail."""
    links = tuple(replace(link, cross_rail_rate=None) for link in cluster.links)
    return replace(cluster, links=links)


def racks_of_64(cluster: Cluster) -> Cluster:
    """16 hosts of each rack (`--segment=16`), so that all nodes have as many ranks."""
    return replace(cluster, ranks_per_node=64, nics_per_node=64)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One of them.

    Attributes:
        name: what it is called here.
        preset: of configs/clusters.
        change: what is made of the preset.
    """

    name: str
    preset: str
    change: Callable[[Cluster], Cluster] = lambda cluster: cluster

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return self.change(load_cluster(self.preset))


TOPOLOGIES = (
    Topology(name="A100, HDR", preset="a100_hdr"),
    Topology(name="A100 PCIe, 2 HDR", preset="a100_pcie_hdr"),
    Topology(name="H100, NDR", preset="h100_8x_ndr"),
    Topology(name="H100, EFA", preset="h100_efa_p5"),
    Topology(name="H100, EFA without rails", preset="h100_efa_p5", change=without_rails),
    Topology(name="GB200, racks of 64", preset="gb200_nvl72", change=racks_of_64),
)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What is exchanged.

    Attributes:
        title: of its table.
        model: preset of configs/models.
        seq_length, tp, ep, etp: of the training.
    """

    title: str
    model: str
    seq_length: int
    tp: int
    ep: int
    etp: int = 1


EXCHANGES = (
    Exchange(
        title="Qwen3-235B: EP 16, top-8 of 128 experts, 4,096 tokens of a rank",
        model="qwen3_235b_a22b",
        seq_length=4096,
        tp=1,
        ep=16,
    ),
    Exchange(
        title="Qwen3-235B: EP 128, 4,096 tokens of a rank",
        model="qwen3_235b_a22b",
        seq_length=4096,
        tp=1,
        ep=128,
    ),
    Exchange(
        title="MoNTA-2x70B: EP 2 x ETP 8, top-1 of 2 experts, 32K sequence over TP 8",
        model="monta_2x70b",
        seq_length=32768,
        tp=8,
        ep=2,
        etp=8,
    ),
)


def selections(exchange: Exchange) -> dict[str, Selection]:
    """By topology."""
    return {
        topology.name: select_chain(
            workload_of(
                exchange.model,
                topology.cluster,
                exchange.seq_length,
                exchange.tp,
                exchange.ep,
                exchange.etp,
            ),
            topology.cluster,
        )
        for topology in TOPOLOGIES
    }


def stock_us(selection: Selection) -> float:
    """Plain alltoall's time."""
    return next(price.total_us for price in selection.prices if price.chain.name == "alltoall")


def section() -> str:
    """The whole section."""
    parts = ["## Which chain on which topology\n\n"]
    parts += [
        paragraph(
            "Times of dispatch and combine of one layer, forward and backward, in bf16. Rates are "
            "one GPU's share, in one direction. GB200: a rack is one node here; 64 of its 72 GPUs "
            "take part (`--segment=16`), so EP 16 and MoNTA's exchange lie inside one rack. EFA: "
            "across rails the preset has 19 GB/s in place of 43.5 (`cross_rail_rate`); in the row "
            "below it the same everywhere."
        ),
    ]
    rows = []
    for topology in TOPOLOGIES:
        cluster = topology.cluster
        rates = {link.resource: link.rate.gbytes_per_s for link in cluster.links}
        inter = rates["inter"] * cluster.nics_per_node / cluster.ranks_per_node
        ratio = rates["intra"] / inter
        rows.append(
            (
                topology.name,
                f"`{topology.preset}`",
                f"{inter:.3g}",
                f"{rates['intra']:.3g}",
                f"{ratio:.2g}",
            )
        )
    head = ("topology", "preset", "network GB/s", "node link GB/s", "ratio")
    parts.append("\n" + table(head, rows))
    parts.append("\n![Times by topology](pictures/topologies.png)\n")
    gains: dict[str, list[float]] = {}
    for exchange in EXCHANGES:
        rows = []
        for name, selection in selections(exchange).items():
            stock, chosen = stock_us(selection), selection.price
            gains.setdefault(name, []).append(stock / chosen.total_us)
            resource, busy_us = chosen.busiest()
            rows.append(
                (
                    name,
                    ms(stock),
                    of_chunks(chosen),
                    ms(chosen.total_us),
                    f"{stock / chosen.total_us:.2f}x",
                    f"{resource}, {busy_us / chosen.total_us:.0%}",
                )
            )
        head = ("topology", "`alltoall` ms", "choice", "ms", "gain", "busiest")
        parts += [f"\n### {exchange.title}\n\n", table(head, rows)]
    parts.append("\n### What follows\n\n" + bullets(findings(gains)))
    return "".join(parts)


def findings(gains: dict[str, list[float]]) -> list[str]:
    """What the tables say, in words; the numbers are theirs."""
    order = sorted(gains, key=lambda name: -gains[name][0])
    rails, none = gains["H100, EFA"], gains["H100, EFA without rails"]
    pcie, racks = gains["A100 PCIe, 2 HDR"], gains["GB200, racks of 64"]
    return [
        f"EP 16 gains most on {order[0]} ({gains[order[0]][0]:.2f}x) and least on {order[-1]} "
        f"({gains[order[-1]][0]:.2f}x).",
        f"Rails: on EFA the flat chains cross them, so the gain is {rails[0]:.2f}x where "
        f"{none[0]:.2f}x would be predicted without them, and {rails[1]:.2f}x in place of "
        f"{none[1]:.2f}x at EP 128. MoNTA's exchange keeps to its rails: {rails[2]:.2f}x in both.",
        f"PCIe: the node link has less than three times the rate of the network, and one copy per "
        f"node is still worth {pcie[0]:.2f}x at EP 16 and {pcie[1]:.2f}x at EP 128.",
        f"NVL72: inside a rack {racks[0]:.2f}x at EP 16; {racks[1]:.2f}x where EP 128 lies on two.",
    ]


def draw(path: Path) -> None:
    """Bars by topology, a panel for each exchange."""
    with pictures.figure(path, (WIDTH_INCHES, 7.6), DPI) as figure:
        for axis, exchange in zip(figure.subplots(len(EXCHANGES), 1), EXCHANGES, strict=True):
            found = selections(exchange)
            places = range(len(found))
            for shift, times, colour, label in (
                (
                    -0.2,
                    [stock_us(each) for each in found.values()],
                    pictures.STOCK_COLOUR,
                    "alltoall",
                ),
                (
                    0.2,
                    [each.price.total_us for each in found.values()],
                    pictures.PICK_COLOUR,
                    "the planner's choice",
                ),
            ):
                bars = axis.barh(
                    [place + shift for place in places],
                    [time / 1e3 for time in times],
                    height=0.38,
                    color=colour,
                    label=label,
                )
                axis.bar_label(bars, fmt=lambda value: f"{value:.3g}", padding=2, fontsize=9)
            axis.set_yticks(places, list(found), fontsize=9)
            axis.invert_yaxis()
            axis.set_title(exchange.title, fontsize=10)
            axis.grid(axis="x")
            axis.set_axisbelow(True)
            axis.margins(x=0.12)
        figure.axes[0].legend(loc="lower right", fontsize=9)
        figure.axes[-1].set_xlabel("ms of a layer's exchange, forward and backward, predicted")
