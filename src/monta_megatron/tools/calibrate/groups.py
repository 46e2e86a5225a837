"""The groups in which a cluster is measured: all that a layout on it may have.

Rails and nodes get the SMs that they have in a training by default, others NCCL's default.
"""

import torch.distributed as dist

from monta_megatron.chains.layout import Ctas
from monta_megatron.chains.program import Resource
from monta_megatron.exchange.collectives import PeerGroup, new_local_group
from monta_megatron.planner.calibration.points import Shape


def make_groups(
    shape: Shape, nodes: tuple[int, ...], ctas: Ctas
) -> dict[tuple[Resource, int], PeerGroup]:
    """(resource, ranks) -> the group of this rank, made by all ranks in the same order.

    Args:
        shape: nodes and ranks.
        nodes: node of every rank, in order.
        ctas: the budgets of rails and nodes.
    """
    rank, on_node = dist.get_rank(), shape.ranks_per_node
    node, position = divmod(rank, on_node)
    groups: dict[tuple[Resource, int], PeerGroup] = {}
    for part in shape.parts:
        stride = on_node // part
        # inter: the same positions on every node, `stride` apart; intra: neighbours on this node.
        members: dict[Resource, list[int]] = {
            "inter": [r for r in range(len(nodes)) if r % on_node % stride == position % stride],
            "intra": [node * on_node + p for p in range(on_node) if p // part == position // part],
        }
        budgets = {
            "inter": ctas.rail if part == 1 else None,
            "intra": ctas.node if part == on_node else None,
        }
        for resource, ranks in members.items():
            groups[resource, len(ranks)] = PeerGroup(
                name=f"{resource} {len(ranks)}",
                process_group=new_local_group(
                    ranks, f"monta {resource} {part}", dist.group.WORLD, budgets[resource]
                ),
                size=len(ranks),
                rank=ranks.index(rank),
                nodes=tuple(nodes[other] for other in ranks),
            )
    return groups
