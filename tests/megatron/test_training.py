"""Megatron's own training loop with settings that reach the dispatcher: losses equal stock's.

The script is the quickstart's; the settings are what a user would add to its command line.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
import yaml
from forked_ranks import ForkedRanks
from torch.distributed.checkpoint import FileSystemReader

from monta_megatron.cli import main
from monta_megatron.tools.placed_checkpoint import iteration_folder

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip(
        "megatron.training is not installed: pip install 'megatron-core[training]>=0.19'",
        allow_module_level=True,
    )

SCRIPTS = Path(__file__).parents[2] / "scripts" / "quickstart"
HYBRID = Path(__file__).with_name("train_hybrid.py")
# Megatron's hybrid models import it; PyTorch's build for CPUs does not bring it.
HAS_TRITON = importlib.util.find_spec("triton") is not None
ITERATIONS = 4

MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --micro-batch-size 2 --lr 5e-3 --seed 7 --tokenizer-type NullTokenizer --vocab-size 256
    --distributed-timeout-minutes 2 --log-interval 1 --split 90,10,0 --eval-interval 2
"""

SETTINGS = {
    # Gradient accumulation (2 micro-batches), evaluation on the way, everything recomputed.
    "full_recompute": """
        --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2
        --expert-tensor-parallel-size 2 --global-batch-size 8 --eval-iters 1
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    """,
    # Dense and MoE layers in turn on both pipeline stages.
    "mixed_layers_in_a_pipeline": """
        --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
        --moe-layer-freq ([0,1]*2) --global-batch-size 16 --eval-iters 1
        --moe-expert-capacity-factor 1.0 --moe-shared-expert-intermediate-size 32
        --recompute-granularity selective --recompute-modules moe --use-distributed-optimizer
    """,
    # The exchange of one micro-batch is hidden behind the work of another one.
    "overlapped_micro_batches_in_a_pipeline": """
        --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
        --expert-model-parallel-size 2 --bf16 --overlap-moe-expert-parallel-comm
        --moe-layer-freq ([1,1,0,1]) --moe-shared-expert-intermediate-size 32
        --global-batch-size 16 --eval-iters 1 --train-iters 9
    """,
    # The first stage has no MoE layer, so it makes none of our groups; then Megatron makes more
    # groups, for a checkpoint that is written in the background.
    "dense_first_stage_and_asynchronous_checkpoint": """
        --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
        --moe-layer-freq ([0]*2+[1]*2) --global-batch-size 8 --eval-iters 0
        --save {folder}/checkpoint --save-interval 2 --async-save --use-persistent-ckpt-worker
        --async-strategy mcore --ckpt-format torch_dist
    """,
}
# Added where the dispatcher is ours: chains that are equal to the bit here. With top-2 on two nodes
# of one rank each a hierarchy adds two terms, as stock does.
BITWISE = "--moe-monta-chain alltoall_allgather"
HIERARCHY = "--moe-monta-chain hierarchical_allgather --moe-monta-ranks-per-node 1"
OPTIONS = {
    # The planner's candidates are tried; in the second training the fastest stays.
    "dense_first_stage_and_asynchronous_checkpoint": "--moe-monta-ranks-per-node 1",
    "overlapped_micro_batches_in_a_pipeline": (
        "--moe-monta-ranks-per-node 1 --moe-monta-tune-steps 6"
    ),
}


# Trained once more with the experts of each layer in the pipeline, by an optimizer that reduces
# gradients while others are computed.
PIPELINED = {
    "full_recompute": """
        --moe-monta-chain hierarchical_allgather --moe-monta-ranks-per-node 2
        --moe-monta-overlap-experts --moe-monta-num-chunks 3
        --use-distributed-optimizer --overlap-grad-reduce
    """
}


