"""Imported by every interpreter that a test starts (see conftest.py): it collects rarely.

An import of Megatron makes a million objects that are no garbage. To look at them again and again,
and once more at the end, took a third of the time of a program that does little else.
"""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
