"""Asynchronous collectives of a chain, and their process groups.

Groups are Megatron's, and the rails and nodes derived from them. On a device the process group is
called directly: the look-ups and checks of torch's functions take the host as long as the call. CPU
ranks call torch's functions, which their emulation replaces. So do groups wrapped by a framework,
which may lack methods of the group inside.

Collectives of several groups overlap, and every rank issues them in the same order. That order does
not rule out a circular wait: two ranks may start the kernels of two NCCL communicators in different
orders, each with the one first that on the other rank lacks SMs. NCCL_LAUNCH_ORDER_IMPLICIT=1 does
(`exchange.launch_order`); without it they do not overlap (`exchange.streams`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from monta_megatron.chains import Chain
from monta_megatron.common.errors import UserError
from monta_megatron.common.torch_private import (
    ALL_GATHER,
    ALL_TO_ALL,
    is_open,
    is_wrapped,
    new_named_group,
    options_of,
    timeout_of,
)
from monta_megatron.core import Layout
from monta_megatron.exchange.launch_order import set_launch_order

# Created here; the other groups are Megatron's.
OWN_GROUPS = ("node", "rail")


@dataclass(frozen=True, kw_only=True)
class PeerGroup:
    """A process group and the node of each of its ranks.

    Attributes:
        name: for messages, such as "ep".
        process_group: the group in torch.distributed.
        size: number of ranks.
        rank: this rank's position.
        nodes: [size] node of each rank.
    """

    name: str
    process_group: dist.ProcessGroup
    size: int
    rank: int
    nodes: tuple[int, ...]

    @cached_property
    def is_called(self) -> bool:
        """Whether a device bypasses torch's functions and calls the process group directly."""
        is_torchs = dist.all_to_all_single is distributed_c10d.all_to_all_single
        return is_torchs and not is_wrapped(self.process_group)

    @cached_property
    def peers(self) -> dict[str, list[int]]:
        """The other ranks by resource: "inter" over the network, "intra" over the node link."""
        here = self.nodes[self.rank]
        others = [peer for peer in range(self.size) if peer != self.rank]
        by_resource = {
            "inter": [peer for peer in others if self.nodes[peer] != here],
            "intra": [peer for peer in others if self.nodes[peer] == here],
        }
        return {resource: peers for resource, peers in by_resource.items() if peers}


def start_all_to_all(
    output: torch.Tensor,
    input_: torch.Tensor,
    receive: list[int],
    send: list[int],
    group: PeerGroup,
) -> dist.Work:
    """Start to send `send[p]` rows to each peer p and receive `receive[p]` rows from it."""
    if output.is_cuda and group.is_called:
        return group.process_group.alltoall_base(output, input_, receive, send, ALL_TO_ALL)
    work = dist.all_to_all_single(
        output,
        input_,
        output_split_sizes=receive,
        input_split_sizes=send,
        group=group.process_group,
        async_op=True,
    )
    assert work is not None, f"this rank is no member of group {group.name}"
    return work


def start_all_gather(
    output: torch.Tensor,
    input_: torch.Tensor,
    receive: list[int],
    send: list[int],
    group: PeerGroup,
) -> dist.Work:
    """Start to send the same rows to every peer and receive `receive[p]` rows from each peer p."""
    process_group, is_equal = group.process_group, len(set(receive)) == 1
    is_called = output.is_cuda and group.is_called
    if is_equal and is_called:
        return process_group._allgather_base(output, input_, ALL_GATHER)
    if is_equal:
        work = dist.all_gather_into_tensor(output, input_, group=process_group, async_op=True)
    elif output.is_cuda:
        # NCCL gathers unequal parts by one broadcast after the other.
        outputs, inputs = list(output.split(receive)), [input_] * group.size
        if is_called:
            return process_group.alltoall(outputs, inputs, ALL_TO_ALL)
        work = dist.all_to_all(outputs, inputs, group=process_group, async_op=True)
    else:
        outputs = list(output.split(receive))
        work = dist.all_gather(outputs, input_, group=process_group, async_op=True)
    assert work is not None, f"this rank is no member of group {group.name}"
    return work


# The settings that Megatron's communicator config file may hold.
NCCL_SETTINGS = (
    "cga_cluster_size",
    "max_ctas",
    "min_ctas",
    "net_name",
    # Of torch >= 2.8.
    "cta_policy",
    "nvls_ctas",
)
# NCCL's "not set" of a numeric setting.
UNSET = -(2**31)


class _OwnGroup(NamedTuple):
    """A group created here, and how often it was; all of its members have counted the same."""

    group: dist.ProcessGroup
    times: int


# By the default group, as a restart of torch.distributed creates another one; then by members. All
# layers share them.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _OwnGroup]] = WeakKeyDictionary()


def join_launch(local_rank: int, transport: str = "nccl") -> torch.device:
    """For tools: join the launch, and take a GPU where there is one; CPU tensors go through Gloo.

    Args:
        local_rank: number among the ranks of this node, which take its GPUs in turn.
        transport: backend for tensors on GPUs.

    Raises:
        UserError: there is neither a GPU nor a stand-in.
    """
    if not torch.cuda.is_available():
        raise UserError("MONTA_CPU_RANKS: not set, must be 1 where there is no GPU")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    # As in a training.
    set_launch_order()
    dist.init_process_group(f"cpu:gloo,cuda:{transport}")
    return device_of_ranks()


