"""The cluster: nodes, and the cost of every operation on them, measured or published."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from monta_megatron.chains.program import Policy, PricedOperation, Resource
from monta_megatron.common.nodes import consecutive_nodes, mixed_node, number_nodes
from monta_megatron.common.rules import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Text,
    require,
)
from monta_megatron.common.units import Rate, bytes_of_gb, counted
from monta_megatron.planner.curves import (
    BY_NAME,
    RESOURCE_NAMES,
    RESOURCES,
    Curve,
    published_curves,
)

# 800 Gb/s, of the newest interfaces.
FASTEST_NIC = Rate(100.0)
# If a cluster has no curve for an operation, this similar operation stands in for it.
STANDS_IN: dict[PricedOperation, PricedOperation] = {"allgather": "alltoall", "sum": "copy"}

# PyTorch's operations or Triton kernels; "auto" takes Triton kernels on GPUs.
Kernels: TypeAlias = Literal["torch", "fused"]
KernelChoice: TypeAlias = Literal["auto", Kernels]
# The slow and the fast end of what was published.
End: TypeAlias = Literal[0, 1]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Published figures of a resource: a line, or NCCL's curves for a GPU.

    Attributes:
        rate: in one direction, of one NIC or of one rank; that of memory counts reads and writes
            together. None with `curves`.
        start_us: time of the smallest operation.
        range: the lowest and the highest rate that was published, where `rate` is the likely one.
        curves: GPU of `curves.published_curves`, in place of a line.
        rate_ratio: rate of this GPU's link over that of the curves'.
        source: where the figures were published.
    """

    rate: Rate | None = None
    start_us: NonNegativeFloat = 0.0
    range: tuple[Rate, Rate] | None = None
    curves: Text | None = None
    rate_ratio: PositiveFloat = 1.0
    source: Text

    def __post_init__(self) -> None:
        if self.curves is not None:
            known = published_curves()
            require(self.curves in known, "curves", self.curves, f"be one of {', '.join(known)}")
        require(
            (self.rate is None) != (self.curves is None), "rate", self.rate, "or curves be given"
        )
        if self.range is not None and self.rate is not None:
            low, high = (rate.gbytes_per_s for rate in self.range)
            within = low <= self.rate.gbytes_per_s <= high
            ends = f"[{self.range[0]}, {self.range[1]}]"
            require(within, "range", ends, f"hold rate, {self.rate.in_both_units}")

    def times(self, ratio: float) -> "Link":
        """The link at `ratio` times its rates."""
        scaled = (
            self if self.rate is None else replace(self, rate=self.rate.times(ratio), range=None)
        )
        if self.range is not None:
            low, high = (rate.times(ratio) for rate in self.range)
            scaled = replace(scaled, range=(low, high))
        return replace(scaled, rate_ratio=self.rate_ratio * ratio)

    def ratio_at(self, end: End) -> float:
        """An end of the range over the likely rate."""
        if self.range is None or self.rate is None:
            return 1.0
        return self.range[end].gbytes_per_s / self.rate.gbytes_per_s


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Host time to start an operation, for each stage and chunk, and around the stages.

    The defaults are those of one processor, the reference (docs/calibration.md, host of a preset).

    Attributes:
        collective_us: to start an AllToAll or AllGather, whatever its group.
        collective_peer_us: as much more for each other rank of the group.
        operation_us: to hand one operation on tensors to the device, its launch included; what a
            stage takes of them is in `planner.traffic`.
        counts_to_host_us: to copy the counts to the host and wait for them.
        counts_us: to count what goes where and bind a chain to it, once per dispatch.
        pass_us: what a pass takes besides its stages: autograd and the executor.
        stage_us: what the executor takes for each stage of each chunk.
        speed: how many times as fast as the processor of these figures the cluster's is: all of
            them are divided by it.
        range: the least and the most that the speed may be; None where it was measured.
        source: what they were measured with, or where they were published.
    """

    collective_us: NonNegativeFloat = 21.8
    collective_peer_us: NonNegativeFloat = 1.4
    operation_us: NonNegativeFloat = 9.0
    counts_to_host_us: NonNegativeFloat = 18.0
    counts_us: NonNegativeFloat = 427.0
    pass_us: NonNegativeFloat = 55.0
    stage_us: NonNegativeFloat = 11.7
    speed: PositiveFloat = 1.0
    range: tuple[PositiveFloat, PositiveFloat] | None = None
    source: Text

    def __post_init__(self) -> None:
        if self.range is not None:
            low, high = self.range
            require(low <= self.speed <= high, "range", [low, high], f"hold speed, {self.speed:g}")

    @cached_property
    def at_speed(self) -> "HostCosts":
        """The same costs as this host has them: of speed 1."""
        scaled = {
            entry.name: getattr(self, entry.name) / self.speed
            for entry in fields(self)
            if entry.name.endswith("_us")
        }
        return replace(self, speed=1.0, range=None, **scaled)


class NodeSizes(NamedTuple):
    """Ranks of a node, and the network interfaces that they share evenly."""

    ranks: PositiveInt
    nics: PositiveInt

    def load(self, operation: PricedOperation, ranks_on_node: int) -> float:
        """Bytes through a network interface for a byte of each rank, in groups of all ranks."""
        # A ring crosses once per node, not once per rank that the group has on it.
        return self.ranks / self.nics / (ranks_on_node if operation == "allgather" else 1)


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Factors by which operations on two resources slow each other while both run.

    Attributes:
        pair: two resources.
        factor: slowdown of the first one: 1 if the other does not affect it, 2 if it runs at
            half its rate.
        factor_of_second: slowdown of the second one.
    """

    pair: tuple[Resource, Resource]
    factor: float
    factor_of_second: float

    RULE: ClassVar[str] = (
        "two resources and the factor >= 1 by which each slows the other, such as "
        "node_link memory 1.3 1.1 (resources: network, node_link, memory)"
    )

    def __post_init__(self) -> None:
        for factor in (self.factor, self.factor_of_second):
            require(1 <= factor < math.inf, "contention", factor, f"be {self.RULE}")

    @classmethod
    def from_text(cls, text: str) -> "Contention":
        """Read "node_link memory 1.3 1.1".

        Raises:
            ValueError: the text is no such row.
        """
        first, second, factor, factor_of_second = text.split()
        require({first, second} <= BY_NAME.keys(), "contention", text, f"be {cls.RULE}")
        return cls(
            pair=(BY_NAME[first], BY_NAME[second]),
            factor=float(factor),
            factor_of_second=float(factor_of_second),
        )

    def __str__(self) -> str:
        """The row that `from_text` reads back to an equal value."""
        names = " ".join(RESOURCE_NAMES[resource].replace(" ", "_") for resource in self.pair)
        return f"{names} {self.factor:g} {self.factor_of_second:g}"


