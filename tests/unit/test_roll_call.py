"""Who is named after a failed collective: on a store of this process."""

from collections.abc import Iterator
from threading import Event
from unittest import mock

import pytest
import torch.distributed as dist

from monta_megatron.exchange import errors, roll_call

HERE = "exchange of counts: chain alltoall, group tp_ep of ranks 0, 1, 2, 3"
RANKS = range(4)


@pytest.fixture
def store() -> Iterator[dist.Store]:
    """Rank 0's; nobody waits in real time for ranks that stay silent."""
    made = dist.HashStore()
    with (
        mock.patch.object(roll_call, "default_store", lambda: made),
        mock.patch.object(dist, "get_rank", lambda: 0),
        mock.patch.object(roll_call, "ANSWER_S", 0.05),
        mock.patch.object(roll_call, "LOOK_S", 0.001),
    ):
        yield made


def tell(store: dist.Store, rank: int, place: str, message: str = "") -> None:
    store.set(f"monta/roll call/{rank}", f"{place}\n{message}")


def test_silent_ranks_are_named_with_a_reason(store: dist.Store) -> None:
    tell(store, 2, HERE)
    # It has waited for long somewhere, and gone on.
    tell(store, 3, "")
    said = roll_call.call_roll(HERE, RANKS, ", or with fewer micro-batches than the others")
    assert said == (
        "ranks 1, 3 left or did not come: ended, stuck elsewhere, or with fewer micro-batches "
        "than the others"
    )
    # The others find this rank.
    assert store.get("monta/roll call/0").decode() == f"{HERE}\n"


def test_what_ranks_at_other_places_said_is_quoted(store: dist.Store) -> None:
    tell(store, 1, HERE, ", which failed there: rank 3 left or did not come")
    tell(store, 2, "combine: stage alltoall", ", which failed there: rank 3 left")
    tell(store, 3, HERE)
    assert roll_call.call_roll(HERE, RANKS, "") == (
        "rank 2 was last at: combine: stage alltoall, which failed there: rank 3 left"
    )
    tell(store, 2, HERE)
    assert roll_call.call_roll(HERE, RANKS, "") == "all ranks of the group have come"


def test_ranks_at_one_place_are_named_together(store: dist.Store) -> None:
    tell(store, 1, HERE)
    for rank in (2, 3):
        tell(store, rank, "combine: stage alltoall")
    said = roll_call.call_roll(HERE, RANKS, "")
    assert said == "ranks 2, 3 were last at: combine: stage alltoall"


def test_quotes_of_quotes_do_not_grow(store: dist.Store) -> None:
    """Ranks of two groups fail one after the other, and each quotes all that came before it."""
    ranks, place = range(16), "stage alltoall, group {} of ranks 0, 1, 2, 3"
    lengths = []
    for rank in ranks:
        with mock.patch.object(dist, "get_rank", return_value=rank):
            lengths.append(len(errors.call_roll(place.format(rank % 2), ranks)))
    assert max(lengths) < len(ranks) * (len(place) + roll_call.MAX_QUOTED + 50)


def test_one_silent_rank_is_not_waited_for(store: dist.Store) -> None:
    for rank in (1, 2):
        tell(store, rank, HERE)
    clock = mock.Mock(monotonic=lambda: 0.0, sleep=mock.Mock(side_effect=AssertionError))
    with mock.patch.object(roll_call, "time", clock):
        assert roll_call.call_roll(HERE, RANKS, "").startswith("rank 3 left or did not come")


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_lost_store_is_named_in_bounded_time(store: dist.Store, is_stuck: bool) -> None:
    """Its connection is closed, or the process that holds it was stopped and does not answer."""
    released = Event()
    broken = mock.Mock()
    broken.set.side_effect = (
        (lambda *_: released.wait()) if is_stuck else RuntimeError("Broken pipe")
    )
    with (
        mock.patch.object(roll_call, "default_store", lambda: broken),
        mock.patch.object(roll_call, "STORE_LIMIT_S", 0.05),
    ):
        said = roll_call.call_roll(HERE, RANKS, "")
        roll_call.write(HERE)
    released.set()
    assert said.startswith("the store of the process groups does not answer")
