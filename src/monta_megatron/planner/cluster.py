"""The cluster: nodes, and the cost of every operation on them, measured or published."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

from monta_megatron.chains.program import Policy, PricedOperation, Resource
from monta_megatron.common.errors import UserError
from monta_megatron.common.nodes import consecutive_nodes, number_nodes
from monta_megatron.common.rules import NonNegativeFloat, PositiveFloat, PositiveInt, Text, require
from monta_megatron.common.text import counted
from monta_megatron.planner.curves import (
    BY_NAME,
    NAMES,
    RESOURCES,
    Curve,
    Rate,
    ResourceName,
    published_curves,
)

# If a cluster has no curve for an operation, this similar operation stands in for it.
STANDS_IN: dict[PricedOperation, PricedOperation] = {"allgather": "alltoall", "sum": "copy"}

# Of an operation, in us; a number above it was meant in other units.
MAX_START_US = 1e6
# Several others on a resource; two that share it evenly slow each other by 2.
MAX_CONTENTION = 4.0
# The most of any machine that is sold: EFA on an AWS p5, and the memory of an AMD MI355X.
MAX_NICS_PER_HOST, MAX_MEMORY_GB = 32, 310

# A resource is slower by a factor while another is busy: 1 if it is not affected, 2 if it runs at
# half its rate.
Contention: TypeAlias = tuple[ResourceName, ResourceName, PositiveFloat]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Published figures of a resource: a line, or NCCL's curves for a GPU.

    Attributes:
        rate: rate in one direction of one NIC or one rank; that of memory counts reads and writes
            together. None with `curves`.
        start_us: time of the smallest operation.
        range: lowest and highest published rate, where `rate` is the likely one.
        curves: GPU of `curves.published_curves`, in place of a line.
        rate_ratio: rate of this link over `rate`, or over the link of the curves' GPU.
        source: source of the figures; None where a user's own file does not say.
    """

    rate: Rate | None = None
    start_us: NonNegativeFloat = 0.0
    range: tuple[Rate, Rate] | None = None
    curves: Text | None = None
    rate_ratio: PositiveFloat = 1.0
    source: Text | None = None

    def __post_init__(self) -> None:
        rule = f"be at most {MAX_START_US:,.0f}, a second"
        require(self.start_us <= MAX_START_US, "start_us", self.start_us, rule)
        if self.curves is not None:
            known = published_curves()
            require(self.curves in known, "curves", self.curves, f"be one of {', '.join(known)}")
        require(
            (self.rate is None) != (self.curves is None), "rate", self.rate, "or curves be given"
        )
        if self.range is not None:
            ends = f"[{self.range[0]}, {self.range[1]}]"
            low, high = (rate.gbytes_per_s for rate in self.range)
            within = self.rate is not None and low <= self.rate.gbytes_per_s <= high
            likely = "which curves have not" if self.rate is None else self.rate.in_both_units
            require(within, "range", ends, f"hold rate, {likely}")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Both ends of the range over the likely rate; 1 without a range."""
        if self.range is None or self.rate is None:
            return (1.0,)
        return tuple(end.gbytes_per_s / self.rate.gbytes_per_s for end in self.range)


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Host time to start an operation, for each stage and chunk, and around the stages.

    The defaults are those of one processor, the reference (docs/calibration.md, host of a preset).

    Attributes:
        collective_us: time to start an AllToAll or AllGather, whatever its group.
        collective_peer_us: additional time for each other rank of the group.
        operation_us: time to hand one operation on tensors to the device, its launch included;
            `planner.traffic` has the number of operations of a stage.
        counts_to_host_us: time to copy the counts to the host and wait for them.
        counts_us: time to count what goes where and bind a chain to it, once per dispatch.
        stock_counts_us: time that stock's dispatcher takes to count; it binds no chain, so it is
            taken to need at most `counts_us`.
        pass_us: time of a pass besides its stages: autograd and the executor.
        stage_us: time that the executor takes for each stage of each chunk.
        speed: speed of the cluster's processor over that of the reference; all times above are
            divided by it.
        range: lowest and highest speed that is possible; None where it was measured.
        source: source of the figures, or the program that measured them, if the file says it.
    """

    collective_us: NonNegativeFloat = 21.8
    collective_peer_us: NonNegativeFloat = 1.4
    operation_us: NonNegativeFloat = 3.7
    counts_to_host_us: NonNegativeFloat = 18.0
    counts_us: NonNegativeFloat = 315.0
    stock_counts_us: NonNegativeFloat = 30.0
    pass_us: NonNegativeFloat = 39.0
    stage_us: NonNegativeFloat = 11.5
    speed: PositiveFloat = 1.0
    range: tuple[PositiveFloat, PositiveFloat] | None = None
    source: Text | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.name.endswith("_us"):
                time_us = getattr(self, entry.name)
                rule = f"be at most {MAX_START_US:,.0f}, a second"
                require(time_us <= MAX_START_US, entry.name, time_us, rule)
        if self.range is not None:
            low, high = self.range
            require(low <= self.speed <= high, "range", [low, high], f"hold speed, {self.speed:g}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes and costs; `cluster_file` shows its file.

    Attributes:
        name: name of the cluster, as users call it.
        source: source of its sizes, or the program that measured its costs, if its file says it.
        num_nodes: number of sets of ranks joined by the node link.
        ranks_per_node: number of ranks per node.
        nics_per_node: number of network interfaces, which the ranks of a node share evenly.
        ranks_per_host: number of ranks per host where several hosts make up a node, as in a rack;
            None where a node is one host.
        memory_gb_per_rank: memory that a rank may use, in 1e9 bytes; without it memory is not
            checked. Presets have the size that a GPU is sold with, about 6% less than its driver
            reports.
        policy: the way its ranks run an exchange: "fused" or "streams" on GPUs, by Triton kernels
            or PyTorch's operations; "host" on CPU ranks.
        network: published figures of one network interface.
        node_link: published figures of a rank's node link.
        memory: published figures of a rank's memory.
        host: host time per operation.
        curves: measured curves, one for each operation, resource and group size.
        contention: measured factors of contention; see `factor` for other pairs.
    """

    name: Text
    source: Text | None = None
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

    def __post_init__(self) -> None:
        keys = [(curve.operation, curve.resource, curve.group_size) for curve in self.curves]
        for key in keys:
            require(keys.count(key) == 1, "curves", f"{' '.join(map(str, key))} twice", "be once")
        for resource in self.resources:
            needed = "copy" if resource == "memory" else "alltoall"
            has_curve = any(key[:2] == (needed, resource) for key in keys)
            if resource not in self.links and not has_curve:
                raise UserError(
                    f"{NAMES[resource]}: missing, must be given, or {needed} of it in curves"
                )
        for resource, link in self.links.items():
            name, is_read = f"{NAMES[resource]}.curves", resource == "intra" or link.curves is None
            require(is_read, name, link.curves, "be left out: node_link alone has published curves")
        for *_, factor in self.contention:
            holds = 1 <= factor <= MAX_CONTENTION
            require(holds, "contention", factor, f"be a factor from 1 to {MAX_CONTENTION:g}")

    @property
    def doubts(self) -> tuple[str, ...]:
        """Values of the file that are allowed and hardly meant, for the notes of a plan."""
        ranks, nics, found = self.ranks_per_node, self.nics_per_node, []
        if ranks % nics and nics % ranks:
            found.append(
                f"nics_per_node {nics} does not divide ranks_per_node {ranks}: ranks are taken to "
                "have equal shares of the interfaces"
            )
        nics_per_host = nics * (self.ranks_per_host or ranks) / ranks
        if nics_per_host > MAX_NICS_PER_HOST:
            found.append(
                f"nics_per_node {nics}: {nics_per_host:g} of a host, and no machine has more than "
                f"{MAX_NICS_PER_HOST}"
            )
        if self.memory_gb_per_rank is not None and self.memory_gb_per_rank > MAX_MEMORY_GB:
            found.append(
                f"memory_gb_per_rank {self.memory_gb_per_rank:g}: no GPU has more than "
                f"{MAX_MEMORY_GB}"
            )
        found += [
            f"curve {curve.operation} {NAMES[curve.resource]} {curve.group_size} falls: a larger "
            "size takes less than a smaller one, so a plan may get faster with more tokens"
            for curve in self.curves
            if curve.falls
        ]
        return tuple(found)

    @cached_property
    def links(self) -> dict[Resource, Link]:
        """Published figures by resource."""
        links = {"inter": self.network, "intra": self.node_link, "memory": self.memory}
        return {r: link for r in RESOURCES if (link := links[r]) is not None}

    def with_kernels(self, fused: bool) -> "Cluster":
        """These costs, to price the fused kernels or PyTorch's operations."""
        policy: Policy = "fused" if fused else "streams"
        return self if self.policy == "host" else replace(self, policy=policy)

    def with_links_in_turn(self) -> "Cluster":
        """These costs where collectives of network and node link never run at once."""
        rows: tuple[Contention, ...] = ("network", "node_link", 2.0), ("node_link", "network", 2.0)
        return replace(self, contention=self.contention + rows)

    def corners(self) -> list["Cluster"]:
        """The cluster at every combination of the ends of its published ranges.

        Ranges do not depend on each other: beside a slow network the host may be fast. Three of
        them have 2 x 2 x 2 corners; without a range this cluster is the only one.
        """
        corners = [self]
        for resource, link in self.links.items():
            corners = [
                corner.at_rate(resource, ratio) for corner in corners for ratio in link.ratios
            ]
        hosts = [replace(self.host, speed=s) for s in self.host.range or (self.host.speed,)]
        return [replace(corner, host=host) for corner in corners for host in hosts]

    def at_rate(self, resource: Resource, ratio: float) -> "Cluster":
        """The cluster where one resource has `ratio` times its rate, and the same start times."""
        curves = tuple(
            curve.at_rate(ratio) if curve.resource == resource else curve for curve in self.curves
        )
        changed: dict[str, Any] = {"curves": curves}
        if (link := self.links.get(resource)) is not None:
            changed[NAMES[resource]] = replace(link, rate_ratio=link.rate_ratio * ratio)
        return replace(self, **changed)

    @property
    def as_stock(self) -> "Cluster":
        """The same cluster with the host costs of stock's dispatcher.

        It has no executor. What autograd takes around its operations is not known and left out,
        which favors stock.
        """
        counts_us = min(self.host.stock_counts_us, self.host.counts_us)
        host = replace(self.host, counts_us=counts_us, pass_us=0.0, stage_us=0.0)
        return replace(self, host=host)

    @property
    def resources(self) -> tuple[Resource, ...]:
        """Those that its ranks have."""
        absent = {"inter": self.num_nodes == 1, "intra": self.ranks_per_node == 1}
        return tuple(resource for resource in RESOURCES if not absent.get(resource, False))

    def for_job(self, ranks_per_node: int | None) -> "Cluster":
        """The nodes of a job that uses so many ranks of each: its own count, not the cluster's.

        Hand-worked: 4 of the 8 ranks of a node with 8 interfaces are a node of 4 with 4. Of a node
        of 18 hosts of 4, 64 are a node of 16 hosts; 4 are a host, which shares the whole node.

        Args:
            ranks_per_node: number of ranks used per node, or per host; None for whole nodes.

        Raises:
            UserError: a node has fewer, a host is used in part, or curves hold for another share
                of the network.
        """
        whole = self.ranks_per_node
        if ranks_per_node in (None, whole, self.ranks_per_host):
            return self
        rule = f"be at most {whole}, the ranks of a node of {self.name}"
        require(ranks_per_node < whole, "ranks_per_node", ranks_per_node, rule)
        if self.ranks_per_host is not None:
            rule = f"be a multiple of {self.ranks_per_host}, the ranks of a host of {self.name}"
            holds = ranks_per_node % self.ranks_per_host == 0
            require(holds, "ranks_per_node", ranks_per_node, rule)
        nics = max(self.nics_per_node * ranks_per_node // whole, 1)
        if any(curve.resource == "inter" for curve in self.curves):
            rule = f"share interfaces as the measured nodes of {self.name} do; calibrate such nodes"
            holds = nics * whole == self.nics_per_node * ranks_per_node
            require(holds, "ranks_per_node", ranks_per_node, rule)
        return replace(
            self,
            name=f"{self.name}, {ranks_per_node} of {whole} ranks per node",
            ranks_per_node=ranks_per_node,
            nics_per_node=nics,
        )

    def check_has(self, num_nodes: int) -> None:
        """Refuse an exchange on more nodes by a UserError."""
        rule = f"be at least the {num_nodes} of the exchange; give the nodes of the whole cluster"
        require(num_nodes <= self.num_nodes, f"{self.name}: num_nodes", self.num_nodes, rule)

    def nodes_of(
        self, ranks: Sequence[int], hosts: Sequence[str]
    ) -> tuple[tuple[int, ...], str | None]:
        """The node of each rank: its host, or consecutive ranks where hosts make up a node.

        Args:
            ranks: global ranks of the exchange.
            hosts: name of each rank's host.

        Returns:
            The nodes, numbered from 0, and a note where they are not those of the file, or None.
        """
        by_host, by_file = number_nodes(hosts), consecutive_nodes(ranks, self.ranks_per_node)
        if by_host == by_file:
            return by_host, None
        nodes, text = by_host, "the hosts of this job"
        if self.ranks_per_host is not None:
            nodes, text = by_file, f"{counted(self.ranks_per_node, 'consecutive rank')} each"
        return nodes, (
            f"nodes are {text}; {self.name} has {counted(self.ranks_per_node, 'rank')} in a node, "
            "and --moe-monta-ranks-per-node decides"
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.num_nodes * self.ranks_per_node

    def rate_of(self, resource: Resource) -> Rate:
        """The rate of a rank's large messages: of the curve of the most ranks, or of the line."""
        curves = self._curves.get(("copy" if resource == "memory" else "alltoall", resource))
        if curves is not None:
            return curves[max(curves)].rate
        link = self.links[resource]
        assert link.rate is not None, "a link without curves has a rate"
        share = self.nics_per_node / self.ranks_per_node if resource == "inter" else 1.0
        return link.rate.times(link.rate_ratio * share)

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
            operation: name of the operation.
            resource: the resource through which the bytes go.
            num_bytes: bytes that leave each rank through it; in memory, bytes read and written.
            group_size: number of ranks that take part: the whole group in "inter", its part on one
                node in "intra". Of measured sizes the nearest by ratio is taken.
            ranks_on_node: ranks of the group on each node.
        """
        curves = self._curves.get((operation, resource))
        if curves is None:
            curves = self._curves.get((STANDS_IN.get(operation, operation), resource))
            if (operation, resource) == ("allgather", "inter"):
                # Every rank of a ring passes on the shares of all others, so as much goes through
                # the interfaces of a node, which its ranks have in equal parts.
                num_others = group_size - ranks_on_node
                num_bytes *= (group_size - 1) / num_others / ranks_on_node
        if curves is not None:
            size = min(curves, key=lambda size: (abs(math.log(size / group_size)), -size))
            return curves[size].time_us(num_bytes)
        rate = self.rate_of(resource)
        return self.links[resource].start_us + num_bytes / (rate.gbytes_per_s * 1e3)

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
            left = memory - 2 * self.rate_of(link).gbytes_per_s
            factor = min(memory / left, 2.0) if left > 0 else 2.0
            factors[link, "memory"] = factors["memory", link] = factor
        for first, second, factor in self.contention:
            factors[BY_NAME[first], BY_NAME[second]] = factor
        return factors
