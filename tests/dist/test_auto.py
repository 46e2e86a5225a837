"""The planner chooses: every rank alike, whatever its own tokens, and as often as they change."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layers import (
    Case,
    build_layer,
    compare,
    error_of,
    forward_backward,
    gathered,
    reported,
)
from pool import on_ranks

from monta_megatron.common import strict_yaml
from monta_megatron.core import Choice
from monta_megatron.integration import layer_setup
from monta_megatron.planner.cluster import Cluster

CLUSTER = Path(__file__).parents[2] / "configs/clusters/emulated_2x4_500mbit.yaml"


def with_short_starts(cluster: Cluster) -> Cluster:
    """Costs at which the answer depends on the number of rows of 64 bytes."""
    short = {
        name: replace(link, start_us=link.start_us / 30)
        for name in ("network", "node_link", "memory")
        if (link := getattr(cluster, name))
    }
    return replace(cluster, **short, host=replace(cluster.host, collective_us=5.0))


COSTS = with_short_starts(strict_yaml.load(Cluster, CLUSTER))
# 2 nodes of 2 ranks.
AUTO = Case(chain="auto", options={"cluster": COSTS})
# Nothing is tuned.
PICKED = Case(chain="auto", options={"cluster": COSTS, "tune_steps": 0})
# Four of them are the ranks' in a step, each step one further.
TOKENS = (0, 1, 100, 4096, 0, 1, 1, 0, 0, 0, 0, 100)
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.mark.parametrize("config", [{}, RECOMPUTE], ids=["", "recompute"])
@pytest.mark.parametrize("layout", [{"tp": 2, "topk": 3}, {"ep": 2, "etp": 2}], ids=str)
@on_ranks(4)
def test_unequal_tokens_changing_every_step(layout: dict[str, int], config: dict[str, Any]) -> None:
    case = replace(PICKED, **layout, config=config, tokens=TOKENS, num_steps=len(TOKENS))
    choices = compare(case)
    assert len(set(choices)) > 1, "one answer for 1 and for 4,096 tokens"


@on_ranks(4)
def test_the_planners_pick_is_said_once() -> None:
    said, *others = gathered(reported(replace(PICKED, tokens=(4096,)), True))
    no_tuning, pick = said
    assert no_tuning.startswith("monta: auto: no tuning, the planner's pick runs: ")
    assert re.match(
        r"monta: auto, .+ nodes: \w+ in \d chunks?, planned on .+ for up to 4,096 tokens", pick
    )
    assert others == [[]] * 3


# Other costs under the same name.
DEARER = replace(COSTS, host=replace(COSTS.host, operation_us=1.0))
TWO = Case(chain="hierarchical_allgather")
FOUR_GROUPS = Case(config={"moe_router_num_groups": 4})
TWO_GROUPS = {"config": {"moe_router_num_groups": 2}}


@pytest.mark.parametrize(
    ("common", "other", "message"),
    [
        (Case(), {"num_chunks": 3}, "moe_monta_num_chunks: 4 and 3"),
        (Case(), {"chain": "auto"}, "moe_monta_chain: alltoall_allgather and auto"),
        (FOUR_GROUPS, TWO_GROUPS, "moe_router_num_groups: 4 and 2"),
        (AUTO, {"options": AUTO.options | {"tune_steps": 6}}, "moe_monta_tune_steps: 24 and 6"),
        (AUTO, {"options": {"cluster": DEARER}}, "hash of the costs: "),
        (Case(), {"hidden": 32}, "hidden_size: 16 and 32"),
        (Case(), {"topk": 3}, "moe_router_topk: 2 and 3"),
        (AUTO, {"dtype": "bfloat16"}, "params_dtype: torch.float32 and torch.bfloat16"),
        (TWO, {"ranks_per_node": 1}, "moe_monta_ranks_per_node: 2 and 1"),
        # One that goes by its host, among others that have the option.
        (TWO, {"ranks_per_node": None}, "moe_monta_ranks_per_node: 2 and None"),
    ],
)
@on_ranks(4)
def test_ranks_that_differ_are_told(common: Case, other: dict[str, Any], message: str) -> None:
    """All of them, as a layer is built."""
    case = replace(common, **other) if dist.get_rank() == 2 else common
    refusal = error_of(build_layer, case)
    assert refusal.startswith(f"moe_monta: ranks 0 and 2 differ in {message}"), refusal
    assert refusal.endswith("; give every rank the same options and files")


@pytest.mark.parametrize("name", ["check_supported", "node_here", "planner_for"])
@on_ranks(4)
def test_a_rank_that_fails_alone_ends_all(name: str) -> None:
    """Before ranks gather anything, and behind it."""
    function = getattr(layer_setup, name)
    fails = mock.Mock(side_effect=OSError("no such file"))
    with (
        mock.patch.object(layer_setup, name, fails if dist.get_rank() == 2 else function),
        pytest.raises(OSError if dist.get_rank() == 2 else RuntimeError, match="no such file"),
    ):
        build_layer(replace(Case(), ep=2))


@on_ranks(4)
def test_ranks_with_other_communicator_settings_are_told() -> None:
    """Before groups are made that are named by them, for which the ranks would wait."""
    from monta_megatron.exchange import collectives

    settings: dict[str, Any] = dict.fromkeys(collectives.NCCL_SETTINGS, collectives.UNSET)
    settings |= {"net_name": None, "max_ctas": 32 if dist.get_rank() == 2 else 16}
    options = SimpleNamespace(config=SimpleNamespace(**settings), is_high_priority_stream=False)
    with mock.patch.object(collectives, "options_of", lambda group: options):
        error = error_of(build_layer, Case())
    assert "differ in max_ctas of ep (--nccl-communicator-config-path): 16 and 32; " in error


@on_ranks(4)
def test_ranks_that_come_to_differ_are_told_before_they_exchange() -> None:
    """All ranks agree on two dispatchers; then rank 2 runs the first, the others the second."""
    case = Case(chain="alltoall_dedup")
    first, second = (build_layer(replace(case, num_chunks=chunks)) for chunks in (3, 2))
    layer = first if dist.get_rank() == 2 else second
    error = error_of(forward_backward, case, layer)
    assert "ranks 0 and 2 differ in moe_monta_num_chunks: 2 and 3" in error


@on_ranks(4)
def test_ranks_that_choose_otherwise_are_told() -> None:
    """By the tags of a step, before rank 2 waits for a chunk that no other rank sends."""
    chooser = build_layer(PICKED).token_dispatcher.chooser
    chooser.tuner.choice = Choice(chain="allgather", num_chunks=3 if dist.get_rank() == 2 else 2)
    chooser._set_step_tag()
    counts = SimpleNamespace(tags=np.array(gathered(chooser.tag(False))), max_tokens=1)
    error = error_of(chooser.choose, counts, torch.device("cpu"))
    assert "ranks 0 and 2 differ in choice: allgather in 2 chunks and allgather in 3" in error


@on_ranks(4)
def test_padded_to_capacity_all_ranks_choose_for_as_many_tokens() -> None:
    config = {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}
    case = replace(AUTO, routing="router", config=config, tokens=(30, 31, 32, 29))
    layer = build_layer(case)
    chooser = layer.token_dispatcher.chooser
    with mock.patch.object(chooser, "choose", wraps=chooser.choose) as choose:
        forward_backward(case, layer)
    # Of 8 experts each takes 4 pairs from every rank: ceil(29 * 2 / 8 / 2) = 32 * 2 / 8 / 2.
    assert [call.args[0].max_tokens for call in choose.call_args_list] == [32]