@pytest.fixture(scope="module")
def data_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little text as Megatron's indexed dataset."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import prepare_text
    finally:
        sys.path.remove(str(SCRIPTS))
    folder = tmp_path_factory.mktemp("data")
    # Many documents: a split without one would keep Megatron's dataset builder looping for ever.
    texts = [b"Token %d travels to its experts and back. " % number * 20 for number in range(50)]
    return prepare_text.prepare(texts, folder)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    hybrid = ("megatron.core.models.hybrid.hybrid_model",) if HAS_TRITON else ()
    ranks = ForkedRanks("megatron.training", "megatron.core.models.gpt", *hybrid)
    yield ranks
    ranks.close()


def train(
    ranks: ForkedRanks,
    dispatcher: str,
    settings: str,
    data_prefix: Path,
    folder: Path,
    script: Path = SCRIPTS / "train.py",
) -> list[dict]:
    """Train on 4 CPU ranks; the lines of the run's record."""
    from monta_megatron.emulation import CPU_RANKS_ARGUMENTS

    folder = folder / dispatcher
    folder.mkdir()
    record = folder / "record.jsonl"
    settings = settings.format(folder=folder)
    arguments = f"{MODEL} --train-iters {ITERATIONS} {settings}".split()
    result = ranks.run(
        str(script),
        *("--record", str(record), "--moe-token-dispatcher-type", dispatcher, *arguments),
        *("--data-path", str(data_prefix), "--data-cache-path", str(folder / "cache")),
        *CPU_RANKS_ARGUMENTS,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return [json.loads(line) for line in record.read_text().splitlines()]


def losses_of(record: list[dict]) -> list[float]:
    return [entry["loss"] for entry in record if "loss" in entry]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SETTINGS)
def test_training_settings(
    name: str, ranks: ForkedRanks, data_prefix: Path, tmp_path: Path
) -> None:
    settings = f"{SETTINGS[name]} {OPTIONS.get(name, BITWISE)}"
    ours = train(ranks, "monta", settings, data_prefix, tmp_path)
    stock = train(ranks, "alltoall", SETTINGS[name], data_prefix, tmp_path)
    losses = losses_of(ours)
    assert len(losses) >= ITERATIONS
    assert losses == losses_of(stock)
    assert ours[-1]["dispatcher"] == ["MontaTokenDispatcher"]
    assert stock[-1]["dispatcher"] == ["MoEAlltoAllTokenDispatcher"]
    assert sum(ours[-1]["bytes"].values()) > 0
    if name in PIPELINED:
        (tmp_path / "pipelined").mkdir()
        settings = f"{SETTINGS[name]} {PIPELINED[name]}"
        split = train(ranks, "monta", settings, data_prefix, tmp_path / "pipelined")
        # Partial sums travel, and a weight's gradient is a sum over the chunks.
        assert losses_of(split) == pytest.approx(losses, rel=1e-6)
    for saved in tmp_path.glob("*/checkpoint"):
        assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)


