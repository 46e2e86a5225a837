"""One layer of each kind worked out by hand: every number below is from the sizes in the comment.

2000 tokens of one sequence, H = 1000, 1e9 FLOPs and 1e7 bytes of memory per us (toy.py).
"""

from dataclasses import replace

import pytest
from toy import MEMORY_GBYTES_PER_S, TOY, assumed

from monta_megatron.planner.experts import Work, times_us
from monta_megatron.tools.estimate.layers import (
    LinearAttention,
    TrainingSettings,
    attention,
    embedding_and_loss,
    experts,
    feed_forward,
    router,
)

SETTINGS = TrainingSettings(world_size=4, ep=4, seq_length=2000, global_batch_size=8)


def took(works: tuple[Work, ...]) -> tuple[float, float]:
    return times_us(works, assumed(), MEMORY_GBYTES_PER_S)


def test_grouped_query_attention() -> None:
    # Query, key and value: [2000, 1000] x [1000, 1000 + 2 x 200]: 5.6e9 FLOPs; output 4e9.
    # 10 heads x 2000 x 2000 / 2 pairs x 100 values x 2 FLOPs, for the scores and for the values.
    pairs = 2000 * 2000 / 2
    scores, values = (10 * pairs * 100 * 2,) * 2
    assert scores + values == 8e9
    # Norms, rotary and residual: 12 passes over 2000 x 1000 values of 2 bytes: 4.8e7 bytes.
    forward = 5.6 + 4 + 8 + 4.8
    backward = 2 * 5.6 + 2 * 4 + 2.5 * 8 + 2 * 4.8
    assert took(attention(TOY, SETTINGS, assumed())) == pytest.approx((forward, backward))


def test_sliding_window() -> None:
    # Every other layer sees 500 keys: the first 500 tokens 250 in the mean, 1500 all of them.
    seen = (500 * 250 + 1500 * 500) / 2000
    model = replace(TOY, window_size=500, window_every=2)
    assert model.seen_keys(2000) == (1000 + seen) / 2
    core = 2 * 2000 * 2000 * (1000 + seen) / 2 / 1e9
    forward, _ = took(attention(model, SETTINGS, assumed()))
    assert forward == pytest.approx(5.6 + 4 + core + 4.8)


def test_latent_attention() -> None:
    # 4 heads of 128 + 64 values, values of 128, ranks 200 (query) and 100 (key and value).
    model = replace(
        TOY,
        num_attention_heads=4,
        num_query_groups=4,
        head_dim=128,
        query_rank=200,
        key_value_rank=100,
        rotary_dim=64,
        value_dim=128,
    )
    weights = (1000 * 200, 200 * 768, 1000 * 164, 100 * 1024, 512 * 1000)
    assert model.attention_parameters == sum(weights)
    # [2000, 100] x [100, 1024] has few FLOPs for its bytes: 0.41 us against 2 x (2000 x 1124 +
    # 102400) bytes, 0.47 us. [2000, 200] x [200, 768] likewise: 0.61 against 0.42.
    products = 0.8 + 0.6144 + 0.656 + 0.4700800 + 2.048
    core = 2 * 2000 * 1000 * 4 * (192 + 128) / 1e9
    forward, _ = took(attention(model, SETTINGS, assumed()))
    assert forward == pytest.approx(products + core + 4.8)


def test_gated_delta_net() -> None:
    """Three of four layers: keys of 128 values, 4 heads of 100 values, a convolution of 4 tokens.

    [2000, 1000] x [1000, 256 + 400 + 400 + 8] is 4.256e9 FLOPs, [2000, 400] x [400, 1000] 1.6e9.
    The convolution reads and writes 2000 x 656 values of 2 bytes, 5.248e6 bytes. The state of
    4 heads x 100 x 100 meets each token 4 times: 6.4e8 FLOPs, which take longer than 4.2e6 bytes.
    """
    linear = LinearAttention(
        share=0.75, key_size=128, num_value_heads=4, value_dim=100, conv_size=4
    )
    model = replace(TOY, linear=linear)
    forward, _ = took(attention(model, SETTINGS, assumed()))
    full, delta_net = 5.6 + 4 + 8, 4.256 + 1.6 + 0.5248 + 0.64
    assert forward == pytest.approx(0.25 * full + 0.75 * delta_net + 4.8)
    weights = 1000 * 1064 + 400 * 1000 + 4 * 656
    assert model.attention_parameters == 0.25 * TOY.attention_parameters + 0.75 * weights
    # Megatron counts 3 x 2 FLOPs for each weight and each of the state's products.
    fewer = TOY.attention_parameters - weights + TOY.core_attention_values * 1000 - 4 * 4 * 100**2
    less = TOY.model_flops_per_token(2000) - model.model_flops_per_token(2000)
    assert less == pytest.approx(6 * TOY.num_layers * 0.75 * fewer)


def test_experts() -> None:
    # 2000 tokens x 2 experts arrive at each of 4 ranks, whose 2 experts share them.
    # Gate and up [4000, 1000] x [1000, 1000], down [4000, 500] x [500, 1000]; 3 passes over 500.
    forward = 8 + 4 + 1.2
    assert took(experts(TOY, SETTINGS, assumed())) == pytest.approx((forward, 2 * forward))


def test_experts_with_few_tokens_wait_for_their_weights() -> None:
    # 1 token, 2 copies: the weights of 2 experts, 2 x 1.5e6 values of 2 bytes, 0.6 us and little
    # else.
    few = replace(SETTINGS, seq_length=1, global_batch_size=4)
    forward, _ = took(experts(TOY, few, assumed()))
    assert forward == pytest.approx(0.6, rel=0.01)


def test_router() -> None:
    # [2000, 1000] x [1000, 8] is bound by its bytes, 2 x (2000 x 1008 + 8000); 20 passes over 8
    # scores, 6 over the rows.
    forward = 0.4048 + 0.064 + 2.4
    assert took(router(TOY, SETTINGS, assumed())) == pytest.approx((forward, 2 * forward))


def test_dense_layer() -> None:
    # FFN 4000: [2000, 1000] x [1000, 8000] and [2000, 4000] x [4000, 1000].
    forward = 32 + 16 + 4.8 + 2.4
    assert took(feed_forward(TOY, SETTINGS, 4000, assumed()))[0] == pytest.approx(forward)


def test_loss() -> None:
    # [2000, 1000] x [1000, 10000], and 5 passes over 2000 x 10000 logits of 4 bytes.
    assert took(embedding_and_loss(TOY, SETTINGS, assumed()))[0] == pytest.approx(40 + 40)


def test_tensor_parallelism_divides_products_and_rows() -> None:
    """All tokens meet half of every matrix, and rows are split among the ranks."""
    whole, _ = took(attention(TOY, SETTINGS, assumed()))
    halves = replace(SETTINGS, tp=2, ep=4, world_size=4)
    half, _ = took(attention(TOY, halves, assumed()))
    assert half == pytest.approx(whole / 2)
