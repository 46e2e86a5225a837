"""Megatron's own training loop with settings that reach the dispatcher: losses equal stock's.

The script is the quickstart's; the settings are what a user would add to its command line.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from checkpoints import stored
from commands import Monta, needs_training
from forked_ranks import ForkedRanks

from monta_megatron.emulation import CPU_RANKS_ARGUMENTS
from monta_megatron.tools.launch.run_config import from_words

pytestmark = [pytest.mark.timeout(600), needs_training]

TRAIN = Path(__file__).parents[2] / "scripts" / "quickstart" / "train.py"
HYBRID = Path(__file__).with_name("train_hybrid.py")
# Megatron's hybrid models import it; PyTorch's build for CPUs does not bring it.
HAS_TRITON = find_spec("triton") is not None
ITERATIONS = 4

MODEL = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --micro-batch-size 2 --lr 5e-3 --seed 7 --tokenizer-type NullTokenizer --vocab-size 256
    --mock-data --distributed-timeout-minutes 2 --log-interval 1 --split 90,10,0 --eval-interval 2
    --train-iters {ITERATIONS}
"""
# Chains that are equal to the bit here. With top-2 on two nodes of one rank each a hierarchy adds
# two terms, as stock does.
BITWISE = "--moe-monta-chain alltoall_allgather"
HIERARCHY = "--moe-monta-chain hierarchical_allgather --moe-monta-ranks-per-node 1"

SETTINGS = yaml.safe_load(Path(__file__).with_name("training_settings.yaml").read_text())
# "full_recompute" once more, with the experts of each layer in the pipeline and an optimizer that
# reduces gradients while others are computed.
PIPELINED = """
    --moe-monta-chain hierarchical_allgather --moe-monta-ranks-per-node 2
    --moe-monta-overlap-experts --moe-monta-num-chunks 3
    --use-distributed-optimizer --overlap-grad-reduce
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    hybrid = ("megatron.core.models.hybrid.hybrid_model",) if HAS_TRITON else ()
    # What every training imports, text tokenizers too, and mock data that is shuffled in no time.
    modules = "megatron.training", "megatron.core.models.gpt", "megatron.core.tokenizers.text"
    ranks = ForkedRanks(*modules, "small_mock_data", *hybrid)
    yield ranks
    ranks.close()


class Trained(NamedTuple):
    """The record of a training: unrounded losses, what dispatched, and whether it counted bytes."""

    losses: list[float]
    dispatchers: list[str]
    counted: bool


STOCK, OURS = (["MoEAlltoAllTokenDispatcher"], False), (["MontaTokenDispatcher"], True)


def train(
    ranks: ForkedRanks, dispatcher: str, settings: str, folder: Path, script: Path = TRAIN
) -> Trained:
    """Train on 4 CPU ranks, in a new folder."""
    folder.mkdir(parents=True)
    record = folder / "record.jsonl"
    words = f"--record {record} --moe-token-dispatcher-type {dispatcher} {MODEL} {settings}"
    if "--data-path" in settings:
        words = words.replace("--mock-data", "")
    words = words.replace("{folder}", str(folder)).split()
    result = ranks.run(str(script), *words, *CPU_RANKS_ARGUMENTS)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    # A training that exits early has no end.
    end = entries[-1] if "dispatcher" in entries[-1] else {"dispatcher": [], "bytes": {}}
    return Trained(losses, end["dispatcher"], sum(end["bytes"].values()) > 0)


@pytest.mark.parametrize("name", SETTINGS)
def test_training_settings(name: str, ranks: ForkedRanks, tmp_path: Path) -> None:
    settings, options = SETTINGS[name]
    ours = train(ranks, "monta", f"{settings} {options}", tmp_path / "ours")
    stock = train(ranks, "alltoall", settings, tmp_path / "stock")
    assert len(stock.losses) >= ITERATIONS
    assert (ours, stock) == ((stock.losses, *OURS), (stock.losses, *STOCK))
    if name == "full_recompute":
        settings = f"{settings} {PIPELINED}"
        split = train(ranks, "monta", settings, tmp_path / "pipelined")
        # Partial sums travel, and a weight's gradient is a sum over the chunks.
        assert split.losses == pytest.approx(stock.losses, rel=1e-6)
    if "--save" in options:
        tracker = tmp_path / "ours" / "checkpoint" / "latest_checkpointed_iteration.txt"
        assert tracker.read_text() == str(ITERATIONS)


# Four ranks share the dense parameters, two each expert.
SHARED = "--num-layers 2 --expert-model-parallel-size 2 --global-batch-size 8 --eval-iters 0"
# What runs behind other work, each with all before it. Two instances of the optimizer add the
# gradients of two ranks each, then both sums, as Gloo does for four ranks.
OVERLAPPED = (
    "--overlap-grad-reduce",
    "--use-distributed-optimizer",
    "--overlap-param-gather",
    "--ddp-bucket-size 1",
    "--num-distributed-optimizer-instances 2",
)


def test_an_optimizer_behind_other_work(ranks: ForkedRanks, tmp_path: Path) -> None:
    """Its collectives start in torch's `_coalescing_manager`; only the manager is waited for."""
    stock = train(ranks, "alltoall", SHARED, tmp_path / "stock")
    assert len(stock.losses) == ITERATIONS
    settings = f"{SHARED} {BITWISE}"
    for number, option in enumerate(OVERLAPPED):
        settings = f"{settings} {option}"
        ours = train(ranks, "monta", settings, tmp_path / str(number))
        assert ours == (stock.losses, *OURS), settings


