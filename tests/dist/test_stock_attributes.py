"""What stock's dispatcher knows of a micro-batch is here too, or says why it is not."""

from typing import Any
from unittest import mock

import pytest
import torch
from layers import Case, build_layer, build_pair, forward_backward, make_batch
from patches import capturing_preprocess
from pool import on_ranks

from monta_megatron.integration.dispatcher import UNSET

PADDED = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}


def attributes_set(case: Case, layer: Any) -> set[str]:
    """Public attributes that a layer's dispatcher sets in a step."""
    names: set[str] = set()

    def note(dispatcher: Any, name: str, value: Any) -> None:
        names.add(name)
        object.__setattr__(dispatcher, name, value)

    kind = type(layer.token_dispatcher)
    with mock.patch.object(kind, "__setattr__", note, create=True):
        forward_backward(case, layer)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.old_end
@pytest.mark.parametrize("config", [{}, PADDED], ids=["plain", "padded to capacity"])
@on_ranks(2)
def test_each_of_stocks_is_set_or_listed(config: dict[str, Any]) -> None:
    case = Case(chain="alltoall", ep=2, routing="router", config=config)
    of_stock, ours = (attributes_set(case, layer) for layer in build_pair(case))
    assert {"routing_map", "probs", "output_splits" if not config else "capacity"} <= of_stock
    # Where stock's host waits: the constructor has set it before, and no phase of ours asks.
    assert of_stock - ours - {"cuda_sync_point"} <= set(UNSET)
    assert not ours & set(UNSET)


@pytest.mark.old_end
@pytest.mark.parametrize("chain", ["alltoall", "alltoall_dedup", "auto"])
@on_ranks(2)
def test_reading_one_that_is_not_set_says_why(chain: str) -> None:
    case = Case(chain=chain, ep=2)
    layer = build_layer(case)
    dispatcher = layer.token_dispatcher
    # Before the first micro-batch and after it.
    for _ in range(2):
        for name in UNSET:
            said = f"^MontaTokenDispatcher does not set {name}: it describes the collectives"
            with pytest.raises(AttributeError, match=said):
                getattr(dispatcher, name)
            assert not hasattr(dispatcher, name)
            assert getattr(dispatcher, name, None) is None
        forward_backward(case, layer)
    # Others fail as in any object, and what a framework sets is there.
    with pytest.raises(AttributeError, match=r"^MontaTokenDispatcher does not set outputsplits$"):
        dispatcher.outputsplits  # noqa: B018
    dispatcher.output_splits = [1, 2]
    assert dispatcher.output_splits == [1, 2]


@pytest.mark.old_end
@on_ranks(2)
def test_a_graph_reads_every_attribute_of_its_list() -> None:
    """After the preprocessing, and without a default."""
    case = Case(chain="alltoall", ep=2)
    with capturing_preprocess():
        dispatcher = build_layer(case).token_dispatcher
    batch = make_batch(case)
    rows, probs = batch.tokens.unsqueeze(1), batch.routing_map.float()
    dispatcher.dispatch_preprocess(rows, batch.routing_map, probs)
    values = {name: getattr(dispatcher, name) for name in dispatcher.cudagraph_attrs}
    captured = {name for name, value in values.items() if isinstance(value, torch.Tensor)}
    # Newer releases list the probabilities, too.
    expected = {"reversed_local_input_permutation_mapping", "routing_map", "joined_counts"}
    assert captured - {"probs"} == expected
