"""Whether others use this machine's cores, measured before something is timed. No torch."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

STATISTICS = Path("/proc/stat")
MEASURED_S = 0.5
# Share of the cores that the ranks need which has to be free.
MIN_FREE = 0.9


def cores_in_use(seconds: float = MEASURED_S) -> dict[int, float]:
    """Share of the time in use, by core that this process may run on.

    The caller waits meanwhile. Empty where the system does not tell.
    """
    before = _ticks()
    time.sleep(seconds)
    parts = {}
    for core, (busy, total) in _ticks().items():
        busy_before, total_before = before.get(core, (0, 0))
        parts[core] = (busy - busy_before) / max(total - total_before, 1)
    return parts


def _ticks() -> dict[int, tuple[int, int]]:
    """Ticks in use and ticks in all, by core of this process."""
    if not STATISTICS.exists():
        return {}
    ticks, allowed = {}, os.sched_getaffinity(0)
    for line in STATISTICS.read_text().splitlines():
        name, *fields = line.split()
        core = name.removeprefix("cpu")
        if name.startswith("cpu") and core.isdigit() and int(core) in allowed:
            # user, nice, system, idle, iowait, irq, softirq and steal; guests are users.
            user, nice, system, idle, waiting, *others = map(int, fields[:8])
            busy = user + nice + system + sum(others)
            ticks[int(core)] = busy, busy + idle + waiting
    return ticks


def busy_text(in_use: Mapping[int, float], num_ranks: int) -> str | None:
    """A warning if others leave too few cores to the ranks of a machine; None if they do not.

    Args:
        in_use: `cores_in_use` before the ranks did anything.
        num_ranks: ranks on these cores.
    """
    num_cores, used = len(in_use), sum(in_use.values())
    if num_cores - used >= MIN_FREE * min(num_ranks, num_cores):
        return None
    return f"the machine was busy before: others used {used:.1f} of its {num_cores} cores"
