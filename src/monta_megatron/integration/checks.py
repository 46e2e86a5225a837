"""First-use checks: chains against stock's dispatcher, Triton kernels against PyTorch.

Random rows are dispatched and combined by both, along a random routing of their own, so nothing
depends on the micro-batch under way. A driver, a network or a library that moves rows wrongly here
ends the run before it trains on them. Rows are small integers, which the experts multiply by 1 or
2: every sum of them is exact in the rows' dtype, whatever its order, and everything is compared bit
for bit.

Kernels are checked once per machine: a file in the user's cache folder names the versions and
devices that have passed. Without it, or where it is damaged, they are compared again.

Notation: T = tokens of this rank, H = hidden size, E = experts, N = rows for the L local experts.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from monta_megatron.chains import Chain
from monta_megatron.common.files import cache_folder, make_folder, write_whole
from monta_megatron.common.presets import version_of
from monta_megatron.common.units import counted
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.errors import first_difference
from monta_megatron.exchange.kernel_choice import is_fused
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.integration.controller import ChainController
from monta_megatron.planner.chain_policy import FixedPolicy

# Tokens of a rank in the check of a chain's first use, at most.
CHECK_TOKENS = 256
# Most ranks have so many fewer than `CHECK_TOKENS`, at most, so that their numbers differ.
FEWER_TOKENS = 8
# Rows hold integers from 0 to this, fewer where their sums would not be exact.
LARGEST_VALUE = 3
LARGEST_FACTOR = 2
ADVICE = "Report it, and train with moe_token_dispatcher_type alltoall"

# Chains that passed the check on a group: layout, chain, number of chunks.
_checked_chains: set[tuple[dist.ProcessGroup, Layout, str, int]] = set()


class SelfCheckError(RuntimeError):
    """A check has failed, or found a difference; the message names it, ranks and coordinate."""


class Batch(NamedTuple):
    """A random batch of one rank.

    Attributes:
        tokens: [T, H] small integers.
        routing_map: [T, E] bool, top-k experts for each token.
        probs: [T, E], 0 where a token has no such expert.
    """

    tokens: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor


@dataclass(frozen=True)
class RoundTrip:
    """Inputs of the experts and outputs of the layer after a round trip.

    Attributes:
        rows: [N, H] at the experts.
        probs: [N] at the experts.
        tokens_per_expert: [L].
        output: [T, H].
    """

    rows: torch.Tensor
    probs: torch.Tensor
    tokens_per_expert: torch.Tensor
    output: torch.Tensor


def check_chains(
    dispatcher: Any, stock_dispatcher: Callable[[], Any], chains: Sequence[tuple[Chain, int]]
) -> None:
    """Compare chains with stock's dispatcher, unless that was done before.

    All ranks of the exchange call it at the same place with the same chains, and wait for each
    other.

    Args:
        dispatcher: a MontaTokenDispatcher that counts for these chains, in a micro-batch.
        stock_dispatcher: makes stock's dispatcher for the same layer.
        chains: each with its number of chunks.

    Raises:
        SelfCheckError: there is a difference on a rank of the exchange, or a round trip failed.
    """
    group, layout = dispatcher.tp_ep_group, dispatcher.layout
    keys = {(group, layout, chain.name, num_chunks): chain for chain, num_chunks in chains}
    new = {key: chain for key, chain in keys.items() if key not in _checked_chains}
    if not new:
        return
    batch = random_batch(dispatcher)
    with torch.no_grad():
        with _naming_check("stock's dispatcher"):
            theirs = round_trip(stock_dispatcher(), batch, dispatcher.layout)
        for key, chain in new.items():
            what = f"chain {chain.name} in {counted(key[-1], 'chunk')}"
            with _naming_check(what):
                probe = probe_of(dispatcher, chain, key[-1])
                ours = round_trip(probe, batch, dispatcher.layout)
            what += " does not give what stock's dispatcher gives"
            end_if_any(gather_objects(difference(ours, theirs), group), group, what, ADVICE)
            _checked_chains.add(key)


def end_if_any(
    differences: Sequence[str], group: dist.ProcessGroup, what: str, advice: str
) -> None:
    """End the run on all ranks of an exchange if there is a difference on one.

    Args:
        differences: of each rank; "" where there is none.
        group: the ranks.
        what: what is wrong then.
        advice: what to do.

    Raises:
        SelfCheckError: there is a difference.
    """
    ranks = dist.get_process_group_ranks(group)
    lines = {rank: line for rank, line in zip(ranks, differences, strict=True) if line}
    if lines:
        rank, line = next(iter(lines.items()))
        raise SelfCheckError(
            f"moe_monta_check: {what}, on rank {', '.join(map(str, lines))} of the ranks "
            f"{', '.join(map(str, ranks))}; on rank {rank} {line}. {advice}"
        )


def random_batch(dispatcher: Any) -> Batch:
    """Rows in the dtype of the parameters; the training's random numbers are not touched."""
    config, layout, like = dispatcher.config, dispatcher.layout, dispatcher.probs
    dtype, topk, num_experts = config.params_dtype, config.moe_router_topk, layout.num_experts
    is_padded = dispatcher.drop_and_pad or config.moe_router_padding_for_quantization
    # Integers up to 2 / eps are exact.
    most_terms = layout.etp * (num_experts if is_padded else topk)
    exact = int(2 / torch.finfo(dtype).eps) // (LARGEST_FACTOR * most_terms)
    largest = max(min(exact, LARGEST_VALUE), 1)
    # Where experts are filled to capacity, stock wants the same number everywhere.
    num_tokens = CHECK_TOKENS - (0 if dispatcher.drop_and_pad else layout.rank % FEWER_TOKENS)
    generator = torch.Generator(like.device).manual_seed(layout.rank)
    on_device: dict[str, Any] = {"generator": generator, "device": like.device}
    shape = num_tokens, dispatcher.hidden_shape[-1]
    tokens = torch.randint(largest + 1, shape, **on_device).to(dtype)
    scores = torch.rand(num_tokens, num_experts, **on_device)
    routing_map = torch.zeros_like(scores, dtype=torch.bool)
    routing_map.scatter_(1, scores.topk(topk, dim=1).indices, True)
    return Batch(tokens, routing_map, (scores * routing_map).to(like.dtype))