@dataclass(frozen=True, kw_only=True)
class ResourceRate:
    """The rate of large messages through a resource: of one NIC, of a rank's link or memory."""

    resource: Resource
    rate: Rate
    basis: Literal["measured", "published"]

    def __str__(self) -> str:
        return f"{RESOURCE_NAMES[self.resource]} {self.rate.in_both_units}, {self.basis}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes and costs; `cluster_file` shows its file.

    Attributes:
        name: what users call it.
        source: where its sizes come from, or what its costs were measured with.
        num_nodes: number of sets of ranks joined by the node link.
        ranks_per_node: ranks in each.
        nics_per_node: network interfaces that the ranks of a node share evenly.
        ranks_per_host: where several hosts make up a node, as in a rack; without it a node is one.
        memory_gb_per_rank: 1e9 bytes that a rank may use; without it memory is not checked.
        policy: how its ranks run an exchange: "fused" or "streams" on GPUs, by Triton kernels or
            PyTorch's operations; "host" on CPU ranks.
        network: published figures of one network interface.
        node_link: of a rank's node link.
        memory: of a rank's memory.
        host: host time per operation.
        curves: measured, one for each operation, resource and group size.
        contention: of pairs that were measured; see `factor` for the others.
        calibrated_node: for which the curves of the network hold; bytes of other nodes are
            converted to those that load a network interface as much. None for this cluster's nodes.
    """

    name: Text
    source: Text
    num_nodes: PositiveInt
    ranks_per_node: PositiveInt
    nics_per_node: PositiveInt
    ranks_per_host: PositiveInt | None = None
    memory_gb_per_rank: PositiveFloat | None = None
    policy: Policy = "fused"
    network: Link | None = None
    node_link: Link | None = None
    memory: Link | None = None
    host: HostCosts
    curves: tuple[Curve, ...] = ()
    contention: tuple[Contention, ...] = ()
    calibrated_node: tuple[PositiveInt, PositiveInt] | None = None

    def __post_init__(self) -> None:
        keys = [(curve.operation, curve.resource, curve.group_size) for curve in self.curves]
        for key in keys:
            require(keys.count(key) == 1, "curves", f"{' '.join(map(str, key))} twice", "be once")
        for resource in self.resources:
            needed = "copy" if resource == "memory" else "alltoall"
            has_curve = any(key[:2] == (needed, resource) for key in keys)
            if resource not in self.links and not has_curve:
                name = RESOURCE_NAMES[resource].replace(" ", "_")
                raise ValueError(f"{name}: missing, must be given, or {needed} of it in curves")
        for name in ("node_link", "memory"):
            link = getattr(self, name)
            if link is not None and link.rate is not None:
                has_unit = not link.rate.is_of_network
                require(has_unit, f"{name}.rate", link.rate.in_both_units, f"be {Rate.RULE}")

    @cached_property
    def links(self) -> dict[Resource, Link]:
        """Published figures by resource."""
        links = {"inter": self.network, "intra": self.node_link, "memory": self.memory}
        return {r: link for r in RESOURCES if (link := links[r]) is not None}

    def check_network(self) -> None:
        """Refuse rates of the network that are probably bits taken for bytes."""
        network = self.network
        if network is None or network.rate is None:
            return
        if network.rate.gbytes_per_s > FASTEST_NIC.gbytes_per_s:
            raise ValueError(
                f"network: {network.rate.in_both_units} for each interface, must be at most "
                f"{FASTEST_NIC.in_both_units}; check bits and bytes"
            )
        if "intra" in self.resources:
            share, node_link = self._share_of_network, self.rate_of("intra")
            if share.gbytes_per_s > node_link.gbytes_per_s:
                raise ValueError(
                    f"network: {share.in_both_units} for each rank, must be at most the "
                    f"{node_link.in_both_units} of the node link; check bits and bytes"
                )

    def notes_on(self, world_size: int) -> tuple[str, ...]:
        """Notes of a plan for so many ranks, on nodes filled one after the other."""
        notes = []
        left = world_size % self.ranks_per_node
        if left:
            notes.append(
                f"{world_size} ranks leave {self.ranks_per_node - left} of the "
                f"{self.ranks_per_node} ranks of a node unused"
            )
        sizes = sorted((self.nics_per_node, self.ranks_per_node))
        if world_size > self.ranks_per_node and sizes[1] % sizes[0]:
            notes.append(
                f"{self.nics_per_node} interfaces cannot be shared evenly by the "
                f"{self.ranks_per_node} ranks of a node, and are priced as if they were"
            )
        return tuple(notes)

    def with_kernels(self, fused: bool) -> "Cluster":
        """These costs, to price the fused kernels or PyTorch's operations."""
        return self if self.policy == "host" else replace(self, policy=_POLICIES[fused])

    def with_kernel_choice(self, choice: KernelChoice) -> "Cluster":
        """These costs for a value of `--kernels`; "auto" is a training's "auto" on a GPU.

        Raises:
            ValueError: fused kernels on CPU ranks.
        """
        rule = f"be auto or torch: the ranks of {self.name} are no GPUs"
        require(choice != "fused" or self.policy != "host", "kernels", choice, rule)
        return self.with_kernels(choice != "torch")

    @property
    def kernels(self) -> Kernels:
        """Kernels that copy and sum rows in the priced exchange."""
        return "fused" if self.policy == "fused" else "torch"

    @cached_property
    def has_range(self) -> bool:
        """Whether a range was published for any of its figures."""
        ranges = (self.host.range, *(link.range for link in self.links.values()))
        return any(each is not None for each in ranges)

    def at_end(self, end: End) -> "Cluster":
        """The cluster at the slow or at the fast end of the published figures."""
        scaled = self
        for resource, link in self.links.items():
            scaled = scaled.at_rate(resource, link.ratio_at(end))
        speed = self.host.speed if self.host.range is None else self.host.range[end]
        return replace(scaled, host=replace(self.host, speed=speed, range=None))

    def at_rate(self, resource: Resource, ratio: float) -> "Cluster":
        """The cluster where one resource has `ratio` times its rate, and the same start times."""
        curves = tuple(
            curve.at_rate(ratio) if curve.resource == resource else curve for curve in self.curves
        )
        name = next(name for name, named in BY_NAME.items() if named == resource)
        link = self.links.get(resource)
        changed = {name: None if link is None else link.times(ratio)}
        return replace(self, curves=curves, **changed)  # type: ignore[arg-type]

    @property
    def resources(self) -> tuple[Resource, ...]:
        """Those that its ranks have."""
        absent = {"inter": self.num_nodes == 1, "intra": self.ranks_per_node == 1}
        return tuple(resource for resource in RESOURCES if not absent.get(resource, False))

    def of_job(self, ranks_per_node: int | None) -> "Cluster":
        """The nodes of a job that uses so many ranks of each: its own count, not the cluster's.

        Hand-worked: 4 of the 8 ranks of a node with 8 interfaces are a node of 4 with 4. Of a node
        of 18 hosts of 4, 2 ranks of each host are a node of 36; 64 are a node of 16 hosts.

        Args:
            ranks_per_node: of a node, or of a host; None for the whole node.

        Raises:
            ValueError: a node has fewer.
        """
        whole = self.ranks_per_node
        if ranks_per_node in (None, whole, self.ranks_per_host):
            return self
        rule = f"be at most {whole}, the ranks of a node of {self.name}"
        require(ranks_per_node < whole, "ranks_per_node", ranks_per_node, rule)
        on_host = self.ranks_per_host
        if on_host is not None and ranks_per_node < on_host:
            on_host, ranks_per_node = ranks_per_node, ranks_per_node * (whole // on_host)
        elif on_host is not None:
            rule = f"be a multiple of {on_host}, the ranks of a host of {self.name}"
            require(ranks_per_node % on_host == 0, "ranks_per_node", ranks_per_node, rule)
        return replace(
            self,
            name=f"{self.name}, {ranks_per_node} of {whole} ranks per node",
            ranks_per_node=ranks_per_node,
            ranks_per_host=on_host,
            nics_per_node=max(self.nics_per_node * ranks_per_node // whole, 1),
            calibrated_node=self.calibrated_node or (whole, self.nics_per_node),
        )

    def nodes_of(
        self, ranks: Sequence[int], hosts: Sequence[str]
    ) -> tuple[tuple[int, ...], str | None]:
        """The node of every rank of an exchange, if its hosts can be nodes of this cluster.

        Args:
            ranks: of the exchange.
            hosts: of the ranks.

        Returns:
            The nodes, numbered from 0, and what users should know about them, or None.

        Raises:
            ValueError: the hosts cannot be nodes of this cluster.
        """
        nodes = consecutive_nodes(ranks, self.ranks_per_node)
        if nodes == number_nodes(hosts):
            return nodes, None
        if self.ranks_per_host is None and len(set(hosts)) > len(set(nodes)):
            # A host used in part: no node has ranks of two hosts.
            return number_nodes(hosts), (
                f"nodes are the hosts of this job, which have fewer ranks than the "
                f"{self.ranks_per_node} of a node of {self.name}"
            )
        mixed = mixed_node(nodes, hosts)
        if mixed is not None:
            first, second = mixed
            raise ValueError(
                f"moe_monta_cluster: {self.name} has nodes of {self.ranks_per_node} consecutive "
                f"ranks, but of one node rank {ranks[first]} is on {hosts[first]}, which has other "
                f"nodes too, and rank {ranks[second]} on {hosts[second]}; number the ranks host by "
                "host (srun --distribution=block), or set MONTA_NODE or --moe-monta-ranks-per-node"
            )
        return nodes, (
            f"nodes of {counted(self.ranks_per_node, 'rank')}, as {self.name} has them, but "
            f"{hosts.count(hosts[0])} of the {len(ranks)} ranks of an exchange are on {hosts[0]}; "
            "--moe-monta-ranks-per-node decides"
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.num_nodes * self.ranks_per_node

    @property
    def memory_bytes_per_rank(self) -> float | None:
        """Bytes that a rank may use, or None where that is not known."""
        return bytes_of_gb(self.memory_gb_per_rank)

    @property
    def rates(self) -> tuple[ResourceRate, ...]:
        """The rate of large messages through every resource."""
        return tuple(
            ResourceRate(
                resource=resource,
                rate=self.rate_of(resource),
                basis="published" if resource in self.links else "measured",
            )
            for resource in self.resources
        )

    def rate_of(self, resource: Resource) -> Rate:
        """The rate of large messages: that of the curve of the most ranks, or of the line."""
        curves = self._curves.get(("copy" if resource == "memory" else "alltoall", resource))
        if curves is not None:
            return curves[max(curves)].rate
        rate = self.links[resource].rate
        assert rate is not None, "a link without curves has a rate"
        return rate

    @property
    def _share_of_network(self) -> Rate:
        """A rank's share of its node's network."""
        return self.rate_of("inter").times(self.nics_per_node / self.ranks_per_node)

    def factor(self, first: Resource, second: Resource) -> float:
        """Factor by which an operation on `first` is slowed while one on `second` runs.

        Where nobody has measured it, 2 on the same resource, and 1 between network and node link:
        along a rail a message goes from memory to the NIC. A link reads and writes the memory at
        its own rate, which leaves memory - 2 * link to what runs there.
        """
        return self._factors[first, second]

    def time_us(
        self,
        operation: PricedOperation,
        resource: Resource,
        num_bytes: float,
        group_size: int = 1,
        ranks_on_node: int = 1,
    ) -> float:
        """Time of one operation.

        Args:
            operation: its name.
            resource: the resource through which the bytes go.
            num_bytes: bytes that leave each rank through it; in memory, bytes read and written.
            group_size: number of ranks that take part: the whole group in "inter", its part on one
                node in "intra". Of measured sizes the nearest by ratio is taken.
            ranks_on_node: ranks of the group on each node.
        """
        node = NodeSizes(self.ranks_per_node, self.nics_per_node)
        for named in (operation, STANDS_IN.get(operation, operation)):
            curves = self._curves.get((named, resource))
            if curves:
                if self.calibrated_node is not None and resource == "inter":
                    # All ranks of a node were in a calibrated AllGather.
                    calibrated = NodeSizes(*self.calibrated_node)
                    num_bytes *= node.load(operation, ranks_on_node)
                    num_bytes /= calibrated.load(operation, calibrated.ranks)
                size = min(curves, key=lambda size: (abs(math.log(size / group_size)), -size))
                return curves[size].time_us(num_bytes)
        link = self.links[resource]
        assert link.rate is not None, "a link without curves has a rate"
        if resource == "inter":
            num_bytes *= node.load(operation, ranks_on_node)
        return link.start_us + num_bytes / (link.rate.gbytes_per_s * 1e3)

    @cached_property
    def _curves(self) -> dict[tuple[PricedOperation, Resource], dict[int, Curve]]:
        """By group size: the measured ones, and the published ones where none was measured."""
        measured = {(curve.operation, curve.resource) for curve in self.curves}
        curves = list(self.curves)
        link = self.node_link
        if link is not None and link.curves is not None:
            curves += (
                curve.at_rate(link.rate_ratio)
                for curve in published_curves()[link.curves]
                if (curve.operation, "intra") not in measured
            )
        by_size: dict[tuple[PricedOperation, Resource], dict[int, Curve]] = {}
        for curve in curves:
            by_size.setdefault((curve.operation, curve.resource), {})[curve.group_size] = curve
        return by_size

    @cached_property
    def _factors(self) -> dict[tuple[Resource, Resource], float]:
        factors = {(a, b): 2.0 if a == b else 1.0 for a in RESOURCES for b in RESOURCES}
        memory = self.rate_of("memory").gbytes_per_s
        for link in self.resources[:-1]:
            rate = self._share_of_network if link == "inter" else self.rate_of(link)
            left = memory - 2 * rate.gbytes_per_s
            factor = min(memory / left, 2.0) if left > 0 else 2.0
            factors[link, "memory"] = factors["memory", link] = factor
        for entry in self.contention:
            factors[entry.pair] = entry.factor
            factors[entry.pair[::-1]] = entry.factor_of_second
        return factors


_POLICIES: dict[bool, Policy] = {True: "fused", False: "streams"}
