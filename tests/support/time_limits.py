"""Time limits of tests, for the machine that they run on and what else runs there now."""

import functools
import os
import subprocess
import sys
import time

# What the import below takes on an idle core.
IMPORT_S = 0.25
# A hang on a busy machine ends within this many times its limit.
MAX_SLOWNESS = 10.0
# Set by the first process of a session that asks; those that it starts find it there.
VARIABLE = "TEST_MACHINE_SLOWNESS"


@functools.cache
def slowness() -> float:
    """How many times slower than an idle core this machine is: at least 1.

    The start of an interpreter that imports numpy is timed once per session.
    """
    if VARIABLE not in os.environ:
        begin_s = time.monotonic()
        subprocess.run([sys.executable, "-c", "import numpy"], check=True)
        measured = (time.monotonic() - begin_s) / IMPORT_S
        os.environ[VARIABLE] = f"{min(max(measured, 1.0), MAX_SLOWNESS):.1f}"
    return float(os.environ[VARIABLE])


def scaled(limit_s: float) -> float:
    """A time limit that an idle machine keeps with ease, in seconds on this one."""
    return limit_s * slowness()
