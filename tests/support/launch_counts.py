"""What one rank's host issues for a layer's exchange, forward and backward, counted by pass.

The dispatcher's phases run on a CUDA device that is not there (`fake_device`), in a world of fake
process groups (`fake_world`): the CUDA branch, with streams. Megatron's own permutation is
replaced by its sizes, so what it launches is not counted; it is the same for stock.
docs/measuring.md, "Host time", says what each figure counts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from fake_device import HAS_TRITON, FakeDevice
from fake_world import LAYOUTS, RANKS_PER_NODE, TOPK, exchanged_counts, megatron_groups
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from stream_recorder import RecordedStream, Recorder
from torch.utils._python_dispatch import TorchDispatchMode

from monta_megatron import register
from monta_megatron.chains.program import COMBINE_BACKWARD, DISPATCH_BACKWARD
from monta_megatron.exchange import agreement
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
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"), 0),
    **dict.fromkeys(("sort", "argsort"), 5),
    "topk": 4,
    **dict.fromkeys(("cumsum", "bincount"), 2),
}


class LaunchCounts(NamedTuple):
    """What is issued in one part of a layer."""

    tensor_operations: int = 0
    kernel_launches: int = 0
    collectives: int = 0
    stream_switches: int = 0
    waits: int = 0


class Rows:
    """By how much a meter goes up in each row of a layer.

    Args:
        read: the meter.

    Attributes:
        spent: by row, without what is spent in a row inside it.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self.spent: dict[str, Any] = defaultdict(lambda: 0 * read())
        self._read = read
        self._inside: Any = 0

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        """Context, or decorator, of work that belongs to a row."""
        outside, self._inside, before = self._inside, 0, self._read()
        yield
        spent = self._read() - before
        self.spent[name] += spent - self._inside
        self._inside = outside + spent


class LaunchCounter(TorchDispatchMode):
    """Counts what is issued while it is entered.

    Attributes:
        counts: the fields of `LaunchCounts`.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.counts: dict[str, int] = LaunchCounts()._asdict()
        self._recorder = recorder
        self._num_read = 0

    def read(self) -> NDArray[np.int64]:
        """[5] counts until now, with the waits and Triton kernels that the recorder has."""
        new, self._num_read = self._recorder.queue[self._num_read :], len(self._recorder.queue)
        num_launches = sum(each.name.startswith("triton ") for each in new)
        self.counts["tensor_operations"] += num_launches
        self.counts["kernel_launches"] += num_launches
        self.counts["stream_switches"] = self._recorder.num_switches
        # A group's own stream waits inside a collective.
        self.counts["waits"] += sum(
            each.kind == "wait" and not each.stream.startswith("group ") for each in new
        )
        return np.array(list(self.counts.values()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.counts["collectives"] += 1
        # What is muted stands in for a collective's work.
        elif func.namespace == "aten" and not self._recorder._is_muted and not _moves_nothing(func):
            self.counts["tensor_operations"] += 1
            self.counts["kernel_launches"] += KERNELS.get(name, 1)
        return func(*args, **(kwargs or {}))


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
    layer = layer_on_device(chain_name, ep, kernels=kernels, moe_monta_num_chunks=num_chunks)
    with layer as (made, routed, device):
        counter = LaunchCounter(device.recorder)
        rows, inputs = Rows(counter.read), layer_inputs(routed, "cuda")
        with counter:
            run_layer(made, inputs, rows)
    assert made.choice is not None and made.choice.num_chunks == num_chunks
    return {name: LaunchCounts(*rows.spent[name].tolist()) for name in ROWS}


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
    made = make_dispatcher(chain_name, ep, **options)
    copied, routed = exchanged_counts(made.setup.counts.count_messages)
    device = FakeDevice(listed=LISTED, host_values=copied.numpy())
    made.monitor = device.recorder.monitor
    made.cuda_dtoh_stream = RecordedStream(device.recorder, "counts")
    with sizes_of_permutation(), device:
        with device.recorder.muted():
            # A layer makes the index of its messages once.
            made.setup.counts.count_messages.count(torch.empty_like(routed, device="cuda"))
        yield made, routed, device


def make_dispatcher(
    chain_name: str, ep: int = 16, kernels: str = "torch", **options: Any
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
        expert_model_parallel_size=layout.ep,
        add_bias_linear=False,
        moe_monta_chain=chain_name,
        moe_monta_ranks_per_node=RANKS_PER_NODE,
        # On the host, where the counts come from, "auto" is PyTorch.
        moe_monta_kernels="torch" if kernels == "torch" else "auto",
        # Once per training, and the host waits for it.
        moe_monta_check=0,
        **{"moe_router_dtype": "fp32", **options},
    )
    groups = megatron_groups(layout)
    collection = SimpleNamespace(ep=groups["ep"], expt_tp=groups["etp"], tp_ep=groups["tp_ep"])
    first, number = layout.first_expert, layout.num_local_experts
    with (
        mock.patch.object(
            agreement, "gather_objects", lambda value, group, *_: [value] * group.size()
        ),
        # As on GPUs.
        mock.patch.object(
            layer_setup, "is_fused", lambda choice, _: HAS_TRITON and choice != "torch"
        ),
        mock.patch.object(stock.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"),
    ):
        return MontaTokenDispatcher(number, list(range(first, first + number)), config, collection)


def layer_inputs(routed: torch.Tensor, device: str) -> tuple[torch.Tensor, ...]:
    """[T, 1, H], [T, E] bool, [T, E] on a device: tokens, routing map and probabilities."""
    hidden_states = torch.zeros(len(routed), 1, HIDDEN, dtype=torch.bfloat16, device=device)
    on_device = routed
    if device == "cuda":
        on_device = torch.empty(routed.shape, dtype=torch.bool, device=device)
    return hidden_states, on_device, torch.zeros(routed.shape, device=device)


def run_layer(made: MontaTokenDispatcher, inputs: tuple[torch.Tensor, ...], rows: Rows) -> None:
    """The six phases, then the passes of the backward, which autograd's engine would run."""
    counts = made.setup.counts
    with ExitStack() as context:
        for owner, name in ((counts, "collect"), (counts, "copy_to_host"), (made, "_bound")):
            counted = rows.row("counts")(getattr(owner, name))
            context.enter_context(mock.patch.object(owner, name, counted))
        with rows.row("enter"):
            columns, row_probs = made.dispatch_preprocess(*inputs)
        with rows.row("dispatch"):
            columns, row_probs = made.token_dispatch(columns, row_probs)
        (exchange,) = made.micro_batch.exchanges
        with rows.row("combine"):
            output = made.token_combine(columns)
        with rows.row("leave"):
            made.combine_postprocess(output)
    with rows.row("combine_backward"):
        columns = run(exchange, COMBINE_BACKWARD, Columns(rows=output)).rows
    with rows.row("dispatch_backward"):
        run(exchange, DISPATCH_BACKWARD, Columns(rows=columns, probs=row_probs))


def sizes_of_permutation() -> Any:
    """Context in which Megatron's permutation gives tensors of its sizes."""

    def permute(tokens: Any, routing_map: Any, *, num_out_tokens: int, **_: Any) -> tuple[Any, ...]:
        rows = tokens.new_empty(num_out_tokens, HIDDEN)
        return rows, rows.new_empty(num_out_tokens, dtype=torch.float32), routing_map, None, None

    def unpermute(rows: Any, *_: Any, restore_shape: Any, **__: Any) -> torch.Tensor:
        return rows.new_empty(restore_shape)

    return mock.patch.multiple(stock, permute=permute, unpermute=unpermute)
