"""One rank of `monta timeline --record`, as if on its own host; clocks are 1,000 s apart."""

import os
import sys

from monta_megatron.cli import main
from monta_megatron.exchange import step_times
from monta_megatron.tools.timeline import clock

rank, now_us = int(os.environ["RANK"]), clock.now_us
clock.now_us = step_times.now_us = lambda: now_us() + 1000e6 * rank
clock._host = lambda: f"host {rank}"
sys.exit(main(["timeline", *sys.argv[1:]]))
