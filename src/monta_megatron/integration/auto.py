"""Choosers: the choice of each optimizer step, the same on all ranks of an expert group.

`planner.tuning` defines the words: choice, pick, candidate, trial, round, tuning window, winner.
Step n starts when the optimizer step that ends step n - 1 is entered. Its iteration is timed from
its first training counts (of a micro-batch whose layer is in training mode on all ranks) to the
entry of the optimizer step that ends it; evaluation, checkpoints and data loading lie outside, and
so do passes that no backward pass follows, with the pauses behind them (`exchange.monitor`).

Every count exchange carries a tag of 63 bits from each rank:

    32 bits    hash of choice and options; within a tuning window also of the step number
    1 bit      whether the rank's layer is in training mode
    30 bits    the rank's time of an iteration in units of 10 us; 0: none

The tags of step n carry the times of step n - 2. Apart from the tags, ranks exchange something at
construction only. So an expert group that has no micro-batch, or only evaluates, blocks no other.
Where one rank evaluates while others of its group train, all run one choice, and the step is not
timed.
"""

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from monta_megatron.common.ranks import print_once
from monta_megatron.common.torch_private import is_open
from monta_megatron.core import Choice
from monta_megatron.exchange.agreement import gather_objects
from monta_megatron.exchange.count_messages import MicroBatchCounts, busiest_over_mean
from monta_megatron.exchange.monitor import IterationClock, Segment, TimedExchange, us_of
from monta_megatron.integration.optimizer_steps import call_at_steps
from monta_megatron.integration.planning import hash_of
from monta_megatron.integration.ranks import check_same_config
from monta_megatron.integration.results import WindowResult, write_result

if TYPE_CHECKING:
    from monta_megatron.planner.tuning import Tuner, TuningWindow

TIME_BITS = 30
TICK_US, MAX_TICKS = 10, (1 << TIME_BITS) - 1
IN_TRAINING = 1 << TIME_BITS
HASH_SHIFT = TIME_BITS + 1


