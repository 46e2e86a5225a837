"""Choosers: the choice of each optimizer step, the same on all ranks of an exchange.

`planner.choose` defines the words: choice, pick, candidate, trial, round, tuning window, winner.
A step begins where the optimizer's step before it is entered. Its iteration is timed from its first
training counts (of a micro-batch whose layer is in training mode) to the entry of the next
optimizer's step; evaluation, checkpoints and data loading lie outside.

Every exchange of counts carries a head of 63 bits from each rank:

    32 bits    hash of choice and options; within a tuning window also of the step number
    31 bits    the rank's time of an iteration in units of 10 us; 0: none

The heads of step n carry the times of step n - 2; `AutoChooser` has an example. Apart from the
heads, ranks exchange something at construction only. So an exchange that has no micro-batch, or
only evaluates, blocks no other one.
"""

import gc
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from monta_megatron.common.first_rank import print_once
from monta_megatron.common.rules import hash_of
from monta_megatron.common.torch_private import is_usable
from monta_megatron.common.units import counted
from monta_megatron.core import Choice
from monta_megatron.exchange.counts import ExchangeCounts
from monta_megatron.exchange.iteration_clock import IterationClock, Segment, us_of
from monta_megatron.integration.optimizer_steps import call_at_steps
from monta_megatron.integration.ranks import agree
from monta_megatron.planner.choose import (
    ROUNDS,
    TIME_LAG,
    Planner,
    TuningWindow,
    Workload,
    half_octave,
)

TIME_BITS = 31
TICK_US, MOST_TICKS = 10, (1 << TIME_BITS) - 1
# From the first window to the second, because early routing is untrained.
STEPS_TO_SECOND = 1000


