"""The quickstart's training, which waits for a signal on its way: a job's first start alone does.

After iteration PAUSES_AFTER every rank waits until it has the signal on which Megatron saves and
ends, however fast the machine and however slow the signal. The second tuning window opens
STEPS_TO_SECOND steps after the first.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "quickstart"))
import train
from megatron.training import training

from monta_megatron.planner import tuning

decide_exit = training.checkpoint_and_decide_exit


def wait_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
    iteration = args[3] if len(args) > 3 else kwargs["iteration"]
    if iteration == int(os.environ["PAUSES_AFTER"]):
        while not training.get_signal_handler()._signal_received:
            time.sleep(0.05)
    return decide_exit(*args, **kwargs)


tuning.STEPS_TO_SECOND = int(os.environ["STEPS_TO_SECOND"])
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    training.checkpoint_and_decide_exit = wait_and_decide_exit
train.main()