def device_of_ranks() -> torch.device:
    """This rank's GPU; the CPU where CPU ranks stand in for GPUs."""
    return torch.empty(0, device="cuda").device


def wait_for_all() -> None:
    """A barrier by tensors on the host, so that it needs no GPU."""
    dist.all_reduce(torch.zeros(1))


def peer_groups(
    chains: Sequence[Chain],
    layout: Layout,
    megatron_groups: dict[str, dist.ProcessGroup],
) -> dict[str, PeerGroup]:
    """Process groups of the chains, by name.

    Only their own members create rail and node groups: pipeline stages without MoE layers never
    call this, and a world-wide `new_group` on only some ranks would break the next one by all.

    Args:
        chains: the chains whose stages name groups.
        layout: this rank's position; gives the node of every rank of the exchange.
        megatron_groups: "ep", "etp" and "tp_ep"; ours take over the settings of the first.
    """
    ranks = dist.get_process_group_ranks(megatron_groups["tp_ep"])
    node_of = dict(zip(ranks, layout.nodes, strict=True))
    names = {name for chain in chains for name in chain.groups}
    groups: dict[str, dist.ProcessGroup] = dict(megatron_groups)
    like = megatron_groups["ep"]
    # The same order on every rank.
    for name in OWN_GROUPS:
        if name in names:
            members = tuple(ranks[member] for member in layout.members(name, layout.rank))
            groups[name] = _own_group(members, f"monta {name}", like)
    return {name: peer_group(name, groups[name], node_of) for name in sorted(names)}


def are_open(groups: Mapping[str, PeerGroup]) -> bool:
    """Whether the rail and node groups of an exchange are open."""
    return all(is_open(groups[name].process_group) for name in OWN_GROUPS if name in groups)


def close_groups() -> None:
    """Close rail and node groups, and free the memory of their communicators.

    All ranks of an exchange call this at the same point, with no pass in flight. `peer_groups`
    creates the groups again.
    """
    made = _made.get(_world(), {}) if dist.is_initialized() else {}
    for group, _ in made.values():
        if is_open(group):
            dist.destroy_process_group(group)


def _own_group(members: tuple[int, ...], name: str, like: dist.ProcessGroup) -> dist.ProcessGroup:
    """The open group of these members, created if there is none."""
    groups = _made.setdefault(_world(), {})
    before = groups.get(members)
    if before is not None and is_open(before.group):
        return before.group
    times = 1 if before is None else before.times + 1
    made = _OwnGroup(new_local_group(members, name, like, times), times)
    groups[members] = made
    return made.group


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    return world


def new_local_group(
    ranks: Sequence[int],
    name: str,
    like: dist.ProcessGroup | None = None,
    times: int = 1,
) -> dist.ProcessGroup:
    """Create a group by its members alone, independent of groups that other ranks create.

    Args:
        ranks: in ascending order, including this one.
        name: for NCCL's logs; unique together with `ranks` and `times`.
        like: a group whose time limit and NCCL settings are copied.
        times: how many times the group has been created, this time included. The store still holds
            the keys of a closed group under its name.
    """
    members = "_".join(map(str, ranks))
    return new_named_group(
        ranks,
        name=f"{name}, ranks {members}, made {times} times",
        timeout=None if like is None else timeout_of(like),
        options=None if like is None else _nccl_options_like(like),
    )


def nccl_settings(group: dist.ProcessGroup) -> dict[str, Any]:
    """NCCL settings of a group, None where not set; {} without NCCL."""
    options = options_of(group)
    config = getattr(options, "config", None)
    if config is None:
        return {}
    values = {name: getattr(config, name, None) for name in NCCL_SETTINGS}
    return {
        "is_high_priority_stream": options.is_high_priority_stream,
        **{name: None if value == UNSET else value for name, value in values.items()},
    }


def is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL carries the group's tensors on GPUs."""
    kind = dist.ProcessGroupNCCL.Options if dist.is_nccl_available() else ()
    return isinstance(options_of(group), kind)


def _nccl_options_like(group: dist.ProcessGroup) -> Any:
    """NCCL options copied from a group; None if it is not an NCCL group."""
    # Megatron sets them by --nccl-communicator-config-path and --high-priority-stream-groups.
    if not is_nccl(group):
        return None
    given: Any = options_of(group)
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = given.is_high_priority_stream
    for name in NCCL_SETTINGS:
        value = getattr(given.config, name, None)
        # None is skipped: torch would try to copy a string that does not exist.
        if value is not None:
            setattr(options.config, name, value)
    return options


def peer_group(name: str, group: dist.ProcessGroup, node_of: Mapping[int, int]) -> PeerGroup:
    """A group with the nodes of its ranks, which are numbered as in the whole launch."""
    ranks = dist.get_process_group_ranks(group)
    return PeerGroup(
        name=name,
        process_group=group,
        size=len(ranks),
        rank=dist.get_group_rank(group, dist.get_rank()),
        nodes=tuple(node_of[rank] for rank in ranks),
    )
