"""A cluster file from this machine's hardware, given values, and the datasheets of its GPUs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from monta_megatron.chains.program import Resource
from monta_megatron.common import strict_yaml
from monta_megatron.common.units import Rate
from monta_megatron.planner.cluster import FASTEST_NIC, Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.new import hardware
from monta_megatron.tools.new.hardware import Gpus, Interfaces
from monta_megatron.tools.new.template import Template, flags_of, make_template

# Start times and host costs are those of this preset where a GPU is not known.
BASE = "h100_8x_ndr"
GUESSED = "guessed: the published figure of this GPU"
# Resource -> the flag of its rate.
RATE_FLAGS = {
    "inter": "--network-rate-reached",
    "intra": "--node-link-rate",
    "memory": "--memory-rate",
}
CALIBRATE = "`monta calibrate` on the cluster itself gives a better file."


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Place of a GPU's published figures.

    Attributes:
        driver_name: what the driver calls it, without the vendor.
        preset: the cluster preset with its node link and memory.
        memory: rate, 1e9 bytes and source of its memory, if it is not the preset's.
        joins_hosts: whether its node link joins several hosts.
    """

    driver_name: str
    preset: str
    memory: tuple[Rate, float, str] | None = None
    joins_hosts: bool = False


# No rate that was reached on these GPUs was found.
OF_H100 = "times the 0.74 that an H100 reaches (nccl issue 1264)"
OF_A100 = "times the 0.735 that an A100 PCIe reaches (preset a100_pcie_hdr)"
GPUS = {
    "A100": GpuFigures(driver_name="A100-SXM4-80GB", preset="a100_hdr"),
    "A800": GpuFigures(driver_name="A800-SXM4-80GB", preset="a800_2x8_ib200"),
    "H100": GpuFigures(driver_name="H100 80GB HBM3", preset=BASE),
    "H200": GpuFigures(
        driver_name="H200",
        preset=BASE,
        memory=(
            Rate(3550.0),
            141.0,
            f"HBM3e of the H200 SXM, 4800 GB/s (nvidia-h200-datasheet), {OF_H100}",
        ),
    ),
    "H800": GpuFigures(driver_name="H800", preset="h800_8x_ndr"),
    "H20": GpuFigures(
        driver_name="H20",
        preset=BASE,
        memory=(Rate(2960.0), 96.0, f"HBM3 of the H20, 4000 GB/s as published, {OF_H100}"),
    ),
    "A30": GpuFigures(
        driver_name="A30",
        preset="a100_pcie_hdr",
        memory=(Rate(686.0), 24.0, f"HBM2 of the A30, 933 GB/s (nvidia-a30-datasheet), {OF_A100}"),
    ),
    "L40S": GpuFigures(
        driver_name="L40S",
        preset="a100_pcie_hdr",
        memory=(Rate(635.0), 48.0, f"GDDR6, 864 GB/s (nvidia-l40s-datasheet), {OF_A100}"),
    ),
    "B200": GpuFigures(
        driver_name="B200",
        preset="gb200_nvl72",
        memory=(Rate(5677.0), 180.0, "HBM3e, 8 TB/s, of which a GB200 reaches 5677 GB/s"),
    ),
    "B300": GpuFigures(driver_name="B300 SXM6 AC", preset="b300_efa_p6"),
    "GB200": GpuFigures(driver_name="GB200", preset="gb200_nvl72", joins_hosts=True),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware found on this machine; None for values not found.

    Attributes:
        gpus: its GPUs.
        interfaces: its fastest network interfaces.
        num_nodes: nodes of the job.
    """

    gpus: Gpus | None = None
    interfaces: Interfaces | None = None
    num_nodes: int | None = None


def find_machine() -> Machine:
    """This machine."""
    return Machine(
        gpus=hardware.find_gpus(),
        interfaces=hardware.find_interfaces(hardware.SYS),
        num_nodes=hardware.find_num_nodes(),
    )


def cluster_template(
    machine: Machine,
    given: Mapping[str, Any],
    rates: Mapping[Resource, Rate],
    gpu: str | None = None,
    is_line_rate: bool = False,
) -> Template:
    """The template of a cluster file.

    Args:
        machine: what was found.
        given: fields of `Cluster` that the user gives; they win.
        rates: rates that the user gives, by resource.
        gpu: key of `GPUS` whose figures are taken; None for the GPU that was found.
        is_line_rate: whether the given rate of the network is an interface's own.

    Raises:
        ValueError: what is given does not go together.
    """
    figures = GPUS[gpu] if gpu is not None else _figures_of(machine.gpus)
    if gpu is not None and _figures_of(machine.gpus) is not figures:
        # Another GPU than the one that is meant: neither its memory nor its number holds.
        machine = replace(machine, gpus=None)
    flags = RATE_FLAGS | ({"inter": "--network-rate"} if is_line_rate else {})
    values: dict[str, Any] = {}
    remarks: dict[str, str] = {}
    _fill_sizes(machine, figures, values, remarks)
    base = load_cluster(BASE if figures is None else figures.preset)
    if figures is not None and "memory_gb_per_rank" not in values:
        memory = figures.memory
        values["memory_gb_per_rank"] = base.memory_gb_per_rank if memory is None else memory[1]
        remarks["memory_gb_per_rank"] = GUESSED
    if {**values, **given}.get("num_nodes") == 1 and "nics_per_node" not in values:
        values["nics_per_node"] = 1
        remarks["nics_per_node"] = "taken: one node needs none"
    for name in given:
        remarks[name] = "given"
    values |= given
    values["launch"] = {
        name: value for name, value in strict_yaml.plain(base.launch).items() if value
    }
    remarks["launch"] = f"taken from the preset {BASE if figures is None else figures.preset}"
    settled: set[str] = {*given, *rates}
    resources: tuple[Resource, ...] = ("inter", "intra", "memory")
    if values.get("num_nodes") == 1:
        if "inter" in rates:
            raise ValueError(
                f"{flags['inter']}: got {rates['inter']}, must be left out where num_nodes is 1; "
                "--num-nodes says how many there are"
            )
        resources = resources[1:]
        settled |= {"nics_per_node", "inter"}
    values["links"] = []
    for position, resource in enumerate(resources):
        link, remark = _link(
            resource, base, figures, machine.interfaces, rates.get(resource), is_line_rate
        )
        values["links"].append(link)
        if remark is not None:
            remarks[f"links[{position}].rate"] = remark
    nics, ranks = values.get("nics_per_node"), values.get("ranks_per_node")
    nics_per_rank = None if nics is None or ranks is None else nics / ranks
    contention = _contention(values["links"], nics_per_rank)
    contention += [
        strict_yaml.plain(each)
        for each in base.contention
        if set(each.pair) <= {*resources, "compute"}
        and ("memory" not in each.pair or "compute" in each.pair)
    ]
    if contention:
        values["contention"] = contention
    return make_template(
        Cluster,
        {"name": _name(machine, gpu), "kind": "datasheet", "source": _source(machine), **values},
        about=[
            "A cluster, for `monta plan --cluster` and --moe-monta-cluster, from what this machine "
            f"has and what was published. {CALIBRATE}",
            *_findings(machine, figures, gpu, settled),
        ],
        remarks=remarks,
        flags={**flags_of(given), "links": ", ".join(flags[name] for name in rates) or "links"},
        left_out=("curves", "doubts", "calibrated_node"),
    )


def _fill_sizes(
    machine: Machine, figures: GpuFigures | None, values: dict[str, Any], remarks: dict[str, str]
) -> None:
    """The sizes that were found, with the place where."""
    if machine.num_nodes is not None:
        values["num_nodes"] = machine.num_nodes
        remarks["num_nodes"] = "found: the nodes of this Slurm job"
    if machine.gpus is not None:
        number, model = machine.gpus.number, machine.gpus.model
        if figures is not None and figures.joins_hosts:
            remarks["ranks_per_node"] = (
                f"found: {number} x {model} on this host; write how many GPUs a node link joins, "
                "over all of its hosts"
            )
        else:
            values["ranks_per_node"] = number
            remarks["ranks_per_node"] = f"found: {number} x {model} (nvidia-smi)"
        if machine.gpus.memory_gb is not None:
            values["memory_gb_per_rank"] = machine.gpus.memory_gb
            remarks["memory_gb_per_rank"] = "found: all that a GPU has (nvidia-smi)"
    if machine.interfaces is not None:
        names = machine.interfaces.names
        others = f", and {machine.interfaces.others} more" if machine.interfaces.others else ""
        values["nics_per_node"] = len(names)
        remarks["nics_per_node"] = (
            f"found: {', '.join(names)}, {machine.interfaces.kind}{others} "
            f"({machine.interfaces.source}); write how many of them a training may use"
        )


def _link(
    resource: Resource,
    base: Cluster,
    figures: GpuFigures | None,
    interfaces: Interfaces | None,
    given: Rate | None,
    is_line_rate: bool,
) -> tuple[dict[str, Any], str | None]:
    """A link as plain data, without a rate where none is known; and a remark on its rate."""
    (published,) = (link for link in base.links if link.resource == resource)
    alpha, _, origin = published.source.partition("; rate: ")
    rate, remark = None, None
    line_rate, whence = None, "given"
    if resource == "inter":
        if given is None and interfaces is not None:
            line_rate, whence = Rate(interfaces.gbit_per_s / 8), f"found, {interfaces.source}"
        elif is_line_rate:
            line_rate = given
    if line_rate is not None:
        of_preset = _line_rate_of(published.rate)
        published = published.times(line_rate.gbytes_per_s / of_preset.gbytes_per_s)
        share = f"{published.rate.gbytes_per_s / line_rate.gbytes_per_s:.0%}"
        rate = str(published.rate)
        remark = f"{share} of the line rate, {line_rate.in_both_units} ({whence})"
        origin = f"line rate {line_rate.in_both_units}, {whence}; {share} of it as there: {origin}"
    elif given is not None:
        rate, origin, remark = str(given), "given", "given"
    elif resource == "inter":
        pass
    elif figures is not None:
        memory = figures.memory if resource == "memory" else None
        rate = str(published.rate if memory is None else memory[0])
        origin = origin if memory is None else memory[2]
        remark = GUESSED
    source = alpha if rate is None else f"{alpha}; rate: {origin}"
    link: dict[str, Any] = {"resource": resource, "alpha_us": published.alpha_us}
    link |= {} if rate is None else {"rate": rate}
    if rate == str(published.rate):
        names = ("conservative_rate", "optimistic_rate", "rate_of_cta")
        rates = {name: getattr(published, name) for name in names}
        link |= {name: str(one) for name, one in rates.items() if one is not None}
    return {**link, "kind": "datasheet", "source": source}, remark


def _line_rate_of(reached: Rate) -> Rate:
    """Line rate of the interfaces with which a rate was reached: 100 to 800 Gb/s."""
    rates = (12.5, 25.0, 50.0, FASTEST_NIC.gbytes_per_s)
    return Rate(min(rate for rate in rates if rate >= reached.gbytes_per_s))


def _contention(links: list[dict[str, Any]], nics_per_rank: float | None) -> list[dict[str, Any]]:
    """Both links read and write the memory at their own rate in each direction."""
    rates = {
        link["resource"]: Rate.from_text(link["rate"]).gbytes_per_s
        for link in links
        if "rate" in link
    }
    shares = {"intra": rates.get("intra"), "inter": rates.get("inter")}
    if shares["inter"] is not None and nics_per_rank is not None:
        shares["inter"] *= nics_per_rank
    memory = rates.get("memory", 0.0)
    return [
        {
            "pair": [resource, "memory"],
            "factor": float(f"{memory / (memory - 2 * share):.3g}"),
            "kind": "datasheet",
            "source": f"derived from the rates above, {memory:g} / ({memory:g} - 2 * {share:g})",
        }
        for resource, share in shares.items()
        if share is not None and memory > 2 * share
    ]


def _figures_of(gpus: Gpus | None) -> GpuFigures | None:
    """The figures of exactly this GPU: of the same name there are others without NVLink."""
    return next(
        (entry for entry in GPUS.values() if gpus is not None and gpus.model == entry.driver_name),
        None,
    )


def _name(machine: Machine, gpu: str | None) -> str:
    parts = []
    if gpu is not None or machine.gpus is not None:
        number = f"{machine.gpus.number} x " if machine.gpus is not None else ""
        parts.append(f"{number}{gpu or (machine.gpus.model if machine.gpus else '')}")
    if machine.interfaces is not None:
        parts.append(f"{len(machine.interfaces.names)} x {machine.interfaces.kind}")
    return ", ".join(parts) or "own cluster"


def _source(machine: Machine) -> str:
    places = [
        place
        for place, thing in (("nvidia-smi", machine.gpus), ("/sys", machine.interfaces))
        if thing is not None
    ]
    return f"monta new cluster, {' and '.join(places) or 'by hand'}"


def _findings(
    machine: Machine, figures: GpuFigures | None, gpu: str | None, given: Collection[str]
) -> list[str]:
    """Values that were neither found nor given: fields of `Cluster` and resources."""
    texts = []
    lacks_sizes = not {"ranks_per_node", "memory_gb_per_rank"} <= set(given)
    lacks_rates = figures is None and not {"intra", "memory"} <= set(given)
    if machine.gpus is None and gpu is None and (lacks_sizes or lacks_rates):
        texts.append("Not found: a GPU (nvidia-smi).")
    elif machine.gpus is not None and lacks_rates:
        texts.append(
            f"No figures are known of {machine.gpus.model}, neither of its node link nor of its "
            f"memory; known: {', '.join(entry.driver_name for entry in GPUS.values())}."
        )
    if gpu is not None:
        texts.append(f"Published figures of the {gpu} are taken, as asked.")
    if machine.interfaces is None and not {"nics_per_node", "inter"} <= set(given):
        texts.append("Not found: a network interface that is up (/sys/class/infiniband and net).")
    if machine.num_nodes is None and "num_nodes" not in given:
        texts.append("How many nodes there are cannot be seen on one of them (--num-nodes).")
    return texts
