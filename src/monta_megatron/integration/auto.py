"""The choice of each optimizer step, the same on all ranks of an exchange; see `planner.choose`.

Every count exchange carries a tag of 63 bits from each rank:

    32 bits    hash of choice and options; within a window also of the step number
    31 bits    the rank's time of an iteration in units of 10 us; 0: none

The tags of step n carry the times of step n - 2; `AutoChoice` has an example. An iteration lasts
from its first training counts to the optimizer's step; evaluation, checkpoints and data loading lie
outside.

Apart from the tags, ranks communicate about choices at construction only. So an exchange that has
no micro-batch, or only evaluates, blocks no other one.
"""

import gc
from collections import deque
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
from monta_megatron.exchange.count_messages import MicroBatchCounts, busiest_over_mean
from monta_megatron.exchange.iteration_clock import IterationClock, Segment, us_of
from monta_megatron.integration.optimizer_steps import call_at_steps
from monta_megatron.integration.ranks import agree
from monta_megatron.planner.choose import LATE, TRIALS, Planner, Window, half_octave

TIME_BITS = 31
TICK_US, MOST_TICKS = 10, (1 << TIME_BITS) - 1
# From the first window to the second, because early routing is untrained.
STEPS_TO_SECOND = 1000


class Chooser:
    """Holds one given choice and checks that all ranks run it; `AutoChoice` changes it by step.

    Args:
        choice: the given one; None if it depends on the counts of the micro-batch.
        agreed_config: values that all ranks of the exchange agreed on at construction.
        group: the ranks of the exchange.

    Attributes:
        choice: of this step; None as above.
        tag: 63 bits that this rank sends with its counts.
    """

    def __init__(
        self, choice: Choice | None, agreed_config: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self.choice, self.agreed_config, self.group = choice, agreed_config, group
        self._set_tag(agreed_config)

    def choose(self, counts: MicroBatchCounts, is_training: bool, device: torch.device) -> Choice:
        """Compare the tags of all ranks, and return the choice of the micro-batch of the counts.

        Raises:
            ValueError: the ranks differ; the message names the first that does, and the field.
        """
        if len(set((counts.tags >> TIME_BITS).tolist())) > 1:
            # All ranks see it. They agreed at construction, so the step or the choice differs.
            agree(self._hashed, self.group)
        return self._choose(counts, is_training, device)

    def _set_tag(self, agreed: dict[str, Any], ticks: int = 0) -> None:
        """Set the tag: a hash of the values that all ranks have to share, and this rank's time."""
        self._hashed = agreed
        self.tag = (hash_of(agreed) & 0xFFFFFFFF) << TIME_BITS | ticks

    def _choose(self, counts: MicroBatchCounts, is_training: bool, device: torch.device) -> Choice:
        assert self.choice is not None, "given"
        return self.choice


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
    def kind(self) -> tuple[int, int] | None:
        """Kind of a `planner.choose.Trial`; None without training exchanges."""
        return (self.num_exchanges, half_octave(self.tokens)) if self.num_exchanges else None


class AutoChoice(Chooser):
    """Choices for all layers of one shape on an exchange, one per optimizer step.

    A step's first training counts start the clock, and the entry of the optimizer's step stops it
    and chooses for the next step. With tune_steps 6 there are 2 slots, A (plain alltoall) and B, of
    3 turns each:

        step   runs   at the first training counts
        0      A      the window of steps 0 to 5 opens
        1      B      each rank reads its own time of step 0 from the device
        2      A      the tags carry all ranks' times of step 0: A's first turn, not counted
        3      B      the times of step 1: B's first turn, not counted
        4, 5   A, B   the times of step 2: A is the best so far; of step 3: A or B is
        6, 7   best   the times of steps 4 and 5, the last turns
        8      the winner, which a line names as step 8 begins

    Args:
        planner: proposes candidates.
        num_steps: length of a window; 0 if candidates are not compared.
        by_counts: each micro-batch takes the planner's pick for its own counts.
        agreed_config, group: see `Chooser`.
        reports: whether this rank reports for its pipeline stage.

    Attributes:
        step: largest number of steps that an optimizer has made since construction; an optimizer
            that is made later continues the count.
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
        # Steps: number by optimizer, and the records of steps n - 2, n - 1 and n.
        self.step = 0
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._records = deque((StepRecord() for _ in range(LATE + 1)), maxlen=LATE + 1)
        self._clock = IterationClock()
        # Most tokens of any rank, in the last step that had training exchanges.
        self._tokens = 0
        # Windows: the latest, the step from which the second is due, and for the reports choices
        # that have been announced and the rows of the busiest rank over the mean.
        self.window: Window | None = None
        self._second_at = inf
        self._announced: set[Choice] = set()
        self._busiest: float | None = None
        super().__init__(None, agreed_config, group)

    @property
    def is_measuring(self) -> bool:
        """Whether a window is open."""
        return self.window is not None and self.window.is_open(self.step)

    def enter_step(self, optimizer: Any) -> None:
        """End the step when its first optimizer steps; those that follow only stop the clock."""
        self._clock.stop()
        # A new optimizer, such as the wrapper of a second call of `train`, continues the count.
        number = self._steps.get(optimizer, max(self.step - 1, 0)) + 1
        self._steps[optimizer] = number
        if number <= self.step or self.by_counts:
            return
        ended = self._records[-1]
        ended.segments = self._clock.take()
        if ended.kind is not None:
            self._tokens = ended.tokens
            if self.window is not None:
                self.window.add(self.step, ended.kind)
        self._records.append(StepRecord())
        self.step = number
        self._choose_for_step()

    def _choose(self, counts: MicroBatchCounts, is_training: bool, device: torch.device) -> Choice:
        if is_training and not self.by_counts:
            self._clock.start(device)
            record = self._records[-1]
            if record.num_exchanges == 0:
                self._begin(counts)
            record.num_exchanges += 1
            record.tokens = max(record.tokens, counts.max_tokens)
        return self.choice or self._pick(counts.max_tokens)

    def _begin(self, counts: MicroBatchCounts) -> None:
        """Read the times at a step's first training counts; opens the first window."""
        before_last, last, _ = self._records
        self._busiest = busiest_over_mean(counts.received_rows) or self._busiest
        times = counts.tags & MOST_TICKS
        if self.window is not None and times.all():
            us = int(times.max()) * TICK_US
            if line := self.window.add_time(self.step - LATE, us, before_last.kind):
                self._report(line)
        # The device has finished the last step, since the host has waited for later counts.
        if last.segments:
            last.ticks = min(round((us_of(last.segments) or 0) / TICK_US), MOST_TICKS)
        if self.window is None and not self._others_measure:
            self._open(counts.max_tokens)
            self._choose_for_step()

    @property
    def _others_measure(self) -> bool:
        """Whether other layers of this exchange have an open window.

        They must have run in this step or the one before, since the layers of a dropped model may
        still exist on some ranks.
        """
        return any(
            other.is_measuring and (other._records[-1].kind or other._records[-2].kind)
            for other in choosers()
            if other.group is self.group and other is not self
        )

    def _open(self, tokens: int) -> None:
        """Open a window with the candidates for `tokens` on a rank."""
        candidates, num_steps = dict[Choice, float](), self.num_steps
        if num_steps:
            candidates = self.planner.candidates(tokens, num_steps // TRIALS)
            if len(candidates) < 2:
                num_steps = 0
                self._report(f"{self._where}: no turns, plain alltoall is the only candidate")
        is_first, ran = self.window is None, set() if self.window is None else self.window.ran
        self.window = Window(candidates=candidates, first=self.step, num_steps=num_steps, ran=ran)
        self._second_at = self.step + STEPS_TO_SECOND if is_first and self.num_steps else inf
        self._tokens = tokens
        if num_steps:
            pick, why = self.planner.pick(tokens)
            self._report(
                f"{self._where}: {counted(len(candidates), 'candidate')} take turns in steps "
                f"{self.step} to {self.window.end - 1}; the planner's pick is {pick.name}: {why}"
            )

    def _choose_for_step(self) -> None:
        """Choose at the beginning of a step, or when the first window opens in it."""
        if self.window is None:
            return
        # Each exchange has its own result, which its first rank reports.
        has_result = self.window.num_steps > 0 and self.step == self.window.end + LATE
        if has_result and dist.get_rank() == self._ranks[0]:
            ranks, busiest = ", ".join(map(str, self._ranks)), ""
            if self._busiest is not None:
                busiest = f"; the busiest rank receives {self._busiest:.2f} times the mean"
            print_once(f"auto, exchange of ranks {ranks}: {self.window.result}{busiest}")
        if self.step >= self._second_at and not self.is_measuring and not self._others_measure:
            self._open(self._tokens)
        window, tokens = self.window, half_octave(self._tokens)
        self.choice = window.candidate(self.step)
        if self.choice is None:
            # Experts are not split once measured iterations have shown that splitting loses.
            splits_experts = window.best is None or window.best.splits_experts
            self.choice = window.winner(tokens) or self._pick(tokens, splits_experts)
        elif self.choice not in self._announced:
            self._announced.add(self.choice)
            self._report(f"auto: step {self.step} is the first with {self.choice.name}")
        # Outside of a window, ranks may differ in their steps.
        number = {"step": self.step if self.is_measuring else None}
        agreed = number | self.agreed_config | {"choice": self.choice.name}
        self._set_tag(agreed, self._records[0].ticks)

    def _pick(self, tokens: int, splits_experts: bool = True) -> Choice:
        """Return the planner's pick for at most `tokens` on a rank, and report it."""
        choice, why = self.planner.pick(tokens, splits_experts)
        self._report(f"{self._where}: {choice.name}, {why}")
        return choice

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
_shared: WeakValueDictionary[tuple[Any, ...], AutoChoice] = WeakValueDictionary()


def choosers() -> list[AutoChoice]:
    """Every `AutoChoice` that layers of this process share."""
    return list(_shared.values())


def choice_of(group: dist.ProcessGroup, agreed_config: dict[str, Any]) -> AutoChoice | None:
    """The `AutoChoice` that layers with this configuration share on a group, if there is one."""
    if any(each.step or each.window for each in choosers() if each.group is group):
        # It may belong to a dropped model in a reference cycle that has not been collected.
        gc.collect()
    return _shared.get((group, hash_of(agreed_config)))


def share(chooser: AutoChoice) -> AutoChoice:
    """Let layers share an `AutoChoice`, in place of an earlier one."""
    call_at_steps(_enter_step)
    _shared[chooser.group, hash_of(chooser.agreed_config)] = chooser
    return chooser


def _enter_step(optimizer: Any) -> None:
    for chooser in choosers():
        # Layers from before a restart within this process may still exist with closed groups.
        if is_usable(chooser.group):
            chooser.enter_step(optimizer)
