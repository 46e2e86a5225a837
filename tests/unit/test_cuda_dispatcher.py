"""The dispatcher's phases on a GPU, without one: it copies its counts once, and waits once.

Megatron's own permutation is replaced by its sizes, as its fused kernel would return them.
"""

from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

import torch
from fake_device import HostWaitsError
from fake_world import LAYOUTS, NUM_TOKENS, TOPK
from launch_counts import HIDDEN, LISTED, layer_on_device, make_dispatcher
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from stream_recorder import RecordedStream

from monta_megatron import plan
from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import COMBINE
from monta_megatron.exchange import streams
from monta_megatron.integration import count_sources, dispatcher, planning
from monta_megatron.integration.dispatcher import MontaTokenDispatcher
from monta_megatron.integration.layer_setup import streams_line
from monta_megatron.integration.options import Options
from monta_megatron.integration.planning import planner_for
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.model import load_model
from monta_megatron.planner.price import lower_expected

LAYOUT = LAYOUTS[16, 1]
COPY, WAIT, ROW_INDICES = LISTED
pytestmark = pytest.mark.usefixtures("world")


def forward(
    made: MontaTokenDispatcher, routed: torch.Tensor, probs_dtype: torch.dtype = torch.float32
) -> None:
    """The six phases; the experts do nothing."""
    num_tokens, num_experts = routed.shape
    hidden_states = torch.empty(num_tokens, 1, HIDDEN, device="cuda", requires_grad=True)
    probs = torch.empty(num_tokens, num_experts, device="cuda", requires_grad=True).to(probs_dtype)
    on_device = torch.empty(routed.shape, dtype=torch.bool, device="cuda")
    rows, row_probs = made.dispatch_preprocess(hidden_states, on_device, probs)
    rows, row_probs = made.token_dispatch(rows, row_probs)
    rows, tokens_per_expert, row_probs = made.dispatch_postprocess(rows, row_probs)
    assert row_probs.shape == rows.shape[:1] and row_probs.is_cuda
    assert tokens_per_expert.shape == (LAYOUT.num_local_experts,) and not tokens_per_expert.is_cuda
    output = made.combine_postprocess(made.token_combine(made.combine_preprocess(rows * 1)))
    assert output.shape == hidden_states.shape and output.is_cuda


@pytest.mark.parametrize("chain_name", CHAINS)
def test_the_counts_are_copied_once_and_waited_for_once(chain_name: str) -> None:
    with layer_on_device(chain_name) as (made, routed, device):
        forward(made, routed)
        made.joined_counts = None
    of_counts = [each for each in device.crossings if not each.startswith(ROW_INDICES)]
    assert of_counts == [
        f"{COPY} copies to the host",
        f"{WAIT} waits for the device",
        f"{WAIT} reads a copy",
    ]
    queue = device.recorder.queue
    assert [each.name for each in queue if each.stream == "counts"] == ["wait", "_to_copy"]
    # It runs behind the counting, and what it reads is held for it.
    assert device.recorder.findings == []


