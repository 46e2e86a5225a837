"""Every model and every file of configs/runs: Megatron's parser, validation and configuration.

Megatron sees the real WORLD_SIZE and the file's own environment, on CPU stand-ins.
"""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from preloaded import Preloaded
from run_files import CONFIGS

from monta_megatron.planner.model import load_model
from monta_megatron.tools.launch.prepare import prepare
from monta_megatron.tools.launch.run_config import words_of

pytestmark = pytest.mark.timeout(120)

MODELS = sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml"))
IMPORTED_ONCE = (
    "megatron.training.arguments",
    "megatron.core.tokenizers.text",
    "monta_megatron.tools.launch.megatron_arguments",
)
# Those that the model names as Megatron does.
OF_THE_MODEL = (
    *("num_layers", "num_attention_heads", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_router_num_groups", "moe_router_group_topk", "seq_length", "micro_batch_size"),
)


def print_answer(words: list[str], environment: dict[str, str], world_size: int) -> None:
    """Check a run's arguments; print the answer, and what Megatron makes of them."""
    from megatron.training import arguments

    from monta_megatron.tools.launch.megatron_arguments import check

    if "MONTA_CPU_RANKS" not in environment:
        # The stand-ins have set it, which a run on GPUs cannot rely on.
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(environment, RANK="0", WORLD_SIZE=str(world_size))
    made: dict[str, Any] = {}
    of_megatron = arguments.core_transformer_config_from_args

    def recorded(args: Any) -> Any:
        config = of_megatron(args)
        made.update({**vars(args), **vars(config)})
        return config

    arguments.core_transformer_config_from_args = recorded
    print("ANSWER", json.dumps([vars(check(words)), made], default=str))


def answer(
    megatron: Preloaded, words: list[str], environment: dict[str, str], world_size: int
) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Megatron's answer; its arguments and TransformerConfig after its checks."""
    result = megatron.run(print_answer, words, environment, world_size)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("ANSWER "))
    said, made = json.loads(line.removeprefix("ANSWER "))
    return said, made


@pytest.fixture(scope="module")
def megatron() -> Iterator[Preloaded]:
    if find_spec("megatron.training") is None:
        pytest.skip("needs megatron.training: pip install 'megatron-core[training]>=0.19'")
    process = Preloaded(*IMPORTED_ONCE, MONTA_CPU_RANKS="1")
    yield process
    process.close()


@pytest.mark.parametrize("name", MODELS)
def test_megatron_takes_it_and_the_model_agrees(
    name: str, tmp_path: Path, megatron: Preloaded
) -> None:
    """A model without a run has that of another one."""
    path = CONFIGS / "runs" / f"{name}.yaml"
    if not path.exists():
        text = path.with_stem("qwen3_30b_a3b").read_text().replace("qwen3_30b_a3b", name)
        path = tmp_path / path.name
        path.write_text(text.replace("../", f"{CONFIGS}/"))
    run, model = prepare(str(path), [], None, dry_run=True), load_model(name)
    words = list(chain.from_iterable(words_of(run.arguments)))
    environment = {name: str(value) for name, value in run.config.environment.items()}
    said, args = answer(megatron, words, environment, run.config.layout.world_size)
    assert (said["problem"], said["refusal"]) == (None, None)
    # Settings that need Transformer Engine; nothing else is skipped.
    unchecked = (said["unchecked"] or "").partition(":")[0].split(", ")
    assert set(unchecked) <= {"moe_permute_fusion", "apply_rope_fusion", ""}
    frequency = args["moe_layer_freq"]
    num_moe_layers = sum(frequency) if isinstance(frequency, list) else args["num_layers"]
    expected = {
        **{field: args[field] for field in OF_THE_MODEL},
        "row_size": args["hidden_size"],
        "num_experts": args["num_moe_experts"],
        "value_bytes": 2 if args["bf16"] else 4,
    }
    assert {field: getattr(model, field) for field in expected} == expected
    assert sum(model.moe_layers) == num_moe_layers
    assert args["moe_token_dispatcher_type"] == "monta"
    assert args["moe_monta_cluster"] == run.config.cluster
    assert args["expert_tensor_parallel_size"] == run.config.layout.etp


@pytest.mark.parametrize("path", sorted((CONFIGS / "runs").glob("*.yaml")), ids=lambda p: p.stem)
def test_it_fits_the_cluster(path: Path) -> None:
    run = prepare(str(path), [], None, dry_run=True)
    assert run.plan is not None
    fits = not any("does not fit" in note for note in run.notes)
    # With weights and gradients alone on the GPU.
    assert fits or "optimizer-cpu-offload" in run.arguments


MOE = "--num-experts 4 --moe-token-dispatcher-type monta"
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32"
TRAINED = f"{MOE} {MODEL} --seq-length 32 --micro-batch-size 2 --no-rope-fusion --bf16"
REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.mark.parametrize(("words", "expected"), REFUSALS)
def test_what_is_refused(words: str, expected: str, megatron: Preloaded) -> None:
    words = words.format(MOE=MOE, TRAINED=TRAINED)
    said, _ = answer(megatron, words.split(), {"MONTA_CPU_RANKS": "1"}, 2)
    assert expected in f"problem: {said['problem']}; refusal: {said['refusal']}"
