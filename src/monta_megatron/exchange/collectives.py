"""The two collectives of a chain, started without waiting for them, and the groups they run in."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist


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
    process_group = group.process_group
    if len(set(receive)) == 1:
        work = dist.all_gather_into_tensor(output, input_, group=process_group, async_op=True)
    elif output.is_cuda:
        # NCCL gathers unequal parts by one broadcast after the other.
        outputs, inputs = list(output.split(receive)), [input_] * group.size
        work = dist.all_to_all(outputs, inputs, group=process_group, async_op=True)
    else:
        outputs = list(output.split(receive))
        work = dist.all_gather(outputs, input_, group=process_group, async_op=True)
    assert work is not None, f"this rank is no member of group {group.name}"
    return work
