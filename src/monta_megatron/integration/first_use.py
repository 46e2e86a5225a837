"""First use of a chain: a round trip with known answer, over all ranks of an exchange.

Every rank computes by itself what its experts must receive and what must come back to its tokens,
from the rank and index of each token, and compares bit for bit. `FirstUse._passes` follows a token.

- A row is its token's number, rank * 256 + index, in binary: a column per bit, 1 for 0 and 2 for 1.
  So a row in the wrong place shows whose it is.
- An expert multiplies its rows by its own number, written likewise, so a row that went to the wrong
  expert shows too. Sums of products are integers up to 256, exact in bf16 and in any order.
- The backward passes send 3 - row, in which every value differs from the row's, so memory of an
  earlier pass cannot pass for a result.
- Every fourth column tests the order of a sum. The experts of a token put s, B, -B, 0, 0, ...
  there, with s so small that s + B = B in fp32: s + B - B is 0, while B - B + s is s.
  `sum_by_expert` adds them in the order of the chain. Every partial sum is a value of the rows'
  dtype, so no hop changes it.

To debug a failure: the message names the pass, the row and column of its first wrong value, the
row's token and experts, and both values. Every pass gets right inputs, so the pass itself is wrong.
- Does it pass with --moe-monta-num-chunks 1? Then chunks share what they must not: a buffer of a
  ring, an event. With --moe-monta-kernels torch? Then a Triton kernel is wrong.
- A value of 0 was never written, or its chunk is missing. A row with another token's bits went
  astray: `Segments` of the stage that moved it. A smaller sum lacks an expert's row.
- Columns 3, 7, 11, ... of combine and dispatch backward alone: a sum has another order.
`tests/dist/self_checks.py` runs the check on CPU ranks, with planted faults of each kind.

All ranks of the exchange must call `check`. If only one rank raises an exception on its way, the
others wait in the next collective until it ends, or until the time limit of its group; then their
error quotes its own.

A pair is a token and one of its experts, as 4 integers. A source row has K pairs if it is a token,
one if it is a permuted token.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import gcd
from operator import add, setitem
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.program import COMBINE, COMBINE_BACKWARD, DISPATCH, DISPATCH_BACKWARD
from monta_megatron.core import Choice, GroupName, Layout
from monta_megatron.exchange import roll_call
from monta_megatron.exchange.agreement import gather_objects
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.count_messages import block_size
from monta_megatron.exchange.errors import FEWER_MICRO_BATCHES, ExchangeError
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import run
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.pipeline import blocks_of_chunks, run_pipeline
from monta_megatron.integration.layer_setup import LayerSetup

# Most tokens of a rank; rank r has r % 8 fewer, so that neighbours' numbers of tokens differ.
NUM_TOKENS = 256
# bf16 holds all integers up to 256: a sum has at most 64 terms of at most 2 * 2.
LARGEST, MOST_TERMS = 256, 64
# s, B, -B, and 0 for all further summands; all are normal numbers of fp16.
TERMS = (2.0**-13, 2.0**12, -(2.0**12), 0.0)
# Columns that test the order of a sum: over the experts of a token, in ascending order; over the
# ETP ranks of one expert, a token's first, while its other experts put 0.
BY_EXPERT, BY_ETP_RANK = slice(3, None, 8), slice(7, None, 8)
# The integers of a pair: the token's rank and its index there, the expert's index among the
# token's experts in ascending order, and the expert.
SOURCE, TOKEN, PLACE, EXPERT = range(4)

PASSES = (DISPATCH, COMBINE, COMBINE_BACKWARD, DISPATCH_BACKWARD)

# Checks that have passed, by group.
_passed: WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = WeakKeyDictionary()


class SelfCheckError(RuntimeError):
    """The check failed or found a difference; the message names ranks, position and values."""


@dataclass(frozen=True, kw_only=True)
class FirstUse:
    """A choice, with rows like a training's.

    Attributes:
        choice: the same on all ranks of the exchange.
        setup: of the layer. The check uses at most 64 / ETP experts of a token.
        groups: process groups by the group names of the chain.
        hidden_size: of the rows.
        prob_dtype: of the probabilities.
        device: of the rows.
    """

    choice: Choice
    setup: LayerSetup
    groups: Mapping[str, PeerGroup]
    hidden_size: int
    prob_dtype: torch.dtype
    device: torch.device

    def check(self) -> None:
        """Check the choice, unless it has passed in this process; draws no random numbers.

        Raises:
            SelfCheckError: a rank found a difference, or the round trip failed.
        """
        setup, config = self.setup, self.setup.config
        passed = _passed.setdefault(setup.groups["tp_ep"], set())
        rows = self.hidden_size, config.params_dtype, self.prob_dtype, config.moe_router_topk
        key = setup.layout, self.choice, *rows, setup.is_fused
        if key in passed:
            return
        try:
            # A trainer may have set another default device, or evaluate.
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                for difference in self._differences():
                    self._raise_on_any_rank(difference)
        except (ExchangeError, SelfCheckError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            problem = f"the round trip failed: {type(error).__name__}: {error}"
            failed = self._error(problem)
            # The other ranks wait for this one.
            roll_call.write("the check of the first use", f", which failed there: {failed}")
            raise failed from error
        passed.add(key)

    def _raise_on_any_rank(self, difference: str) -> None:
        """Raise on all ranks if any has a difference; the message has the first one's."""
        group = self.setup.groups["tp_ep"]
        ranks = dist.get_process_group_ranks(group)
        what = f"check of the first use: chain {self.choice.chain}"
        differences = gather_objects(difference, group, what, FEWER_MICRO_BATCHES)
        lines = zip(ranks, differences, strict=True)
        if wrong := {rank: line for rank, line in lines if line}:
            all_ranks, wrong_ranks = (", ".join(map(str, each)) for each in (ranks, wrong))
            first = min(wrong)
            raise self._error(
                f"wrong on rank {wrong_ranks} of {all_ranks}; on rank {first}: {wrong[first]}"
            )

    def _error(self, problem: str) -> SelfCheckError:
        advice = "train with moe_token_dispatcher_type alltoall"
        if self.setup.is_fused:
            advice += " or moe_monta_kernels torch"
        return SelfCheckError(
            f"moe_monta_check: {self.choice.name}: {problem}. Report it, and {advice}; "
            "integration/first_use.py says how to debug it"
        )

    def _differences(self) -> Iterator[str]:
        """The first difference in the counts, then the first in the four passes; "" if none."""
        layout, topk = self.setup.layout, self.setup.config.moe_router_topk
        pairs = route(layout, min(topk, layout.num_experts, MOST_TERMS // layout.etp))
        # [N, K, 4] in the order of the source rows: by token; or [N, 1, 4] by (expert, token).
        sent, received = pairs[pairs[:, 0, SOURCE] == layout.rank], received_pairs(pairs, layout)
        if CHAINS[self.choice.chain].rows == "permuted tokens":
            sent = sent.flatten(0, 1)[sent[..., EXPERT].flatten().argsort(stable=True), None]
        exchanges, counts_SL = self._bind(sent)
        expected_SL, local = torch.zeros_like(counts_SL), received[:, EXPERT] - layout.first_expert
        expected_SL.index_put_((received[:, SOURCE], local), torch.tensor(1), accumulate=True)
        yield _difference("counts by source rank and local expert", counts_SL, expected_SL)
        differences = [_difference(*each) for each in self._passes(exchanges, sent, received)]
        yield next((line for line in differences if line), "")

    def _bind(self, sent: torch.Tensor) -> tuple[tuple[Exchange, ...], torch.Tensor]:
        """Exchange the counts and bind the chain to them; also returns the counts [S, L]."""
        routing_map_TE = torch.zeros(
            int(sent[..., TOKEN].max()) + 1, self.setup.layout.num_experts, dtype=torch.bool
        )
        routing_map_TE[sent[..., TOKEN], sent[..., EXPERT]] = True
        source = replace(self.setup.counts, chain_name=self.choice.chain)
        counts_J = source.collect(routing_map_TE.to(self.device))
        counts = source.copy_to_host(counts_J, torch.cuda.current_stream())()
        exchanges = self.setup.bind(
            self.choice,
            counts,
            groups=self.groups,
            prob_dtype=self.prob_dtype,
            monitor=Monitor(),
        )
        # [G, D, L] -> [S, L]
        received = torch.from_numpy(counts.permuted_tokens.received)
        return exchanges, received.transpose(0, 1).flatten(0, 1)

    def _passes(
        self, exchanges: Sequence[Exchange], sent: torch.Tensor, received: torch.Tensor
    ) -> list[Any]:
        """Run the four passes; returns the arguments of `_difference` for each result.

        `sent` are the pairs [N, K, 4] of the source rows, `received` those [M, 4] of the experts'.

        Token 3 of rank 1, on 4 ranks (EP 4, ETP 1) with 2 experts each, top-3: its number is
        1 * 256 + 3 = 259, its experts are 2 and 3 on rank 1 and 4 on rank 2. Columns 0 to 2 hold
        the lowest bits; column 3 tests the order of the experts, column 7 that of the ETP ranks:

            column                   0   1   2   3              7
            row, bits of 259         2   2   1   1              1
            factors of expert 2      1   2   1
            factors of expert 3      2   2   1
            factors of expert 4      1   1   2
            dispatch to experts      2   2   1   1              1   the row, at all 3 experts
            output of expert 2       2   4   1   s              s
            output of expert 3       4   4   1   B              0
            output of expert 4       2   2   2  -B              0
            combine                  8  10   4   s + B - B = 0  s   the sum, at rank 1
            combine backward         1   1   2   2              2   3 - row, at all 3 experts
            dispatch backward        4   5   8   0              s   outputs for 3 - row, summed
        """
        layout, chain = self.setup.layout, CHAINS[self.choice.chain]
        is_token = chain.rows == "tokens"
        terms, etp_rank = torch.tensor(TERMS), layout.rank % layout.etp
        sum_dtype = torch.promote_types(exchanges[0].sum_dtype, self.setup.config.params_dtype)

        # Step 1: rows on both sides, and factors of the experts: [E * G] -> [E, G, bits].
        sizes = len(layout.nodes) * NUM_TOKENS, layout.num_experts * layout.etp
        rows, arrived = (
            self._wide(_bits(pairs[:, SOURCE] * NUM_TOKENS + pairs[:, TOKEN], sizes[0]))
            for pairs in (sent[:, 0], received)
        )
        factors = _bits(torch.arange(sizes[1]), sizes[1]).unflatten(0, (-1, layout.etp))

        # Step 2: outputs of the experts and their sums: factors, then both kinds of order columns.
        place = received[:, PLACE]
        outputs = (
            factors[received[:, EXPERT], etp_rank],
            terms[place.clamp(max=3)] * (etp_rank == 0),
            terms[min(etp_rank, 3)] * ((place == 0) | (not is_token)),
        )
        sums = (
            factors.sum(dim=1)[sent[..., EXPERT]].sum(dim=1),
            sum_by_expert(sent, chain, layout, sum_dtype),
            # Added one after the other.
            reduce(add, terms[: layout.etp].to(sum_dtype)).expand(len(sent)),
        )

        # Step 3: probabilities, [T, K] or [N]; each ETP rank returns a share of their gradients.
        lists = sent if is_token else sent[:, 0]
        probs, arrived_probs = (
            self._probs(1 + _mixed(pairs) % LARGEST) for pairs in (lists, received)
        )
        most = LARGEST // layout.etp
        shares = most - (_mixed(received) + etp_rank) % most
        all_shares = most - (_mixed(lists)[..., None] + torch.arange(layout.etp)) % most
        ids = lists[..., EXPERT].to(self.device, torch.int32) if is_token else None

        # Step 4: the passes.
        inputs = (
            Columns(rows, probs, ids),
            Columns(self._times(arrived, *outputs)),
            Columns(3 - rows),
            Columns(self._times(3 - arrived, *outputs), self._probs(shares)),
        )
        if self.choice.splits_experts:
            results = self._run_in_pipeline(exchanges, received, *inputs)
        else:
            results = [run(exchanges[0], *each) for each in zip(PASSES, inputs, strict=True)]
        dispatched, combined, gradients, returned = results
        prob_gradients = self._probs(all_shares.sum(dim=-1))
        return [
            ("dispatch", dispatched.rows, arrived, received),
            ("dispatch of probabilities", dispatched.probs, arrived_probs, received),
            ("combine", combined.rows, self._times(rows, *sums), sent),
            ("combine backward", gradients.rows, 3 - arrived, received),
            ("dispatch backward", returned.rows, self._times(3 - rows, *sums), sent),
            ("dispatch backward of probabilities", returned.probs, prob_gradients, sent),
        ]

    def _run_in_pipeline(
        self, exchanges: Sequence[Exchange], received: torch.Tensor, *inputs: Columns
    ) -> list[Columns]:
        """Run the passes as a training that splits its experts does; they return what is given."""
        (rows, probs, ids), (outputs, *_), (sum_gradients, *_), (gradients, shares, _) = inputs
        assert probs is not None and ids is not None and shares is not None, "rows are tokens"
        num_blocks = self.setup.counts.count_messages.num_blocks
        num_tokens = NUM_TOKENS - received[:, SOURCE].numpy() % 8
        blocks = received[:, TOKEN].numpy() // block_size(num_tokens, num_blocks)
        # Of the received rows [M], those of each chunk.
        bounds = blocks_of_chunks(num_blocks, len(exchanges))
        chunks = (np.flatnonzero((first <= blocks) & (blocks < end)) for first, end in bounds)
        arrived, arrived_probs = torch.empty_like(outputs), torch.empty_like(shares)
        combined_back = torch.empty_like(outputs)

        def experts(rows_NH: torch.Tensor, _: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
            here = next(chunks)
            arrived[here], arrived_probs[here] = rows_NH.detach(), probs_N.detach()
            rows_NH.register_hook(lambda _: gradients[here])
            probs_N.register_hook(lambda _: shares[here])
            # For autograd the outputs depend on both.
            outputs_NH = outputs[here] + 0 * (rows_NH + probs_N[:, None]).to(rows_NH.dtype)
            outputs_NH.register_hook(partial(setitem, combined_back, here))
            return outputs_NH

        with torch.enable_grad():
            sources = rows.requires_grad_(), probs.requires_grad_()
            sums = run_pipeline(exchanges, *sources, ids, experts)
            returned = torch.autograd.grad(sums, sources, sum_gradients)
        results = (arrived, arrived_probs), (sums.detach(),), (combined_back,), returned
        return [Columns(*each) for each in results]

    def _wide(self, values: torch.Tensor) -> torch.Tensor:
        """[N, bits] -> [N, H]: the bits repeat; an order column repeats the column before it."""
        columns = torch.arange(self.hidden_size)
        index = (columns - (columns + 1) // 4) % values.shape[1]
        return values.to(self.device, self.setup.config.params_dtype).index_select(
            1, index.to(self.device)
        )

    def _times(
        self, rows: torch.Tensor, factors: torch.Tensor, *in_order: torch.Tensor
    ) -> torch.Tensor:
        """[N, H] times [N, bits]; the order columns hold the other two, [N] each."""
        result = rows * self._wide(factors)
        for columns, values in zip((BY_EXPERT, BY_ETP_RANK), in_order, strict=True):
            result[:, columns] = values.to(self.device, self.setup.config.params_dtype)[:, None]
        return result

    def _probs(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, self.prob_dtype)


def route(layout: Layout, topk: int) -> torch.Tensor:
    """All pairs of the exchange: [tokens of all ranks, K, 4]; see `SOURCE` for the integers.

    The experts of a token have one distance, modulo E, which differs from token to token.
    """
    num_experts, places = layout.num_experts, torch.arange(topk)
    num_tokens = NUM_TOKENS - torch.arange(len(layout.nodes)) % 8
    source, token = (torch.arange(NUM_TOKENS) < num_tokens[:, None]).nonzero().T[..., None]
    steps = torch.tensor([n for n in range(1, num_experts + 1) if gcd(n, num_experts) == 1])
    first, step = source + token + token // len(steps), steps[token % len(steps)]
    experts = ((first + step * places) % num_experts).sort(dim=1).values
    return torch.stack(torch.broadcast_tensors(source, token, places, experts), dim=2)


def received_pairs(pairs: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[N, 4] of this rank's experts, in stock's order: expert, ETP rank, EP rank, token."""
    ep_rank = layout.rank // layout.etp
    here = pairs[pairs[..., EXPERT] // layout.num_local_experts == ep_rank]
    source, token, _, expert = here.T
    by_etp_rank = expert * layout.etp + source % layout.etp
    by_source = by_etp_rank * layout.ep + source // layout.etp
    return here[(by_source * NUM_TOKENS + token).argsort()]


def sum_by_expert(
    pairs: torch.Tensor, chain: Chain, layout: Layout, dtype: torch.dtype
) -> torch.Tensor:
    """[N, K, 4] -> [N], the sum of s, B, -B, 0, ... over a row's experts, in the chain's order.

    Each rank adds the terms of its experts. Then the copies go back, from the chain's last
    collective to its first, and each rank adds up those that return to it, in the order of ranks.
    """
    terms = torch.tensor(TERMS, dtype=dtype)[pairs[..., PLACE].clamp(max=3)]
    holders = pairs[..., EXPERT] // layout.num_local_experts * layout.etp
    rows, sums_NS = torch.arange(len(pairs)), terms.new_zeros(len(pairs), len(layout.nodes))
    for place in range(pairs.shape[1]):
        sums_NS[rows, holders[:, place]] += terms[:, place]
    paths = [_path(layout, chain.groups, layout.rank, int(rank)) for rank in holders.unique()]
    for hop in range(len(chain.groups), 0, -1):
        returned_NS = torch.zeros_like(sums_NS)
        for holder, before in sorted({(path[hop], path[hop - 1]) for path in paths}):
            returned_NS[:, before] += sums_NS[:, holder]
        sums_NS = returned_NS
    return sums_NS[:, layout.rank]


def _path(layout: Layout, groups: Sequence[GroupName], here: int, there: int) -> tuple[int, ...]:
    """Ranks that hold a copy on its way: `here`, then one after each collective; () if none is."""
    if not groups:
        return (here,) if here == there else ()
    rest = (_path(layout, groups[1:], peer, there) for peer in layout.members(groups[0], here))
    return next(((here, *path) for path in rest if path), ())


def _difference(
    name: str, actual: torch.Tensor, expected: torch.Tensor, pairs: torch.Tensor | None = None
) -> str:
    """The first wrong value with its position, token and experts, and their number; "" if none."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, {expected.shape}"
    wrong = (actual != expected).nonzero()
    if len(wrong) == 0:
        return ""
    first = tuple(wrong[0].tolist())
    line = f"{name}: {actual[first].item():g} at {list(first)}, must be {expected[first].item():g}"
    if pairs is not None:
        source, token, _, experts = pairs[first[0]].view(-1, 4).T.tolist()
        line += f" (token {token[0]} of rank {source[0]}, experts {experts})"
    return f"{line}; {len(wrong):,} of {expected.numel():,} values are wrong"


def _bits(numbers: torch.Tensor, end: int) -> torch.Tensor:
    """[N] numbers below `end` -> [N, bits], lowest first, written as 1 and 2."""
    return 1 + (numbers[:, None] >> torch.arange(max((end - 1).bit_length(), 1)) & 1)


def _mixed(pairs: torch.Tensor) -> torch.Tensor:
    """An integer for each pair, unlike its neighbours': [..., 4] -> [...]."""
    return (pairs * torch.tensor([29, 5, 0, 77])).sum(dim=-1)
