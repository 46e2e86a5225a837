"""Clusters and shapes that the tests of this folder share."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monta_megatron.chains.program import Resource
from monta_megatron.cli import main
from monta_megatron.common import strict_yaml
from monta_megatron.common.units import Rate
from monta_megatron.core import Layout, Routing, Shape
from monta_megatron.planner.cluster import Cluster, Link
from monta_megatron.planner.curves import HostCosts
from monta_megatron.planner.routing.expected import UniformRouting

CONFIGS = Path(__file__).resolve().parents[3] / "configs"

LAUNCH = HostCosts(
    collective_us=0.0,
    operation_us=0.0,
    counts_to_host_us=0.0,
    kind="measured",
    source="by hand",
)


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a command prints with --json."""
    assert main([*words, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def link(resource: Resource, alpha_us: float, gbytes_per_s: float) -> Link:
    """A link by hand."""
    return Link(
        resource=resource,
        alpha_us=alpha_us,
        rate=Rate(gbytes_per_s),
        kind="measured",
        source="by hand",
    )


def preset(name: str) -> Cluster:
    """A cluster of configs/clusters."""
    return strict_yaml.load(Cluster, CONFIGS / "clusters" / f"{name}.yaml")


def with_link(cluster: Cluster, resource: Resource, **changes: float) -> Cluster:
    """The cluster with another line for one resource."""
    links = tuple(
        replace(each, **changes) if each.resource == resource else each  # type: ignore[arg-type]
        for each in cluster.links
    )
    return replace(cluster, links=links)


def layout_of(ep: int, etp: int, ranks_per_node: int, num_experts: int) -> Layout:
    """Consecutive ranks, nodes filled one after the other."""
    return Layout(
        ep=ep,
        etp=etp,
        num_local_experts=num_experts // ep,
        rank=0,
        nodes=tuple(rank // ranks_per_node for rank in range(ep * etp)),
    )


def shape_of(
    ep: int,
    etp: int = 1,
    *,
    ranks_per_node: int = 8,
    num_experts: int = 64,
    topk: int = 8,
    tokens: int = 4096,
    hidden: int = 4096,
    routing: Routing | None = None,
) -> Shape:
    """An exchange in bf16."""
    return Shape(
        layout=layout_of(ep, etp, ranks_per_node, num_experts),
        hidden_size=hidden,
        value_bytes=2,
        prob_bytes=4,
        routing=routing or UniformRouting(num_experts=num_experts, topk=topk),
        tokens_per_rank=tokens,
    )
