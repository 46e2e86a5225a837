"""The training iterations of an exchange: counted, observed, and decided on by all ranks alike.

One `Iterations` belongs to all layers of one shape on one exchange. What runs in an iteration
(`planner.decision`) holds for all its micro-batches, those layers, and their recomputes. What it
rests on is shared once per iteration:

    iteration i        every rank sums up what it receives, and times the passes while tuning
    first exchange of  the ranks start to gather these figures, and nothing waits for them
    iteration i + 1
    end of i + 1       they are there, and decide what runs in iteration i + 2

An iteration ends with the step of an optimizer that follows a forward pass whose gradient is
recorded. So evaluation changes nothing, the steps of several optimizers count once, and one that is
skipped does not count.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.common.hashes import hash_of
from monta_megatron.common.quantities import counted
from monta_megatron.exchange.count_table import ExchangeCounts
from monta_megatron.exchange.gathering import Gathering
from monta_megatron.exchange.groups import gather_objects
from monta_megatron.integration.agreement import agree, check_same_rule
from monta_megatron.integration.observation import Received, traffic_of
from monta_megatron.integration.optimizer_steps import after_optimizer_steps
from monta_megatron.integration.options import Options
from monta_megatron.integration.reports import Report
from monta_megatron.planner.chain_policy import (
    ChainChoice,
    ChainPolicy,
    PlannedPolicy,
    bucket_of,
)
from monta_megatron.planner.decision import Decision, DecisionState, Outcome

if TYPE_CHECKING:
    from monta_megatron.exchange.pass_times import PassTimes


class Choices:
    """What runs in each micro-batch, where the policy says it once and for all.

    Args:
        policy: the policy.
        rule: what all ranks of the exchange have agreed on.
        group: the ranks of the exchange.

    Attributes:
        agreement: hash of what they agree on now.
        pass_times: times the passes; None where no times are wanted.
    """

    def __init__(self, policy: ChainPolicy, rule: dict[str, Any], group: dist.ProcessGroup) -> None:
        self._policy = policy
        self.agreed_rule = rule
        self.group = group
        self.agreement = hash_of(rule)
        self.pass_times: PassTimes | None = None

    def expected(self) -> ChainChoice | None:
        """What will run, as far as it is known before the counts are."""
        return self._policy.choose(1)

    def choose(
        self, counts: ExchangeCounts, device: torch.device, side_stream: torch.cuda.Stream
    ) -> ChainChoice:
        """What runs in a micro-batch of a layer, by its counts.

        Args:
            counts: which every rank of the exchange has; all ask in the same order.
            device: where the exchange runs.
            side_stream: for copies between host and device.

        Raises:
            ValueError: the ranks disagree; names the first that differs.
        """
        self._check_agreement(counts)
        return self._policy.choose(counts.max_tokens, counts.max_experts_per_token)

    def news(self, choice: ChainChoice, counts: ExchangeCounts) -> str:
        """Why that was chosen for these counts, if it has to be said and was not said before."""
        return ""

    def rule(self) -> dict[str, Any]:
        """What all ranks of the exchange have to agree on now."""
        return self.agreed_rule

    def _check_agreement(self, counts: ExchangeCounts) -> None:
        if (counts.hashes != counts.hashes[:1]).any():
            # They agreed at construction: one has another configuration since, or another number
            # of iterations.
            agree(self.rule(), self.group)


class Iterations(Choices):
    """What runs in each micro-batch, decided anew for each iteration.

    Args:
        policy, rule, group: see `Choices`.
        replicas: the ranks with this rank's position in the other exchanges of the pipeline stage;
            None if they are not known.
        num_tuning_steps: see `Decision`.
        advice: what the first choice is said with.
        report: prints a message.
        plan_out: file for the plan of the tuning; None for none.
    """

    def __init__(
        self,
        policy: PlannedPolicy,
        rule: dict[str, Any],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        num_tuning_steps: int,
        advice: str,
        report: Report,
        plan_out: str | None,
    ) -> None:
        super().__init__(policy, rule, group)
        self.policy = policy
        self.num_tuning_steps = num_tuning_steps
        self.decision = Decision(policy, num_tuning_steps)
        self.layout = policy.workload.layout
        self.replicas = replicas
        self.report = report
        self._advice, self._plan_out = advice, plan_out
        self._gathering = Gathering(group, "between iterations: exchange of traffic")
        self._received = Received()
        kinds_of_rows = {chain.rows for chain in policy.chains}
        if num_tuning_steps:
            from monta_megatron.exchange.pass_times import PassTimes

            self.pass_times = PassTimes(with_copies=len(kinds_of_rows) > 1)
        # Of the iteration that has ended, until the next one's first exchange; most tokens and
        # experts of its last micro-batch; its tokens of a rank if they were always the same.
        self._finished: list[int] | None = None
        self._most = 1, 0
        self._fixed_tokens: int | None = None
        self._said: dict[tuple[int, ...], tuple[str, int]] = {}
        self._decided()

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
            self._gathering.start([*self._finished, *pass_us], device, side_stream)
            self._finished = None
            if self.decision.has_to_settle:
                self._settle()
        most = counts.max_tokens, counts.max_experts_per_token
        if torch.is_grad_enabled():
            self._received.add(counts)
            self._most = most
        return self.decision.choose(*most)

    def news(self, choice: ChainChoice, counts: ExchangeCounts) -> str:
        """See `Choices`: what was chosen before for so many tokens is none."""
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
        outcome = self._outcome() if self._gathering.is_under_way else None
        self._finished = [self.decision.number, *received.figures]
        numbers = received.numbers_of_tokens
        self._fixed_tokens = next(iter(numbers)) if len(numbers) == 1 else None
        if self.pass_times is not None:
            self.pass_times.end_iteration()
        self.decision.end_iteration(outcome, *self._most)
        self._decided()

    def resume(self, state: DecisionState) -> None:
        """Go on where a decision was stored; see `Decision.resume`.

        Raises:
            ValueError: it does not fit.
        """
        if self._gathering.is_under_way:
            self._gathering.finish()
        self._received, self._finished = Received(), None
        if self.pass_times is not None:
            self.pass_times.end_iteration()
        self.decision.resume(state)
        self._decided()

    def _outcome(self) -> Outcome:
        """What the ranks have gathered.

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
        from monta_megatron.integration.tuning_end import report_tuning

        report_tuning(tuning, selection, self._most[0], self.report, self._plan_out)
        self._decided()

    def _decided(self) -> None:
        """Let the exchange of counts compare what was decided."""
        self.agreement = hash_of(self.rule())
        if self.pass_times is not None:
            self.pass_times.is_on = self.decision.is_timed


