"""What is found about copies: it grows with the pairs that are there, not with the longest list."""

import dataclasses

import torch
from fake_world import LAYOUTS, empty_copies, routing_map
from test_stream_safety import Layer

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.executor import dispatch
from monta_megatron.exchange.rows import Copies, PartBounds, expert_ids_of, find_copies

# 256 experts on two nodes of 8 ranks.
LAYOUT = dataclasses.replace(LAYOUTS[16, 1], num_local_experts=16)


def found_copies(ids: torch.Tensor, parts: Parts, num_copies: int) -> Copies:
    copies = empty_copies(len(ids), num_copies, parts, ids.device)
    copies.row.fill_(-1)
    find_copies(ids, PartBounds.of(parts, len(ids) + 3, num_copies + 2, ids), copies)
    return copies


def test_by_hand() -> None:
    """The example of `find_copies`."""
    ids = torch.tensor([[1, 4, 5], [0, 5, 8]], dtype=torch.int32)
    copies = found_copies(ids, Parts(first=0, size=4, num_parts=2), num_copies=4)
    assert copies.row.tolist() == [0, 1, 0, 1]
    assert copies.by_row.tolist() == [0, 2, 1, 3]
    assert copies.row_starts.tolist() == [0, 2, 4]
    assert copies.place is None
    copies_of_rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.bfloat16)
    assert copies.sum_by_row(copies_of_rows, torch.float32).tolist() == [[5.0], [10.0]]
    # One copy for every expert of 4 to 7.
    by_expert = found_copies(ids, Parts(first=4, size=1, num_parts=4), num_copies=3)
    assert by_expert.place is not None
    assert by_expert.row.tolist() == [0, 0, 1] and by_expert.place.tolist() == [1, 2, 1]
    assert ids[by_expert.row, by_expert.place].tolist() == [4, 5, 5]


def test_padding_of_the_map_takes_memory_for_its_pairs_alone() -> None:
    """Padded for quantization: few tokens have long lists, and each row carries one so long."""
    routed = routing_map(4096, LAYOUT.num_experts, padded=True)
    longest, num_pairs = int(routed.sum(dim=1).max()), int(routed.sum())
    assert longest > 200 and num_pairs < 10 * 4096
    layer = Layer("hierarchical_alltoall", LAYOUT, routing_map=routed)
    with layer.recorder, torch.no_grad():
        dispatch(layer.exchange, *layer.inputs())
    # All ranks have the same tokens: those of both nodes' rail, and then of all ranks, come here.
    first, num_local = LAYOUT.first_expert, LAYOUT.num_local_experts
    on_node = routed.unflatten(1, (LAYOUT.num_nodes, -1))[:, LAYOUT.node]
    num_pairs += LAYOUT.num_nodes * int(on_node.sum())
    num_pairs += len(LAYOUT.nodes) * int(routed[:, first : first + num_local].sum())
    indices = layer.exchange.indices
    # Five numbers for each, at most, where lists would take 238.
    assert indices.memory is not None
    # Three stages and chunks, with one row start more than rows each.
    assert indices.memory.nbytes <= 5 * 8 * (num_pairs + 3 * 3)


def test_expert_ids_keep_nothing_of_their_width_until_backward() -> None:
    routed = routing_map(512, LAYOUT.num_experts, padded=True)
    probs = torch.rand(routed.shape).requires_grad_()
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lists, ids = expert_ids_of(routed, probs, int(routed.sum(dim=1).max()))
    assert [each.data_ptr() for each in saved] == [routed.data_ptr()]
    padded = torch.nn.functional.pad(probs * routed, (0, 1))
    assert torch.equal(lists, padded.gather(1, ids.long()))
    gradient = torch.rand(lists.shape)
    lists.backward(gradient)
    expected = torch.zeros_like(padded).scatter_(1, ids.long(), gradient)[:, :-1]
    assert torch.equal(probs.grad, expected)
