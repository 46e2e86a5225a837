"""Run a training script unmodified and write down its unrounded losses and gradient norms.

    torchrun ... record_losses.py RECORD SCRIPT [arguments of the script]

Megatron prints losses with 7 digits; this notes what `training_log` is given. RECORD gets one JSON
document per iteration, from the last rank, which has the loss under pipeline parallelism too.
"""

import inspect
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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


def main() -> None:
    record, script = Path(sys.argv[1]), sys.argv[2]
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        after_import("megatron.training.training", lambda module: record_losses(module, record))
    sys.argv = sys.argv[2:]
    # As `python SCRIPT` has it: a checkout's own megatron comes before an installed one.
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
