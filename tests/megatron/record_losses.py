"""Run a training script unmodified and write down its unrounded losses and gradient norms.

    torchrun ... record_losses.py RECORD SCRIPT [arguments of the script]

Megatron prints losses with 7 digits; this notes what `training_log` is given. RECORD gets one JSON
document per iteration, from the last rank, which has the loss under pipeline parallelism too.
Every rank saves its parameters after the last iteration, beside RECORD (`parameters_of`).
"""

import inspect
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from monta_megatron.common.import_hook import after_import


def record_losses(training: ModuleType, record: Path) -> None:
    """Note the loss of every iteration before Megatron logs it."""
    training_log = training.training_log
    signature = inspect.signature(training_log)

    def recording_log(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        entry = {
            "iteration": given["iteration"],
            "loss": float(given["loss_dict"]["lm loss"]),
            "grad_norm": float(given["grad_norm"]),
        }
        with record.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return training_log(*args, **kwargs)

    training.training_log = recording_log  # type: ignore[attr-defined]


def parameters_of(record: Path, rank: int) -> Path:
    """The file with the parameters of a rank, by name, after the last iteration."""
    return record.with_name(f"{record.stem}_parameters_{rank}.pt")


def save_parameters(training: ModuleType, record: Path, rank: int) -> None:
    """Save the parameters of this rank when training ends."""
    train = training.train
    signature = inspect.signature(train)

    def saving_train(*args: Any, **kwargs: Any) -> Any:
        result = train(*args, **kwargs)
        parameters = {
            f"{number}.{name}": parameter.detach().clone()
            for number, part in enumerate(signature.bind(*args, **kwargs).arguments["model"])
            for name, parameter in part.named_parameters()
        }
        torch.save(parameters, parameters_of(record, rank))
        return result

    training.train = saving_train  # type: ignore[attr-defined]


def main() -> None:
    record, script = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])

    def patch(training: ModuleType) -> None:
        save_parameters(training, record, rank)
        if rank == int(os.environ["WORLD_SIZE"]) - 1:
            record_losses(training, record)

    after_import("megatron.training.training", patch)
    sys.argv = sys.argv[2:]
    # As `python SCRIPT` has it: a checkout's own megatron comes before an installed one.
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
