"""A rank that ends, or does not come, is named by the others with the group in which they wait."""

import os
from contextlib import closing
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from layers import Case, build_layer, forward_backward
from pool import Pool

# Of the process groups. A rank that ends is seen at once.
LIMIT_S = 5.0
CASE = Case(chain="alltoall", ep=2)
GROUP = "group tp_ep (rank 0 of 2: ranks 0, 1) failed: "
GONE = "\nrank 1 left or did not come: ended, stuck elsewhere"
FEWER = ", or with fewer micro-batches than the others\n"


def error_with_group(step: Any) -> str:
    from monta_megatron.exchange.errors import ExchangeError

    with pytest.raises(ExchangeError) as failed:
        step()
    return str(failed.value)


def end(*_: Any, **__: Any) -> None:
    os._exit(0)


def in_the_check() -> str:
    """Rank 1 ends after the passes of the first check, before the ranks compare."""
    from monta_megatron.integration.first_use import FirstUse

    if dist.get_rank() == 1:
        FirstUse._raise_on_any_rank = end  # type: ignore[method-assign]
    return error_with_group(lambda: forward_backward(CASE, build_layer(CASE)))


def in_set_up() -> str:
    """Rank 1 ends before it tells the others what it has set up."""
    from monta_megatron.integration import layer_setup

    # Megatron's groups have to be there.
    build_layer(CASE, "alltoall")
    patch = mock.patch.object(layer_setup, "check_supported", end)
    if dist.get_rank() == 1:
        patch.start()
    return error_with_group(lambda: build_layer(CASE))


def with_more_micro_batches() -> str:
    """Rank 0 has one more; rank 1 waits elsewhere meanwhile."""
    layer = build_layer(CASE)
    forward_backward(CASE, layer)
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["said"], timedelta(seconds=60))
        return ""
    said = error_with_group(lambda: forward_backward(CASE, layer))
    dist.distributed_c10d._get_default_store().set("said", "")
    return said


def alone_in_the_check() -> str:
    """Rank 1 fails on its way to the comparison, and its process ends."""
    from monta_megatron.integration.first_use import FirstUse

    if dist.get_rank() == 1:
        FirstUse._passes = mock.Mock(side_effect=MemoryError("no memory"))  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            forward_backward(CASE, build_layer(CASE))
        end()
    return error_with_group(lambda: forward_backward(CASE, build_layer(CASE)))


@pytest.mark.parametrize(
    ("scenario", "num_lost", "begin", "last"),
    [
        (in_the_check, 1, "check of the first use: chain alltoall, ", GONE + FEWER),
        (in_set_up, 1, "set-up of an MoE layer, ", f"{GONE}, or with fewer MoE layers\n"),
        (with_more_micro_batches, 0, "exchange of counts: chain alltoall, ", GONE + FEWER),
        (
            alone_in_the_check,
            1,
            "",
            "\nrank 1 was last at: the check of the first use, which failed there: "
            "moe_monta_check: alltoall in 1 chunk: the round trip failed: MemoryError: no memory. ",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_lost_peer_is_named(scenario: Any, num_lost: int, begin: str, last: str) -> None:
    with closing(Pool(2, group_limit_s=LIMIT_S)) as pool:
        said = pool.run(scenario, num_lost=num_lost)[0]
    assert said.startswith(begin)
    assert last in said
    if begin:
        assert said.startswith(begin + GROUP)