@pytest.mark.parametrize("chain_name", CHAINS)
def test_only_permuted_tokens_are_summed_as_the_router_says(chain_name: str) -> None:
    """The planner knows."""
    with (
        layer_on_device(chain_name, moe_router_dtype="fp64") as (made, routed, _),
        mock.patch.object(dispatcher, "combine", wraps=dispatcher.combine) as combine,
    ):
        forward(made, routed, torch.float64)
    exchange = combine.call_args.args[0]
    planned = planner_for(Options(), made.config, made.setup.layout, permuted_only=False)
    assert planned.shape is not None
    row = lower_expected(planned.shape, exchange.bound_chain, COMBINE, "streams").program.row
    sum_dtype = torch.float64 if CHAINS[chain_name].rows == "permuted tokens" else torch.float32
    assert (row.prob_bytes, row.sum_bytes) == (8, sum_dtype.itemsize)
    assert exchange.sum_dtype == sum_dtype


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("tokens", [NUM_TOKENS, 98304])
def test_a_plan_and_a_training_pick_the_same(tokens: int, kernels: str) -> None:
    """Chain, chunks and microseconds, of the kernels that run."""
    options = {"params_dtype": torch.bfloat16, "moe_monta_cluster": "h100_8x_ndr"}
    # As where a kernel can be built.
    with mock.patch.object(planning, "is_fused", lambda choice, _: choice != "torch"):
        made = make_dispatcher("auto", kernels=kernels, **options)
    choice, why = made.setup.planner.pick(tokens)
    model = replace(
        load_model("qwen3_235b_a22b"),
        row_size=HIDDEN,
        num_experts=LAYOUT.num_experts,
        moe_router_topk=TOPK,
    )
    planned = plan(
        model=model,
        cluster=load_cluster("h100_8x_ndr").with_kernels(kernels == "auto"),
        world_size=16,
        ep=16,
        tp=1,
        tokens=tokens,
    )
    assert (planned.chain, planned.num_chunks) == (choice.chain, choice.num_chunks)
    assert f": {planned.predicted_us:,.0f} us, {planned.reason}" in why


def test_a_copy_that_stops_the_host_is_found() -> None:
    """`test_cuda_branch.py` has the other ways to stop it."""
    with (
        pytest.raises(HostWaitsError, match="a blocking copy to the host"),
        layer_on_device("hierarchical_alltoall") as (made, routed, _),
        mock.patch.object(
            count_sources, "maybe_move_tensor_to_cpu", lambda counts, **_: counts.cpu()
        ),
    ):
        forward(made, routed)


@pytest.mark.parametrize("kind", ["race", "reuse"])
def test_a_copy_before_the_counting_or_of_memory_that_is_not_held_is_found(kind: str) -> None:
    with layer_on_device("hierarchical_alltoall") as (made, routed, device):
        fault = mock.patch.object(made.cuda_dtoh_stream, "wait_stream")
        if kind == "reuse":
            fault = mock.patch.object(
                count_sources,
                "maybe_move_tensor_to_cpu",
                lambda counts, **_: stock.maybe_move_tensor_to_cpu(counts),
            )
        with fault:
            forward(made, routed)
        made.joined_counts = None
    assert {each.kind for each in device.recorder.findings} == {kind}


def test_counts_of_two_micro_batches_do_not_mix() -> None:
    """Padded to capacity, with other numbers of tokens; the first is bound after the second."""
    options = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    with layer_on_device("alltoall", **options) as (made, _, _):
        waits = []
        for size in (32, 64):
            made.routing_map = made.probs = torch.ones(size, LAYOUT.num_experts)
            waits.append(made._copy_counts())
        num_rows = [made._bound(wait).num_source_rows for wait in waits]
    assert num_rows == [32 * TOPK, 64 * TOPK]


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_streams_are_said_before_the_first_rows(is_shared: bool) -> None:
    """On the first GPU day a shared one has to be seen."""
    streams_line.cache_clear()
    lines: list[str] = []
    with layer_on_device("hierarchical_alltoall") as (made, routed, device):
        # A shared setup: the index of the messages stays.
        object.__setattr__(made.setup, "report", lines.append)
        counts, caller = made.cuda_dtoh_stream, device.recorder.current
        others = RecordedStream(device.recorder, "shared experts")
        ours = streams.side_streams(torch.device("cuda", 0))
        with (
            mock.patch.object(stock.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", counts),
            mock.patch.object(SharedExpertMLP, "stream", ours[1] if is_shared else others),
        ):
            for _ in range(2):
                forward(made, routed)
    handle = (ours[1] if is_shared else others).cuda_stream
    assert lines == [
        f"streams: caller {caller.cuda_stream:#x}, "
        f"ours {' '.join(f'{stream.cuda_stream:#x}' for stream in ours)}, "
        f"copies of counts {counts.cuda_stream:#x}, shared experts {handle:#x}; "
        f"shared with ours: {'shared experts' if is_shared else 'none'}"
    ]
    streams_line.cache_clear()
