"""The two collectives of a chain, started without waiting for them, and the groups they run in.

On a device the process group is called itself: what torch's functions look up and check each time
takes the host as long as the call. CPU ranks call those functions, which their emulation replaces;
so does a device where they were replaced, and so do groups that a framework has wrapped, which need
not have the methods of those in them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from monta_megatron.common import torch_private


@dataclass(frozen=True, kw_only=True)
class PeerGroup:
    """A process group, and which of its ranks sit on which node.

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
        """Whether a device calls the process group itself."""
        is_torchs = dist.all_to_all_single is distributed_c10d.all_to_all_single
        return is_torchs and not torch_private.is_wrapped(self.process_group)

    @cached_property
    def peers(self) -> dict[str, list[int]]:
        """The other ranks by resource: "inter" over the network, "intra" over the node link."""
        here = self.nodes[self.rank]
        return {
            "inter": [peer for peer in range(self.size) if self.nodes[peer] != here],
            "intra": [
                peer for peer in range(self.size) if self.nodes[peer] == here and peer != self.rank
            ],
        }


def start_all_to_all(
    output: torch.Tensor,
    input_: torch.Tensor,
    receive: list[int],
    send: list[int],
    group: PeerGroup,
) -> dist.Work:
    """Send `send[p]` rows to every peer p and receive `receive[p]` rows from it."""
    if output.is_cuda and group.is_called:
        return torch_private.start_all_to_all(group.process_group, output, input_, receive, send)
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
    """Send the same rows to everyone and receive `receive[p]` rows from every peer p."""
    process_group, is_equal = group.process_group, len(set(receive)) == 1
    is_called = output.is_cuda and group.is_called
    if is_equal and is_called:
        return torch_private.start_all_gather(process_group, output, input_)
    if is_equal:
        work = dist.all_gather_into_tensor(output, input_, group=process_group, async_op=True)
    elif output.is_cuda:
        # NCCL gathers unequal parts by one broadcast after the other.
        outputs, inputs = list(output.split(receive)), [input_] * group.size
        if is_called:
            return torch_private.start_all_to_all_of_lists(process_group, outputs, inputs)
        work = dist.all_to_all(outputs, inputs, group=process_group, async_op=True)
    else:
        outputs = list(output.split(receive))
        work = dist.all_gather(outputs, input_, group=process_group, async_op=True)
    assert work is not None, f"this rank is no member of group {group.name}"
    return work
