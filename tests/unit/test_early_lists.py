"""Lists of experts that are made before the counts are known, as wide as the last time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monta_megatron.exchange.counts import expert_ids_of
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.integration.strategies import STRATEGIES, WHOLE_TOKENS

ROUTED = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
PROBS = torch.tensor([[0.7, 0.0, 0.3, 0.0], [0.0, 0.9, 0.0, 0.0], [0.0] * 4])


def dispatcher(expected_width: int) -> Any:
    return SimpleNamespace(
        options=SimpleNamespace(kernels="torch"),
        monitor=Monitor(),
        routing_map=ROUTED,
        expected_width=expected_width,
        early_lists=None,
    )


def exchange(width: int) -> Any:
    return SimpleNamespace(max_experts_per_token=width)


# Fewer than the widest list of this rank has, as many, and more, as where another rank's is wider.
@pytest.mark.parametrize("width", (1, 2, 3))
@pytest.mark.parametrize("expected_width", (1, 2, 3))
def test_lists_have_the_width_of_the_counts(expected_width: int, width: int) -> None:
    made = dispatcher(expected_width)
    WHOLE_TOKENS.begin(made, PROBS)
    assert made.early_lists is not None
    early = made.early_lists[1]
    columns = WHOLE_TOKENS.columns(made, exchange(width), PROBS)
    assert (columns is early) == (expected_width == width)
    for column, expected in zip(columns, expert_ids_of(ROUTED, PROBS, width), strict=True):
        assert torch.equal(column, expected)
    # The next micro-batch expects what this one had, and nothing of it is kept.
    assert made.expected_width == width
    assert made.early_lists is None


def test_lists_of_other_probabilities_are_not_taken() -> None:
    made = dispatcher(2)
    WHOLE_TOKENS.begin(made, PROBS)
    probs, _ = WHOLE_TOKENS.columns(made, exchange(2), 2 * PROBS)
    assert torch.equal(probs, expert_ids_of(ROUTED, 2 * PROBS, 2)[0])


def test_lists_are_dropped_where_another_chain_is_chosen() -> None:
    made = dispatcher(2)
    WHOLE_TOKENS.begin(made, PROBS)
    STRATEGIES["permuted tokens"].columns(made, exchange(0), PROBS)
    assert made.early_lists is None
