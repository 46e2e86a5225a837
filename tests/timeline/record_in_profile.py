"""One rank: `monta timeline --record` under torch's profiler; the names of our ranges in a file."""

import json
import os
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from monta_megatron.cli import main

folder = Path(sys.argv[sys.argv.index("--record") + 1])
with profile(activities=[ProfilerActivity.CPU]) as profiled:
    status = main(["timeline", *sys.argv[1:]])
names = [event.name for event in profiled.events() if event.name.startswith("monta ")]
(folder / f"ranges_{os.environ['RANK']}").write_text(json.dumps(names))
sys.exit(status)
