"""The process groups of an exchange in one process."""

import torch.distributed as dist

from monta_megatron.chains import CHAINS
from monta_megatron.exchange.groups import peer_groups
from monta_megatron.topology.layout import Layout


def test_groups_do_not_outlive_their_torch_distributed() -> None:
    layout = Layout(ep=1, etp=1, num_local_experts=2, rank=0, nodes=(0,))
    chains = [CHAINS["hierarchical_allgather"]]
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            megatron_groups = dict.fromkeys(("ep", "etp", "tp_ep"), dist.group.WORLD)
            groups = peer_groups(chains, layout, megatron_groups)
            assert {name: group.size for name, group in groups.items()} == {"node": 1, "rail": 1}
        finally:
            dist.destroy_process_group()
