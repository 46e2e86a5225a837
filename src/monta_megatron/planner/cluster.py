"""The cluster: nodes, and the cost of every operation on them, measured or from datasheets."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, TypeAlias

from monta_megatron.chains.program import COLLECTIVES, Policy, PricedOperation, Resource
from monta_megatron.common.nodes import consecutive_nodes, mixed_node, number_nodes
from monta_megatron.common.rules import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Rule,
    Text,
    require,
)
from monta_megatron.common.units import Rate, bytes_of_gb, counted
from monta_megatron.planner.curves import RESOURCES, CostKind, Curve, HostCosts

# 800 Gb/s, of the newest interfaces.
FASTEST_NIC = Rate(100.0)
# If a cluster has no curve for an operation, this similar operation stands in for it.
STANDS_IN: dict[PricedOperation, PricedOperation] = {
    "sum": "copy",
    "find": "copy",
    "find_lists": "find",
    "count": "copy",
    "lists": "copy",
    "put": "copy",
    "permute": "copy",
    "unpermute": "sum",
}

# PyTorch's operations or Triton kernels; "auto" takes Triton kernels on GPUs.
Kernels: TypeAlias = Literal["torch", "fused"]
KernelChoice: TypeAlias = Literal["auto", Kernels]


class Time(NamedTuple):
    """Time of an operation, and a note on assumptions, if any."""

    us: float
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """A resource as a straight line: for clusters that nobody has calibrated.

    Attributes:
        resource: inter is the network, of one NIC; intra the node link (NVLink) and memory a GPU's
            own, of one rank.
        alpha_us: time of the smallest operation.
        rate: in one direction; that of memory counts reads and writes together.
        kind: whether it was measured on this cluster.
        source: where it was published.
        cross_rail_rate: of inter, between ranks with different positions on their nodes; none for
            the same as `rate`.
        conservative_rate: the lowest that was published, where `rate` is the likely one; none for
            the same.
        optimistic_rate: the highest; likewise.
    """

    resource: Resource
    alpha_us: NonNegativeFloat
    rate: Rate
    kind: CostKind
    source: Text
    cross_rail_rate: Rate | None = None
    conservative_rate: Rate | None = None
    optimistic_rate: Rate | None = None

    def __post_init__(self) -> None:
        if self.resource != "inter":
            require(not self.rate.is_of_network, "rate", self.rate.in_both_units, f"be {Rate.RULE}")
        across = self.cross_rail_rate
        if across is not None:
            is_less = self.resource == "inter" and across.gbytes_per_s <= self.rate.gbytes_per_s
            rule = f"be of inter and at most rate, {self.rate.in_both_units}"
            require(is_less, "cross_rail_rate", f"{across} of {self.resource}", rule)

    def check_ends(self) -> None:
        """Refuse ends that do not lie on their sides of the likely rate."""
        likely = self.rate.gbytes_per_s
        for name, lowest, highest, rule in (
            ("conservative_rate", 0.0, likely, "at most"),
            ("optimistic_rate", likely, math.inf, "at least"),
        ):
            rate: Rate | None = getattr(self, name)
            if rate is not None:
                is_end = lowest <= rate.gbytes_per_s <= highest
                where = f"links: {self.resource}: {name}"
                require(
                    is_end, where, rate, f"be {rule} rate, {self.rate.in_both_units}, or left out"
                )

    def times(self, ratio: float) -> "Link":
        """The link at `ratio` times its rates."""
        names = ("rate", "cross_rail_rate", "conservative_rate", "optimistic_rate")
        rates = {name: rate.times(ratio) for name in names if (rate := getattr(self, name))}
        return replace(self, **rates)

    def at_end(self, rate: Rate | None) -> "Link":
        """The link if it has this rate, one of its ends, and no others."""
        ratio = 1.0 if rate is None else rate.gbytes_per_s / self.rate.gbytes_per_s
        return replace(self, conservative_rate=None, optimistic_rate=None).times(ratio)

    def mean_rate(self, ranks_on_node: int) -> float:
        """GB/s of an AllToAll with so many ranks on a node: bytes to one of them cross no rail."""
        if self.cross_rail_rate is None:
            return self.rate.gbytes_per_s
        crossing = (ranks_on_node - 1) / self.cross_rail_rate.gbytes_per_s
        return ranks_on_node / (1 / self.rate.gbytes_per_s + crossing)


@dataclass(frozen=True, kw_only=True)
class NodeSizes:
    """Ranks and network interfaces of a node.

    Attributes:
        ranks: on each node.
        nics: network interfaces that they share evenly.
    """

    ranks: PositiveInt
    nics: PositiveInt

    def load(self, operation: PricedOperation, ranks_on_node: int) -> float:
        """Bytes through a network interface for a byte of each rank, in groups of all ranks."""
        # A ring crosses once per node, not once per rank that the group has on it.
        return self.ranks / self.nics / (ranks_on_node if operation == "allgather" else 1)


Slowdown = Annotated[float, Rule("a number >= 1", lambda value: value >= 1)]


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Factor by which two operations slow each other while both run.

    Attributes:
        pair: two resources; the same one twice for two operations on one resource.
        factor: slowdown of the first one: 1 if the other does not affect it, 2 if it runs at
            half its rate.
        factor_of_second: slowdown of the second one; without it the same.
        kind: whether it was measured on this cluster.
        source: what it was measured with, or where it was published.
    """

    pair: tuple[Resource, Resource]
    factor: Slowdown
    kind: CostKind
    source: Text
    factor_of_second: Slowdown | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes and costs: at least a link or curves for every resource that the cluster has.

    Attributes:
        name: what users call it.
        num_nodes: number of sets of ranks joined by the node link.
        ranks_per_node: ranks in each.
        nics_per_node: network interfaces that the ranks of a node share evenly.
        ranks_per_host: where several hosts make up a node, as in a rack; without it a node is one.
        kind: whether these numbers and the memory come from this cluster or were published.
        source: where they come from.
        launch: host time per operation.
        memory_gb_per_rank: 1e9 bytes that a rank may use; without it memory is not checked.
        copies_block_host: copies run on the host thread in program order, as on CPU ranks.
        fused_kernels: price the fused kernels, which also ran when curves were measured; a training
            prices what it runs.
        links: each resource as a line, used where there is no curve.
        curves: one for each operation, resource and group size.
        contention: pairs that are not listed have factor 1, or 2 if both are the same resource.
        doubts: what the calibration found wanting in itself; every plan notes it.
        calibrated_node: for which the curves of inter hold; bytes of other nodes are converted to
            those that load a network interface as much. None for this cluster's nodes.
    """

    name: Text
    num_nodes: PositiveInt
    ranks_per_node: PositiveInt
    nics_per_node: PositiveInt
    kind: CostKind
    source: Text
    launch: HostCosts
    ranks_per_host: PositiveInt | None = None
    memory_gb_per_rank: PositiveFloat | None = None
    copies_block_host: bool = False
    fused_kernels: bool = False
    links: tuple[Link, ...] = ()
    curves: tuple[Curve, ...] = ()
    contention: tuple[Contention, ...] = ()
    doubts: tuple[Text, ...] = ()
    calibrated_node: NodeSizes | None = None

    def __post_init__(self) -> None:
        _refuse_twice("links", (link.resource for link in self.links))
        _refuse_twice(
            "curves", ((curve.operation, curve.resource, curve.group_size) for curve in self.curves)
        )
        _refuse_twice("contention", (tuple(sorted(entry.pair)) for entry in self.contention))
        for curve in self.curves:
            in_memory = curve.operation not in COLLECTIVES
            require(
                in_memory == (curve.resource == "memory"),
                "curves",
                f"{curve.operation} in {curve.resource}",
                "be in " + ("memory" if in_memory else "inter or intra"),
            )
        resources = [link.resource for link in self.links]
        for resource in self.resources:
            needed = ("copy",) if resource == "memory" else COLLECTIVES
            curves = {curve.operation for curve in self.curves if curve.resource == resource}
            if resource not in resources and not curves.issuperset(needed):
                raise ValueError(
                    f"links: none for {resource}, must be given where curves has none for "
                    f"{' and '.join(needed)} there"
                )
        for link in self.links:
            link.check_ends()

    def check_network(self) -> None:
        """Refuse rates of the network that are probably bits taken for bytes."""
        network, node_link = self._links.get("inter"), self._links.get("intra")
        if network is None:
            return
        share = network.rate.times(self.nics_per_node / self.ranks_per_node)
        if node_link is not None and share.gbytes_per_s > node_link.rate.gbytes_per_s:
            raise ValueError(
                f"links: the network has {share.in_both_units} for each rank, must be at most the "
                f"{node_link.rate.in_both_units} of intra; check bits and bytes"
            )
        if network.rate.gbytes_per_s > FASTEST_NIC.gbytes_per_s:
            raise ValueError(
                f"links: the network has {network.rate.in_both_units} for each interface, must be "
                f"at most {FASTEST_NIC.in_both_units}; check bits and bytes"
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

    @property
    def policy(self) -> Policy:
        """Execution policy of programs on it."""
        return "host" if self.copies_block_host else "fused" if self.fused_kernels else "streams"

    def with_kernels(self, fused: bool) -> "Cluster":
        """These costs, to price the fused kernels or PyTorch's operations."""
        if fused == self.fused_kernels:
            return self
        doubts = self.doubts
        if self.curves:
            kernels = ("PyTorch's operations", "Triton kernels")
            doubts += (
                f"measured with {kernels[self.fused_kernels]}, and {kernels[fused]} run: "
                "calibrate again",
            )
        return replace(self, fused_kernels=fused, doubts=doubts)

    def with_kernel_choice(self, choice: KernelChoice) -> "Cluster":
        """These costs for a value of `--kernels`; "auto" is a training's "auto" on a GPU.

        Raises:
            ValueError: fused kernels on CPU ranks.
        """
        rule = f"be auto or torch: the ranks of {self.name} are no GPUs"
        require(choice != "fused" or not self.copies_block_host, "kernels", choice, rule)
        return self.with_kernels(choice != "torch" and not self.copies_block_host)

    @property
    def kernels(self) -> Kernels:
        """Kernels that copy and sum rows in the priced exchange."""
        return "fused" if self.policy == "fused" else "torch"

    @property
    def host(self) -> HostCosts:
        """Host costs of this cluster."""
        return self.launch.at_speed

    @cached_property
    def ends(self) -> "tuple[Cluster, Cluster] | None":
        """The cluster at the optimistic and at the conservative end of the published figures.

        None where neither differs from the likely figures, as with measured curves and host times.
        """
        curves = {curve.resource for curve in self.curves}
        links = [link for link in self.links if link.resource not in curves]
        stated = (
            *(rate for link in links for rate in (link.conservative_rate, link.optimistic_rate)),
            self.launch.conservative_speed,
            self.launch.optimistic_speed,
        )
        if all(end is None for end in stated):
            return None
        launch = self.launch
        optimistic, conservative = (
            replace(
                self,
                links=tuple(link.at_end(getattr(link, f"{end}_rate")) for link in self.links),
                launch=replace(
                    launch,
                    host_speed=getattr(launch, f"{end}_speed") or launch.host_speed,
                    conservative_speed=None,
                    optimistic_speed=None,
                ),
            )
            for end in ("optimistic", "conservative")
        )
        return optimistic, conservative

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
            calibrated_node=self.calibrated_node or self._node,
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
    def ranks_per_nic(self) -> int:
        """Ranks of a node that share a network interface."""
        return max(self.ranks_per_node // self.nics_per_node, 1)

    @property
    def memory_bytes_per_rank(self) -> float | None:
        """Bytes that a rank may use, or None where that is not known."""
        return bytes_of_gb(self.memory_gb_per_rank)

    def factor(self, first: Resource, second: Resource) -> float:
        """Factor by which an operation on `first` is slowed while one on `second` runs."""
        return self._factors[first, second]

    def time_us(
        self,
        operation: PricedOperation,
        resource: Resource,
        num_bytes: float,
        group_size: int = 1,
        ranks_on_node: int = 1,
    ) -> Time:
        """Time of one operation.

        Args:
            operation: its name.
            resource: the resource through which the bytes go.
            num_bytes: bytes that leave each rank through it; in memory, bytes read and written.
            group_size: number of ranks that take part: the whole group in "inter", its part on one
                node in "intra".
            ranks_on_node: ranks of the group on each node.

        Raises:
            ValueError: there is neither curve nor link, as for "inter" on a single node.
        """
        named: PricedOperation | None = operation
        while named is not None:
            curves = self._curves.get((named, resource))
            if curves:
                node = self.calibrated_node
                if node is not None and resource == "inter":
                    # All ranks of a node were in a calibrated AllGather.
                    num_bytes *= self._node.load(operation, ranks_on_node)
                    num_bytes /= node.load(operation, node.ranks)
                return _from_curves(curves, num_bytes, group_size)
            named = STANDS_IN.get(named)
        link = self._links.get(resource)
        if link is None:
            raise ValueError(
                f"cluster {self.name}: no curve and no link for {operation} in {resource}"
            )
        gbytes_per_s = link.rate.gbytes_per_s
        if resource == "inter":
            if operation == "alltoall":
                gbytes_per_s = link.mean_rate(ranks_on_node)
            num_bytes *= self._node.load(operation, ranks_on_node)
        return Time(link.alpha_us + num_bytes / (gbytes_per_s * 1e3))

    @cached_property
    def _node(self) -> NodeSizes:
        return NodeSizes(ranks=self.ranks_per_node, nics=self.nics_per_node)

    @cached_property
    def _links(self) -> dict[Resource, Link]:
        return {link.resource: link for link in self.links}

    @cached_property
    def _curves(self) -> dict[tuple[PricedOperation, Resource], dict[int, Curve]]:
        by_size: dict[tuple[PricedOperation, Resource], dict[int, Curve]] = {}
        for curve in self.curves:
            by_size.setdefault((curve.operation, curve.resource), {})[curve.group_size] = curve
        return by_size

    @cached_property
    def _factors(self) -> dict[tuple[Resource, Resource], float]:
        factors = {(a, b): 2.0 if a == b else 1.0 for a in RESOURCES for b in RESOURCES}
        for entry in self.contention:
            factors[entry.pair] = factors[entry.pair[::-1]] = entry.factor
            if entry.factor_of_second is not None:
                factors[entry.pair[::-1]] = entry.factor_of_second
        return factors


def _from_curves(curves: dict[int, Curve], num_bytes: float, group_size: int) -> Time:
    """The time from the curve for this group size, or for the nearest one by ratio."""
    notes = []
    curve = curves.get(group_size)
    if curve is None:
        nearest = min(curves, key=lambda size: (abs(math.log(size / group_size)), -size))
        curve = curves[nearest]
        notes.append(f"no curve for {group_size} ranks, that for {nearest} taken")
    if num_bytes > 0 and not curve.covers(num_bytes):
        ends = (curve.sizes_bytes[0], curve.sizes_bytes[-1])
        notes.append(f"extrapolated beyond {ends[0]:,} to {ends[1]:,} bytes")
    note = f"{curve.operation} ({curve.resource}): {'; '.join(notes)}" if notes else None
    return Time(curve.time_us(num_bytes), note)


def _refuse_twice(field: str, keys: Iterable[object]) -> None:
    for key, times in Counter(keys).items():
        require(times == 1, field, f"{key} twice", "be given once")
