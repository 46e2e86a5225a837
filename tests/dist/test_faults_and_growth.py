"""A lost rank ends the others in bounded time with a name; nothing grows over many steps."""

import gc
import os
import signal
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layers import Case, build_layer, forward_backward
from pool import Pool, on_ranks

import monta_megatron

# What Megatron gives its groups here, and the rails and nodes inherit.
GROUP_LIMIT_S = 10.0
LOST = 3


def lose_in_dispatch(signal_number: int) -> Any:
    """Let a rank be killed, or stop, between two chunks."""
    from monta_megatron.exchange import errors, operations

    original = operations.OPERATIONS

    def alltoall(buffers: Any, operation: Any) -> Any:
        if operation.chunk == 1 and dist.get_rank() == LOST:
            # What it has started before reaches the others.
            for each in errors.UNDER_WAY:
                for work in chain.from_iterable(each.works.values()):
                    work.wait()
            os.kill(os.getpid(), signal_number)
        return original["alltoall"](buffers, operation)

    return mock.patch.object(operations, "OPERATIONS", {**original, "alltoall": alltoall})


def lose_in_exchange_of_counts(signal_number: int) -> Any:
    """Let a rank be killed, or stop, before it tells its counts."""
    if dist.get_rank() == LOST:
        os.kill(os.getpid(), signal_number)
    return nullcontext()


def failure_of_step(case: Case, lose: Any, signal_number: int) -> tuple[str, float]:
    """How a step fails that has lost a rank, and after how many seconds."""
    from monta_megatron.exchange.errors import ExchangeError

    layer = build_layer(case)
    forward_backward(case, layer)
    begin = time.monotonic()
    with lose(signal_number), pytest.raises(ExchangeError) as failed:
        forward_backward(case, layer)
    seconds = time.monotonic() - begin
    # Megatron would end with this error, and so close its connections to the other ranks.
    dist.destroy_process_group()
    return str(failed.value), seconds


def failures(case: Case, lose: Any, stops: bool) -> list[str]:
    """What the others say of a rank that is killed, or stopped by SIGSTOP, in bounded time.

    The connections of a stopped one stay open, and nothing answers.
    """
    how = signal.SIGSTOP if stops else signal.SIGKILL
    with closing(Pool(4, group_limit_s=GROUP_LIMIT_S)) as pool:
        answers = pool.run(failure_of_step, case, lose, how, num_lost=1)
    assert all(seconds < GROUP_LIMIT_S + 5.0 for _, seconds in answers)
    return [message for message, _ in answers]


@pytest.mark.parametrize(
    ("chain", "groups", "stops"),
    [("alltoall_allgather", ("ep",), True), ("hierarchical_alltoall", ("rail", "node"), False)],
)
def test_a_lost_rank_is_reported_by_stage_chunk_and_group(
    chain: str, groups: tuple[str, ...], stops: bool
) -> None:
    found = failures(Case(chain=chain), lose_in_dispatch, stops)
    for rank, message in enumerate(found):
        # A rank may wait for the dead one, or for one that waits for it.
        assert f"chain {chain}, stage " in message
        assert "chunk " in message and " of 4" in message
        assert any(f"group {name}" in message for name in groups)
        # Who is lost, directly or by the rank that waited for it.
        assert f"rank {LOST} left or did not come: ended, stuck elsewhere" in message
        assert f"; monta-megatron {monta_megatron.__version__}, megatron-core " in message
        if stops:
            # Of pack, alltoall, pack, alltoall, put, pack, alltoall, put, ...: the eighth waits for
            # the second chunk's AllToAll, to which the lost rank has not come.
            assert message.startswith(
                f"dispatch: chain {chain}, stage alltoall, chunk 2 of 4, group ep (rank {rank} of "
                "4) failed: "
            )
            assert (
                "\nlast started: operation 7 of 12, alltoall, stage alltoall, chunk 3 of 4, group "
                f"ep (rank {rank} of 4); last ended: operation 6 of 12, pack, stage pack, chunk 3 "
                "of 4; monta-megatron "
            ) in message


@pytest.mark.parametrize(("chain", "stops"), [("alltoall_allgather", False), ("auto", True)])
def test_a_rank_that_ends_or_stops_in_the_exchange_of_counts(chain: str, stops: bool) -> None:
    found = failures(Case(chain=chain), lose_in_exchange_of_counts, stops)
    for rank, message in enumerate(found):
        assert message.startswith(
            f"exchange of counts: chain {chain}, group tp_ep (rank {rank} of 4: "
            "ranks 0, 1, 2, 3) failed: "
        )
        assert (
            f"\nrank {LOST} left or did not come: ended, stuck elsewhere, or with fewer "
            "micro-batches than the others\nno pass is under way; monta-megatron "
        ) in message


@on_ranks(4, limit_s=240.0)
def test_many_steps_grow_nothing() -> None:
    """Neither resident memory nor threads, process groups and live tensors."""
    case = Case(chain="hierarchical_alltoall", num_chunks=2)
    layer, memory, counts = build_layer(case), [], []
    for step in range(300):
        forward_backward(replace(case, seed=step % 7), layer)
        if (step + 1) % 75 == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
            threads, groups = os.listdir("/proc/self/task"), dist.distributed_c10d._world.pg_map
            tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
            counts.append((len(threads), len(groups), tensors))
    assert threading.active_count() < 64
    # The first quarter warms up allocators and caches.
    assert memory[-1] - memory[1] < 5 * 2**20
    assert len(set(counts[1:])) == 1, f"threads, groups, tensors: {counts}"
