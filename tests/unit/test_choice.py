"""From a configuration to the planner of a dispatcher."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import torch

from monta_megatron.common.files import CONFIGS
from monta_megatron.core import Layout, Shape
from monta_megatron.integration.options import Options
from monta_megatron.integration.planning import planner_for
from monta_megatron.integration.supported_settings import check_supported
from monta_megatron.planner.cluster_file import load_cluster

LAYOUT = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 0, 1, 1))


def config(**changes: Any) -> Any:
    """The fields of a TransformerConfig that a choice looks at."""
    fields = {
        **{"num_moe_experts": 8, "moe_router_topk": 2, "hidden_size": 64},
        **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk")),
        "params_dtype": torch.bfloat16,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_auto_plans_for_what_the_configuration_exchanges() -> None:
    def shape(**changes: Any) -> Shape:
        found = planner_for(Options(), config(**changes), LAYOUT, permuted_only=False).shape
        assert found is not None
        return found

    plain = shape()
    assert (plain.hidden_size, plain.value_bytes, plain.prob_bytes) == (64, 2, 2)
    assert shape(moe_latent_size=12).hidden_size == 12
    assert shape(moe_router_dtype="fp32").prob_bytes == 4
    assert shape(moe_router_dtype="fp64").prob_bytes == 8
    assert shape(params_dtype=torch.float32).value_bytes == 4
    limited = shape(moe_router_num_groups=4, moe_router_group_topk=2)
    assert (limited.routing.num_groups, limited.routing.group_topk) == (4, 2)
    # With 2 groups on each of 2 nodes, a token crosses less often if it may take only 2 of them.
    assert limited.routing.hits(2).sum() < plain.routing.hits(2).sum()


def test_an_exchange_on_more_nodes_than_there_are_is_refused() -> None:
    options = Options(cluster=load_cluster("a800_2x8_ib200"))
    assert planner_for(options, config(), LAYOUT, permuted_only=False)
    spread = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"num_nodes: got 2, must be at least the 4 of the exch"):
        planner_for(options, config(), spread, permuted_only=False)


def test_only_auto_is_tuned() -> None:
    """A case is the fields of a configuration."""

    def answer(fields: str) -> str:
        try:
            return str(Options.of(SimpleNamespace(**ast.literal_eval(fields))).tune_steps)
        except ValueError as error:
            return str(error)

    golden.check_cases(Path(__file__).parent / "golden" / "tune_steps.txt", answer)


def test_variables_hold_where_a_layer_spec_has_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_MONTA_OVERLAP_EXPERTS", "1")
    assert Options.of(config()).overlap_experts
    with pytest.raises(ValueError, match="delay_wgrad_compute: not supported with moe_monta_over"):
        check_supported(config(delay_wgrad_compute=True))


def test_a_cluster_file_is_read_once_unless_it_changes(tmp_path: Path) -> None:
    """Every layer makes its options."""
    path = tmp_path / "cluster.yaml"
    path.write_bytes((CONFIGS / "clusters" / "a800_2x8_ib200.yaml").read_bytes())
    given = SimpleNamespace(moe_monta_cluster=str(path))
    found = Options.of(given).cluster
    assert Options.of(given).cluster is found
    os.utime(path, ns=(1, 1))
    again = Options.of(given).cluster
    assert again == found and again is not found
