"""What an exchange says when it fails."""

from unittest import mock

import pytest
from stream_recorder import Recorder
from test_stream_safety import LAYOUTS, PLAIN, make_exchange, make_inputs

from monta_megatron.chains import CHAINS
from monta_megatron.exchange import operations
from monta_megatron.exchange.autograd import dispatch
from monta_megatron.exchange.state import ExchangeError


@pytest.mark.parametrize("where", ["start", "wait"])
def test_a_failed_collective_is_named(where: str) -> None:
    """The AllToAll of the second of three chunks fails, when it is started or waited for."""
    layout = LAYOUTS["ep2_etp2"]
    routing_map = PLAIN.map(layout.num_experts)
    exchange = make_exchange(CHAINS["alltoall_allgather"], layout, routing_map, 3, Recorder())
    closed = RuntimeError("connection closed by peer")
    failing = closed if where == "start" else mock.Mock(**{"wait.side_effect": closed})
    with (
        mock.patch.object(
            operations, "start_all_to_all", side_effect=[mock.Mock(), failing, mock.Mock()]
        ),
        mock.patch.object(operations, "start_all_gather"),
        pytest.raises(ExchangeError) as error,
    ):
        dispatch(exchange, *make_inputs(exchange, routing_map))
    assert str(error.value) == (
        "dispatch: chain alltoall_allgather, stage alltoall, chunk 2 of 3, group ep (rank 0 of 2) "
        "failed: connection closed by peer"
    )
