"""The quickstart's training, in which every rank notes what each micro-batch ran.

    train_tuning.py [--frozen experts|dense] [--two-shapes] --record RECORD [Megatron's arguments]

Frozen are the experts of every other rank, so ranks of an exchange have other optimizers; or all
parameters but experts, which leaves a stub of an optimizer. With `--two-shapes` layers have
tuning windows apart, as layers of two shapes do.
"""

import json
import sys
from argparse import ArgumentParser
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer

from monta_megatron.integration import dispatcher, layer_setup
from monta_megatron.integration.auto import AutoChooser

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "quickstart"))
import train

# Of every micro-batch, recomputes and evaluations too: shape, step, choice, whether it trains.
noted: list[tuple[int, int, str, bool]] = []
choosers: list[AutoChooser] = []
# Whether each step changed parameters.
updated: list[bool] = []


def note_choices() -> None:
    bound = dispatcher.MontaTokenDispatcher._bound

    def noting(self: Any, batch: Any) -> Any:
        batch = bound(self, batch)
        if isinstance(self.chooser, AutoChooser):
            if self.chooser not in choosers:
                choosers.append(self.chooser)
            shape, is_training = choosers.index(self.chooser), self.moe_layer().training
            noted.append((shape, self.chooser.tuner.step, batch.choice.name, is_training))
        return batch

    dispatcher.MontaTokenDispatcher._bound = noting  # type: ignore[method-assign]
    step = ChainedOptimizer.step

    def noting_step(self: Any) -> Any:
        result = step(self)
        updated.append(bool(result[0]))
        return result

    ChainedOptimizer.step = noting_step


def choose_by_layer() -> None:
    """Let every other layer choose as if it had another shape."""
    agreed_config, numbers = layer_setup.agreed_config, count()

    def of_its_own(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return agreed_config(*args, **kwargs) | {"shape": next(numbers) % 2}

    layer_setup.agreed_config = of_its_own


def freeze(model: list[torch.nn.Module], kind: str | None) -> list[torch.nn.Module]:
    """Freeze parameters before Megatron wraps the model."""
    for name, parameter in (pair for chunk in model for pair in chunk.named_parameters()):
        is_expert = ".experts." in name
        if is_expert and kind == "experts":
            parameter.requires_grad = dist.get_rank() % 2 == 1
        elif not is_expert and kind == "dense":
            parameter.requires_grad = False
    return model


def main() -> None:
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--frozen", choices=["experts", "dense"])
    parser.add_argument("--two-shapes", action="store_true")
    mine, sys.argv[1:] = parser.parse_known_args()
    note_choices()
    if mine.two_shapes:
        choose_by_layer()
    config_from_args = train.gpt_config_from_args

    def with_frozen(args: Any) -> Any:
        config = config_from_args(args)
        config.pre_wrap_hooks.append(lambda model: freeze(model, mine.frozen))
        return config

    train.gpt_config_from_args = with_frozen
    record = Path(sys.argv[sys.argv.index("--record") + 1])
    train.main()
    document: dict[str, Any] = {"updated": updated, "noted": noted, "windows": []}
    for chooser in choosers:
        window = chooser.tuner.window
        assert window is not None, "trained"
        document["exchange"] = dist.get_process_group_ranks(chooser.group)
        document["windows"].append(
            {
                "steps": [window.first, window.end],
                "candidates": [choice.name for choice in window.candidates],
                "best": window.best and window.best.name,
                "trials": [
                    [each.workload.num_exchanges, each.us] for each in window.trials.values()
                ],
            }
        )
    record.with_name(f"tuning_{dist.get_rank()}.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main()
