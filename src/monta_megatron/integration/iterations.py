"""Training iterations of an exchange: counted, observed, and decided on by all ranks alike.

One `Iterations` belongs to all layers of one shape on one exchange. A decision
(`planner.online.decision`) holds for all micro-batches of an iteration, those layers, and their
recomputes. Its figures are shared once per iteration:

    iteration i        every rank sums up what it receives, and times the passes while tuning
    first exchange of  the ranks start to gather these figures, and nothing waits for them
    iteration i + 1
    end of i + 1       they are there, and decide what runs in iteration i + 2

An iteration ends with the step of an optimizer that follows a forward pass whose gradient is
recorded. So evaluation changes nothing, the steps of several optimizers count once, and one that is
skipped does not count.

Notation: S = ranks of the exchange, EP and ETP = sizes of its groups.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.layout import Layout
from monta_megatron.common.rules import hash_of
from monta_megatron.common.torch_private import is_usable
from monta_megatron.common.units import counted
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.counts import ExchangeCounts, Gathering
from monta_megatron.integration.chain_policy import Choices
from monta_megatron.integration.metrics import after_optimizer_steps
from monta_megatron.integration.options import Options
from monta_megatron.integration.ranks import Report, check_same_rule
from monta_megatron.planner.chain_policy import (
    ChainChoice,
    PlannedPolicy,
    bucket_of,
)
from monta_megatron.planner.online.decision import Decision, DecisionState, Outcome
from monta_megatron.planner.routing.observed import Traffic

# The integers of `Received.figures`.
NUM_FIGURES = 4


@dataclass(kw_only=True)
class Received:
    """Sums over the micro-batches and layers of an iteration; all ranks have the same tokens.

    Attributes:
        tokens: of all ranks.
        pairs: token-expert pairs that came to this rank.
        for_rank: tokens with an expert here, as far as they are counted.
        for_node: tokens with an expert on this node, likewise.
        numbers_of_tokens: of each rank in each micro-batch.
        pairs_of_each: `pairs` of each micro-batch and layer.
    """

    tokens: int = 0
    pairs: int = 0
    for_rank: int = 0
    for_node: int = 0
    numbers_of_tokens: set[int] = field(default_factory=set)
    pairs_of_each: list[int] = field(default_factory=list)

    def add(self, counts: ExchangeCounts) -> None:
        """Add a micro-batch of a layer."""
        self.tokens += int(counts.num_tokens.sum())
        self.pairs_of_each.append(int(counts.permuted_tokens.received.sum()))
        self.pairs += self.pairs_of_each[-1]
        self.numbers_of_tokens.update(counts.num_tokens.tolist())
        if counts.tokens is not None:
            for_rank, for_node = counts.tokens.for_rank, counts.tokens.for_node
            self.for_rank += 0 if for_rank is None else int(for_rank.sum())
            self.for_node += 0 if for_node is None else int(for_node.sum())

    @property
    def figures(self) -> list[int]:
        """Figures that ranks share."""
        return [self.tokens, self.pairs, self.for_rank, self.for_node]


def traffic_of(figures: NDArray[np.int64], layout: Layout) -> Traffic | None:
    """The traffic of an iteration; None if there was none.

    Args:
        figures: [S, 4] the `Received.figures` of all ranks.
        layout: any rank's place.
    """
    # [S], and [EP] since all ranks of an expert tensor parallel group receive the same
    tokens, pairs, for_rank, for_node = figures.T
    if not tokens[0] or not pairs.any():
        return None
    by_rank = slice(None, None, layout.etp)
    nothing = np.empty(0)
    return Traffic(
        pairs=pairs[by_rank] / tokens[0],
        rank_hits=for_rank[by_rank] / tokens[0] if for_rank.any() else nothing,
        # In order on even nodes, or no chain copies tokens for nodes.
        node_hits=for_node[:: layout.ranks_per_node] / tokens[0] if for_node.any() else nothing,
    )


class Iterations(Choices):
    """Choice for each micro-batch, decided anew for each iteration.

    Args:
        policy, rule, group: see `Choices`.
        replicas: the ranks with this rank's position in the other exchanges of the pipeline stage;
            None if they are not known.
        options: of a layer.
        report: prints a message.
    """

    def __init__(
        self,
        policy: PlannedPolicy,
        rule: dict[str, Any],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        options: Options,
        report: Report,
    ) -> None:
        super().__init__(policy, rule, group)
        self.policy = policy
        self.num_tuning_steps, self.layout = options.tune_steps, policy.workload.layout
        self._publisher = watching = None
        if options.watch_steps:
            from monta_megatron.integration.metrics import Publisher, Watching

            ranks = dist.get_process_group_ranks(group)
            watching = Watching(options.watch_steps, ranks, self.layout)
            self._publisher = Publisher(watching, group, options, report)
        self.decision = Decision(policy, self.num_tuning_steps, watching)
        self.replicas = replicas
        self.report = report
        self._advice, self._plan_out = _advice(options), options.plan_out
        self._gathering = Gathering(group, "between iterations: exchange of traffic")
        self._received = Received()
        kinds_of_rows = {chain.rows for chain in policy.chains}
        if self.num_tuning_steps or watching is not None:
            from monta_megatron.exchange.pass_times import PassTimes

            self.pass_times = PassTimes(with_copies=len(kinds_of_rows) > 1)
        # Of the iteration that has ended, until the next one's first exchange; most tokens and
        # experts of its last micro-batch; its tokens of a rank if they were always the same.
        self._finished: list[int] | None = None
        self._pairs: list[int] = []
        self._most = 1, 0
        self._fixed_tokens: int | None = None
        # Of this process: of the training, or since it was resumed.
        self._is_first_iteration = True
        self._said: dict[tuple[int, ...], tuple[str, int]] = {}
        self._decided()

    @property
    def has_ended(self) -> bool:
        """Whether an iteration of this process has ended."""
        return not self._is_first_iteration

    def expected(self) -> ChainChoice | None:
        """See `Choices`: known while the number of tokens does not change."""
        if self._fixed_tokens is None:
            return None
        return self.decision.choose(self._fixed_tokens, self._most[1])

    def choose(
        self, counts: ExchangeCounts, device: torch.device, side_stream: torch.cuda.Stream
    ) -> ChainChoice:
        """See `Choices`."""
        self._check_agreement(counts)
        if self._finished is not None:
            # The device has done these passes: the host has waited for counts after them.
            pass_us = [] if self.pass_times is None else self.pass_times.collect().tolist()
            self._gathering.start([*self._finished, *pass_us, *self._pairs], device, side_stream)
            self._finished = None
            if self.decision.has_to_settle:
                self._settle()
        most = counts.max_tokens, counts.max_experts_per_token
        if torch.is_grad_enabled():
            self._received.add(counts)
            self._most = most
        return self.decision.choose(*most)

    def chains_to_check(
        self, choice: ChainChoice, counts: ExchangeCounts
    ) -> list[tuple[Chain, int]]:
        """See `Choices`: the tuning's candidates too, so that it times no check."""
        chains = super().chains_to_check(choice, counts)
        if self._is_first_iteration:
            most = counts.max_tokens, counts.max_experts_per_token
            chains += [
                (CHAINS[candidate.chain], candidate.num_chunks)
                for candidate in self.decision.candidates(*most)
            ]
        return chains

    def news(self, choice: ChainChoice, counts: ExchangeCounts) -> str:
        """See `Choices`: repeated choices are not reported."""
        buckets = bucket_of(counts.max_tokens), bucket_of(counts.max_experts_per_token)
        key, before = (choice.chain.name, choice.num_chunks), self._said.get(buckets)
        if not choice.reason or before == key:
            return ""
        self._said[buckets] = key
        since = f"; after {counted(self.decision.number, 'iteration')}"
        advice, self._advice = self._advice, ""
        return choice.reason + since * (before is not None) + advice

    def rule(self) -> dict[str, Any]:
        """See `Choices`."""
        return {**self.agreed_rule, **self.decision.rule()}

    def end(self) -> None:
        """End the iteration, if there was one: an optimizer has made a step."""
        received, self._received = self._received, Received()
        if not received.numbers_of_tokens:
            return
        self._is_first_iteration = False
        outcome = self._outcome() if self._gathering.is_under_way else None
        self._finished = [self.decision.number, *received.figures]
        self._pairs = received.pairs_of_each if self.decision.is_watched else []
        numbers = received.numbers_of_tokens
        self._fixed_tokens = next(iter(numbers)) if len(numbers) == 1 else None
        if self.pass_times is not None:
            self.pass_times.end_iteration()
        self.decision.end_iteration(outcome, *self._most)
        if self._publisher is not None:
            self._publisher.after_iteration(self.decision.number - 1)
        self._decided()

    def resume(self, state: DecisionState) -> None:
        """Go on where a decision was stored; see `Decision.resume`.

        Raises:
            ValueError: it does not fit.
        """
        if self._gathering.is_under_way:
            self._gathering.finish()
        self._received, self._finished = Received(), None
        self._is_first_iteration = True
        if self.pass_times is not None:
            self.pass_times.end_iteration()
        self.decision.resume(state)
        self._decided()

    def _outcome(self) -> Outcome:
        """Gathered outcome of the iteration that has ended.

        Raises:
            ExchangeError: a rank has died or stopped.
            ValueError: it is of different iterations.
        """
        # [S, 1], [S, figures], [S, P]
        numbers, figures, pass_us = np.split(
            self._gathering.finish(), [1, 1 + len(Received().figures)], axis=1
        )
        ranks = dist.get_process_group_ranks(self.group)
        check_same_rule([{"iteration": number} for number in numbers[:, 0].tolist()], ranks)
        return Outcome(traffic_of(figures, self.layout), pass_us)

    def _settle(self) -> None:
        """End the tuning together with the replicas of this exchange."""
        tuning = self.decision.tuning
        assert tuning is not None
        alone = self.replicas is None or dist.get_world_size(self.replicas) == 1
        summary = tuning.summary()
        summaries = [summary] if alone else gather_objects(summary, self.replicas)
        selection = self.decision.settle(summaries)
        from monta_megatron.integration.metrics import report_tuning

        report_tuning(tuning, selection, self._most[0], self.report, self._plan_out)
        self._decided()

    def _decided(self) -> None:
        """Let the exchange of counts compare the decision."""
        self.agreement = hash_of(self.rule())
        if self.pass_times is not None:
            self.pass_times.is_on = self.decision.is_timed
            if self.decision.is_watched:
                self.pass_times.watch()


