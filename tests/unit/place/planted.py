"""Router traces in which experts belong together, and the placement that they were made from."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TOPK = 8


def planted_routing(
    num_experts: int, num_ranks: int, num_nodes: int, num_tokens: int, strength: float, seed: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Tokens that prefer one node's experts and, there, those of two ranks or more.

    Args:
        num_experts: E, of which each of `num_ranks` ranks has as many, in order.
        num_ranks, num_nodes: of the exchange.
        num_tokens: T.
        strength: of each preference, as a log-weight; 0 gives uniform routing.
        seed: of the draw.

    Returns:
        [T, E] routing with the experts in a random order, and [E] the order that puts them back.
    """
    generator = np.random.default_rng(seed)
    rank_of, node_of = (np.arange(num_experts) * n // num_experts for n in (num_ranks, num_nodes))
    nodes = generator.integers(num_nodes, size=(num_tokens, 1))
    num_wanted = max(2, TOPK * num_ranks // num_experts)
    per_node = num_ranks // num_nodes
    ranks = nodes * per_node + generator.integers(per_node, size=(num_tokens, num_wanted))
    scores = generator.gumbel(size=(num_tokens, num_experts)) + strength * (node_of == nodes)
    scores += strength * (rank_of == ranks[:, :, None]).any(axis=1)
    in_order = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(in_order, np.argsort(-scores, axis=1)[:, :TOPK], True, axis=1)
    shuffled = generator.permutation(num_experts)
    return in_order[:, shuffled], np.argsort(shuffled)


def write_trace(folder: Path, rank: int, records: Iterable[Mapping[str, object]]) -> None:
    """Write a rank's records as Megatron's tracer does."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": 0, "rank": rank, **each}) for each in records]
    (folder / f"router_trace_rank{rank}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def record(layer: int, top_indices: list[list[int]]) -> dict[str, object]:
    """A layer's tokens, each as the list of its experts."""
    sizes = {"layer": layer, "num_tokens": len(top_indices)}
    return {"block": "decoder", **sizes, "top_indices": top_indices}