class Chooser:
    """Holds one given choice and checks that all ranks run it; `AutoChooser` changes it by step.

    Args:
        choice: the given one; None if there is none.
        agreed_config: values that all ranks of the exchange agreed on at construction.
        group: the ranks of the exchange.

    Attributes:
        step_choice: the choice of all micro-batches of this step. None: each micro-batch has the
            planner's pick for its own counts, so its choice is unknown until they are here.
        head: 63 bits that this rank sends with its counts.
    """

    def __init__(
        self, choice: Choice | None, agreed_config: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self.step_choice, self.agreed_config, self.group = choice, agreed_config, group
        self._set_head(agreed_config)

    def choose(self, counts: ExchangeCounts, is_training: bool, device: torch.device) -> Choice:
        """Compare the heads of all ranks, and return the choice of the micro-batch of the counts.

        Raises:
            ValueError: the ranks differ; the message names the first that does, and the field.
        """
        self._check_heads(counts)
        assert self.step_choice is not None, "given"
        return self.step_choice

    def _check_heads(self, counts: ExchangeCounts) -> None:
        if len(set((counts.heads >> TIME_BITS).tolist())) > 1:
            # All ranks see it. They agreed at construction, so the step or the choice differs.
            agree(self._hashed, self.group)

    def _set_head(self, agreed: dict[str, Any], ticks: int = 0) -> None:
        """Set the head: a hash of the values that all ranks have to share, and this rank's time."""
        self._hashed = agreed
        self.head = (hash_of(agreed) & 0xFFFFFFFF) << TIME_BITS | ticks


@dataclass(kw_only=True)
class StepRecord:
    """Training exchanges of one optimizer step, and its time on this rank."""

    num_exchanges: int = 0
    # Most tokens of any rank in an exchange.
    tokens: int = 0
    # Each from a training exchange to an optimizer's step; a device may not have finished them.
    segments: list[Segment] = field(default_factory=list)
    # Their time in units of 10 us; 0 if there is none, or until it was read.
    ticks: int = 0

    @property
    def workload(self) -> Workload | None:
        """None without training exchanges."""
        if not self.num_exchanges:
            return None
        return Workload(num_exchanges=self.num_exchanges, tokens=half_octave(self.tokens))


class AutoChooser(Chooser):
    """Choices for all layers of one shape on an exchange, one per optimizer step.

    With tune_steps 6 a round has 2 steps, one for A (plain alltoall) and one for B:

        step   runs   at the first training counts
        0      A      the window of steps 0 to 5 opens
        1      B      each rank reads its own time of step 0 from the device
        2      A      the heads carry all ranks' times of step 0: A's warm-up, not compared
        3      B      the times of step 1: B's warm-up, not compared
        4, 5   A, B   the times of step 2: A is the best so far; of step 3: A or B is
        6, 7   best   the times of steps 4 and 5, the last trials
        8      the winner, which a line names as step 8 begins

    `_begin_step` and `_at_first_training_counts` do all of this.

    Args:
        planner: proposes candidates.
        num_steps: length of a window; 0 if candidates are not measured.
        by_counts: each micro-batch has the planner's pick for its own counts, always.
        agreed_config, group: see `Chooser`.
        reports: whether this rank reports for its pipeline stage.

    Attributes:
        step: number of the step, from 0 at construction.
        window: the latest one; None before the first training exchange.
    """

    def __init__(
        self,
        planner: Planner,
        num_steps: int,
        by_counts: bool,
        agreed_config: dict[str, Any],
        group: dist.ProcessGroup,
        reports: bool,
    ) -> None:
        self.planner, self.num_steps, self.by_counts = planner, num_steps, by_counts
        self._reports = reports
        # A group may be closed before its layers are gone.
        self._ranks = dist.get_process_group_ranks(group)
        # Steps: how many each optimizer has ended, and the records since step - TIME_LAG by number.
        self.step = 0
        self._steps_ended: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._records = defaultdict[int, StepRecord](StepRecord)
        self._clock = IterationClock()
        # Most tokens of any rank, in the last step that had training exchanges.
        self._tokens = 0
        # Windows: the latest, the step from which the second is due, and for the reports candidates
        # that have been announced and the rows of the busiest rank over the mean.
        self.window: TuningWindow | None = None
        self._second_due_at = inf
        self._announced: set[Choice] = set()
        self._busiest: float | None = None
        super().__init__(None, agreed_config, group)

    @property
    def is_tuning(self) -> bool:
        """Whether a window is open."""
        return self.window is not None and self.window.is_open(self.step)

    def choose(self, counts: ExchangeCounts, is_training: bool, device: torch.device) -> Choice:
        """See `Chooser`; training counts start the clock, and are added to the step's record."""
        self._check_heads(counts)
        if is_training and not self.by_counts:
            self._clock.start(device)
            record = self._records[self.step]
            if record.num_exchanges == 0:
                self._at_first_training_counts(counts)
            record.num_exchanges += 1
            record.tokens = max(record.tokens, counts.max_tokens)
        return self.step_choice or self._report_pick(counts.max_tokens)

    def enter_step(self, optimizer: Any) -> None:
        """Stop the clock, and begin the next step if this optimizer is the first of its step."""
        self._clock.stop()
        if not self.by_counts and self._ends_step(optimizer):
            self._end_record()
            self.step += 1
            self._begin_step()

    def _begin_step(self) -> None:
        """Everything that is done as a step begins."""
        if self.window is not None:
            self._report_result()
            if self.step >= self._second_due_at and not self.is_tuning and not self._others_tune:
                self._open_window(self._tokens)
            self._set_step_choice()

    def _at_first_training_counts(self, counts: ExchangeCounts) -> None:
        """Everything that is done at a step's first training counts."""
        self._receive_times(counts)
        self._read_own_time()
        if self.window is None and not self._others_tune:
            self._open_window(counts.max_tokens)
            self._set_step_choice()

    def _ends_step(self, optimizer: Any) -> bool:
        """Count the optimizer's step; whether it ends the current one.

        Of several optimizers, such as an actor's and a critic's, the first ends the step, and the
        others, which follow, have ended the same. So an optimizer that is new also counts as having
        ended all but the last: if it is a critic's, its first step must not end another one. If it
        replaces an optimizer, as the wrapper of a second call of `train` does, its first step ends
        none either, and the iteration before it becomes a part of the next.
        """
        others_ended = max(self.step - 1, 0)
        ended = self._steps_ended[optimizer] = self._steps_ended.get(optimizer, others_ended) + 1
        return ended > self.step

    def _end_record(self) -> None:
        """Complete the record of the current step; it is a trial if its step is in the window."""
        record = self._records[self.step]
        record.segments = self._clock.take()
        if record.workload is not None:
            self._tokens = record.tokens
            if self.window is not None:
                self.window.add_trial(self.step, record.workload)
        self._records.pop(self.step - TIME_LAG, None)

    def _receive_times(self, counts: ExchangeCounts) -> None:
        """Add the longest time of any rank in step - TIME_LAG; lost if a rank has none."""
        self._busiest = counts.busiest_over_mean or self._busiest
        ticks = counts.heads & MOST_TICKS
        if self.window is not None and ticks.all():
            step, us = self.step - TIME_LAG, int(ticks.max()) * TICK_US
            if line := self.window.add_time(step, us, self._records[step].workload):
                self._report(line)

    def _read_own_time(self) -> None:
        """Read this rank's time of the last step, which is sent in the next one.

        The device has finished that step, since the host has waited for later counts.
        """
        record = self._records[self.step - 1]
        if record.segments:
            record.ticks = min(round((us_of(record.segments) or 0) / TICK_US), MOST_TICKS)

    @property
    def _others_tune(self) -> bool:
        """Whether other layers of this exchange have an open window.

        They must have run in this step or the one before, since the layers of a dropped model may
        still exist on some ranks.
        """
        return any(
            other.is_tuning
            and any(other._records[other.step - ago].num_exchanges for ago in (0, 1))
            for other in shared_choosers()
            if other.group is self.group and other is not self
        )

    def _open_window(self, tokens: int) -> None:
        """Open a window in this step, with the candidates for `tokens` on a rank."""
        candidates, num_steps = dict[Choice, float](), self.num_steps
        if num_steps:
            candidates = self.planner.candidates(tokens, num_steps // ROUNDS)
            if len(candidates) < 2:
                num_steps = 0
                self._report(f"{self._where}: no tuning, plain alltoall is the only candidate")
        is_first, warm = self.window is None, set() if self.window is None else self.window.warm
        self._second_due_at = self.step + STEPS_TO_SECOND if is_first and self.num_steps else inf
        self.window = TuningWindow(
            candidates=candidates, first=self.step, num_steps=num_steps, warm=warm
        )
        self._tokens = tokens
        if num_steps:
            pick, why = self.planner.pick(tokens)
            self._report(
                f"{self._where}: tuning window of {counted(len(candidates), 'candidate')} in steps "
                f"{self.step} to {self.window.end - 1}; the planner's pick is {pick.name}: {why}"
            )

    def _set_step_choice(self) -> None:
        """Set the choice of this step: a candidate, or the best of the window; and its head."""
        assert self.window is not None, "opened"
        candidate, tokens = self.window.candidate_of(self.step), half_octave(self._tokens)
        if candidate is not None:
            self._announce(candidate)
        # Experts are not split once measured iterations have shown that splitting loses.
        splits_experts = self.window.best is None or self.window.best.splits_experts
        choice = (
            candidate or self.window.winner(tokens) or self._report_pick(tokens, splits_experts)
        )
        self.step_choice = choice
        # Outside of a window, ranks may differ in their steps.
        number = {"step": self.step if self.is_tuning else None}
        agreed = number | self.agreed_config | {"choice": choice.name}
        self._set_head(agreed, self._records[self.step - TIME_LAG].ticks)

    def _report_result(self) -> None:
        """Report the result of the window, once all ranks know the times of its last trial.

        Each exchange has its own result, which its first rank reports.
        """
        assert self.window is not None, "opened"
        is_known = self.window.num_steps > 0 and self.step == self.window.end + TIME_LAG
        if is_known and dist.get_rank() == self._ranks[0]:
            ranks, busiest = ", ".join(map(str, self._ranks)), ""
            if self._busiest is not None:
                busiest = f"; the busiest rank receives {self._busiest:.2f} times the mean"
            print_once(f"auto, exchange of ranks {ranks}: {self.window.result}{busiest}")

    def _announce(self, candidate: Choice) -> None:
        """Report a candidate before its first trial, which may run out of memory."""
        if candidate not in self._announced:
            self._announced.add(candidate)
            self._report(f"auto: step {self.step} is the first with {candidate.name}")

    def _report_pick(self, tokens: int, splits_experts: bool = True) -> Choice:
        """Return the planner's pick for at most `tokens` on a rank, and report it."""
        pick, why = self.planner.pick(tokens, splits_experts)
        self._report(f"{self._where}: {pick.name}, {why}")
        return pick

    def _report(self, line: str) -> None:
        if self._reports:
            print_once(line)

    @cached_property
    def _where(self) -> str:
        assert self.planner.shape is not None, "priced"
        layout = self.planner.shape.layout
        nodes = counted(layout.num_nodes, "node")
        return f"auto, EP {layout.ep} x ETP {layout.etp} over {nodes}"


# One for all layers of a shape on an exchange; freed with the last of them.
_shared: WeakValueDictionary[tuple[Any, ...], AutoChooser] = WeakValueDictionary()


def shared_choosers() -> list[AutoChooser]:
    """Every `AutoChooser` that layers of this process share."""
    return list(_shared.values())


def shared_chooser(group: dist.ProcessGroup, agreed_config: dict[str, Any]) -> AutoChooser | None:
    """The `AutoChooser` of the layers with this configuration on a group, if there is one."""
    if any(each.step or each.window for each in shared_choosers() if each.group is group):
        # It may belong to a dropped model in a reference cycle that has not been collected.
        gc.collect()
    return _shared.get((group, hash_of(agreed_config)))


def share_chooser(chooser: AutoChooser) -> AutoChooser:
    """Let layers share an `AutoChooser`, in place of an earlier one."""
    call_at_steps(_enter_step)
    _shared[chooser.group, hash_of(chooser.agreed_config)] = chooser
    return chooser


def _enter_step(optimizer: Any) -> None:
    for chooser in shared_choosers():
        # Layers from before a restart within this process may still exist with closed groups.
        if is_usable(chooser.group):
            chooser.enter_step(optimizer)
