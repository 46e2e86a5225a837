"""What the executor does on a GPU, without one: every chain and pass, and no wait of the host.

Passes run directly, since autograd's engine needs a driver. The counts are those of real routing
maps; the rows are fake tensors on "cuda" (see fake_device), the process groups torch's fake ones.
"""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_device import HAS_TRITON, FakeDevice, HostWaitsError
from fake_world import (
    LAYOUTS,
    TOPK,
    bound_exchange,
    groups_of,
    megatron_groups,
    routing_maps,
)

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import (
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    FORWARD_BACKWARD,
    Operation,
)
from monta_megatron.chains.stages import Permute
from monta_megatron.exchange import operations as torch_operations
from monta_megatron.exchange.buffers import Buffers, Columns
from monta_megatron.exchange.collectives import peer_groups, start_all_gather
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import run
from monta_megatron.exchange.rows import expert_ids_of

HIDDEN = 32
NUM_BLOCKS = 6
NUM_CHUNKS = 3
ROW_INDICES = "exchange.exchange._expand_runs"
CASES = [
    (chain.name, ep, etp)
    for chain in CHAINS.values()
    for (ep, etp), layout in LAYOUTS.items()
    # On 128 ranks, those alone that have something to do in an expert tensor parallel group.
    if chain.incompatibility(layout) is None and (ep * etp <= 64 or "etp" in chain.groups)
]
pytestmark = pytest.mark.usefixtures("world")


def make_exchange(
    chain_name: str,
    ep: int,
    etp: int,
    device: FakeDevice,
    padded: bool = False,
    fused: bool = False,
) -> tuple[Exchange, torch.Tensor]:
    """A micro-batch's exchange, and its routing map on the host."""
    chain, layout = CHAINS[chain_name], LAYOUTS[ep, etp]
    maps = routing_maps(layout, padded)
    exchange, _ = bound_exchange(
        chain,
        layout,
        maps,
        NUM_CHUNKS,
        NUM_BLOCKS,
        groups=peer_groups([chain], layout, megatron_groups(layout)),
        monitor=device.recorder.monitor,
        fused=fused,
    )
    return exchange, maps[layout.rank % len(maps)]


def source_lanes(exchange: Exchange, routed: torch.Tensor, dtype: torch.dtype) -> Columns:
    """The columns that dispatch is given."""
    num_rows = int(exchange.bound_chain.num_source_rows)
    rows = torch.empty(num_rows, HIDDEN, dtype=dtype, device="cuda")
    if not exchange.max_experts_per_token:
        return Columns(rows=rows, probs=torch.empty(num_rows, device="cuda"))
    on_device = torch.empty(routed.shape, dtype=torch.bool, device="cuda")
    on_map, width = torch.empty(routed.shape, device="cuda"), exchange.max_experts_per_token
    probs, ids = expert_ids_of(on_device, on_map, width, exchange.fused)
    return Columns(rows=rows, probs=probs, ids=ids)


def run_layer(exchange: Exchange, routed: torch.Tensor, dtype: torch.dtype) -> None:
    """All four passes, and the shapes of what they return."""
    source = source_lanes(exchange, routed, dtype)
    assert source.probs is not None
    expert = run(exchange, DISPATCH, source)
    output = run(exchange, COMBINE, Columns(rows=torch.empty_like(expert.rows)))
    gradients = run(exchange, COMBINE_BACKWARD, Columns(rows=torch.empty_like(output.rows)))
    of_probs = torch.empty(len(gradients.rows), device="cuda")
    back = run(exchange, DISPATCH_BACKWARD, Columns(rows=gradients.rows, probs=of_probs))
    num_rows = int(exchange.bound_chain.num_expert_rows)
    for columns, *shapes in (
        (expert, (num_rows, HIDDEN), (num_rows,)),
        (output, source.rows.shape),
        (gradients, (num_rows, HIDDEN)),
        (back, source.rows.shape, source.probs.shape),
    ):
        found = [(each.is_cuda, each.shape, each.dtype) for each in columns.tensors()]
        dtypes = dtype, torch.float32
        assert found == [(True, *each) for each in zip(shapes, dtypes, strict=False)]


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("chain_name", "ep", "etp"), CASES)
def test_the_host_waits_for_nothing(
    chain_name: str, ep: int, etp: int, dtype: torch.dtype, padded: bool, fused: bool
) -> None:
    if fused and not HAS_TRITON:
        pytest.skip("needs triton, which comes with torch's GPU wheels")
    device = FakeDevice(listed=[ROW_INDICES])
    exchange, routed = make_exchange(chain_name, ep, etp, device, padded, fused)
    if exchange.max_experts_per_token:
        assert (exchange.max_experts_per_token > 2 * TOPK) == padded
    stages = exchange.bound_chain.stages
    with device:
        run_layer(exchange, routed, dtype)
        del exchange, routed
    # One copy for each stage that puts rows into another order, whatever passes there are.
    permutes = [
        each
        for each in stages
        if isinstance(each.shape.stage, Permute)
        and each.segments is not None
        and not each.segments.is_slice
    ]
    assert device.crossings == [f"{ROW_INDICES} copies to the device"] * len(permutes)
    recorder = device.recorder
    assert recorder.findings == []
    passes = {each.step.pass_name for each in recorder.collectives() if each.step is not None}
    assert passes == {each.name for each in FORWARD_BACKWARD}
    launched = any(each.name.startswith("triton ") for each in recorder.queue)
    assert launched == (fused and (CHAINS[chain_name].rows == "tokens" or etp > 1))