def probe_of(dispatcher: Any, chain: Chain, num_chunks: int) -> Any:
    """A dispatcher that runs a chain beside the micro-batch under way, and leaves no trace of it.

    The phases set attributes on the copy. It has no shared experts, whose turn is not now, and
    neither monitor nor check.
    """
    probe = copy.copy(dispatcher)
    for name in vars(dispatcher):
        # Hooks around the phases of one dispatcher are of its own micro-batches.
        if callable(getattr(type(dispatcher), name, None)):
            delattr(probe, name)
    policy = FixedPolicy(chains=(chain,), num_chunks=(num_chunks,), reason="")
    controller = dispatcher.controller
    probe.controller = ChainController(policy, controller.agreed_config, controller.group)
    probe.chain, probe.num_chunks, probe._kinds_of_rows = chain, num_chunks, {chain.rows}
    probe._counts = copy.copy(dispatcher._counts)
    probe.options = replace(dispatcher.options, check=0, overlap_experts=False)
    probe.monitor, probe.shared_experts, probe.experts_pipelined = Monitor(), None, False
    # Nothing of it is captured in a CUDA graph.
    probe.cuda_dtoh_point = "before_permutation_1"
    return probe


def round_trip(dispatcher: Any, batch: Batch, layout: Any) -> RoundTrip:
    """The six phases of any dispatcher, with experts that multiply their rows."""
    rows, probs = dispatcher.dispatch_preprocess(
        batch.tokens, batch.routing_map.clone(), batch.probs
    )
    rows, tokens_per_expert, probs = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(rows, probs)
    )
    tokens_per_expert = torch.as_tensor(tokens_per_expert).cpu()
    computed = dispatcher.combine_preprocess(_experts(layout, rows, tokens_per_expert))
    output = dispatcher.combine_postprocess(dispatcher.token_combine(computed))
    return RoundTrip(rows, probs, tokens_per_expert, output)


