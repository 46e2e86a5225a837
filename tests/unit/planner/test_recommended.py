"""What a plan recommends beside stock, and what the settings of a training do to it."""

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clusters import CONFIGS, preset
from commands import Monta, needs_training
from training_logs import QWEN3_30B, training_log

from monta_megatron.chains import CHAINS
from monta_megatron.core import Choice
from monta_megatron.integration.options import Options
from monta_megatron.planner.model import load_model
from monta_megatron.planner.plan import NUM_CHUNKS, Plan
from monta_megatron.planner.training import captures_preprocessing, settings_of, training_of
from monta_megatron.tools.launch import megatron_arguments
from monta_megatron.tools.plan.request import PlanRequest, plan_request

MODELS, CLUSTERS = (
    sorted(path.stem for path in (CONFIGS / kind).glob("*.yaml")) for kind in ("models", "clusters")
)
OF_TOKENS = {name for name, chain in CHAINS.items() if chain.rows == "tokens"}
H100 = "--cluster h100_8x_ndr"


def started_by(flags: str) -> tuple[str, Choice | None]:
    """The dispatcher that a training's flags start, and the choice that ours runs."""
    words = flags.split()
    values: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=True))
    values = {name.removeprefix("--").replace("-", "_"): value for name, value in values.items()}
    dispatcher = values.pop("moe_token_dispatcher_type")
    if dispatcher != "monta":
        assert not values
        return dispatcher, None
    values["moe_monta_num_chunks"] = int(values["moe_monta_num_chunks"])
    options = Options.of(SimpleNamespace(**values))
    assert options.named_chain is not None and options.num_chunks is not None
    return "monta", Choice(chain=options.chain, num_chunks=options.num_chunks)


def check_recommended(plan: Plan) -> None:
    times_us = [us for each in plan.candidates if (us := each.predicted_us) is not None]
    fastest_us = min(*times_us, *plan.stock_times_us.values())
    assert plan.recommended_us <= 1.03 * fastest_us + 0.1
    # Never slower than stock, the fastest of whose dispatchers is named.
    assert plan.recommended_us <= plan.stock_us == min(plan.stock_times_us.values())
    assert plan.stock_us == plan.stock_times_us[plan.stock]
    dispatcher, choice = started_by(plan.flags)
    if dispatcher == "monta":
        assert plan.recommended == plan.chain and choice == plan.choice
        assert plan.recommended_us == plan.predicted_us < plan.stock_us
        assert CHAINS[plan.chain].incompatibility(plan.shape.layout) is None
    else:
        assert dispatcher == plan.recommended == plan.stock
    assert plan.predicted_us <= 1.03 * min(times_us) + 0.1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(20))
def test_random_plans(seed: int) -> None:
    """50 of 1,000 plans over all presets, layouts, numbers of tokens, and settings."""
    draw = random.Random(seed)
    num_planned = 0
    while num_planned < 50:
        model, cluster = load_model(draw.choice(MODELS)), preset(draw.choice(CLUSTERS))
        sizes = {
            name: draw.choice((1, 1, 2, 4, 8)) if name != "ep" else 2 ** draw.randrange(8)
            for name in ("tp", "ep", "etp", "pp")
        }
        request = PlanRequest(
            model=model,
            cluster=cluster,
            world_size=2 ** draw.randrange(1, 10),
            tokens=draw.choice((None, 1, 16, 512, 3000, 8192)),
            **sizes,
        )
        try:
            plan = plan_request(request)
        except ValueError:
            # The layout does not divide the model, the ranks or the cluster.
            continue
        num_planned += 1
        check_recommended(plan)


