"""Work of Megatron's phases around a chain, for permuted tokens and for tokens, and its counts.

                          PermutedTokens               WholeTokens
    dispatch_preprocess   Megatron's permute           nothing
    token_dispatch        rows + probs                 rows + probs and experts of each token
    combine_postprocess   Megatron's unpermute         nothing: the chain sums copies itself
    sums                  in the probabilities' dtype  fp32

Each takes the layer's MontaTokenDispatcher, on which Megatron's own names are kept, so that CUDA
graphs can replay them.

Counts come from an exchange, or are known where experts are always filled. Both sources give them
in three steps: `exchange` on the device (CUDA graphs may capture it), `copy_to_host` where Megatron
copies its own metadata, and `read` where the host needs them.

Notation: H = hidden size, T = tokens of this rank, E = experts, N = permuted tokens of this rank,
W = most experts of any token, K = integers that this rank needs.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.moe_utils import get_capacity, maybe_move_tensor_to_cpu

from monta_megatron.chains import Counts, TokenCounts
from monta_megatron.core import Layout
from monta_megatron.exchange.counts import CountTable, ExchangeCounts, naming_failure
from monta_megatron.exchange.kernel_choice import is_fused
from monta_megatron.exchange.state import Exchange


@dataclass(kw_only=True)
class CountExchange:
    """Counts of all ranks of the group, from which every split follows."""

    count_table: CountTable
    config: Any
    group: dist.ProcessGroup
    chain_name: str
    _copy: torch.Tensor | None = None
    _copied: torch.cuda.Event | None = None

    def exchange(
        self, routing_map: torch.Tensor, agreement: int
    ) -> tuple[torch.Tensor | None, int | None]:
        """Exchange counts: [T, E] bool -> [K] int32 on its device, with no sync.

        Returns:
            The counts, and the number of permuted tokens: that of a map with top-k experts for
            each token, or None if only the counts tell it.
        """
        messages, sent = self.count_table.count(routing_map, agreement)
        received = torch.empty_like(messages)
        with self._named():
            dist.all_to_all_single(received, messages, group=self.group)
        counts = self.count_table.join(received, sent)
        is_dropless = self.config.moe_expert_capacity_factor is None
        if is_dropless and not self.config.moe_router_padding_for_quantization:
            return counts, len(routing_map) * self.config.moe_router_topk
        return counts, None

    def copy_to_host(self, counts: torch.Tensor | None, side_stream: torch.cuda.Stream) -> None:
        """Start to copy the result of `exchange`, the only tensor that goes to the host."""
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self._copy = maybe_move_tensor_to_cpu(counts, record_stream=True)
        self._copied = side_stream.record_event()

    def read(self) -> ExchangeCounts:
        """Wait for the copy."""
        assert self._copy is not None and self._copied is not None, "not on its way to the host"
        with self._named():
            self._copied.synchronize()
        return self.count_table.read(self._copy.numpy())

    def _named(self) -> AbstractContextManager[None]:
        what = f"dispatch: chain {self.chain_name}, exchange of counts"
        return naming_failure(what, self.group)


@dataclass(kw_only=True)
class CapacityCounts:
    """The counts where every expert takes `capacity` rows from every rank: none are exchanged."""

    layout: Layout
    config: Any
    capacity: int = 0

    def exchange(
        self, routing_map: torch.Tensor, agreement: int
    ) -> tuple[torch.Tensor | None, int | None]:
        """Find the capacity, by [T, E]; returns None, and the number of permuted tokens."""
        num_tokens, num_experts = routing_map.shape
        self.capacity = get_capacity(
            num_tokens=num_tokens * self.config.moe_router_topk,
            num_experts=num_experts,
            capacity_factor=self.config.moe_expert_capacity_factor,
        )
        return None, self.capacity * num_experts

    def copy_to_host(self, counts: torch.Tensor | None, side_stream: torch.cuda.Stream) -> None:
        """Do nothing: the capacity is on the host."""

    def read(self) -> ExchangeCounts:
        """The same counts for every pair of ranks."""
        layout, config = self.layout, self.config
        received = np.full((layout.etp, layout.ep, layout.num_local_experts), self.capacity)
        # All ranks know the capacity; each rank's number of tokens is known only to itself.
        per_token = config.moe_router_topk * config.moe_expert_capacity_factor
        return ExchangeCounts(
            count_permuted_tokens=lambda: Counts(sent=received[0], received=received),
            tokens=None,
            num_tokens=np.full(
                len(layout.nodes), int(self.capacity * layout.num_experts / per_token)
            ),
            max_experts_per_token=0,
            hashes=np.empty(0, dtype=np.int64),
        )


def counts_are_patched() -> bool:
    """Whether a framework has replaced stock's `preprocess`.

    As they do where routing maps hold fewer or more experts of a token than top-k: it then counts
    the rows that stock permutes by the map.
    """
    replaced = getattr(stock.MoEAlltoAllTokenDispatcher.preprocess, "__code__", None)
    original = stock.MoETokenDispatcher.__init__.__code__
    return replaced is None or replaced.co_filename != original.co_filename


# In batch-invariant mode (since 0.20) Megatron's unpermute adds a token's rows by EP rank, then by
# expert, and finds them by a map that permute returns where it is asked to.
KNOWS_ORDER = hasattr(moe_utils, "is_batch_invariant_mode_enabled")


def demands_order(config: Any) -> bool:
    """Whether Megatron adds a token's rows in the order of its batch-invariant mode."""
    return bool(getattr(config, "batch_invariant_mode", False)) and KNOWS_ORDER


