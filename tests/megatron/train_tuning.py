"""The quickstart's training; its ranks check what every micro-batch ran while candidates are tried.

    train_tuning.py [--frozen experts|dense] [--skips] [--workloads N]
        --record RECORD [Megatron's arguments]

Frozen are the experts of every other rank, so ranks of an exchange have other optimizers; or all
parameters but experts, which leaves a stub of an optimizer. `--skips`: the loss scaler skips steps.
`--workloads`: how many numbers of exchanges the steps of the window have.
"""

import sys
from argparse import ArgumentParser
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.training import get_args

from monta_megatron.core import Choice
from monta_megatron.exchange.agreement import gather_objects
from monta_megatron.integration import dispatcher
from monta_megatron.integration.auto import AutoChooser
from monta_megatron.planner.tuning import ROUNDS, TIME_LAG

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "quickstart"))
import train

# Step, choice and whether it trains, of every micro-batch, recomputes and evaluations too.
micro_batches: list[tuple[int, Choice, bool]] = []
choosers: set[AutoChooser] = set()
# Whether each step changed parameters.
updated: list[bool] = []


def note_choices() -> None:
    bound, step = dispatcher.MontaTokenDispatcher._bound, ChainedOptimizer.step

    def noting(self: Any, batch: Any) -> Any:
        batch = bound(self, batch)
        if isinstance(self.chooser, AutoChooser):
            choosers.add(self.chooser)
            noted = self.chooser.tuner.step, self.choice, self.moe_layer().training
            micro_batches.append(noted)
        return batch

    def noting_step(self: Any) -> Any:
        result = step(self)
        updated.append(bool(result[0]))
        return result

    dispatcher.MontaTokenDispatcher._bound = noting  # type: ignore[method-assign]
    ChainedOptimizer.step = noting_step


def freeze(model: list[torch.nn.Module], kind: str | None) -> list[torch.nn.Module]:
    """Freeze parameters before Megatron wraps the model."""
    for name, parameter in (pair for chunk in model for pair in chunk.named_parameters()):
        is_expert = ".experts." in name
        if is_expert and kind == "experts":
            parameter.requires_grad = dist.get_rank() % 2 == 1
        elif not is_expert and kind == "dense":
            parameter.requires_grad = False
    return model


def check(num_steps: int, skips: bool, workloads: int) -> None:
    """Check that ranks ran alike, each candidate had its trials, and the best stays."""
    assert updated[-1] and (False in updated) is skips
    (chooser,) = choosers
    window = chooser.tuner.window
    assert window is not None and (window.first, window.num_steps) == (0, num_steps)
    for other in gather_objects((micro_batches, window), chooser.group):
        assert other == (micro_batches, window)
    ran: dict[int, set[Choice]] = defaultdict(set)
    for step, choice, _ in micro_batches:
        ran[step].add(choice)
    assert {len(choices) for choices in ran.values()} == {1}
    candidates = list(window.candidates)
    assert len(candidates) == num_steps // ROUNDS and window.best in candidates
    trials = [choice for step in range(num_steps) for choice in ran[step]]
    assert sorted(trials) == sorted(candidates * ROUNDS)
    # Steps of unequal work may need more rounds than the training has.
    assert window.end == num_steps or workloads > 1
    after = {choice for step in ran if step >= window.end + TIME_LAG for choice in ran[step]}
    assert after == {window.best} or (workloads > 1 and len(after) <= 1)
    assert all(window.trials[step].us for step in range(num_steps))
    numbers = {trial.work.num_exchanges for trial in window.trials.values()}
    assert len(numbers) == workloads
    # On all exchanges candidates are in phase; evaluation may be later.
    trained = {
        (step, candidates.index(choice))
        for step, choice, trains in micro_batches
        if trains and step < num_steps
    }
    assert len(set.union(*gather_objects(trained, dist.group.WORLD))) == num_steps


def main() -> None:
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--frozen", choices=["experts", "dense"])
    parser.add_argument("--skips", action="store_true")
    parser.add_argument("--workloads", type=int, default=1)
    mine, sys.argv[1:] = parser.parse_known_args()
    note_choices()
    config_from_args = train.gpt_config_from_args

    def with_frozen(args: Any) -> Any:
        config = config_from_args(args)
        config.pre_wrap_hooks.append(lambda model: freeze(model, mine.frozen))
        return config

    train.gpt_config_from_args = with_frozen
    train.main()
    if "--moe-monta-tune-steps" in sys.argv:
        check(get_args().moe_monta_tune_steps, mine.skips, mine.workloads)
    else:
        assert micro_batches == []


if __name__ == "__main__":
    main()