@pytest.mark.parametrize(
    ("words", "stock"),
    [
        (f"--model mixtral_8x7b {H100} --world-size 16 --ep 8 --tokens 512", "alltoall"),
        (f"--model mixtral_8x7b {H100} --world-size 16 --ep 1", "allgather"),
        (f"--model qwen3_30b_a3b {H100} --world-size 16 --ep 16 --tokens 1", "allgather"),
    ],
)
def test_where_stock_wins(monta: Monta, words: str, stock: str) -> None:
    planned = monta.document("plan", *words.split())
    ours_us, stock_us = planned["predicted_us"], planned["stock_us"]
    assert planned["stock"] == planned["recommended"] == stock and stock_us < ours_us
    assert planned["flags"] == f"--moe-token-dispatcher-type {stock}"
    assert planned["chain"] in CHAINS
    _, printed, _ = monta("plan", *words.split())
    lines = " ".join(printed.split())
    assert f"choice stock {stock}: {stock_us:,.0f} us" in lines
    assert f"benefit none: stock {stock} takes {stock_us:,.0f} us" in lines
    assert f"takes {ours_us:,.0f} us and is {stock_us / ours_us:.2f}x" in lines


def test_the_standing_of_a_chain_is_beside_what_is_recommended(monta: Monta) -> None:
    """Its ratio and its percentage are of one thing: "1.86 times", "86% slower"."""
    words = f"plan --model qwen3_30b_a3b {H100} --world-size 16 --ep 16 --tokens".split()
    for tokens in (1, 4096):
        planned = monta.document(*words, tokens)
        for chain in CHAINS:
            _, printed, _ = monta(*words, tokens, "--chain", chain)
            (asked,) = re.findall(r"asked +(.*?)\nbenefit", printed, re.DOTALL)
            words_of_it = " ".join(asked.split())
            if chain == planned["chain"]:
                is_it = planned["recommended"] == chain
                assert words_of_it.endswith("it is that" if is_it else "the best chain of monta")
            elif "the same as" not in words_of_it:
                ratio = float(re.findall(r"takes ([\d.]+) times", words_of_it)[0])
                percent = int(re.findall(r"(\d+)% slower", words_of_it)[0])
                assert percent == pytest.approx(100 * (ratio - 1), abs=1.01)


def test_the_faster_stock_dispatcher_is_compared(monta: Monta) -> None:
    words = "--model glm_4_5_air --cluster a100_4x_hdr --world-size 64 --ep 4"
    planned = monta.document("plan", *words.split())
    assert planned["stock"] == "allgather" and planned["stock_us"] == pytest.approx(6243, abs=1)
    assert planned["stock_times_us"]["alltoall"] == pytest.approx(7769, abs=1)
    assert planned["benefit"]["text"].startswith("1.34x stock allgather, 6,243 us")


@needs_training
def test_flags_are_megatrons() -> None:
    plans = [f"--moe-token-dispatcher-type {name}" for name in ("alltoall", "allgather")]
    for name, chain in CHAINS.items():
        choice = Choice(chain=name, num_chunks=1 if chain.serial else NUM_CHUNKS[-1])
        plans.append(f"--moe-token-dispatcher-type monta {choice.flags}")
    for flags in plans:
        answer = megatron_arguments.check(["--num-experts", "8", *flags.split()])
        assert answer.megatron is not None and answer.problem is None, flags


# A training on 16 ranks over two nodes.
ON_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}


class Logged:
    """`monta plan --log` for a training with some settings."""

    def __init__(self, folder: Path, monta: Monta) -> None:
        self._path, self._monta = folder / "train.log", monta

    def __call__(self, **settings: Any) -> dict[str, Any]:
        """Its document, with the text in `printed`."""
        text = training_log({**ON_16, "moe_token_dispatcher_type": "alltoall", **settings}, 9000.0)
        self._path.write_text(text, encoding="utf-8")
        words = ["plan", "--log", self._path, *H100.split()]
        status, printed, error = self._monta(*words)
        assert status == 0, error
        return {**self._monta.document(*words), "printed": " ".join(printed.split())}


