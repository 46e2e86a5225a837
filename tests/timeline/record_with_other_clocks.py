"""One rank of `monta bench --trace`, as if on its own host; clocks are 1,000 s apart."""

import os
import sys

from monta_megatron.cli import main
from monta_megatron.tools import record

rank, now_us = int(os.environ["RANK"]), record.now_us
record.now_us = lambda: now_us() + 1000e6 * rank
record._host = lambda: f"host {rank}"
sys.exit(main(["bench", *sys.argv[1:]]))
