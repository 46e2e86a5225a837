"""What a training holds on a rank, by hand."""

from dataclasses import replace

import pytest
from clusters import preset

from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.model import load_model
from monta_megatron.planner.ranking import (
    TrainingMemory,
    num_parameters,
    rank_layouts,
    training_memory,
)

QWEN = load_model("qwen3_235b_a22b")
PARAMETERS = num_parameters(QWEN) or 0


def test_what_is_held_by_hand() -> None:
    # The first of 4 stages has 24 of 94 layers and a table, the last 22, a table, and the logits of
    # its tokens in bf16 and fp32: the longer sequence is where the last is the largest.
    table, experts, dense = 151936 * 4096, 128 * 3 * 4096 * 1536, (QWEN.layer_parameters or (0,))[0]
    layout = ParallelLayout(world_size=128, tp=2, ep=16, pp=4)
    for layers, logits, tokens in ((24, 0, 2048), (22, 151936 * (2 + 4), 65536)):
        # Weights and gradients in 2 + 4 bytes, 12 of the optimizer sharded over 2 replicas of the
        # experts and 16 of what is dense.
        state_bytes = layers * experts / 16 * (6 + 12 / 2)
        state_bytes += (layers * dense + table) / 2 * (6 + 12 / 16)
        needed_bytes = training_memory(QWEN, preset("h100_8x_ndr"), layout, tokens).needed_bytes
        assert needed_bytes == pytest.approx(state_bytes + tokens * logits)
    # In fp32 there are no master weights: two moments of 4 bytes beside weights and gradients.
    alone = ParallelLayout(world_size=1)
    for model, per_parameter in ((replace(QWEN, state_bytes=(4, 4, 8)), 16), (QWEN, 18)):
        needed_bytes = training_memory(model, preset("h100_8x_ndr"), alone, 0).needed_bytes
        assert needed_bytes == pytest.approx(PARAMETERS * per_parameter)


@pytest.mark.parametrize(
    ("needed_bytes", "available_bytes", "fits"),
    [(72e9, 80e9, True), (72.1e9, 80e9, False), (900e9, None, True), (None, 80e9, True)],
)
def test_a_tenth_of_the_memory_is_left_free(
    needed_bytes: float | None, available_bytes: float | None, fits: bool
) -> None:
    memory = TrainingMemory(
        needed_bytes=needed_bytes, available_bytes=available_bytes, state_bytes=(2, 4, 12)
    )
    assert memory.fits is fits and memory.document()["fits"] is fits
    assert ("does not fit" in memory.text) is not fits


def test_no_layout_that_does_not_fit_is_ranked() -> None:
    cluster = replace(preset("h100_8x_ndr"), memory_gb_per_rank=8)
    with pytest.raises(ValueError, match=r"no \(tp, ep, etp\) with cp 1 and pp 4 fits"):
        rank_layouts(QWEN, cluster, 128, None, pp=4)
    # Whether a model fits whose parameters cannot be counted is not known.
    unknown = replace(QWEN, layer_parameters=None, uncounted=("vocab-size: not given",))
    with pytest.raises(ValueError, match=r"vocab-size: not given.*cannot be ranked by memory"):
        rank_layouts(unknown, cluster, 128, None, pp=4)
    without_limit = replace(cluster, memory_gb_per_rank=None)
    assert rank_layouts(unknown, without_limit, 128, None, pp=4)[0].needed_bytes is None
