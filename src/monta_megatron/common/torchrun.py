"""torchrun, whose failure is one line and the exit status of the rank that failed first.

    python -m monta_megatron.common.torchrun --nproc-per-node 8 SCRIPT ARGS...

torchrun itself prints some eighty lines, and its status is always 1.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from monta_megatron.common.ranks import ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks of this node and wait for them; returns the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # It reports every rank that it ends, and every one that failed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        print(f"torchrun: rank {rank} ended first, {ended(status)}", file=sys.stderr)
        return status
    except SignalException as error:
        # It has ended the ranks. A step of Slurm takes the highest status of its nodes, which is to
        # be that of the rank that failed, not of the nodes that were ended for it.
        return 130 if error.sigval == signal.SIGINT else 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
