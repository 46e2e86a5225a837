"""What ranks do in the tests of what starts them: `rank_programs.py NAME ARGUMENTS...`."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

RANK = int(os.environ.get("RANK", "0"))
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))

# Every byte there is, no line end: anything that reads lines or decodes them would change it.
BYTES_OF_RANK_0 = bytes(range(256))


def place() -> None:
    """Say where this rank is, which has to know where the first one is."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    line = json.dumps([int(os.environ[name]) for name in names])
    # In one piece, as ranks share the pipe.
    os.write(1, f"{line}\n".encode())


def address() -> None:
    """Say where this rank looks for the first one."""
    os.write(1, f"{os.environ['MASTER_ADDR']}\n".encode())


def write() -> None:
    """Rank 0 writes bytes; every rank says what it is given on an emulated cluster."""
    from monta_megatron.common import strict_yaml
    from monta_megatron.planner.cluster import Cluster

    os.write(1, BYTES_OF_RANK_0 if RANK == 0 else b"a line on standard output\n")
    names = ("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "MONTA_CPU_RANKS", "OMP_NUM_THREADS")
    values = {name: os.environ[name] for name in names}
    costs = strict_yaml.load(Cluster, os.environ["MOE_MONTA_CLUSTER"]).name
    print(json.dumps({"host": socket.gethostname(), "costs": costs, **values}), file=sys.stderr)


def incast() -> None:
    """All other ranks send to rank 0 at once; rank 0 prints what it receives, in 1e6 bits/s."""
    address = (os.environ["MASTER_ADDR"], 5000)
    if RANK != 0:
        with connected(address) as connection:
            try:
                while True:
                    connection.sendall(bytes(1 << 20))
            except ConnectionError:
                return
    with socket.create_server(address) as server, selectors.DefaultSelector() as selector:
        for _ in range(NUM_RANKS - 1):
            selector.register(server.accept()[0], selectors.EVENT_READ)
        receive_for(selector, 0.3)
        print(receive_for(selector, 1.0))


def connected(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)


def receive_for(selector: selectors.BaseSelector, seconds: float) -> float:
    start, num_bytes = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            num_bytes += len(key.fileobj.recv(1 << 20))
    return num_bytes * 8 / elapsed / 1e6


def exchange(num_bytes: str) -> None:
    """An all-to-all over Gloo; each node's first rank prints the bytes that the node sent."""
    import torch
    import torch.distributed as dist

    from monta_megatron.emulation.cluster import EmulatedCluster
    from monta_megatron.emulation.node_memory import neighbours_of

    dist.init_process_group("gloo")
    cluster = EmulatedCluster.from_environment()
    assert cluster is not None and dist.group.WORLD is not None
    rows = torch.full((int(num_bytes) // 4,), float(RANK))
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    assert received.view(NUM_RANKS, -1)[:, 0].tolist() == list(range(NUM_RANKS))
    # Ranks of this node talk through memory; the network is for the others.
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    own_node = {RANK - local_rank + other for other in range(num_local)}
    assert neighbours_of(dist.group.WORLD).positions == own_node - {RANK}
    dist.barrier()
    before = cluster.sent_bytes()
    dist.barrier()  # or a faster rank's bytes would count as sent before
    dist.all_to_all_single(received, rows)
    dist.barrier()
    if local_rank == 0:
        print(cluster.sent_bytes() - before)
    dist.barrier()


def fail(rank: str, status: str) -> None:
    """One rank fails, the others would go on."""
    if int(rank) == RANK:
        print("no more of this", file=sys.stderr)
        sys.exit(int(status))
    signal.pause()


def linger() -> None:
    """Stay, with a child in a session of its own."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.write(1, b"lingers\n")
    child.wait()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
