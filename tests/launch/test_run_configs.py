"""Every file of configs/runs: Megatron's parser, its validation, its configuration, and the model.

Megatron sees the real WORLD_SIZE and the file's own environment, on CPU stand-ins.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded

from monta_megatron.planner.model import load_model
from monta_megatron.tools.launch.prepare import Run, prepare
from monta_megatron.tools.launch.run_config import words_of

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted((CONFIGS / "runs").glob("*.yaml"))

IMPORTED_ONCE = (
    "megatron.training.arguments",
    "monta_megatron.tools.launch.megatron_arguments",
)
FIELDS = (
    *("hidden_size", "num_layers", "num_attention_heads", "num_query_groups"),
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_dtype", "bf16"),
    *("moe_token_dispatcher_type", "moe_monta_cluster", "expert_tensor_parallel_size"),
)
# Those that the model names as Megatron does.
OF_THE_MODEL = (
    *("num_layers", "num_attention_heads", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_router_num_groups", "moe_router_group_topk", "seq_length", "micro_batch_size"),
)
ARGUMENTS = ("seq_length", "micro_batch_size", "global_batch_size", "data_parallel_size")


def print_validated(words: list[str], environment: dict[str, str], world_size: int) -> None:
    """Check a run's arguments; print what Megatron makes of them."""
    from megatron.training import arguments

    from monta_megatron.tools.launch.megatron_arguments import check

    if "MONTA_CPU_RANKS" not in environment:
        # The stand-ins have set it, which a run on GPUs cannot rely on.
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(environment, RANK="0", WORLD_SIZE=str(world_size))
    made = []
    of_megatron = arguments.core_transformer_config_from_args

    def recorded(args: Any) -> Any:
        made.extend((of_megatron(args), args))
        return made[0]

    arguments.core_transformer_config_from_args = recorded
    answer = check(words)
    assert (answer.problem, answer.refusal) == (None, None), answer
    config, args = made
    fields = {name: getattr(config, name) for name in FIELDS}
    fields |= {name: getattr(args, name) for name in ARGUMENTS}
    # Settings that need Transformer Engine; nothing else is skipped.
    fields["unchecked"] = answer.unchecked
    print("RESULT", json.dumps(fields, default=str))


def print_refusal(words: list[str], world_size: int) -> None:
    from monta_megatron.tools.launch.megatron_arguments import check

    os.environ.update(RANK="0", WORLD_SIZE=str(world_size))
    answer = check(words)
    print(f"{'problem' if answer.problem else 'refusal'}: {answer.problem or answer.refusal}")


@pytest.fixture(scope="module")
def megatron() -> Iterator[Preloaded]:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("needs megatron.training: pip install 'megatron-core[training]>=0.19'")
    process = Preloaded(*IMPORTED_ONCE, MONTA_CPU_RANKS="1")
    yield process
    process.close()


def read(path: Path) -> Run:
    return prepare(str(path), [], None, dry_run=True)


def validated(megatron: Preloaded, run: Run) -> dict[str, Any]:
    """Fields of the TransformerConfig and arguments, as Megatron has them after its checks."""
    words = [word for argument in words_of(run.arguments) for word in argument]
    environment = {name: str(value) for name, value in run.config.environment.items()}
    world_size = run.config.layout.world_size
    result = megatron.run(print_validated, words, environment, world_size)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_megatron_takes_it_and_the_model_agrees(path: Path, megatron: Preloaded) -> None:
    run = read(path)
    args = validated(megatron, run)
    model = load_model(path.stem)
    num_layers, frequency = args["num_layers"], args["moe_layer_freq"]
    expected = {
        **{name: args[name] for name in OF_THE_MODEL},
        "row_size": args["hidden_size"],
        "num_experts": args["num_moe_experts"],
        "value_bytes": 2 if args["bf16"] else 4,
    }
    assert {name: getattr(model, name) for name in expected} == expected
    num_moe_layers = sum(frequency) if isinstance(frequency, list) else num_layers
    assert sum(model.moe_layers) == num_moe_layers
    assert args["moe_token_dispatcher_type"] == "monta"
    assert args["moe_monta_cluster"] == run.config.cluster
    assert args["expert_tensor_parallel_size"] == run.config.layout.etp
    unchecked = [] if args["unchecked"] is None else args["unchecked"].partition(":")[0].split(", ")
    assert set(unchecked) <= {"moe_permute_fusion", "apply_rope_fusion"}


def test_megatron_takes_models_without_a_run(tmp_path: Path, megatron: Preloaded) -> None:
    models = {path.stem for path in (CONFIGS / "models").glob("*.yaml")}
    for name in sorted(models - {path.stem for path in FILES}):
        run = tmp_path / f"{name}.yaml"
        text = (CONFIGS / "runs" / "qwen3_30b_a3b.yaml").read_text().replace("qwen3_30b_a3b", name)
        run.write_text(text.replace("../", f"{CONFIGS}/"))
        args, model = validated(megatron, read(run)), load_model(name)
        expected = {field: args[field] for field in OF_THE_MODEL}
        assert {field: getattr(model, field) for field in expected} == expected
        assert (model.row_size, model.num_experts) == (args["hidden_size"], args["num_moe_experts"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_fits_the_cluster(path: Path) -> None:
    run = read(path)
    assert run.plan is not None
    fits = not any("does not fit" in note for note in run.notes)
    # With weights and gradients alone on the GPU.
    assert fits or "optimizer-cpu-offload" in run.arguments


MOE = "--num-experts 4 --moe-token-dispatcher-type monta"
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32"
TRAINED = f"{MOE} {MODEL} --seq-length 32 --micro-batch-size 2 --no-rope-fusion --bf16"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--min-lrr 0", "problem: --min-lrr: no argument of Megatron-Core"),
        ("--min-lrr 0", "did you mean --min-lr?"),
        # argparse's own words.
        ("--lr fast", "problem: --lr: invalid float value: 'fast'"),
        ("--lr", "--lr: expected one argument"),
        ("--lr-decay-style cosin", "--lr-decay-style: invalid choice: 'cosin'"),
        ("--bf16 1", "got '1', a value of no argument"),
        ("--moe-layer-freq [x]", "problem: --moe-layer-freq: invalid"),
        # Ours.
        (f"{MOE} --moe-monta-num-chunks 0", "moe_monta_num_chunks: got 0, must be an integer >= 1"),
        (f"{MOE} --cuda-graph-impl local", "not supported"),
        ("--moe-token-dispatcher-type monta", "problem: moe_token_dispatcher_type: got 'monta'"),
        # Megatron's validation, its batches, and its TransformerConfig.
        (f"{TRAINED} --seq-length 64", "refusal: AssertionError"),
        (f"{TRAINED} --global-batch-size 6", "divisible by"),
        (f"{TRAINED} --moe-pad-expert-input-to-capacity", "moe_expert_capacity_factor must be set"),
        (
            f"{TRAINED} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm {FULL}",
            "disable full recomputation when enabling overlap_moe_expert_parallel_comm",
        ),
        (TRAINED, "refusal: None"),
    ],
)
def test_what_is_refused(words: str, said: str, megatron: Preloaded) -> None:
    result = megatron.run(print_refusal, words.split(), 2)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(("prob", "refus")))
    assert said in line
