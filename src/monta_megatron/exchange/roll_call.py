"""Roll call after a failure: which ranks of a group wait too, which failed, and which are silent.

A collective that fails says that a connection was closed, or that time is over, but not whose fault
it is. So a rank whose collective fails writes where it is to the store behind the process groups,
and reads what the others wrote. Nobody writes in a training that runs, except a rank that has
waited for half of its time limit: when the first of them reports, the others have written.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread

import torch.distributed as dist

from monta_megatron.common.torch_private import default_store

# How long a rank waits for the others to write. All that fail at once have written by then.
ANSWER_S = 3.0
LOOK_S = 0.05
# After this time the store counts as lost: the process that held it has ended, or hangs.
STORE_LIMIT_S = 2.0
# Characters that are quoted of what another rank said, which quotes others in its turn.
MAX_QUOTED = 400
# The store's own are RuntimeErrors; without process groups there is none (ValueError).
STORE_ERRORS = (RuntimeError, ValueError)


def write(place: str, message: str = "") -> None:
    """Tell all ranks where this one waits or has failed; in bounded time, and never an error.

    Args:
        place: the collective, named alike on all ranks that wait in it; empty where it has ended.
        message: how it failed; empty while it waits.
    """
    thread = Thread(target=_write, args=(place, message), name="monta roll call", daemon=True)
    thread.start()
    thread.join(STORE_LIMIT_S)


def call_roll(place: str, ranks: Sequence[int], reason: str) -> str:
    """Sentence on the ranks of a group, after a collective of it failed here; in bounded time.

    Args:
        place: see `write`.
        ranks: the group's.
        reason: why a rank may not have come; continues "ended, stuck elsewhere".
    """
    found: dict[int, tuple[str, str]] = {}
    answered = Event()

    def ask() -> None:
        with suppress(*STORE_ERRORS):
            _write(place, "")
            end_s = time.monotonic() + ANSWER_S
            while True:
                found.update(_answers(ranks))
                # One silent rank explains the failure, however long it stays so.
                if len(found) >= len(ranks) - 1 or time.monotonic() > end_s:
                    break
                time.sleep(LOOK_S)
            answered.set()

    thread = Thread(target=ask, name="monta roll call", daemon=True)
    thread.start()
    thread.join(ANSWER_S + STORE_LIMIT_S)
    if not answered.is_set():
        return (
            "the store of the process groups does not answer, so the process that held it has "
            "ended or hangs: rank 0, or the launcher on its node"
        )
    sentences = []
    silent = [rank for rank in ranks if rank not in found]
    if silent:
        sentences.append(f"{_listed(silent)} left or did not come: ended, stuck elsewhere{reason}")
    elsewhere: dict[str, list[int]] = {}
    for rank, (there, message) in found.items():
        if there != place:
            quoted = message if len(message) <= MAX_QUOTED else f"{message[:MAX_QUOTED]} ..."
            elsewhere.setdefault(f"{there}{quoted}", []).append(rank)
    for text, there_ranks in elsewhere.items():
        were = "was" if len(there_ranks) == 1 else "were"
        sentences.append(f"{_listed(there_ranks)} {were} last at: {text}")
    return "; ".join(sentences) or "all ranks of the group have come"


def _listed(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _write(place: str, message: str) -> None:
    with suppress(*STORE_ERRORS):
        default_store().set(_key(dist.get_rank()), f"{place}\n{message}")


def _answers(ranks: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Place and message of the ranks that wrote one."""
    store = default_store()
    answers = {}
    for rank in ranks:
        if store.check([_key(rank)]):
            place, message = store.get(_key(rank)).decode().split("\n", 1)
            # Without a place it has waited for long, and gone on.
            if place:
                answers[rank] = place, message
    return answers


def _key(rank: int) -> str:
    return f"monta/roll call/{rank}"