def difference(ours: RoundTrip, theirs: RoundTrip) -> str:
    """First difference between two round trips; "" if there is none."""
    for name in (entry.name for entry in fields(RoundTrip)):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine.shape != other.shape:
            return f"{name} has shape {list(mine.shape)}, stock's {list(other.shape)}"
        if line := first_difference(name, mine, other, "stock's is"):
            return line
    return ""


def _experts(layout: Any, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """[N, H] times 1 or 2, which differs between an expert and the next, and its ETP ranks."""
    numbers = (
        torch.arange(layout.num_local_experts) + layout.first_expert + layout.rank % layout.etp
    )
    factors = (1 + numbers % LARGEST_FACTOR).repeat_interleave(tokens_per_expert)
    # [N] -> [N, 1]
    return rows * factors.to(rows)[:, None]


@contextmanager
def _naming_check(what: str) -> Iterator[None]:
    """Name the check where a round trip fails."""
    try:
        yield
    except Exception as error:
        raise SelfCheckError(
            f"moe_monta_check: a round trip of {what} failed: {type(error).__name__}: {error}. "
            f"{ADVICE}"
        ) from error


# Kernels that were checked in this process, by group.
_checked_kernels: set[tuple[dist.ProcessGroup, str]] = set()


def check_kernels(dispatcher: Any, device: torch.device) -> None:
    """Compare the kernels with PyTorch operations, unless that was done here before.

    All ranks of the exchange call it at the same place, and wait for each other.

    Args:
        dispatcher: a MontaTokenDispatcher, whose rows' size and dtype are taken.
        device: of the rows.

    Raises:
        SelfCheckError: a kernel differs on a rank of the exchange.
    """
    group, hidden_size = dispatcher.tp_ep_group, dispatcher.hidden_shape[-1]
    dtype = dispatcher.config.params_dtype
    identity = _identity(device, hidden_size, dtype)
    if (group, identity) in _checked_kernels:
        return
    difference = ""
    if is_fused(dispatcher.options.kernels, device.type):
        difference = _difference(identity, device, hidden_size, dtype)
    advice = "Report it, and train with moe_monta_kernels torch"
    what = "Triton kernels do not give what PyTorch's operations give"
    end_if_any(gather_objects(difference, group), group, what, advice)
    _checked_kernels.add((group, identity))


def _identity(device: torch.device, hidden_size: int, dtype: torch.dtype) -> str:
    versions = ", ".join(
        f"{package} {version_of(package)}" for package in ("monta-megatron", "triton", "torch")
    )
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return f"{versions}, {name} ({capability}), hidden size {hidden_size}, {dtype}"


def _difference(identity: str, device: torch.device, hidden_size: int, dtype: torch.dtype) -> str:
    """The first difference, "" if there is none, or was none before."""
    path = _path(identity)
    if _is_known(path, identity):
        return ""
    from monta_megatron.exchange.kernels.check import first_difference

    difference = first_difference(device, hidden_size, dtype)
    if not difference:
        try:
            make_folder(path.parent, "the cache folder")
            write_whole(path, json.dumps({"checked": identity}))
        except ValueError as error:
            _say(f"Triton kernels are compared again by the next run: {error}")
    return difference


def _path(identity: str) -> Path:
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"{name}.json"


def _is_known(path: Path, identity: str) -> bool:
    try:
        if json.loads(path.read_text(encoding="utf-8")) == {"checked": identity}:
            return True
        problem = "it says something else"
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        problem = str(error)
    _say(f"Triton kernels are compared again, as {path} cannot be used: {problem}")
    return False


def _say(line: str) -> None:
    logging.getLogger(__name__).warning("%s", line)