# One for all layers of a shape on an exchange; it goes with the last of them.
_shared: WeakValueDictionary[tuple[Any, ...], Iterations] = WeakValueDictionary()


def iterations_of(
    policy: PlannedPolicy,
    rule: dict[str, Any],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None,
    options: Options,
    report: Report,
) -> Iterations:
    """Shared `Iterations` of the layers of one shape on an exchange."""
    after_optimizer_steps(_end_iterations)
    # A policy is one object for all layers of a shape.
    key = policy, group, hash_of(rule)
    iterations = _shared.get(key)
    if iterations is not None and iterations.has_ended:
        # A model that was dropped may be gone on some ranks only; then all begin anew.
        del iterations
        gc.collect()
        iterations = _shared.get(key)
    if iterations is None:
        iterations = Iterations(
            policy,
            rule,
            group,
            replicas,
            options=options,
            report=report,
        )
        _shared[key] = iterations
    return iterations


def _advice(options: Options) -> str:
    """Note on overlapped work that the choice does not take into account."""
    if options.named_chain is None and options.overlap_experts:
        return "; there is no tuning, which would time exchanges alone"
    if options.beside_us > 0 or not options.overlaps or options.named_chain is not None:
        return ""
    return (
        f"; minimizes the exchange itself, not what {options.overlaps[0]} leaves over of it: "
        "--moe-monta-beside-us changes that"
    )


def all_iterations() -> Iterator[Iterations]:
    """Iterations of all exchanges of this rank, in the order in which its layers were built.

    Layers from before a restart in this process may not be gone yet, but their groups are.
    """
    yield from [each for each in _shared.values() if is_usable(each.group)]


def _end_iterations() -> None:
    for iterations in all_iterations():
        iterations.end()
