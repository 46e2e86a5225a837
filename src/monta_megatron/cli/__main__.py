"""`python -m monta_megatron.cli` is the same as `monta`."""

import sys

from monta_megatron.cli import main

sys.exit(main())
