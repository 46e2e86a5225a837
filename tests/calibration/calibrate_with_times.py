"""`monta calibrate` whose runs are real and take planted times: 100 us, and 1 us for 100 bytes.

The environment may name a curve, "alltoall node_link 2", that takes 100 us whatever its bytes.
"""

import os
import sys
from typing import Any

from monta_megatron.calibration.tasks import Point, Sample
from monta_megatron.calibration.timer import Timer
from monta_megatron.cli import main
from monta_megatron.planner.curves import NAMES

run = Timer._run


def planted(self: Timer, task: Any, *arguments: Any, **named: Any) -> Sample:
    run(self, task, *arguments, **named)
    if not isinstance(task, Point):
        return Sample(1000.0, 100.0)
    name = f"{task.operation} {NAMES[task.resource]} {task.group_size}"
    is_flat = name == os.environ.get("FLAT_CURVE")
    return Sample(100.0 + (0 if is_flat else task.num_bytes / 100), 50.0)


Timer._run = planted  # type: ignore[method-assign]
sys.exit(main(["calibrate", *sys.argv[1:]]))
