"""First use of a chain: a round trip with known answer, over all ranks of an exchange.

Tokens, their experts and the experts' outputs are functions of indices, so every rank computes by
itself what its experts must receive and what must come back, and compares bit for bit.

    row of a token        its number, rank * 256 + token, in bits; a bit is 1 or 2, not 0 or 1
    output of an expert   the row times the number of the expert and its ETP rank, in such bits
    every 8th column      a token's experts, or an expert's ETP ranks, return s, B, -B, 0, 0, ...
    backward passes       the same with 3 - row

Sums of bits are integers up to 256, exact in any order. Of the others s + B = B in fp32, so that
s + B - B is 0, but -B + B + s is s: they show the order. All partial sums of them are values of the
rows' dtype, so hops round nothing.

All ranks of the exchange must call `check`. After an exception on one rank alone, the others wait
in the next collective, a pass or the gather of differences, until the time limit of its group.

Notation: S = ranks of the exchange, T = tokens of a rank, E = experts, K = experts of a token, H =
hidden size, N = rows, X = experts of a source row: K of a token, 1 of a permuted token.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from operator import add
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from monta_megatron.chains import Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.chains.counts import num_counted_blocks
from monta_megatron.chains.program import COMBINE, COMBINE_BACKWARD, DISPATCH, DISPATCH_BACKWARD
from monta_megatron.common.units import counted
from monta_megatron.core import Layout
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.collectives import PeerGroup, gather_objects
from monta_megatron.exchange.counts import CountTable
from monta_megatron.exchange.errors import ExchangeError
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import run
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.integration.counts import CountExchange

# Tokens of a rank; most ranks have up to 7 fewer, so that their numbers differ.
NUM_TOKENS, FEWER_TOKENS = 256, 8
# bf16 holds the integers up to 256: a sum has at most 64 terms, and a term is at most 2 * 2.
LARGEST, MOST_TERMS = 256, 64
# s, B, -B and the rest; all are normal numbers of fp16.
TERMS = (2.0**-13, 2.0**12, -(2.0**12), 0.0)
BY_EXPERT, BY_ETP_RANK = slice(3, None, 8), slice(7, None, 8)
# Columns of a pair: rank of the token and its position there, position of the expert among the
# token's, which ascend, and the expert.
SOURCE, TOKEN, PLACE, EXPERT = range(4)

# Checks that have passed, by group.
_passed: WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = WeakKeyDictionary()


class SelfCheckError(RuntimeError):
    """The check of a first use failed or found a difference; the message names ranks and place."""


@dataclass(frozen=True, kw_only=True)
class FirstUse:
    """A chain in a number of chunks, for the rows of a training.

    Attributes:
        chain, num_chunks: the same on all ranks of the exchange.
        layout: this rank's place.
        group: the ranks of the exchange.
        groups: the process group for each group name of the chain.
        hidden_size, dtype: of the rows.
        prob_dtype: of the probabilities.
        topk: K of the training; the check has fewer where it is above 64 / ETP.
        device: of the rows.
        fused: Triton kernels do the work.
    """

    chain: Chain
    num_chunks: int
    layout: Layout
    group: dist.ProcessGroup
    groups: Mapping[str, PeerGroup]
    hidden_size: int
    dtype: torch.dtype
    prob_dtype: torch.dtype
    topk: int
    device: torch.device
    fused: bool

    def check(self) -> None:
        """Check the chain, unless it has passed in this process before; draws no random numbers.

        Raises:
            SelfCheckError: there is a difference on a rank, or the round trip failed.
        """
        passed = _passed.setdefault(self.group, set())
        rows = self.hidden_size, self.dtype, self.prob_dtype, self.topk
        key = self.layout, self.chain.name, self.num_chunks, *rows, self.fused
        if key in passed:
            return
        problem = ""
        cause: Exception | None = None
        try:
            # Whatever a trainer's default device is.
            with torch.no_grad(), torch.device("cpu"):
                for difference in self._differences():
                    # A collective, with the same answer on all ranks.
                    if problem := self._on_any_rank(difference):
                        break
        except ExchangeError:
            raise
        except Exception as error:  # noqa: BLE001 - named, and raised below
            problem, cause = f": the round trip failed: {type(error).__name__}: {error}", error
        if problem:
            chain = f"chain {self.chain.name} in {counted(self.num_chunks, 'chunk')}"
            advice = "Report it, and train with moe_token_dispatcher_type alltoall"
            if self.fused:
                advice += " or moe_monta_kernels torch"
            raise SelfCheckError(f"moe_monta_check: {chain}{problem}. {advice}") from cause
        passed.add(key)

    def _on_any_rank(self, difference: str) -> str:
        """The ranks of the exchange with a difference, and that of the first; "" without one."""
        ranks = dist.get_process_group_ranks(self.group)
        lines = dict(zip(ranks, gather_objects(difference, self.group), strict=True))
        wrong = [rank for rank in ranks if lines[rank]]
        if not wrong:
            return ""
        return (
            f" is wrong on rank {', '.join(map(str, wrong))} of the ranks "
            f"{', '.join(map(str, ranks))}; on rank {wrong[0]} {lines[wrong[0]]}"
        )

    def _differences(self) -> Iterator[str]:
        """The first difference on this rank, or "": of the counts, then of the four passes."""
        layout = self.layout
        pairs = route(layout, min(self.topk, layout.num_experts, MOST_TERMS // layout.etp))
        # [N, X, 4]: by token; or in Megatron's permuted order, (expert, token).
        sent, received = pairs[pairs[:, 0, SOURCE] == layout.rank], received_pairs(pairs, layout)
        if self.chain.rows == "permuted tokens":
            sent = sent.flatten(0, 1)[sent[..., EXPERT].flatten().argsort(stable=True), None]
        exchange, counts_SL = self._exchange(sent)
        expected_SL, local = torch.zeros_like(counts_SL), received[:, EXPERT] - layout.first_expert
        expected_SL.index_put_((received[:, SOURCE], local), torch.tensor(1), accumulate=True)
        yield _difference("counts by source rank and local expert", counts_SL, expected_SL)
        differences = [_difference(*each) for each in self._passes(exchange, sent, received)]
        yield next((line for line in differences if line), "")

    def _exchange(self, sent: torch.Tensor) -> tuple[Exchange, torch.Tensor]:
        """Exchange the counts, and bind the chain by them; with them: [S, L]."""
        layout, chain = self.layout, self.chain
        table = CountTable(
            chains=(chain,),
            layout=layout,
            num_blocks=num_counted_blocks((chain,), blocks_for(self.num_chunks)),
            kernels="fused" if self.fused else "torch",
        )
        routing_map_TE = torch.zeros(int(sent[..., TOKEN].max()) + 1, layout.num_experts).bool()
        routing_map_TE[sent[..., TOKEN], sent[..., EXPERT]] = True
        source = CountExchange(
            count_table=table, topk=self.topk, group=self.group, chain_name=chain.name
        )
        counts_K, _ = source.exchange(routing_map_TE.to(self.device))
        counts = table.read(counts_K.cpu().numpy())
        permuted = counts.permuted_tokens
        least = torch.float32 if chain.rows == "tokens" else self.prob_dtype
        exchange = Exchange(
            bound_chain=chain.bind(layout, counts.tokens or permuted, self.num_chunks),
            groups=self.groups,
            sum_dtype=torch.promote_types(least, torch.float32),
            monitor=Monitor(),
            max_experts_per_token=counts.max_experts_per_token,
            fused=self.fused,
        )
        # [ETP, EP, L] -> [S, L]
        return exchange, torch.from_numpy(permuted.received).transpose(0, 1).flatten(0, 1)

    def _passes(self, exchange: Exchange, sent: torch.Tensor, received: torch.Tensor) -> list[Any]:
        """Arguments of `_difference`. No memory that a pass has left holds the answer of another.

        Args:
            exchange: bound to the counts of the pairs.
            sent: [N, X, 4].
            received: [N, 4].
        """
        layout, is_token = self.layout, self.chain.rows == "tokens"
        terms, etp_rank = torch.tensor(TERMS), layout.rank % layout.etp
        sum_dtype = torch.promote_types(exchange.sum_dtype, self.dtype)

        # Step 1: rows on both sides, and the numbers of the experts: [E * ETP] -> [E, ETP, bits].
        sizes = len(layout.nodes) * NUM_TOKENS, layout.num_experts * layout.etp
        rows, arrived = (
            self._wide(_bits(pairs[:, SOURCE] * NUM_TOKENS + pairs[:, TOKEN], sizes[0]))
            for pairs in (sent[:, 0], received)
        )
        factors = _bits(torch.arange(sizes[1]), sizes[1]).unflatten(0, (-1, layout.etp))

        # Step 2: outputs of the experts, and their sums. Of a token that is summed by its chain the
        # first expert's ETP ranks have an order.
        place, own_place = received[:, PLACE], sent[:, 0, PLACE]
        outputs = (
            factors[received[:, EXPERT], etp_rank],
            terms[place.clamp(max=3)] * (etp_rank == 0),
            terms[min(etp_rank, 3)] * ((place == 0) | (not is_token)),
        )
        sums = (
            factors.sum(dim=1)[sent[..., EXPERT]].sum(dim=1),
            sum_by_expert(sent[..., EXPERT], self.chain, layout, sum_dtype)
            if is_token
            else terms[own_place.clamp(max=3)],
            _sum_of_terms(layout.etp, sum_dtype).expand(len(rows)),
        )

        # Step 3: probabilities, [T, K] or [N]; of their gradients each ETP rank has a share.
        lists = sent if is_token else sent[:, 0]
        probs, arrived_probs = (
            self._probs(1 + _mixed(each) % LARGEST) for each in (lists, received)
        )
        most = LARGEST // layout.etp
        shares = most - (_mixed(received) + etp_rank) % most
        all_shares = most - (_mixed(lists)[..., None] + torch.arange(layout.etp)) % most
        ids = lists[..., EXPERT].to(self.device, torch.int32) if is_token else None

        # Step 4: the passes.
        dispatched = run(exchange, DISPATCH, Columns(rows, probs, ids))
        combined = run(exchange, COMBINE, Columns(self._times(arrived, *outputs)))
        gradients = run(exchange, COMBINE_BACKWARD, Columns(3 - rows))
        of_experts = Columns(self._times(3 - arrived, *outputs), self._probs(shares))
        returned = run(exchange, DISPATCH_BACKWARD, of_experts)
        prob_gradients = self._probs(all_shares.sum(dim=-1))
        return [
            ("rows at the experts", dispatched.rows, arrived, received),
            ("probabilities", dispatched.probs, arrived_probs, received),
            ("combine", combined.rows, self._times(rows, *sums), sent),
            ("combine backward", gradients.rows, 3 - arrived, received),
            ("dispatch backward", returned.rows, self._times(3 - rows, *sums), sent),
            ("dispatch backward of probabilities", returned.probs, prob_gradients, sent),
        ]

    def _wide(self, values: torch.Tensor) -> torch.Tensor:
        """[N, any number] -> [N, H]: the same values again and again, but in the order columns."""
        columns = torch.arange(self.hidden_size)
        index = (columns - (columns + 1) // 4) % values.shape[1]
        return values.to(self.device, self.dtype).index_select(1, index.to(self.device))

    def _times(self, rows: torch.Tensor, *of_rows: torch.Tensor) -> torch.Tensor:
        """[N, H] times [N, bits]; the columns in which the order shows hold [N] and [N]."""
        result = rows * self._wide(of_rows[0])
        for columns, values in zip((BY_EXPERT, BY_ETP_RANK), of_rows[1:], strict=True):
            result[:, columns] = values.to(self.device, self.dtype)[:, None]
        return result

    def _probs(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, self.prob_dtype)


def route(layout: Layout, topk: int) -> torch.Tensor:
    """All pairs of the exchange, [S * T, K, 4]; see `SOURCE` for the columns.

    A token's experts are equally far apart, cyclically; how far differs from token to token.
    """
    num_experts, places = layout.num_experts, torch.arange(topk)
    num_tokens = NUM_TOKENS - torch.arange(len(layout.nodes)) % FEWER_TOKENS
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
    experts: torch.Tensor, chain: Chain, layout: Layout, dtype: torch.dtype
) -> torch.Tensor:
    """[T, K] ascending experts -> [T] sum of their s, B, -B, 0 ... by the hops of a chain.

    A rank sums its experts; where a collective stays in the node, it sums its ranks; the token's
    rank sums what comes to it. Each hop's order ascends, so this is one sum in order, unless B and
    -B have met in a hop before s.
    """
    total = _sum_of_terms(experts.shape[1], dtype).expand(len(experts))
    if experts.shape[1] < 3:
        return total
    ranks = experts // layout.num_local_experts * layout.etp
    hops_apart = (ranks.diff() != 0).int()
    if "node" in chain.groups:
        hops_apart += torch.tensor(layout.nodes)[ranks].diff() != 0
    return torch.where(hops_apart[:, 1] < hops_apart[:, 0], TERMS[0], total)


def _difference(
    name: str, actual: torch.Tensor, expected: torch.Tensor, pairs: torch.Tensor | None = None
) -> str:
    """The first place, its token and experts, and both values there; "" if all are equal."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, {expected.shape}"
    places = (actual != expected).nonzero()
    if len(places) == 0:
        return ""
    first = tuple(places[0].tolist())
    line = f"{name}: {actual[first].item():g} at {list(first)}"
    if pairs is not None:
        source, token, _, experts = pairs[first[0]].view(-1, 4).T.tolist()
        line += f" (token {token[0]} of rank {source[0]}, experts {experts})"
    return f"{line}, must be {expected[first].item():g}"


def _bits(numbers: torch.Tensor, end: int) -> torch.Tensor:
    """[N] numbers below `end` -> [N, bits], each 1 or 2."""
    return 1 + (numbers[:, None] >> torch.arange(max((end - 1).bit_length(), 1)) & 1)


def _mixed(pairs: torch.Tensor) -> torch.Tensor:
    """An integer of each pair, other than its neighbours': [..., 4] -> [...]."""
    return (pairs * torch.tensor([29, 5, 0, 77])).sum(dim=-1)


def _sum_of_terms(num_terms: int, dtype: torch.dtype) -> torch.Tensor:
    return reduce(add, torch.tensor(TERMS, dtype=dtype)[:num_terms])
