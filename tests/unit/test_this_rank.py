"""Who reports a mistake, of the ranks that have made it."""

import socket
import sys
from unittest import mock

import pytest
from run_python import run_python

from monta_megatron.common import ranks


@pytest.mark.parametrize(
    ("environ", "waits_s", "ending"),
    [
        ({}, 0, "wrong\n"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, 0, "wrong\n"),
        # Another node's first rank, then its others: unless the first rank has ended them by then.
        ({"RANK": "8", "LOCAL_RANK": "0"}, 10, "wrong (rank 8 on {host})\n"),
        ({"RANK": "9", "LOCAL_RANK": "1"}, 15, "wrong (rank 9 on {host})\n"),
    ],
)
def test_ranks_report_one_after_the_other(
    environ: dict[str, str], waits_s: float, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(ranks, "linger") as linger:
        ranks.report("wrong", environ)
    default_s = ranks.OTHER_RANKS_LINGER_S
    assert sum((*call.args, default_s)[0] for call in linger.call_args_list) == waits_s
    assert capsys.readouterr().err == ending.format(host=socket.gethostname())


def test_a_mistake_of_all_ranks_is_one_line() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--no-python")
    command = (sys.executable, "-m", "monta_megatron", "bench", "--top-k", "0")
    result = run_python(*torchrun, *command)
    lines = [line for line in result.stderr.splitlines() if line.startswith("monta bench: ")]
    assert lines == ["monta bench: --top-k: got '0', must be an integer >= 1"]
