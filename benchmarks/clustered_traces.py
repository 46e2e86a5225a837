"""Router traces of experts that cluster as Occult's do, for `monta place` and `monta bench`.

    python benchmarks/clustered_traces.py FOLDER
    monta place --trace FOLDER/trace --model FOLDER/model.yaml ... --out FOLDER/placement.json
    python benchmarks/clustered_traces.py FOLDER --placement FOLDER/placement.json

The first call writes the trace to place experts by. The second writes one exchange that was held
out from it, as a trace for each way of routing: uniform, as_trained, placed, and pruned to two
ranks and to one. Top-8 of 64 experts on 4 ranks, as OLMoE in Occult (arXiv 2505.13345), whose
tokens need 3.02 ranks after its placement. A token prefers the experts of one hidden cluster of 16.

Notation: T = tokens of a rank, E = experts, R = ranks.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from monta_megatron.integration.limited_routing import within_best_places
from monta_megatron.tools.place.placement import read_placement

NUM_EXPERTS, TOPK, NUM_RANKS, TOKENS = 64, 8, 4, 512
# Of which the last ones, a quarter, are held out; the very last one is exchanged.
STEPS = 16
# Log-weight of the preferred cluster, for 3.02 ranks of a token where every cluster is on one.
PREFERENCE = 1.73
SEED = 1


def scores_of(rank: int, step: int, preference: float) -> NDArray[np.float64]:
    """[T, E] scores of a router, the experts in the order of the training."""
    generator = np.random.default_rng([SEED, rank, step])
    clusters = generator.integers(NUM_RANKS, size=(TOKENS, 1))
    scores = generator.gumbel(size=(TOKENS, NUM_EXPERTS))
    order = np.random.default_rng(SEED).permutation(NUM_EXPERTS)
    # [1, E] == [T, 1]
    return scores + preference * (order[None, :] * NUM_RANKS // NUM_EXPERTS == clusters)


def record(rank: int, step: int, scores: NDArray[np.float64]) -> str:
    """A line of Megatron's tracer."""
    experts = np.sort(np.argsort(-scores, axis=1)[:, :TOPK], axis=1)
    fields = {"step": step, "block": "decoder", "layer": 0, "rank": rank}
    sizes = {"num_tokens": TOKENS, "topk": TOPK}
    return json.dumps(fields | sizes | {"top_indices": experts.tolist()}) + "\n"


def write(folder: Path, lines_of: list[list[str]]) -> None:
    """Write a trace: the lines of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, lines in enumerate(lines_of):
        (folder / f"router_trace_rank{rank}.jsonl").write_text("".join(lines))


def write_training(folder: Path) -> None:
    """The trace to place experts by, and the model that it is of."""
    lines_of = [
        [record(rank, step, scores_of(rank, step, PREFERENCE)) for step in range(STEPS)]
        for rank in range(NUM_RANKS)
    ]
    write(folder / "trace", lines_of)
    olmoe = yaml.safe_load(Path("configs/models/olmoe_1b_7b.yaml").read_text())
    olmoe |= {"name": "OLMoE's router, one layer", "num_layers": 1, "num_moe_layers": 1}
    olmoe |= {"num_parameters_billions": 0.6, "hidden_size": 1024, "dtype": "fp32"}
    (folder / "model.yaml").write_text(yaml.safe_dump(olmoe))


def write_exchanges(folder: Path, placement: Path) -> None:
    """One exchange in each way of routing."""
    order = read_placement(placement).layers[0]
    last = range(NUM_RANKS)
    trained = [scores_of(rank, STEPS - 1, PREFERENCE) for rank in last]
    placed = [scores[:, order] for scores in trained]
    ways = {
        "uniform": [scores_of(rank, STEPS - 1, 0.0) for rank in last],
        "as_trained": trained,
        "placed": placed,
        **{
            name: [
                within_best_places(torch.from_numpy(scores), NUM_RANKS, most).numpy()
                for scores in placed
            ]
            for name, most in (("two_ranks", 2), ("one_rank", 1))
        },
    }
    for name, scores_by_rank in ways.items():
        write(folder / name, [[record(rank, 0, scores_by_rank[rank])] for rank in last])


def main() -> None:
    """Write traces into the folder that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--placement", metavar="FILE", type=Path, help="what monta place wrote")
    parsed = parser.parse_args()
    if parsed.placement is None:
        write_training(parsed.folder)
    else:
        write_exchanges(parsed.folder, parsed.placement)


if __name__ == "__main__":
    main()
