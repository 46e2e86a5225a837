"""The chain of each micro-batch, alike on all ranks: fixed, or decided for each iteration.

One `ChainController` belongs to a dispatcher with a fixed policy, or to all layers of one shape on
an exchange with a planned one. A decision (`planner.online.decision`) then holds for all
micro-batches of an iteration, those layers, and their recomputes; it rests on the times of earlier
iterations (`iteration_figures`).

An iteration ends with the step of an optimizer that follows a forward pass whose gradient is
recorded. So evaluation changes nothing, the steps of several optimizers count once, and one that is
skipped does not count.
"""

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.common.rules import hash_of
from monta_megatron.common.torch_private import is_usable
from monta_megatron.common.units import counted
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.counts import ExchangeCounts
from monta_megatron.integration.options import Options
from monta_megatron.integration.ranks import Report, agree
from monta_megatron.planner.chain_policy import ChainChoice, ChainPolicy, PlannedPolicy, bucket_of

if TYPE_CHECKING:
    from monta_megatron.exchange.pass_times import PassTimes
    from monta_megatron.planner.online.decision import Decision


class ChainController:
    """Told what was received, asked what runs.

    Args:
        policy: fixed or planned.
        agreed_config: values that all ranks of the exchange agreed on at construction.
        group: the ranks of the exchange.

    Attributes:
        agreement: hash of the values that the ranks agree on now.
        decision: that of the iteration under way; None where the policy is fixed.
        pass_times: times the passes; None where there is no tuning.
    """

    def __init__(
        self, policy: ChainPolicy, agreed_config: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self.policy, self.agreed_config, self.group = policy, agreed_config, group
        self.agreement = hash_of(agreed_config)
        self.decision: Decision | None = None
        self.pass_times: PassTimes | None = None

    def decide_by_iteration(
        self, replicas: dist.ProcessGroup | None, options: Options, report: Report
    ) -> None:
        """Decide anew for each iteration; the policy is planned.

        Args:
            replicas: the ranks with this rank's position in the other exchanges of the pipeline
                stage; None if they are not known.
            options: of a layer.
            report: prints a message.
        """
        from monta_megatron.exchange.pass_times import PassTimes
        from monta_megatron.integration.iteration_figures import IterationFigures
        from monta_megatron.planner.online.decision import Decision

        policy = self.policy
        assert isinstance(policy, PlannedPolicy)
        self.replicas, self.report = replicas, report
        self.decision = Decision(policy, options.tune_steps)
        self._figures: IterationFigures | None = None
        if options.tune_steps:
            self.pass_times = PassTimes(with_copies=len({each.rows for each in policy.chains}) > 1)
            self._figures = IterationFigures(self.group, self.pass_times)
        # Numbers of tokens of each rank, in the iteration under way.
        self._numbers_of_tokens: set[int] = set()
        # Most tokens and experts of the last micro-batch; tokens of a rank if always the same.
        self._most = 1, 0
        self._fixed_tokens: int | None = None
        self.has_ended = False
        self._said: dict[tuple[int, ...], tuple[str, int]] = {}
        self._agree_on_decision()

    def expected(self) -> ChainChoice | None:
        """Expected choice; None where it depends on the counts.

        A decision is known while the number of tokens does not change.
        """
        if self.decision is None:
            return self.policy.choose(1)
        if self._fixed_tokens is None:
            return None
        return self.decision.choose(self._fixed_tokens, self._most[1])

    def choose(
        self, counts: ExchangeCounts, device: torch.device, side_stream: torch.cuda.Stream
    ) -> ChainChoice:
        """Choose chain and chunks for a micro-batch of a layer, by its counts.

        Args:
            counts: which every rank of the exchange has; all ask in the same order.
            device: where the exchange runs.
            side_stream: for copies between host and device.

        Raises:
            ValueError: the ranks disagree; names the first that differs.
        """
        if len(set(counts.hashes.tolist())) > 1:
            # They agreed at construction: one has another configuration since, or another number
            # of iterations.
            agree(self.agreed_now(), self.group)
        most = counts.max_tokens, counts.max_experts_per_token
        if self.decision is None:
            return self.policy.choose(*most)
        is_new = self._figures is not None and self._figures.start_gathering(device, side_stream)
        if is_new and self.decision.has_to_settle:
            self._settle()
        if torch.is_grad_enabled():
            self._numbers_of_tokens.update(counts.num_tokens.tolist())
            self._most = most
        return self.decision.choose(*most)

    def chains_to_check(
        self, choice: ChainChoice, counts: ExchangeCounts
    ) -> list[tuple[Chain, int]]:
        """Chains and numbers of chunks that may be used for the first time from here on.

        The same on all ranks of the exchange. In the first iteration the tuning's candidates too,
        so that it times no check.
        """
        chains = [(choice.chain, choice.num_chunks)]
        if self.decision is not None and not self.has_ended:
            most = counts.max_tokens, counts.max_experts_per_token
            chains += [
                (CHAINS[candidate.chain], candidate.num_chunks)
                for candidate in self.decision.candidates(*most)
            ]
        return chains

    def change_message(self, choice: ChainChoice, counts: ExchangeCounts) -> str:
        """Reason for a choice by these counts; "" for a fixed or repeated one."""
        if self.decision is None or not choice.reason:
            return ""
        buckets = bucket_of(counts.max_tokens), bucket_of(counts.max_experts_per_token)
        key, before = (choice.chain.name, choice.num_chunks), self._said.get(buckets)
        if before == key:
            return ""
        self._said[buckets] = key
        since = f"; after {counted(self.decision.number, 'iteration')}"
        return choice.reason + since * (before is not None)

    def agreed_now(self) -> dict[str, Any]:
        """Values that all ranks of the exchange agree on in this iteration."""
        decided = {} if self.decision is None else self.decision.agreed_config()
        return {**self.agreed_config, **decided}

    def end_iteration(self) -> None:
        """End the iteration, if there was one: an optimizer has made a step."""
        assert self.decision is not None, "only decisions change"
        numbers, self._numbers_of_tokens = self._numbers_of_tokens, set()
        if not numbers:
            return
        self.has_ended = True
        self._fixed_tokens = next(iter(numbers)) if len(numbers) == 1 else None
        pass_us = None
        if self._figures is not None:
            pass_us = self._figures.end_iteration(self.decision.number)
        self.decision.end_iteration(pass_us, *self._most)
        if self.decision.is_settled:
            self._figures = None
        self._agree_on_decision()

    def _settle(self) -> None:
        """End the tuning together with the replicas of this exchange."""
        from monta_megatron.planner.online.tuning_report import tuning_table

        assert self.decision is not None and self.decision.tuning is not None
        tuning = self.decision.tuning
        alone = self.replicas is None or dist.get_world_size(self.replicas) == 1
        summary = tuning.summary()
        self.decision.settle([summary] if alone else gather_objects(summary, self.replicas))
        self.report(*tuning_table(tuning))
        self._agree_on_decision()

    def _agree_on_decision(self) -> None:
        """Let the exchange of counts compare the decision, and time what it wants timed."""
        assert self.decision is not None
        self.agreement = hash_of(self.agreed_now())
        if self.pass_times is not None:
            self.pass_times.is_on = self.decision.is_timed


# One for all layers of a shape on an exchange; it goes with the last of them.
_shared: WeakValueDictionary[tuple[Any, ...], ChainController] = WeakValueDictionary()


def controller_of(
    policy: ChainPolicy,
    agreed_config: dict[str, Any],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None,
    options: Options,
    report: Report,
) -> ChainController:
    """Controller of a layer: its own where the policy is fixed, else shared by layers of a shape.

    Args:
        policy, agreed_config, group: see `ChainController`.
        replicas, options, report: see `ChainController.decide_by_iteration`.
    """
    if not isinstance(policy, PlannedPolicy):
        return ChainController(policy, agreed_config, group)
    from monta_megatron.integration.metrics import after_optimizer_steps

    after_optimizer_steps(_end_iterations)
    # A policy is one object for all layers of a shape.
    key = policy, group, hash_of(agreed_config)
    controller = _shared.get(key)
    if controller is not None and controller.has_ended:
        # A model that was dropped may be gone on some ranks only; then all begin anew.
        del controller
        gc.collect()
        controller = _shared.get(key)
    if controller is None:
        controller = ChainController(policy, agreed_config, group)
        controller.decide_by_iteration(replicas, options, report)
        _shared[key] = controller
    return controller


def deciding_controllers() -> Iterator[ChainController]:
    """Controllers of all exchanges of this rank that decide by iteration, as layers were built.

    Layers from before a restart in this process may not be gone yet, but their groups are.
    """
    yield from [each for each in _shared.values() if is_usable(each.group)]


def _end_iterations() -> None:
    for controller in deciding_controllers():
        controller.end_iteration()
