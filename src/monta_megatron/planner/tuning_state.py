"""The state of a tuning, as a file beside a checkpoint holds it: what it may be."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.common import strict_yaml
from monta_megatron.common.rules import PositiveInt, require
from monta_megatron.planner.tuning import Tuning, TuningStep
from monta_megatron.planner.tuning_candidates import TuningCandidate


@dataclass(frozen=True, kw_only=True)
class TuningState:
    """What `Tuning.state` says, by the names of its fields."""

    num_steps: PositiveInt
    candidates: tuple[TuningCandidate, ...]
    steps: tuple[TuningStep, ...]
    settled_us: tuple[int, ...] | None

    def __post_init__(self) -> None:
        num_candidates = len(self.candidates)
        names = [candidate.name for candidate in self.candidates]
        require(0 < len(set(names)) == num_candidates, "candidates", names, "be different ones")
        require(len(self.steps) <= self.num_steps, "steps", len(self.steps), "be at most num_steps")
        for step in self.steps:
            known = 0 <= step.candidate < num_candidates
            require(known, "steps.candidate", step.candidate, f"be from 0 to {num_candidates - 1}")
            require(0 <= step.us <= step.slowest_us, "steps.us", step.us, "be 0 to slowest_us")
        settled = self.settled_us
        fits = settled is None or (len(settled) == num_candidates and min(settled) >= 0)
        require(fits, "settled_us", settled, f"be {num_candidates} integers >= 0")


def resumed(state: Any, num_steps: int, chains: Collection[str] = tuple(CHAINS)) -> Tuning:
    """A tuning that goes on from a state; steps that were started and not added run again.

    Args:
        state: of `Tuning.state`, maybe from a file.
        num_steps: of the tuning here.
        chains: that can run here.

    Raises:
        ValueError: it does not fit; names the key, the value and the rule.
    """
    read = strict_yaml.build(TuningState, state, "tuning")
    asked = f"be {num_steps}, the steps that are asked for"
    require(read.num_steps == num_steps, "tuning: num_steps", read.num_steps, asked)
    for candidate in read.candidates:
        known = f"be one of {', '.join(chains)}, which can run here"
        require(candidate.chain in chains, "tuning: chain", repr(candidate.chain), known)
    return Tuning(
        candidates=read.candidates,
        num_steps=read.num_steps,
        steps=list(read.steps),
        settled_us=read.settled_us,
    )