# Layers in one tensor, an optimizer by parameter; layers apart, a distributed optimizer that can be
# sharded anew.
PLACED = {
    "layers_together": """
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias --swiglu
    """,
    "layers_apart": """
        --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --moe-layer-freq ([0,1])
    """,
}


@pytest.mark.parametrize("name", PLACED)
def test_a_training_goes_on_with_placed_experts(
    name: str,
    ranks: ForkedRanks,
    tmp_path: Path,
    monta: Monta,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced, placed, applied and undone: the order of fp32 sums alone changes, and comes back."""
    saved, placed, undone, again = (
        tmp_path / run for run in ("saved", "placed", "undone", "again")
    )
    # Text, whose experts cluster.
    monkeypatch.syspath_prepend(TRAIN.parent)
    import prepare_text

    texts = [b"Token %d travels to its experts and back. " % number * 20 for number in range(50)]
    data = prepare_text.prepare(texts, tmp_path / "data")
    settings = f"""{PLACED[name]} {BITWISE} --num-layers 2 --expert-model-parallel-size 2
        --global-batch-size 8 --eval-iters 0 --ckpt-format torch_dist --no-save-rng --no-load-rng
        --data-path {data} --data-cache-path {tmp_path / "cache"}"""

    def trained(run: str, more: str) -> list[float]:
        return train(ranks, "monta", f"{settings} {more}", tmp_path / run).losses

    # Step 1: train two iterations with a trace, and place.
    trace, placement, model = (
        tmp_path / file for file in ("trace", "placement.json", "model.yaml")
    )
    trained(
        "first",
        f"--save {saved} --save-interval 2 --exit-interval 2 --moe-routing-trace-path {trace}",
    )
    layers = ["1"] if name == "layers_apart" else ["0", "1"]
    model.write_text(yaml.safe_dump(from_words(f"{MODEL} {settings}".split())))
    words = ["place", "--model", model, "--cluster", "a800_2x8_ib200", "--ep", "2"]
    report = monta.document(*words, "--trace", trace, "--out", placement)
    assert list(report["placement"]) == layers and report["refused"] is None
    copies = report["copies_per_token"]
    assert copies["after"]["rank"] < copies["before"]["rank"] <= 2

    # Step 2: applied, then undone: tensors and objects of the checkpoint, bit for bit.
    apply = ["place", "--placement", placement, "--apply"]
    for source, *undo, out in ((saved, placed), (placed, "--undo", undone), (undone, again)):
        assert monta(*apply, source, *undo, "--out", out)[0] == 0
    before, after = stored(saved), stored(placed)
    moved = [key for key in before if before[key] != after[key]]
    assert moved and all("mlp.router" in key or "mlp.experts" in key for key in moved)
    assert (stored(undone), stored(again)) == (before, after)
    # What is there is kept; and a placement of another model moves nothing.
    content = sorted(tmp_path.rglob("*"))
    assert monta.refusal(*apply, saved, "--out", placed)
    placement.write_text(json.dumps({"placement": {"1": [*range(8)]}}))
    assert "layer 1: got 4" in monta.refusal(*apply, saved, "--out", tmp_path / "other")
    assert sorted(tmp_path.rglob("*")) == content

    # Step 3: train on. Megatron 0.19 cannot load that distributed optimizer on CPU ranks.
    if name == "layers_together":
        went_on = trained("went_on", f"--load {saved}")
        assert trained("with_placed", f"--load {placed}") == pytest.approx(went_on, rel=1e-6)
        assert len(went_on) == 2


# Attention and MoE layers, in an order of its own on each of two pipeline stages.
HYBRID_SETTINGS = """
    --hybrid-layer-pattern *E*E|E*E* --pipeline-model-parallel-size 2
    --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 32
    --global-batch-size 8 --eval-iters 1
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Megatron's hybrid models need Triton")
def test_training_a_hybrid_model(ranks: ForkedRanks, tmp_path: Path) -> None:
    def trained(name: str, dispatcher: str, options: str) -> Trained:
        return train(ranks, dispatcher, f"{HYBRID_SETTINGS} {options}", tmp_path / name, HYBRID)

    stock = trained("stock", "alltoall", "")
    assert len(stock.losses) >= ITERATIONS and stock[1:] == STOCK
    ours = (stock.losses, *OURS)
    assert trained("flag", "monta", HIERARCHY) == ours
    # The way in that patches nothing: a layer spec; the planner chooses.
    assert trained("spec", "alltoall", "--monta-in-spec") == ours
