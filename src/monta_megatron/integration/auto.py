"""The choice of each optimizer step, alike on all ranks of an exchange; see `planner.choose`.

What the ranks know of each other travels in their exchanges of counts, 63 bits from each:

    32 bits    hash of choice and options, and inside a window of the step number
    31 bits    the time of an iteration in units of 10 us; 0: none

In step n that is the time of step n - 2; `AutoChoice` has the timeline. Evaluation, checkpoints and
data loading lie outside.

Only at construction do ranks exchange anything else, so an exchange without a micro-batch, or one
that evaluates alone, holds nobody up.
"""

import gc
from collections import deque
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
from monta_megatron.planner.choose import LATE, TRIALS, Planner, Window, half_octave

TIME_BITS = 31
TICK_US = 10
# From the first window to the second: early routing is untrained.
STEPS_TO_SECOND = 1000


class Chooser:
    """Keeps a given choice, and checks that all ranks do; `AutoChoice` changes it by step.

    Args:
        choice: the given one; None where it follows from the counts of a micro-batch.
        agreed_config: values that all ranks of the exchange agreed on at construction.
        group: the ranks of the exchange.

    Attributes:
        choice: of this step; None as above.
        head: 63 bits that this rank sends with its counts.
    """

    def __init__(
        self, choice: Choice | None, agreed_config: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self.choice, self.agreed_config, self.group = choice, agreed_config, group
        self._set_head(agreed_config)

    def choose(self, counts: ExchangeCounts, is_training: bool, device: torch.device) -> Choice:
        """Compare the heads of all ranks; returns the choice of a micro-batch, by its counts.

        Args:
            counts: of an exchange, which all ranks of the group have.
            is_training: whether the layer is in training mode.
            device: where the exchange runs.

        Raises:
            ValueError: the ranks differ; names the first that does, and in what.
        """
        if len(set((counts.heads >> TIME_BITS).tolist())) > 1:
            # They agreed at construction: one has other options since, or another step.
            agree(self._hashed, self.group)
        return self._choose(counts, is_training, device)

    def _set_head(self, agreed: dict[str, Any], ticks: int = 0) -> None:
        """Set the head, of values on which all ranks have to agree and the time to report."""
        self._hashed = agreed
        self.head = (hash_of(agreed) & 0xFFFFFFFF) << TIME_BITS | ticks

    def _choose(self, counts: ExchangeCounts, is_training: bool, device: torch.device) -> Choice:
        assert self.choice is not None, "given"
        return self.choice


class AutoChoice(Chooser):
    """Choices for all layers of one shape on an exchange, from one optimizer step to the next.

    Step n:

        first training counts    start the clock; read all ranks' times of step n - 2 from the
                                 heads; read this rank's time of step n - 1 off the device
        optimizer's step entry   stop the clock; choose for step n + 1, whose head brings this
                                 rank's time of step n - 1

    Args:
        planner: proposes.
        num_steps: length of a window; 0 where candidates are not compared.
        by_counts: each micro-batch takes the planner's pick for its own counts.
        agreed_config, group: see `Chooser`.
        reports: whether this rank reports for its pipeline stage.

    Attributes:
        step: the largest number of steps of an optimizer since construction; an optimizer that is
            made later continues the count.
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
        self.step = 0
        self.window: Window | None = None
        # From this step on another window is due.
        self._next_window = inf
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # Training exchanges in this step, and the most tokens of a rank in any of them; before: of
        # the last step that had any.
        self._num_exchanges = self._tokens = self._tokens_before = 0
        # Number and size of the exchanges in each of the last two steps; None without any.
        self._kinds: deque[tuple[int, int] | None] = deque([None] * LATE, maxlen=LATE)
        # Runs from a training exchange to the next entry of an optimizer's step.
        self._clock = IterationClock()
        # The last step and its segments, which the device may not have finished.
        self._ended: tuple[int, list[Segment]] | None = None
        # A step and this rank's time of it, which the head of two steps later reports.
        self._ticks = -1, 0
        self._busiest: float | None = None
        self._announced: set[Choice] = set()
        # A group may be closed before its layers are gone.
        self._ranks = dist.get_process_group_ranks(group)
        self._is_first_rank = dist.get_group_rank(group, dist.get_rank()) == 0
        super().__init__(None, agreed_config, group)

    @property
    def is_measuring(self) -> bool:
        """Whether a window is open."""
        return self.window is not None and self.window.is_open(self.step)

    def enter_step(self, optimizer: Any) -> None:
        """Called at the entry of an optimizer's step; the first one of an iteration ends it."""
        self._clock.stop()
        # A later one, such as the wrapper of a second call of `train`, continues the count.
        number = self._steps.get(optimizer, max(self.step - 1, 0)) + 1
        self._steps[optimizer] = number
        if number <= self.step or self.by_counts:
            return
        segments, kind = self._clock.take(), None
        if self._num_exchanges:
            kind = self._num_exchanges, half_octave(self._tokens)
            self._ended, self._tokens_before = (self.step, segments), self._tokens
            if self.window is not None:
                self.window.add(self.step, kind)
        self._kinds.append(kind)
        self._num_exchanges = self._tokens = 0
        self.step = number
        self._choose_for_step()

    def _choose(self, counts: ExchangeCounts, is_training: bool, device: torch.device) -> Choice:
        if is_training and not self.by_counts:
            self._clock.start(device)
            if self._num_exchanges == 0:
                self._begin(counts)
            self._num_exchanges += 1
            self._tokens = max(self._tokens, counts.max_tokens)
        return self.choice or self._pick(counts.max_tokens)

    def _begin(self, counts: ExchangeCounts) -> None:
        """Read the times in the heads of a step's first training exchange."""
        self._busiest = counts.busiest_over_mean or self._busiest
        times = counts.heads & (1 << TIME_BITS) - 1
        if self.window is not None and times.all():
            us, kind = int(times.max()) * TICK_US, self._kinds[0]
            if line := self.window.add_time(self.step - LATE, us, kind):
                self._report(line)
        # The device has done that step: the host has waited for counts after it.
        if self._ended is not None:
            step, segments = self._ended
            ticks = round((us_of(segments) or 0) / TICK_US)
            self._ticks, self._ended = (step, min(ticks, (1 << TIME_BITS) - 1)), None
        if self.window is None and not self._others_measure:
            self._open(counts.max_tokens)
            self._choose_for_step()

    @property
    def _others_measure(self) -> bool:
        """Whether other layers of this exchange have a window that is open.

        Only those that ran in this step or the one before count: layers of a dropped model may
        still exist on some ranks.
        """
        return any(
            other.is_measuring and (other._num_exchanges or other._kinds[-1])
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
        self._next_window = self.step + STEPS_TO_SECOND if is_first and self.num_steps else inf
        self._tokens_before = tokens
        if num_steps:
            pick, why = self.planner.pick(tokens)
            self._report(
                f"{self._where}: {counted(len(candidates), 'candidate')} take turns in steps "
                f"{self.step} to {self.window.end - 1}; the planner's pick is {pick.name}: {why}"
            )

    def _choose_for_step(self) -> None:
        """Choose for the step that begins, or in which a window has opened."""
        if self.window is None:
            return
        # Exchanges have results of their own, so each reports, from its first rank.
        has_result = self.window.num_steps > 0 and self.step == self.window.end + LATE
        if has_result and self._is_first_rank:
            ranks, busiest = ", ".join(map(str, self._ranks)), ""
            if self._busiest is not None:
                busiest = f"; the busiest rank receives {self._busiest:.2f} times the mean"
            print_once(f"auto, exchange of ranks {ranks}: {self.window.result}{busiest}")
        if self.step >= self._next_window and not self.is_measuring and not self._others_measure:
            self._open(self._tokens_before)
        window, tokens = self.window, half_octave(self._tokens_before)
        self.choice = window.candidate(self.step)
        if self.choice is None:
            # The experts are not split where measured iterations have shown that this loses.
            splits_experts = window.best is None or window.best.splits_experts
            self.choice = window.winner(tokens) or self._pick(tokens, splits_experts)
        elif self.choice not in self._announced:
            self._announced.add(self.choice)
            self._report(f"auto: step {self.step} is the first with {self.choice.name}")
        step, ticks = self._ticks
        # Outside of a window a framework may step as it likes.
        number = {"step": self.step if self.is_measuring else None}
        agreed = number | self.agreed_config | {"choice": self.choice.name}
        self._set_head(agreed, ticks if step == self.step - LATE else 0)

    def _pick(self, tokens: int, splits_experts: bool = True) -> Choice:
        """The planner's pick for at most `tokens` on a rank; reports it."""
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


# One for all layers of a shape on an exchange; it goes with the last of them.
_shared: WeakValueDictionary[tuple[Any, ...], AutoChoice] = WeakValueDictionary()


def choosers() -> list[AutoChoice]:
    """Every `AutoChoice` that layers of this process share."""
    return list(_shared.values())


def choice_of(group: dist.ProcessGroup, agreed_config: dict[str, Any]) -> AutoChoice | None:
    """The choice that layers of this process share, if there is one."""
    if any(each.step or each.window for each in choosers() if each.group is group):
        # It may belong to a dropped model in a reference cycle that is not collected yet.
        gc.collect()
    return _shared.get((group, hash_of(agreed_config)))


def share(chooser: AutoChoice) -> AutoChoice:
    """Let layers share a choice; replaces an earlier one."""
    call_at_steps(_enter_step)
    _shared[chooser.group, hash_of(chooser.agreed_config)] = chooser
    return chooser


def _enter_step(optimizer: Any) -> None:
    for chooser in choosers():
        # Layers from before a restart in this process may not be gone yet, but their groups are.
        if is_usable(chooser.group):
            chooser.enter_step(optimizer)