class Chooser:
    """Holds one given choice and checks that all ranks run it; `AutoChooser` changes it by step.

    Args:
        choice: the given one; None if there is none.
        agreed_config: values that all ranks of the group agreed on at construction.
        group: the expert group; see `integration.ranks`.

    Attributes:
        step_choice: the choice of all micro-batches of this step. None: each micro-batch has the
            planner's pick for its own counts, so its choice is unknown until they are here.
    """

    def __init__(
        self, choice: Choice | None, agreed_config: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self.step_choice, self.agreed_config, self.group = choice, agreed_config, group
        self._set_tag(agreed_config)

    def tag(self, is_training: bool) -> int:
        """The 63 bits that this rank sends with the counts of a layer in that mode."""
        return self._tag | (IN_TRAINING if is_training else 0)

    def choose(self, counts: MicroBatchCounts, device: torch.device) -> Choice:
        """Compare the tags of all ranks, and return the choice of the micro-batch of the counts.

        Raises:
            UserError: the ranks differ; the message names the first that does, and the field.
        """
        self._check_tags(counts)
        assert self.step_choice is not None, "given"
        return self.step_choice

    def time_exchange(self, layer: object, counts: MicroBatchCounts) -> TimedExchange | None:
        """Time the exchange of the counts that were just chosen for; None if it is not timed."""
        return None

    def _check_tags(self, counts: MicroBatchCounts) -> None:
        if len(set((counts.tags >> HASH_SHIFT).tolist())) > 1:
            # All ranks see it. They agreed at construction, so the step or the choice differs.
            by_rank = gather_objects(self._hashed, self.group, "comparison of choices")
            check_same_config(by_rank, dist.get_process_group_ranks(self.group))

    def _set_tag(self, agreed: dict[str, Any], ticks: int = 0) -> None:
        """Set the tag: a hash of the values that all ranks have to share, and this rank's time."""
        self._hashed = agreed
        self._tag = hash_of(agreed) << HASH_SHIFT | ticks


class AutoChooser(Chooser):
    """Choices for all layers of one shape in an expert group, one per optimizer step.

    `planner.tuning.Tuner` chooses, by the same rules on all ranks, and has an example. This class
    numbers the steps, times them and tells all ranks:

        as step n begins, the entry of an optimizer's step     `enter_step`
            the tuner chooses for step n
            the tag of step n: its choice, and this rank's time of step n - 2
        at the first training counts of step n                 `choose`
            the clock starts
            all ranks' times of step n - 2 arrive with the tags

    As step n begins, the device has finished step n - 2, since the host has waited for the counts
    of step n - 1. So reading the time waits for nothing.

    Args:
        tuner: of this shape.
        permuted_only: see `planner_for`; every micro-batch has the planner's pick for its counts.
        agreed_config, group: see `Chooser`.
    """

    def __init__(
        self,
        tuner: "Tuner",
        permuted_only: bool,
        agreed_config: dict[str, Any],
        group: dist.ProcessGroup,
    ) -> None:
        self.tuner, self.permuted_only = tuner, permuted_only
        # A group may be closed before its layers are gone.
        self._ranks = dist.get_process_group_ranks(group)
        self._steps_ended: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._clock = IterationClock()
        # Of the steps since the tuner's `timed_step`; a device may not have finished the last.
        self._segments: dict[int, list[Segment]] = {}
        # Rows of the busiest rank over the mean, for the report.
        self._busiest: float | None = None
        self._num_results = 0
        # Whether layers have run in training mode in this step, and in the one before.
        self._ran, self._ran_before = False, False
        # Whether ranks were in different modes in this step.
        self._is_mixed = False
        super().__init__(None, agreed_config, group)

    def enter_step(self, optimizer: Any) -> None:
        """Stop the clock, and begin the next step if this optimizer is the first of its step."""
        self._clock.stop()
        if self.permuted_only or not self._ends_step(optimizer):
            return
        segments = self._segments[self.tuner.step] = self._clock.take()
        self._segments.pop(self.tuner.timed_step, None)
        window = self.tuner.window
        tokens = [] if self._is_mixed else trained_tokens(segments)
        self.tuner.next_step(tokens, self._others_tune)
        self._ran, self._ran_before, self._is_mixed = False, self._ran, False
        self._keep_while_tuning()
        if window is not None and self.tuner.result is not None:
            self._report_result(window, self.tuner.result)
        self._set_step_tag()

    def choose(self, counts: MicroBatchCounts, device: torch.device) -> Choice:
        """See `Chooser`."""
        self._check_tags(counts)
        in_training = counts.tags & IN_TRAINING != 0
        if in_training.any() and not in_training.all():
            self._is_mixed = True
        if in_training.all() and not self.permuted_only:
            self._clock.start(device)
            if not self._ran:
                self._ran = True
                self._receive_times(counts)
                if self.tuner.window is None and not self._others_tune:
                    self.tuner.open_window(counts.max_tokens)
                    self._set_step_tag()
            self._keep_while_tuning()
        return self.step_choice or self.tuner.pick(counts.max_tokens)

    def time_exchange(self, layer: object, counts: MicroBatchCounts) -> TimedExchange | None:
        """See `Chooser`."""
        return self._clock.add(layer, counts.max_tokens)

    def _ends_step(self, optimizer: Any) -> bool:
        """Count the optimizer's step; whether it ends the current one.

        Of an actor's and a critic's optimizer, the first ends the step, and the other follows. So,
        but in step 0, a new optimizer's first step ends none: it may be a critic's. If it replaces
        an optimizer, as the wrapper of a second call of `train` does, its first iteration is
        counted with the next.

            optimizer's step:   actor 1   critic 1   actor 2   critic 2   new 1   new 2
            ends step:          0         -          1         -          -       2
        """
        others_ended = max(self.tuner.step - 1, 0)
        ended = self._steps_ended[optimizer] = self._steps_ended.get(optimizer, others_ended) + 1
        return ended > self.tuner.step

    def _receive_times(self, counts: MicroBatchCounts) -> None:
        """Add the longest time of any rank in step n - 2; lost if a rank has none."""
        self._busiest = busiest_over_mean(counts.received_rows) or self._busiest
        ticks = counts.tags & MAX_TICKS
        if ticks.all():
            self.tuner.add_time(int(ticks.max()) * TICK_US)

    def _set_step_tag(self) -> None:
        """Set the choice of this step, and its tag."""
        self.step_choice = self.tuner.choice
        if self.step_choice is not None:
            us = us_of(self._segments.get(self.tuner.timed_step, [])) or 0
            # Outside of a window, ranks may differ in their steps.
            number = {"step": self.tuner.step if self.tuner.is_open else None}
            agreed = number | self.agreed_config | {"choice": self.step_choice.name}
            self._set_tag(agreed, min(round(us / TICK_US), MAX_TICKS))

    def _report_result(self, window: "TuningWindow", result: str) -> None:
        """Report a window's result; each expert group has its own, which its first rank reports."""
        self._num_results += 1
        if dist.get_rank() != self._ranks[0]:
            return
        print_once(result_line(self._ranks, result, self._busiest))
        problem = write_result(
            WindowResult(
                ranks=tuple(self._ranks),
                layers=hash_of({"ranks": self._ranks} | self.agreed_config),
                window=self._num_results,
                step=window.first,
                flags=None if window.best is None else window.best.flags,
            )
        )
        if problem is not None:
            print_once(problem)

    @property
    def tunes(self) -> bool:
        """Whether a window is open, and layers have run in this step or the one before."""
        return self.tuner.is_open and (self._ran or self._ran_before)

    def _keep_while_tuning(self) -> None:
        if self.tunes:
            _tuning.add(self)
        else:
            _tuning.discard(self)

    @property
    def _others_tune(self) -> bool:
        """Whether other layers of this expert group have an open window; see `tunes`."""
        others = (each for each in _shared.values() if each.group is self.group)
        return any(each.tunes for each in others if each is not self)


def trained_tokens(segments: Sequence[Segment]) -> list[int]:
    """Tokens of the exchanges of a step that a backward pass followed."""
    exchanges = [exchange for segment in segments for exchange in segment.exchanges]
    return [exchange.tokens for exchange in exchanges if exchange.is_trained]


def result_line(ranks: Sequence[int], result: str, busiest: float | None) -> str:
    """The line of a window's result.

    Args:
        ranks: of the expert group.
        result: of `planner.tuning.TuningWindow`.
        busiest: received rows of the busiest rank over the mean; None if unknown.
    """
    load = "" if busiest is None else f"; the busiest rank receives {busiest:.2f} times the mean"
    return f"auto, ranks {', '.join(map(str, ranks))}: {result}{load}"


# By number, in the order of construction. One is freed with the last of its layers, at another time
# on each rank, so no choice may follow from whether it is still there.
_shared: WeakValueDictionary[int, AutoChooser] = WeakValueDictionary()
_numbers = count()
# Kept on every rank for as long as they hold up the windows of others, also without layers.
_tuning: set[AutoChooser] = set()


def find_chooser(group: dist.ProcessGroup, agreed_config: dict[str, Any]) -> AutoChooser | None:
    """The latest `AutoChooser` of the layers with this configuration on a group.

    One that has ended a step or opened a window belongs to a model before, and is not returned.
    """
    for chooser in reversed(list(_shared.values())):
        is_new = chooser.tuner.step == 0 and chooser.tuner.window is None
        if is_new and (chooser.group, chooser.agreed_config) == (group, agreed_config):
            return chooser
    return None


def register_chooser(chooser: AutoChooser) -> AutoChooser:
    """Let layers share an `AutoChooser`, and optimizers' steps reach it: their calls are hooked."""
    call_at_steps(_enter_step)
    _shared[next(_numbers)] = chooser
    return chooser


def _enter_step(optimizer: Any) -> None:
    for chooser in list(_shared.values()):
        # Layers from before a restart within this process may still exist with closed groups.
        if is_open(chooser.group):
            chooser.enter_step(optimizer)
        else:
            _tuning.discard(chooser)