def on_host(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(rows.shape, dtype=rows.dtype)


FAULTS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    # A value, or a size, of the device.
    "item": (lambda rows: rows[0, 0].item(), "_local_scalar_dense asks the device for a value"),
    "equal": (lambda rows: torch.equal(rows, rows), "equal asks the device for a value"),
    "nonzero": (lambda rows: rows.nonzero(), "nonzero asks the device for a size"),
    "repeat_interleave": (
        lambda rows: torch.repeat_interleave(rows[:, 0], rows[:, 0].long()),
        "repeat_interleave asks the device for a size",
    ),
    "mask": (lambda rows: rows[rows > 0], "index asks the device how much a mask selects"),
    # Copies between host and device.
    "cpu": (lambda rows: rows.cpu(), "a blocking copy to the host"),
    "to_cpu_unlisted": (
        lambda rows: rows.to("cpu", non_blocking=True),
        "copies to the host: not listed",
    ),
    "into_pageable": (
        lambda rows: on_host(rows).copy_(rows, non_blocking=True),
        "a copy to the host of pageable memory",
    ),
    "tensor": (lambda rows: torch.tensor([1], device=rows.device), "a blocking copy to the device"),
    "pageable": (
        lambda rows: on_host(rows).to(rows.device, non_blocking=True),
        "a copy to the device of pageable memory",
    ),
    "pinned_unlisted": (
        lambda rows: on_host(rows).pin_memory().to(rows.device, non_blocking=True),
        "copies to the device: not listed",
    ),
    "index": (lambda rows: rows[torch.zeros(1).long()], "index takes tensors of the host and"),
    # Waits.
    "event": (
        lambda rows: torch.cuda.current_stream().record_event().synchronize(),
        "waits for the device: not listed",
    ),
    "stream": (lambda rows: torch.cuda.current_stream().synchronize(), "waits for the device"),
    "device": (lambda rows: torch.cuda.synchronize(), "waits for the device"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_wait_is_found(fault: str) -> None:
    plant, message = FAULTS[fault]
    duplicate = torch_operations.OPERATIONS["duplicate"]

    def with_fault(buffers: Buffers, operation: Operation) -> list[dist.Work]:
        plant(buffers.source(operation).rows)
        return duplicate(buffers, operation)

    device = FakeDevice(listed=[ROW_INDICES])
    exchange, routed = make_exchange("hierarchical_alltoall", 16, 1, device)
    operations = {**torch_operations.OPERATIONS, "duplicate": with_fault}
    with (
        mock.patch.object(torch_operations, "OPERATIONS", operations),
        pytest.raises(HostWaitsError, match=message),
        device,
    ):
        run_layer(exchange, routed, torch.bfloat16)


@pytest.mark.parametrize(("num_more", "issued"), [(0, "_allgather_base"), (1, "alltoall")])
def test_how_rows_are_gathered(num_more: int, issued: str) -> None:
    """Parts of one size, or this rank's with more rows; `tests/dist` gathers on the host."""
    calls = mock.Mock(spec=["_allgather_base", "alltoall"])
    group = replace(groups_of(LAYOUTS[16, 1])["node"], process_group=calls)
    receive = [3 + num_more * (peer == group.rank) for peer in range(group.size)]
    send = [receive[group.rank]] * group.size
    with FakeDevice():
        message = torch.empty(send[0], HIDDEN, device="cuda")
        output = message.new_empty(sum(receive), HIDDEN)
        start_all_gather(output, message, receive, send, group)
    ((name, (outputs, inputs, *_), _),) = calls.method_calls
    assert name == issued
    if num_more:
        assert [len(each) for each in outputs] == receive
        assert all(each._base is output for each in outputs)
    sent = inputs if issued == "alltoall" else [inputs] * group.size
    assert len(sent) == group.size and all(each is message for each in sent)


def test_a_pageable_copy_in_place_of_the_listed_one_is_found() -> None:
    device = FakeDevice(listed=[ROW_INDICES])
    exchange, routed = make_exchange("hierarchical_alltoall", 16, 1, device)
    with (
        pytest.raises(HostWaitsError, match="a copy to the device of pageable memory"),
        device,
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
    ):
        run_layer(exchange, routed, torch.bfloat16)
