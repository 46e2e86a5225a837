"""A pool of ranks that is started once per world size and reused by every test.

Importing torch and Megatron costs seconds per process, so one process imports them for all pools
and forks the ranks, which stay alive and run one function after another. A rank that fails, or a
time limit that passes, ends the pool: the error holds every rank's traceback or stack, and the next
test gets a fresh pool.
"""

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
from free_ports import free_ports
from time_limits import scaled

# All limits are scaled by how slow the machine is. Until the ranks have started and imported
# Megatron, of which 8 share 2 cores:
START_LIMIT_S = 240.0
ANSWER_LIMIT_S = 120.0
# Ranks that wait for each other say so after this.
GROUP_LIMIT_S = 30.0

T = TypeVar("T")


class PoolError(AssertionError):
    """A rank failed or hung; the text holds what every rank says of it."""


class Pool:
    """`world_size` CPU ranks with torch.distributed (Gloo) and Megatron imported.

    Process groups give up after `group_limit_s`; None for what this machine needs.
    """

    def __init__(
        self, world_size: int, backend: str = "gloo", group_limit_s: float | None = None
    ) -> None:
        self.world_size = world_size
        self._stacks = tempfile.TemporaryDirectory(prefix="monta-pool-")
        environment = {
            "MONTA_CPU_RANKS": "1" if backend == "gloo" else "0",
            # For the test that launches Triton's kernels on CPU ranks.
            "TRITON_INTERPRET": "1" if backend == "gloo" else "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "POOL_STACKS": self._stacks.name,
            "POOL_BACKEND": backend,
            "POOL_GROUP_LIMIT_S": str(group_limit_s or scaled(GROUP_LIMIT_S)),
        }
        # With a GPU each rank imports for itself: CUDA does not survive a fork.
        kind = "forkserver" if backend == "gloo" else "spawn"
        context: Any = multiprocessing.get_context(kind)
        context.set_forkserver_preload(["monta_megatron.integration.dispatcher"])
        pipes = [context.Pipe() for _ in range(world_size)]
        self._connections: list[Connection] = [ours for ours, _ in pipes]
        of_ranks = [of_rank for _, of_rank in pipes]
        arguments = environment, of_ranks
        self._process = context.Process(target=_fork_ranks, args=arguments, daemon=True)
        with mock.patch.dict(os.environ, environment):
            self._process.start()
        for each in of_ranks:
            each.close()
        self._process_ids = []
        for each in self._connections:
            assert each.poll(scaled(START_LIMIT_S)), "a rank has not started"
            self._process_ids.append(each.recv())

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        limit_s: float = ANSWER_LIMIT_S,
        num_lost: int = 0,
    ) -> list[T]:
        """Run a function with `args` on every rank; what each rank returned, by rank.

        Args:
            function: of a module that the ranks can import; they are sent its name.
            args: anything that can be pickled.
            limit_s: seconds in which each rank of an idle machine has to answer.
            num_lost: the last ranks, which are lost in the function and return nothing.

        Raises:
            PoolError: another rank raised, died, or did not answer in time.
        """
        message = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(message)
        results: list[T] = []
        failures: list[str] = []
        for rank, connection in enumerate(self._connections[: self.world_size - num_lost]):
            # Once a rank has failed the others may wait for it in a collective.
            wait_s = scaled(5.0 if failures else limit_s)
            try:
                if not connection.poll(wait_s):
                    stack = self._stack(rank)
                    failures.append(f"rank {rank}: no answer after {wait_s:g} s\n{stack}")
                    continue
                succeeded, value = connection.recv()
            except (EOFError, ConnectionError) as error:
                failures.append(f"rank {rank}: died: {type(error).__name__}")
                continue
            if succeeded:
                results.append(value)
            else:
                failures.append(f"rank {rank}: {value}")
        if failures:
            self.close()
            raise PoolError(f"{function.__name__}{args}\n" + "\n".join(failures))
        return results

    @property
    def alive(self) -> bool:
        """Whether the ranks can run another function."""
        return bool(self._connections)

    def close(self) -> None:
        """End every rank."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        # Each rank leaves as its connection ends, and writes its coverage; one that hangs does not.
        self._process.join(timeout=5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._stacks.cleanup()

    def _stack(self, rank: int) -> str:
        """Where a rank is: it writes its stack to a file on SIGUSR1."""
        with suppress(ProcessLookupError):
            os.kill(self._process_ids[rank], signal.SIGUSR1)
        path = Path(self._stacks.name) / str(rank)
        for _ in range(20):
            if path.exists() and path.stat().st_size > 0:
                break
            time.sleep(0.1)
        return path.read_text() if path.exists() else "no stack"


class Pools:
    """Starts a pool when it is first asked for, and again after a test has broken it."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __getitem__(self, world_size: int) -> Pool:
        pool = self._pools.get(world_size)
        if pool is None or not pool.alive:
            pool = self._pools[world_size] = Pool(world_size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def on_ranks(
    world_size: int, limit_s: float = ANSWER_LIMIT_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body runs on all ranks of a pool, and has to pass on each of them.

    It is skipped where the ranks skip it. Marks and fixtures are as for any other test, but that
    the ranks have to be sent its arguments.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(pools: Pools, **arguments: Any) -> None:
            name = body.__module__, body.__name__
            reasons = pools[world_size].run(_run_body, *name, arguments, limit_s=limit_s)
            if all(reasons):
                pytest.skip(reasons[0])

        signature = inspect.signature(body)
        pools = inspect.Parameter("pools", inspect.Parameter.KEYWORD_ONLY)
        parameters = [*signature.parameters.values(), pools]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> str:
    """Run the body of a test on this rank; why it is skipped, or ""."""
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return ""


def _fork_ranks(environment: dict[str, str], connections: list[Connection]) -> None:
    """Fork a rank for each connection, and stay until the last of them has ended."""
    os.environ.update(environment)
    # A session of its own: whatever it has forked ends with it.
    os.setsid()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    import torch

    torch.set_num_threads(1)
    # Collections would copy the pages that the ranks share.
    gc.freeze()
    for rank, connection in enumerate(connections):
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            if rank > 0:
                os.dup2(silence, sys.stderr.fileno())
            # Only the one that uses a connection has it open, so that its end is seen.
            for other in connections:
                if other is not connection:
                    other.close()
            _serve(rank, connection)
            os._exit(0)
    for connection in connections:
        connection.close()
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(rank: int, connection: Connection) -> None:
    """Body of one rank: run what the pool sends until the connection closes."""
    from datetime import timedelta

    stack_file = open(Path(os.environ["POOL_STACKS"]) / str(rank), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)

    import torch
    import torch.distributed as dist

    if os.environ["POOL_BACKEND"] == "nccl":
        torch.cuda.set_device(0)
    group_limit = timedelta(seconds=float(os.environ["POOL_GROUP_LIMIT_S"]))
    dist.init_process_group(os.environ["POOL_BACKEND"], timeout=group_limit)
    connection.send(os.getpid())
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(message)
            connection.send((True, function(*args)))
        except BaseException:  # noqa: BLE001 - the pool has to hear of every failure
            connection.send((False, traceback.format_exc()))
