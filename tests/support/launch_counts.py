"""What one rank's host issues for a layer's exchange, forward and backward, counted by pass.

The dispatcher's phases run on a CUDA device that is not there (`fake_device`), in a world of fake
process groups (`fake_world`): the CUDA branch, with streams. Megatron's own permutation is
replaced by its sizes, so what it launches is not counted; it is the same for stock.

    tensor_operations  operations of ATen that reach the dispatcher, without views, without what
                       reads or changes metadata alone; an allocation is one
    kernel_launches    of those, by `KERNELS`: an estimate. A collective's own are not among them.
                       A launch of a Triton kernel is one of both
    collectives        calls of a process group
    stream_switches    calls of `torch.cuda.set_stream`; a context `torch.cuda.stream` is two
    waits              of a stream for an event or for a collective; the host's are none of them
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_device import HAS_TRITON, FakeDevice
from fake_world import LAYOUTS, RANKS_PER_NODE, TOPK, exchanged_counts, megatron_groups
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.transformer_config import TransformerConfig
from stream_recorder import RecordedStream, Recorder
from torch.utils._python_dispatch import TorchDispatchMode

from monta_megatron import register
from monta_megatron.chains.program import COMBINE_BACKWARD, DISPATCH_BACKWARD
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.executor import run
from monta_megatron.integration import layer_setup
from monta_megatron.integration.dispatcher import MontaTokenDispatcher

HIDDEN = 32
# Before and behind the passes: the exchange of counts, what makes columns of a routing map.
ROWS = ("counts", "enter", "dispatch", "combine", "leave", "combine_backward", "dispatch_backward")
LISTED = (
    "integration.count_sources.copy_to_host",
    "integration.count_sources.read",
    "exchange.exchange._expand_runs",
)
# Device kernels of an operation of ATen, where they are not one. Sorts are CUB's radix sort of
# 64-bit keys with its copies; scans have a kernel that begins them; a copy is a transfer.
KERNELS = {
    "empty": 0,
    "empty_like": 0,
    "empty_strided": 0,
    "new_empty": 0,
    "new_empty_strided": 0,
    "sort": 5,
    "argsort": 5,
    "topk": 4,
    "cumsum": 2,
    "bincount": 2,
}
KERNELS_OTHERWISE = 1


@dataclass(kw_only=True)
class LaunchCounts:
    """What is issued in one part of a layer; see the module for what each field counts."""

    tensor_operations: int = 0
    kernel_launches: int = 0
    collectives: int = 0
    stream_switches: int = 0
    waits: int = 0


class LaunchCounter(TorchDispatchMode):
    """Counts what is issued while it is entered, by the row that `row` names.

    Attributes:
        counts: of each of `ROWS`.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.counts = {name: LaunchCounts() for name in ROWS}
        self._recorder = recorder
        self._rows = ["enter"]
        self._num_read = 0

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        """Context in which what is issued belongs to a row."""
        self._read_queue()
        self._rows.append(name)
        try:
            yield
        finally:
            self._read_queue()
            self._rows.pop()

    def in_row(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose work belongs to a row."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.row(name):
                return function(*args, **kwargs)

        return counted

    def switched(self, switch: Callable[..., Any], times: int) -> Callable[..., Any]:
        """`torch.cuda.stream` or `torch.cuda.set_stream`, counted so many times."""

        def counted(stream: RecordedStream) -> Any:
            self._here.stream_switches += times
            return switch(stream)

        return counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._here.collectives += 1
        # What is muted stands in for a collective's work.
        elif func.namespace == "aten" and not self._recorder._is_muted and not _moves_nothing(func):
            self._here.tensor_operations += 1
            self._here.kernel_launches += KERNELS.get(name, KERNELS_OTHERWISE)
        return func(*args, **(kwargs or {}))

    @property
    def _here(self) -> LaunchCounts:
        return self.counts[self._rows[-1]]

    def _read_queue(self) -> None:
        """Count the waits and Triton kernels since the last call.

        A group's own stream waits inside a collective.
        """
        new, self._num_read = self._recorder.queue[self._num_read :], len(self._recorder.queue)
        num_launches = sum(each.name.startswith("triton ") for each in new)
        self._here.tensor_operations += num_launches
        self._here.kernel_launches += num_launches
        self._here.waits += sum(
            each.kind == "wait" and not each.stream.startswith("group ") for each in new
        )


def _moves_nothing(func: Any) -> bool:
    """Whether an operation makes a view, or has to do with dtypes alone."""
    return func.overloadpacket.__name__ == "promote_types" or any(
        each.alias_info and not each.alias_info.is_write for each in func._schema.returns
    )


def count_launches(
    chain_name: str, ep: int, num_chunks: int, kernels: str = "torch"
) -> dict[str, LaunchCounts]:
    """The counts of each of `ROWS`, for one layer's exchange, forward and backward.

    Args:
        chain_name: of `chains.CHAINS`.
        ep: expert parallel ranks; a layout of `fake_world.LAYOUTS`, with ETP 1.
        num_chunks: chunks of each pass, 1 for a serial chain.
        kernels: what does the work, "torch" or "fused".
    """
    # On the host, where the counts come from, "auto" is PyTorch.
    options = {"moe_monta_kernels": "auto" if kernels == "fused" else "torch"}
    layer = layer_on_device(chain_name, ep, moe_monta_num_chunks=num_chunks, **options)
    with layer as (made, routed, device):
        counter = LaunchCounter(device.recorder)
        for owner, name in counting(made):
            setattr(owner, name, counter.in_row("counts", getattr(owner, name)))
        switches = {
            "stream": counter.switched(torch.cuda.stream, 2),
            "set_stream": counter.switched(torch.cuda.set_stream, 1),
        }
        inputs = layer_inputs(routed, "cuda")
        with mock.patch.multiple(torch.cuda, **switches), counter:
            run_layer(made, inputs, counter.row)
    assert made.choice is not None and made.choice.num_chunks == num_chunks
    return counter.counts


def counting(made: MontaTokenDispatcher) -> list[tuple[Any, str]]:
    """The methods that exchange, copy and read the counts, by their owners."""
    return [(made._counts, "collect"), (made._counts, "copy_to_host"), (made, "_bound")]


@contextmanager
def layer_on_device(
    chain_name: str, ep: int = 16, **options: Any
) -> Iterator[tuple[MontaTokenDispatcher, torch.Tensor, FakeDevice]]:
    """Context of a device that is not there: a dispatcher, its routing map on the host, the device.

    Args:
        chain_name: of `chains.CHAINS`.
        ep: see `count_launches`.
        options: see `make_dispatcher`.
    """
    with mock.patch.object(stock.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"):
        made = make_dispatcher(chain_name, ep, **options)
    copied, routed = exchanged_counts(made._counts.count_messages)
    device = FakeDevice(listed=LISTED, host_values=copied.numpy())
    made.monitor = device.recorder.monitor
    made.cuda_dtoh_stream = RecordedStream(device.recorder, "counts")
    with mock.patch.multiple(stock, permute=permute_sizes, unpermute=unpermute_sizes), device:
        yield made, routed, device


def make_dispatcher(
    chain_name: str, ep: int = 16, router_dtype: str = "fp32", **options: Any
) -> MontaTokenDispatcher:
    """A layer's dispatcher; all ranks say what this one says."""
    register()
    layout = LAYOUTS[ep, 1]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=layout.num_experts,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type="monta",
        moe_router_load_balancing_type="none",
        moe_router_dtype=router_dtype,
        expert_model_parallel_size=layout.ep,
        add_bias_linear=False,
        moe_monta_chain=chain_name,
        moe_monta_ranks_per_node=RANKS_PER_NODE,
        # Once per training, and the host waits for it.
        moe_monta_check=0,
        **options,
    )
    groups = megatron_groups(layout)
    alike: dict[str, Any] = {"gather_objects": lambda value, group: [value] * group.size()}
    collection = SimpleNamespace(ep=groups["ep"], expt_tp=groups["etp"], tp_ep=groups["tp_ep"])
    first, number = layout.first_expert, layout.num_local_experts
    # As on GPUs.
    alike["is_fused"] = lambda choice, _: HAS_TRITON and choice != "torch"
    with mock.patch.multiple(layer_setup, **alike):
        return MontaTokenDispatcher(number, list(range(first, first + number)), config, collection)


def layer_inputs(routed: torch.Tensor, device: str) -> tuple[torch.Tensor, ...]:
    """[T, 1, H], [T, E] bool, [T, E] on a device: tokens, routing map and probabilities."""
    hidden_states = torch.zeros(len(routed), 1, HIDDEN, dtype=torch.bfloat16, device=device)
    on_device = routed
    if device == "cuda":
        on_device = torch.empty(routed.shape, dtype=torch.bool, device=device)
    return hidden_states, on_device, torch.zeros(routed.shape, device=device)


def run_layer(
    made: MontaTokenDispatcher,
    inputs: tuple[torch.Tensor, ...],
    row: Callable[[str], AbstractContextManager[None]],
) -> None:
    """The six phases, then the passes of the backward, which autograd's engine would run."""
    with row("enter"):
        rows, row_probs = made.dispatch_preprocess(*inputs)
    with row("dispatch"):
        rows, row_probs = made.token_dispatch(rows, row_probs)
    (exchange,) = made.micro_batch.exchanges
    with row("combine"):
        output = made.token_combine(rows)
    with row("leave"):
        made.combine_postprocess(output)
    with row("combine_backward"):
        rows = run(exchange, COMBINE_BACKWARD, Columns(rows=output)).rows
    with row("dispatch_backward"):
        run(exchange, DISPATCH_BACKWARD, Columns(rows=rows, probs=row_probs))


def permute_sizes(
    tokens: Any, routing_map: Any, *, num_out_tokens: int, **_: Any
) -> tuple[Any, ...]:
    rows = tokens.new_empty(num_out_tokens, HIDDEN)
    return rows, rows.new_empty(num_out_tokens, dtype=torch.float32), routing_map, None, None


def unpermute_sizes(rows: Any, *_: Any, restore_shape: Any, **__: Any) -> torch.Tensor:
    return rows.new_empty(restore_shape)