@pytest.fixture
def logged(tmp_path: Path, monta: Monta) -> Logged:
    return Logged(tmp_path, monta)


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 48},
        {"recompute_granularity": "selective", "recompute_modules": "['core_attn', 'moe']"},
        {"moe_layer_recompute": True},
    ],
)
def test_recomputation_makes_six_passes_of_four(logged: Logged, settings: dict[str, Any]) -> None:
    four, six = logged(), logged(**settings)
    # A dispatch and a combine more; launches are hidden in other passes to another extent.
    for name in ("alltoall", "allgather"):
        ratio = six["stock_times_us"][name] / four["stock_times_us"][name]
        assert ratio == pytest.approx(1.5, rel=0.01)
    assert six["exchange_share"] / four["exchange_share"] == pytest.approx(1.5, rel=0.01)
    assert six["predicted_us"] / four["predicted_us"] == pytest.approx(1.5, rel=0.06)
    bytes_of_four, bytes_of_six = (each["candidates"][0]["inter_bytes"] for each in (four, six))
    assert bytes_of_six == pytest.approx(1.5 * bytes_of_four, rel=0.01)
    assert "six passes of four" in six["printed"] and "six passes" not in four["printed"]


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "selective", "recompute_modules": "['core_attn', 'moe_act']"},
        # Without a granularity no module is recomputed.
        {"recompute_modules": "['moe']"},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ],
)
def test_what_does_not_recompute_the_exchange(logged: Logged, settings: dict[str, Any]) -> None:
    four, other = logged(), logged(**settings)
    assert other["predicted_us"] == four["predicted_us"]
    number = settings.get("recompute_num_layers")
    assert ("the first 3 layers of a stage run dispatch" in other["printed"]) is (number == 3)
    assert ("the first layer of a stage runs dispatch" in other["printed"]) is (number == 1)


@pytest.mark.parametrize("name", ["overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap"])
def test_a_part_is_hidden_already(logged: Logged, name: str) -> None:
    found = logged(**{name: True})
    assert f"{name} hides a part of the exchange" in found["printed"]
    assert "saves at most" in found["benefit"]["text"]
    assert "whose exchange takes as long as" in found["printed"]
    # Megatron refuses its allgather.
    assert list(found["stock_times_us"]) == ["alltoall"]


def test_no_gain_over_alltoall_where_deepep_ran(logged: Logged) -> None:
    found = logged(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    assert found["benefit"] is None and found["saved_share"] is None
    assert "benefit not predicted: flex runs, which has no price here" in found["printed"]
    assert "x stock" not in found["printed"] and "saves" not in found["printed"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0},
            "moe_pad_expert_input_to_capacity pads permuted tokens",
        ),
        ({"batch_invariant_mode": True}, "batch_invariant_mode wants the rows of a token added"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "['moe_preprocess']"},
            "CUDA graphs of moe_preprocess capture the permutation",
        ),
        (
            {
                "cuda_graph_impl": "transformer_engine",
                "cuda_graph_scope": "[<Scope.attn: 2>, <Scope.moe_preprocess: 6>]",
            },
            "CUDA graphs of moe_preprocess capture the permutation",
        ),
    ],
)
def test_chains_that_the_training_refuses(
    logged: Logged, settings: dict[str, Any], reason: str
) -> None:
    found = logged(**settings)
    refused = {each["chain"]: each["rejected"] for each in found["candidates"]}
    refused = {name: text for name, text in refused.items() if name in OF_TOKENS}
    assert refused.keys() == OF_TOKENS and all(reason in text for text in refused.values())
    assert found["chain"] in CHAINS.keys() - OF_TOKENS


def test_a_training_that_refuses_monta_is_told(logged: Logged) -> None:
    found = logged(cuda_graph_impl="full_iteration")
    assert found["recommended"] == found["stock"] and found["benefit"] is None
    assert "note monta refuses cuda_graph_impl" in found["printed"]


def test_settings_are_read_alike_from_a_configuration_and_from_a_log() -> None:
    module = SimpleNamespace(name="moe_preprocess")
    config = SimpleNamespace(
        cuda_graph_impl="transformer_engine", cuda_graph_modules=[module], recompute_modules=["moe"]
    )
    assert captures_preprocessing(config) and training_of(config).phase == "forward_backward"
    config.recompute_granularity = "selective"
    assert training_of(config).phase == "recomputed"
    texts = {"cuda-graph-impl": "local", "recompute-granularity": "None", "num-layers": "48"}
    settings = settings_of(texts)
    # Without a list of modules, all are captured.
    assert captures_preprocessing(settings) and settings.num_layers == 48
    assert not hasattr(settings, "recompute_granularity")
