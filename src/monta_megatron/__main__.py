"""`python -m monta_megatron` is the same as `monta`."""

import sys

from monta_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