CLUSTER = Path(__file__).parents[2] / "configs" / "clusters" / "a800_2x8_ib200.yaml"
# The sizes of MODEL, as a model file has them.
ROUTER = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "ffn-hidden-size": 64,
    "seq-length": 32,
    "num-experts": 4,
    "moe-router-topk": 2,
    "micro-batch-size": 2,
}
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLACED)
def test_a_training_goes_on_with_placed_experts(
    name: str,
    ranks: ForkedRanks,
    data_prefix: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Traced, placed, applied and undone: the order of fp32 sums alone changes, and comes back."""
    saved, placed, undone = (tmp_path / folder for folder in ("saved", "placed", "undone"))
    settings = f"""{PLACED[name]} {BITWISE} --num-layers 2 --expert-model-parallel-size 2
        --global-batch-size 8 --eval-iters 0 --ckpt-format torch_dist --no-save-rng --no-load-rng"""

    def trained(run: str, more: str) -> list[float]:
        (tmp_path / run).mkdir()
        return losses_of(train(ranks, "monta", f"{settings} {more}", data_prefix, tmp_path / run))

    # Step 1: train two iterations with a trace, and place.
    trace, placement = tmp_path / "trace", tmp_path / "placement.json"
    trained(
        "first",
        f"--save {saved} --save-interval 2 --exit-interval 2 --moe-routing-trace-path {trace}",
    )
    model = {**ROUTER, "moe-layer-freq": "([0,1])" if name == "layers_apart" else 1}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model))
    words = ["place", "--model", f"{tmp_path}/model.yaml", "--cluster", str(CLUSTER), "--ep", "2"]
    assert main([*words, "--trace", str(trace), "--out", str(placement), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    layers = ["1"] if name == "layers_apart" else ["0", "1"]
    assert list(report["placement"]) == layers and report["refused"] is None
    copies = report["copies_per_token"]
    assert copies["after"]["rank"] < copies["before"]["rank"] <= 2

    # Step 2: applied, then undone: tensors and objects of the checkpoint, bit for bit.
    apply = ["place", "--placement", str(placement), "--apply"]
    assert main([*apply, str(saved), "--out", str(placed)]) == 0
    assert main([*apply, str(placed), "--undo", "--out", str(undone)]) == 0
    before, after, back = map(stored, (saved, placed, undone))
    moved = [key for key in before if before[key] != after[key]]
    assert moved and all("mlp.router" in key or "mlp.experts" in key for key in moved)
    assert before == back
    assert main([*apply, str(undone), "--out", f"{tmp_path}/again"]) == 0
    assert stored(tmp_path / "again") == after
    # What is there is kept; and a placement of another model moves nothing.
    assert main([*apply, str(saved), "--out", str(placed)]) == 2
    content = sorted(tmp_path.rglob("*"))
    for layer, experts, says in (("1", 8, "layer 1: got 4"), ("2", 4, "layer 2: got 0")):
        placement.write_text(json.dumps({"placement": {layer: [*range(experts)]}}))
        capsys.readouterr()
        assert main([*apply, str(saved), "--out", f"{tmp_path}/other"]) == 2
        assert says in capsys.readouterr().err and sorted(tmp_path.rglob("*")) == content

    # Step 3: train on. Megatron 0.19 cannot load that distributed optimizer on CPU ranks.
    if name == "layers_together":
        went_on = trained("went_on", f"--load {saved}")
        assert trained("with_placed", f"--load {placed}") == pytest.approx(went_on, rel=1e-6)
        assert trained("with_undone", f"--load {undone}") == went_on and len(went_on) == 2


def stored(checkpoint: Path) -> dict[str, bytes]:
    """Piece of a checkpoint -> the bytes of its tensor, or of its object."""
    folder = iteration_folder(checkpoint)
    content = {}
    for key, info in FileSystemReader(folder).read_metadata().storage_data.items():
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            piece = file.read(info.length)
        if key.offset is not None:
            tensor = torch.load(BytesIO(piece))
            piece = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        content[f"{key.fqn} {key.offset}"] = piece
    return content


# Attention, MoE and MLP layers, in an order of its own on each of two pipeline stages.
HYBRID_SETTINGS = """
    --hybrid-layer-pattern *E*-|E*E* --pipeline-model-parallel-size 2
    --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 32
    --global-batch-size 8 --eval-iters 1
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_TRITON, reason="Megatron's hybrid models need Triton")
def test_training_a_hybrid_model(ranks: ForkedRanks, data_prefix: Path, tmp_path: Path) -> None:
    def trained(name: str, dispatcher: str, options: str) -> tuple[list[float], list[str], bool]:
        folder = tmp_path / name
        folder.mkdir()
        settings = f"{HYBRID_SETTINGS} {options}"
        record = train(ranks, dispatcher, settings, data_prefix, folder, HYBRID)
        return losses_of(record), record[-1]["dispatcher"], sum(record[-1]["bytes"].values()) > 0

    stock, dispatchers, _ = trained("stock", "alltoall", "")
    assert len(stock) >= ITERATIONS and dispatchers == ["MoEAlltoAllTokenDispatcher"]
    ours = (stock, ["MontaTokenDispatcher"], True)
    assert trained("flag", "monta", HIERARCHY) == ours
    # The way in that patches nothing: a layer spec; the planner chooses.
    assert trained("spec", "alltoall", "--monta-in-spec") == ours
