"""What a training holds on a rank, by hand, and what is said of a layout that does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from clusters import CONFIGS, preset
from commands import Monta

from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.model import load_model
from monta_megatron.planner.ranking import TrainingMemory, training_memory

QWEN = load_model(CONFIGS / "models" / "qwen3_235b_a22b.yaml")
PARAMETERS = QWEN.num_parameters or 0
H100 = preset("h100_8x_ndr")
# 4096 tokens per micro-batch, of which a rank brings half at TP 2.
FITS = ParallelLayout(world_size=128, tp=2, ep=16, pp=4)
COMMAND = ["plan", "--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr"]


def test_what_is_held_by_hand() -> None:
    # The largest of 4 stages has 24 of 94 layers. Weights and gradients in 2 + 4 bytes, 12 of the
    # optimizer sharded over 8 replicas of the experts and 64 / 4 of what is dense.
    experts = QWEN.num_expert_parameters
    dense = PARAMETERS - experts
    state_bytes = 24 / 94 * (experts / 16 * (6 + 12 / 2) + dense / 2 * (6 + 12 / 16))
    # Logits in bf16 and fp32.
    logits_bytes = 2048 * 151936 * (2 + 4)
    needed_bytes = training_memory(QWEN, H100, FITS, 2048).needed_bytes
    assert needed_bytes == pytest.approx(state_bytes + logits_bytes)
    # In fp32 there are no master weights: two moments of 4 bytes beside weights and gradients.
    alone = ParallelLayout(world_size=1)
    for model, per_parameter in ((replace(QWEN, value_bytes=4), 16), (QWEN, 18)):
        needed_bytes = training_memory(model, H100, alone, 0).needed_bytes
        assert needed_bytes == pytest.approx(PARAMETERS * per_parameter)


@pytest.mark.parametrize(
    ("needed_gb", "available_gb", "fits"),
    [(72.0, 80, True), (72.1, 80, False), (900.0, None, True), (None, 80, True)],
)
def test_a_tenth_of_the_memory_is_left_free(
    needed_gb: float | None, available_gb: float | None, fits: bool
) -> None:
    memory = TrainingMemory(
        needed_bytes=needed_gb and needed_gb * 1e9,
        available_bytes=available_gb and available_gb * 1e9,
    )
    assert memory.fits is fits and memory.document()["fits"] is fits
    assert ("does not fit" in memory.text) is not fits


def test_a_named_layout_that_does_not_fit_is_planned_and_said(monta: Monta) -> None:
    """The state of 235 billion parameters on 16 ranks."""
    memory = monta.document(*COMMAND, "--world-size", "16", "--ep", "16")["memory"]
    assert not memory["fits"] and memory["needed_bytes"] > 309e9 > memory["available_bytes"]


def test_no_layout_that_does_not_fit_is_ranked(monta: Monta, tmp_path: Path) -> None:
    words = [*COMMAND, "--world-size", "128", "--pp", "4"]
    ranked = monta.document(*words)["layouts"]
    assert ranked and max(layout["needed_bytes"] for layout in ranked) <= 0.9 * 80e9
    data = yaml.safe_load((CONFIGS / "clusters" / "h100_8x_ndr.yaml").read_text())
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**data, "memory_gb_per_rank": 8}))
    said = monta.refusal(*words, "--cluster", path)
    assert "no (tp, ep, etp) with cp 1 and pp 4 fits" in said and "10% of headroom" in said
