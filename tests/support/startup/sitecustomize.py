"""Every interpreter that a test starts imports this (see conftest.py) and collects garbage rarely.

Importing Megatron creates a million objects that live to the end. Scanning them again and again,
and once more at exit, took a third of the run time of a short program.
"""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