_PERMUTES_ONCE = "moe_permute_fusion"
_HAS_NO_TOKENS = "overlap_moe_expert_parallel_comm, or moe_preprocess in cuda_graph_modules"


def _as_asked_for(dispatcher: Any) -> dict[str, Any]:
    """Arguments of an `Exchange` from the options that hold for all chains."""
    options = dispatcher.options
    return {
        "fused": is_fused(options.kernels, dispatcher.probs.device.type),
        "quantized": options.wire_dtype is not None,
    }


class PermutedTokens:
    """For chains whose rows are permuted tokens: Megatron permutes and sums them, bit for bit."""

    def enter(
        self, dispatcher: Any, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Permute: [T, H] and [T, E] -> [N, H] in expert order and [N]."""
        dispatcher.hidden_shape_before_permute = tokens.shape
        by_map = demands_order(dispatcher.config)
        with dispatcher.monitor.timed_copies(tokens.device):
            asked = {"return_batch_invariant_inverse_map": True} if by_map else {}
            rows, row_probs, permutation, *more = stock.permute(
                tokens,
                dispatcher.routing_map,
                probs=probs,
                num_out_tokens=dispatcher.num_out_tokens,
                fused=dispatcher.config.moe_permute_fusion,
                drop_and_pad=dispatcher.drop_and_pad,
                **asked,
            )
        if by_map:
            dispatcher.batch_invariant_inverse_permutation_mapping = more[0]
        dispatcher.reversed_local_input_permutation_mapping = permutation
        return rows, row_probs

    def as_counted(
        self, dispatcher: Any, rows: torch.Tensor, probs: torch.Tensor, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that the map holds, where they were permuted before that was known.

        Megatron's permute puts what a map does not hold behind what it holds.

        Args:
            dispatcher: whose `num_out_tokens` was counted.
            rows: [any number, H] permuted tokens.
            probs: [any number].
            tokens: [T, H], or None where they are gone.

        Returns:
            [N, H] and [N].

        Raises:
            ValueError: the map holds more, and they cannot be permuted again.
        """
        num_rows, num_permuted = dispatcher.num_out_tokens, rows.shape[0]
        if num_permuted == num_rows:
            return rows, probs
        fused = dispatcher.config.moe_permute_fusion
        if num_permuted < num_rows:
            # The fused kernel has written behind its output by now.
            if tokens is None or fused:
                raise ValueError(
                    f"{_PERMUTES_ONCE if fused else _HAS_NO_TOKENS}: given, must be left out where "
                    f"a routing map holds more experts than moe_router_topk: got {num_rows} "
                    f"token-expert pairs, of which {num_permuted} were permuted"
                )
            return self.enter(dispatcher, tokens, dispatcher.probs)
        if not fused:
            mapping = dispatcher.reversed_local_input_permutation_mapping
            dispatcher.reversed_local_input_permutation_mapping = mapping[:num_rows]
        return rows[:num_rows], probs[:num_rows]

    def bind(self, dispatcher: Any, counts: ExchangeCounts) -> Exchange:
        """This micro-batch's exchange."""
        layout, num_chunks = dispatcher.layout, dispatcher.num_chunks
        return Exchange(
            bound=dispatcher.chain.bind(layout, counts.permuted_tokens, num_chunks),
            groups=dispatcher.groups,
            # Megatron reduces over the expert tensor parallel group in the probabilities' dtype.
            sum_dtype=torch.promote_types(dispatcher.probs.dtype, torch.float32),
            monitor=dispatcher.monitor,
            **_as_asked_for(dispatcher),
        )

    def begin(self, dispatcher: Any, probs: torch.Tensor) -> None:
        """Do nothing before the counts are known."""

    def columns(
        self, dispatcher: Any, exchange: Exchange, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Columns beside the rows: their probabilities [N], and no experts."""
        # Those that another chain was expected to need.
        dispatcher.early_lists = None
        return probs, None

    def leave(self, dispatcher: Any, rows: torch.Tensor) -> torch.Tensor:
        """Unpermute, and add the shared experts' output: [N, H] -> [S/TP, B, H]."""
        megatron = stock.MoEAlltoAllTokenDispatcher
        with dispatcher.monitor.timed_copies(rows.device):
            output: torch.Tensor = megatron.combine_postprocess(dispatcher, rows)
        return output


class WholeTokens:
    """For chains whose rows are tokens, which they copy and sum themselves."""

    def enter(
        self, dispatcher: Any, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave everything as it is: [T, H] and [T, E]."""
        if dispatcher.config.overlap_moe_expert_parallel_comm:
            # The 1F1B schedule frees what goes into token_dispatch, but the router has saved these.
            return tokens.clone(), probs.clone()
        return tokens, probs

    def as_counted(
        self, dispatcher: Any, rows: torch.Tensor, probs: torch.Tensor, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave everything as it is: how many tokens there are needs no counts."""
        return rows, probs

    def bind(self, dispatcher: Any, counts: ExchangeCounts) -> Exchange:
        """This micro-batch's exchange."""
        assert counts.tokens is not None, "counted for chains of tokens"
        return self._exchange(dispatcher, counts, counts.tokens, dispatcher.num_chunks)

    def bind_chunks(self, dispatcher: Any, counts: ExchangeCounts) -> list[Exchange]:
        """The exchanges of its chunks, where experts compute one while others travel."""
        assert counts.tokens is not None, "counted for chains of tokens"
        from monta_megatron.chains.pipelined_layer import blocks_of_chunks

        num_blocks = counts.tokens.tokens.shape[1]
        return [
            self._exchange(dispatcher, counts, counts.tokens.of_blocks(first, end), 1)
            for first, end in blocks_of_chunks(num_blocks, dispatcher.num_chunks)
        ]

    def _exchange(
        self, dispatcher: Any, counts: ExchangeCounts, tokens: TokenCounts, num_chunks: int
    ) -> Exchange:
        return Exchange(
            bound=dispatcher.chain.bind(dispatcher.layout, tokens, num_chunks),
            groups=dispatcher.groups,
            sum_dtype=torch.float32,
            monitor=dispatcher.monitor,
            max_experts_per_token=counts.max_experts_per_token,
            **_as_asked_for(dispatcher),
        )

    def begin(self, dispatcher: Any, probs: torch.Tensor) -> None:
        """List the experts of tokens before the counts are known, as wide as the last time.

        The device makes the lists while the counts travel. They are made again where the gathered
        maximum turns out to be another one.
        """
        lists = self._lists(dispatcher, probs, dispatcher.expected_width)
        dispatcher.early_lists = probs, lists

    def columns(
        self, dispatcher: Any, exchange: Exchange, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Columns beside the rows: [T, E] -> probabilities [T, W] and experts [T, W]."""
        width, early = exchange.max_experts_per_token, dispatcher.early_lists
        dispatcher.expected_width, dispatcher.early_lists = width, None
        if early is not None:
            of_probs, lists = early
            if of_probs is probs and lists[1].shape[1] == width:
                return lists
        return self._lists(dispatcher, probs, width)

    def _lists(
        self, dispatcher: Any, probs: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with dispatcher.monitor.timed_copies(probs.device):
            if is_fused(dispatcher.options.kernels, probs.device.type):
                from monta_megatron.exchange.kernels.expert_lists import expert_ids_of
            else:
                from monta_megatron.exchange.counts import expert_ids_of
            return expert_ids_of(dispatcher.routing_map, probs, width)

    def leave(self, dispatcher: Any, rows: torch.Tensor) -> torch.Tensor:
        """Add the shared experts' output: [T, H] -> [S/TP, B, H]."""
        output = rows.view(dispatcher.hidden_shape)
        if dispatcher.shared_experts is not None:
            output = output + dispatcher.shared_experts.get_output()
        return output


WHOLE_TOKENS = WholeTokens()
# By `Chain.rows`.
STRATEGIES: dict[str, PermutedTokens | WholeTokens] = {
    "permuted tokens": PermutedTokens(),
    "tokens": WHOLE_TOKENS,
}
