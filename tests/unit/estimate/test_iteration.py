"""An iteration worked out by hand from its layers, and what hides what."""

from dataclasses import replace

import pytest
from toy import TOY, assumed, toy_cluster

from monta_megatron.tools.estimate.exchange import ExchangeTime
from monta_megatron.tools.estimate.iteration import (
    BUBBLE,
    EXCHANGE,
    HIDDEN,
    HOST,
    UNEVEN,
    Iteration,
    context_parallel_us,
    estimate_iteration,
    gradient_us,
    moe_layer,
    ring_us,
    tensor_parallel_us,
)
from monta_megatron.tools.estimate.layers import TrainingSettings

SETTINGS = TrainingSettings(world_size=4, ep=4, seq_length=2000, global_batch_size=8)
EXCHANGED = ExchangeTime(forward_us=100, backward_us=120, num_chunks=4)
# From test_layer_work.py, forward and backward.
ATTENTION, EXPERTS, ROUTER, LOSS = 22.4 + 48.8, 3 * 13.2, 3 * 2.8688, 3 * 80
LAYER = ATTENTION + EXPERTS + ROUTER + 220


def run(settings: TrainingSettings, pipelined: bool = False, **changes: float) -> Iteration:
    return estimate_iteration(
        TOY, settings, toy_cluster(), assumed(**changes), EXCHANGED, experts_pipelined=pipelined
    )


def test_by_hand() -> None:
    """2 layers, 2 micro-batches on each of 4 ranks of one node."""
    parts = run(SETTINGS).parts_ms
    for part, time_us in {
        "attention (GQA)": 4 * ATTENTION,
        "experts": 4 * EXPERTS,
        "router": 4 * ROUTER,
        "embedding and loss": 2 * LOSS,
        EXCHANGE: 4 * 220,
        HIDDEN: 0,
        HOST: 0,
        BUBBLE: 0,
    }.items():
        assert parts[part] == pytest.approx(time_us / 1e3, abs=1e-9), part
    # 2 x (2.4e6 of attention + 8000 of the router) + 2 x 1e7 of embedding and output on every rank;
    # gradients in 4 bytes and weights in 2 go around 4 ranks at 1e5 bytes per us, half of it shown.
    others = 2 * (2.4e6 + 8000) + 2e7
    reduction = others * (4 + 2) * 3 / 4 / 1e5
    assert parts["gradient reduction"] == pytest.approx(reduction / 2 / 1e3)
    # 30 bytes for each of others / 4 and of the 2 x 2 experts of 1.5e6 weights.
    optimizer = 30 * (others / 4 + 4 * 1.5e6) / 1e7
    assert parts["optimizer"] == pytest.approx(optimizer / 1e3)


def test_total_is_the_sum_of_what_is_not_hidden() -> None:
    iteration = run(replace(SETTINGS, overlap=True))
    shown = sum(time for part, time in iteration.parts_ms.items() if part != HIDDEN)
    assert iteration.parts_ms[HIDDEN] > 0 and iteration.total_ms == shown
    tokens = 8 * 2000
    assert iteration.tokens_per_s_per_gpu == pytest.approx(tokens / 4 / (shown / 1e3))
    flops = tokens * TOY.model_flops_per_token(2000)
    assert iteration.tflops_per_gpu == pytest.approx(flops / 4 / (shown / 1e3) / 1e12)


def test_model_flops_by_hand() -> None:
    # A token meets 2.4e6 weights of attention, 2 x 1.5e6 of experts and 8000 of the router in each
    # of 2 layers, and 1e7 of the output; 1000 keys x 2000 values. 2 FLOPs each, 3 times.
    per_layer = 2.4e6 + 3e6 + 8000 + 1000 * 2000
    assert TOY.model_flops_per_token(2000) == 6 * (2 * per_layer + 1e7)


@pytest.mark.parametrize(("virtual_stages", "bubble_layers"), [(1, 1.0), (2, 0.5)])
def test_pipeline(virtual_stages: int, bubble_layers: float) -> None:
    """2 stages of a layer each: the last, with the loss, sets the pace; the mean is the bubble."""
    settings = replace(
        SETTINGS, world_size=8, pp=2, virtual_stages=virtual_stages, global_batch_size=40
    )
    parts = run(settings).parts_ms
    assert parts["experts"] == pytest.approx(10 * EXPERTS / 1e3)
    mean = (2 * LAYER + LOSS) / 2
    assert parts[UNEVEN] == pytest.approx(10 * (LAYER + LOSS - mean) / 1e3)
    assert parts[BUBBLE] == pytest.approx(bubble_layers * mean / 1e3)
    # A stage is a node: 2000 x 1000 values of 2 bytes through 1e4 bytes per us, both ways, for
    # every virtual stage.
    boundary = 10 * 2 * virtual_stages * 4e6 / 1e4
    assert parts["pipeline communication"] == pytest.approx(boundary / 1e3)


def test_a_last_stage_with_fewer_layers() -> None:
    """Of 2 layers the first stage has both and the last has the loss alone."""
    settings = replace(SETTINGS, world_size=8, pp=2, global_batch_size=40, last_stage_layers=0)
    mean = (2 * LAYER + LOSS) / 2
    assert run(settings).parts_ms[UNEVEN] == pytest.approx(10 * (2 * LAYER - mean) / 1e3)


