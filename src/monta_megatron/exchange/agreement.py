"""Values that the ranks of a group gather, and failures that they share."""

import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from monta_megatron.common.busy import busy_text, cores_in_use
from monta_megatron.common.errors import UserError
from monta_megatron.common.nodes import BOOT_ID, consecutive_nodes, node_here, number_nodes
from monta_megatron.exchange.collectives import wait_for_all
from monta_megatron.exchange.errors import naming_failure

T = TypeVar("T")
U = TypeVar("U")

SET_UP = "set-up of an MoE layer"


def gather_objects(
    value: T,
    group: dist.ProcessGroup | None = None,
    what: str = "gathering of results",
    reason: str = "",
    group_name: str = "tp_ep",
) -> list[T]:
    """Gather an object from each rank of `group`, in the order of its ranks.

    Args:
        value: of this rank.
        group: None for all ranks.
        what: purpose, for the message of a failure.
        reason: see `roll_call.call_roll`.
        group_name: of `group`, for the message of a failure.

    Raises:
        ExchangeError: a rank has left or did not come in time.
    """
    values = [value] * dist.get_world_size(group)
    name = "world" if group is None else group_name
    with naming_failure(what, group, reason, name):
        dist.all_gather_object(values, value, group=group)
    return values


def share_with_group(
    make: Callable[[], tuple[T, U]],
    group: dist.ProcessGroup,
    group_name: str = "tp_ep",
    place: str = "rank",
) -> tuple[T, list[U]]:
    """Gather a value that every rank makes; a failure on one rank is raised on all.

    Args:
        make: returns an object for this rank alone, and the value for all ranks.
        group: the ranks.
        group_name: of `group`, for the message where a rank does not come.
        place: in the message of a failure on another rank.

    Raises:
        UserError: a rank's `make` did.
        RuntimeError: `make` failed in another way on another rank; on its own rank as it is.
        ExchangeError: a rank has left or did not come in time.
    """
    kept: Any = None
    shared: Any = None
    own: Exception | None = None
    problem: tuple[type[Exception], str] | None = None
    try:
        kept, shared = make()
    except UserError as error:
        own, problem = error, (UserError, str(error))
    except Exception as error:  # noqa: BLE001 - raised below
        own, problem = error, (RuntimeError, f"{type(error).__name__}: {error}")
    reason = ", or with fewer MoE layers"
    by_rank = gather_objects((problem, shared), group, SET_UP, reason, group_name)
    if own is not None:
        raise own
    for rank, (found, _) in zip(dist.get_process_group_ranks(group), by_rank, strict=True):
        if found is not None:
            raise found[0](f"{found[1]} ({place} {rank})")
    return kept, [shared for _, shared in by_rank]


def find_nodes(group: dist.ProcessGroup, ranks_per_node: int | None = None) -> tuple[int, ...]:
    """The node of every rank of `group`, numbered from 0 in the order of the ranks.

    For tools: a dispatcher has gathered the hosts with its other facts, and may have a cluster
    file; see `integration.ranks.nodes_of_ranks`.

    Args:
        group: the ranks of an exchange; all of them call this, unless `ranks_per_node` is given.
        ranks_per_node: number of consecutive ranks on each node; None to ask every rank.
    """
    if ranks_per_node is not None:
        return consecutive_nodes(dist.get_process_group_ranks(group), ranks_per_node)
    return number_nodes(gather_objects(node_here(), group, "gathering of hosts"))


def find_busy_machines() -> tuple[str, ...]:
    """For tools: a text for each machine on which others are busy; all ranks of a launch call this.

    They wait while it measures, so what runs is not theirs.
    """
    wait_for_all()
    ranks = gather_objects((socket.gethostname(), BOOT_ID.read_text(), cores_in_use()))
    hosts: dict[str, str] = {}
    in_use: dict[str, dict[int, float]] = {}
    num_ranks: Counter[str] = Counter()
    for host, machine, cores in ranks:
        hosts.setdefault(machine, host)
        in_use.setdefault(machine, {}).update(cores)
        num_ranks[machine] += 1
    found = []
    for machine, cores in in_use.items():
        text = busy_text(cores, num_ranks[machine])
        if text is not None:
            found.append(text if len(in_use) == 1 else f"{hosts[machine]}: {text}")
    return tuple(found)
