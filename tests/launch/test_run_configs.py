"""Every file of configs/runs: Megatron's parser, its validation, its configuration, and the model.

Megatron sees the real WORLD_SIZE and the file's own environment, on CPU stand-ins.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded

from monta_megatron.common import strict_yaml
from monta_megatron.planner.models.files import load_model
from monta_megatron.tools.launch.prepare import Run, prepare
from monta_megatron.tools.launch.run_config import RunConfig

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted((CONFIGS / "runs").glob("*.yaml"))

# What needs Transformer Engine or a GPU, and what takes its place before the TransformerConfig is
# made. Nothing else is replaced or skipped.
REPLACED = {
    "moe_permute_fusion": False,
    "apply_rope_fusion": False,
}

IMPORTED_ONCE = (
    "megatron.training.arguments",
    "megatron.training.argument_utils",
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
    *("hidden_size", "num_layers", "num_attention_heads", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_router_num_groups", "moe_router_group_topk", "seq_length", "micro_batch_size"),
)
ARGUMENTS = ("seq_length", "micro_batch_size", "global_batch_size", "data_parallel_size")


def print_validated(
    arguments: list[list[str]], environment: dict[str, str], world_size: int
) -> None:
    """Check, parse and validate a run's arguments; print what Megatron makes of them."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    from monta_megatron.tools.launch.megatron_arguments import check

    if "MONTA_CPU_RANKS" not in environment:
        # The stand-ins have set it, which a run on GPUs cannot rely on.
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(environment, RANK="0", WORLD_SIZE=str(world_size))
    answer = check(arguments)
    assert (answer.problem, answer.unchecked, answer.doubt) == (None, None, None), answer
    sys.argv[1:] = [word for words in arguments for word in words]
    args = validate_args(parse_args())
    for name, value in REPLACED.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    config = core_transformer_config_from_args(args)
    fields = {name: getattr(config, name) for name in FIELDS}
    fields |= {name: getattr(args, name) for name in ARGUMENTS}
    print("RESULT", json.dumps(fields, default=str))


def print_refusal(arguments: list[list[str]]) -> None:
    from monta_megatron.tools.launch.megatron_arguments import check

    answer = check(arguments)
    print(answer.position, answer.problem)


@pytest.fixture(scope="module")
def megatron() -> Iterator[Preloaded]:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("needs megatron.training: pip install 'megatron-core[training]>=0.19'")
    print("replaced before TransformerConfig:", REPLACED)
    process = Preloaded(*IMPORTED_ONCE, MONTA_CPU_RANKS="1")
    yield process
    process.close()


def read(path: Path) -> Run:
    return prepare(str(path), [], None, dry_run=True)


def validated(megatron: Preloaded, run: Run) -> dict[str, Any]:
    """Fields of the TransformerConfig and arguments, as Megatron has them after its checks."""
    arguments = [argument.words for argument in run.arguments.values()]
    environment = {name: str(value) for name, value in run.config.environment.items()}
    world_size = run.config.layout.parallel.world_size
    result = megatron.run(print_validated, arguments, environment, world_size)
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_megatron_takes_it_and_the_model_agrees(path: Path, megatron: Preloaded) -> None:
    run = read(path)
    args = validated(megatron, run)
    assert run.config.model is not None
    model = load_model(run.config.model)
    num_layers, frequency = args["num_layers"], args["moe_layer_freq"]
    expected = {
        **{name: args[name] for name in OF_THE_MODEL},
        "num_moe_layers": sum(frequency) if isinstance(frequency, list) else num_layers,
        "num_experts": args["num_moe_experts"],
        "value_bytes": 2 if args["bf16"] else 4,
    }
    assert {name: getattr(model, name) for name in expected} == expected
    assert args["moe_token_dispatcher_type"] == "monta"
    assert args["moe_monta_cluster"] == run.config.cluster
    assert args["expert_tensor_parallel_size"] == run.config.layout.etp
    # Megatron asks for it only when the training starts.
    assert args["global_batch_size"] % (args["micro_batch_size"] * args["data_parallel_size"]) == 0


def test_megatron_takes_models_without_a_run(tmp_path: Path, megatron: Preloaded) -> None:
    models = {path.stem for path in (CONFIGS / "models").glob("*.yaml")}
    for name in sorted(models - {path.stem for path in FILES}):
        run = tmp_path / f"{name}.yaml"
        text = (CONFIGS / "runs" / "qwen3_30b_a3b.yaml").read_text().replace("qwen3_30b_a3b", name)
        run.write_text(text.replace("../", f"{CONFIGS}/"))
        args, model = validated(megatron, read(run)), load_model(name)
        expected = {field: args[field] for field in OF_THE_MODEL}
        assert {field: getattr(model, field) for field in expected} == expected
        assert model.num_experts == args["num_moe_experts"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_fits_the_cluster(path: Path) -> None:
    run = read(path)
    assert run.plan is not None and run.memory is not None
    if "optimizer-cpu-offload" not in run.arguments:
        assert run.memory.fits
        return
    # Weights and gradients in 16 bits; everything else is in the host's memory.
    layout, memory = run.config.layout, run.memory.available_bytes
    num_parameters = load_model(str(run.config.model)).num_parameters
    assert num_parameters is not None and memory is not None
    assert num_parameters * 4 / (layout.etp * layout.ep * layout.pp) < 0.75 * memory


MOE = [["--num-experts", "4"], ["--moe-token-dispatcher-type", "monta"]]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "position", "said"),
    [
        ([["--lr", "1e-4"], ["--min-lrr", "0"]], 1, "did you mean min-lr?"),
        ([["--xyzzy"]], 0, "no argument of Megatron-Core"),
        # argparse's own words.
        ([["--lr", "fast"]], 0, "invalid float value: 'fast'"),
        ([["--lr"]], 0, "expected one argument"),
        ([["--lr-decay-style", "cosin"]], 0, "invalid choice: 'cosin'"),
        ([["--bf16", "1"]], 0, "got '1', which it does not take"),
        ([["--moe-layer-freq", "[x]"]], 0, "[x]"),
        # Ours.
        ([*MOE, ["--moe-monta-num-chunks", "0"]], 2, "got 0, must be an integer >= 1"),
        ([*MOE, ["--cuda-graph-impl", "local"]], 2, "not supported"),
        ([["--moe-token-dispatcher-type", "monta"]], 0, "--num-experts"),
    ],
)
def test_what_is_refused(
    arguments: list[list[str]], position: int, said: str, megatron: Preloaded
) -> None:
    result = megatron.run(print_refusal, arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    number, _, problem = result.stdout.strip().partition(" ")
    assert (int(number), problem.count("\n")) == (position, 0)
    assert said in problem


def test_the_table_of_the_readme_is_current() -> None:
    text = (CONFIGS / "runs" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*\d) (?:CPU ranks|[AH]\d+) \|(.*)\|.*\|$", text, re.M)
    table = {name: (ranks, [int(size) for size in sizes.split("|")]) for name, ranks, sizes in rows}
    for path in FILES:
        layout = strict_yaml.load(RunConfig, path).layout
        nodes, per_node = layout.nodes, layout.ranks_per_node
        ranks = str(per_node) if path.stem == "quickstart" else f"{nodes} x {per_node}"
        assert table.pop(path.stem) == (ranks, [layout.tp, layout.ep, layout.etp, layout.pp])
    assert table == {}