def test_overlap_hides_a_share_of_what_could_be_hidden() -> None:
    # Beside the exchange of 220 run 119.4 of another micro-batch; half of that is hidden.
    beside = ATTENTION + EXPERTS + ROUTER
    layer = moe_layer(TOY, replace(SETTINGS, overlap=True), toy_cluster(), assumed(), EXCHANGED)
    assert layer.parts[HIDDEN] == pytest.approx(0.5 * beside)
    assert layer.parts[EXCHANGE] == pytest.approx(220 - 0.5 * beside)


def test_pipelined_experts_hide_all_chunks_but_one() -> None:
    layer = moe_layer(TOY, SETTINGS, toy_cluster(), assumed(), EXCHANGED, experts_pipelined=True)
    assert layer.parts[HIDDEN] == pytest.approx(3 / 4 * EXPERTS)
    assert run(SETTINGS, pipelined=True).total_ms < run(SETTINGS).total_ms


def test_recompute() -> None:
    """Full: a forward pass and its exchange again, which nothing runs beside."""
    forward = 22.4 + 13.2 + 2.8688
    for recompute, again, exchange in (("selective", 0.1, 220), ("full", 1, 320)):
        settings = replace(SETTINGS, recompute=recompute)
        layer = moe_layer(TOY, settings, toy_cluster(), assumed(), EXCHANGED)
        assert layer.parts["recompute"] == pytest.approx(again * forward)
        assert layer.parts[EXCHANGE] == pytest.approx(exchange)
    full = replace(SETTINGS, recompute="full", overlap=True)
    layer = moe_layer(TOY, full, toy_cluster(), assumed(), EXCHANGED)
    assert layer.parts[HIDDEN] + layer.parts[EXCHANGE] == pytest.approx(320)
    assert layer.parts[EXCHANGE] > 100


def test_host() -> None:
    """The GPU waits for a slower host, and for half of the shorter of both times."""
    for host_us, waits in ((1000, 1000 - LAYER + LAYER / 2), (100, 50)):
        constants = assumed(host_layer_us=host_us)
        layer = moe_layer(TOY, SETTINGS, toy_cluster(), constants, EXCHANGED)
        assert layer.parts[HOST] == pytest.approx(waits)
    constants = assumed(host_layer_us=1000)
    graphs = moe_layer(TOY, replace(SETTINGS, graphs=True), toy_cluster(), constants, EXCHANGED)
    assert graphs.parts[HOST] == pytest.approx(250 / 2)
    # Where two micro-batches take turns, the shorter time does not show.
    both = moe_layer(TOY, replace(SETTINGS, overlap=True), toy_cluster(), constants, EXCHANGED)
    assert both.total == pytest.approx(1000)


def test_dense_layers() -> None:
    one_dense = replace(TOY, num_dense_layers=1)
    parts = estimate_iteration(one_dense, SETTINGS, toy_cluster(), assumed(), EXCHANGED).parts_ms
    assert parts["dense"] == pytest.approx(2 * 3 * 55.2 / 1e3)
    assert parts["experts"] == pytest.approx(2 * EXPERTS / 1e3)
    with pytest.raises(ValueError, match=r"num_dense_layers: got 2, must be less than num_layers"):
        replace(TOY, num_dense_layers=2)


def test_rings_by_hand() -> None:
    cluster = toy_cluster()
    # 4 ranks of a node: 3/4 of 4e5 bytes at 1e5 per us.
    assert ring_us(cluster, 4e5, 4, 1) == pytest.approx(3)
    # 8 ranks on 2 nodes: each carries 7/8 of 8e5 bytes, on 4 network interfaces.
    assert ring_us(cluster, 8e5, 8, 1) == pytest.approx(7e5 / 4e4)
    # 2 ranks on 2 nodes have one each.
    assert ring_us(cluster, 2e5, 2, 4) == pytest.approx(1e5 / 1e4)
    assert ring_us(cluster, 2e5, 1, 1) == 0


def test_tensor_and_context_parallelism_by_hand() -> None:
    # TP 2: 2000 tokens x 1000 x 2 bytes, half of them through 1e5 bytes per us: 20 us, 2 forward
    # and 3 backward for each block.
    settings = replace(SETTINGS, tp=2)
    assert tensor_parallel_us(TOY, settings, toy_cluster(), 1) == pytest.approx((40, 60))
    assert tensor_parallel_us(TOY, SETTINGS, toy_cluster(), 1) == (0, 0)
    # CP 2: keys and values of 2 groups x 100, 2000 tokens, 2 bytes; half of 1.6e6.
    settings = replace(SETTINGS, cp=2)
    assert context_parallel_us(TOY, settings, toy_cluster()) == pytest.approx((8, 16))
    assert context_parallel_us(TOY, SETTINGS, toy_cluster()) == (0, 0)


def test_experts_have_their_own_data_parallel_group() -> None:
    """On 8 ranks with EP 4 an expert is held twice, on both nodes; one interface each."""
    settings = replace(SETTINGS, world_size=8, global_batch_size=8)
    others = 2 * (2.4e6 + 8000) + 2e7
    experts = 4 * 1.5e6
    by_hand = others * 6 * 7 / 8 / 4e4 + experts * 6 / 2 / 1e4
    assert gradient_us(TOY, settings, toy_cluster()) == pytest.approx(by_hand)