# One for all layers of a shape on an exchange; it goes with the last of them.
_shared: WeakValueDictionary[tuple[Any, ...], Iterations] = WeakValueDictionary()


def choices_of(
    policy: ChainPolicy,
    rule: dict[str, Any],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None,
    options: Options,
    report: Report,
) -> Choices:
    """What runs in the layers of one shape on an exchange; see `Iterations`.

    Args:
        policy, rule, group, replicas: see `Iterations`.
        options: of a layer.
        report: prints a message.
    """
    if not isinstance(policy, PlannedPolicy):
        return Choices(policy, rule, group)
    after_optimizer_steps(_end_iterations)
    # A policy is one object for all layers of a shape.
    key = policy, group, hash_of(rule)
    iterations = _shared.get(key)
    if iterations is None:
        iterations = Iterations(
            policy,
            rule,
            group,
            replicas,
            num_tuning_steps=options.tune_steps,
            advice=_advice(options),
            report=report,
            plan_out=options.plan_out,
        )
        _shared[key] = iterations
    return iterations


def _advice(options: Options) -> str:
    """What the exchange is minimized without, though the training has it."""
    if options.overlap_experts:
        return "; there is no tuning, which would time exchanges alone"
    if options.beside_us > 0 or not options.overlaps:
        return ""
    return (
        f"; minimizes the exchange itself, not what {options.overlaps[0]} leaves over of it: "
        "--moe-monta-beside-us changes that"
    )


def all_iterations() -> Iterator[Iterations]:
    """Those of all exchanges of this rank, in the order in which its layers were built."""
    yield from list(_shared.values())


def _end_iterations() -> None:
    for iterations in all_iterations():
        iterations.end()
