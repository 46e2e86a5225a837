"""One rank: `monta bench --trace` under torch's profiler; the names of our ranges in a file."""

import json
import os
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from monta_megatron.cli import main

trace = Path(sys.argv[sys.argv.index("--trace") + 1])
with profile(activities=[ProfilerActivity.CPU]) as profiled:
    status = main(["bench", *sys.argv[1:]])
names = [event.name for event in profiled.events() if event.name.startswith("monta ")]
trace.with_name(f"ranges_{os.environ['RANK']}").write_text(json.dumps(names))
sys.exit(status)
