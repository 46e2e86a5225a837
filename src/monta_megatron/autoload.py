"""Entry point of PyTorch's autoload (group `torch.backends`), called at the end of `import torch`.

Installing the package is enough: nothing has to be imported or edited for a launch script to
accept `--moe-token-dispatcher-type monta`. Two rules keep that safe: this module imports nothing
heavy, and no exception leaves `activate`, so `import torch` works whatever state Megatron is in.

    MONTA_AUTOLOAD=0    nothing is hooked
    MONTA_CPU_RANKS=1   Megatron runs on CPU ranks (see emulation/cpu_ranks.py)
"""

import os
import sys


def activate() -> None:
    """Hook into Megatron's modules, for when they are imported. Never raises."""
    try:
        if os.environ.get("MONTA_AUTOLOAD", "1") != "0":
            from monta_megatron.integration import registration

            registration.install(way_in="autoload")
        if os.environ.get("MONTA_CPU_RANKS", "0") == "1":
            from monta_megatron.emulation import cpu_ranks

            cpu_ranks.install()
    except Exception as error:  # noqa: BLE001 - whatever it is, `import torch` goes on
        print(f"monta: not active: {type(error).__name__}: {error}", file=sys.stderr)
