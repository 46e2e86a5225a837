"""One thread for torch in every test; several would wait for each other where cores are few.

Set before torch is imported, and handed on to the processes that tests start.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
