"""Measures briefly the rate of one TCP stream between two addresses.

Run as a script, by path, on the nodes at both ends: `receive` prints "ready" and then the rate;
`send` sends until the receiver closes the connection.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

_PORT = 5201
_WARM_UP_SECONDS = 0.2
_SECONDS = 0.5
_TIMEOUT_SECONDS = 10.0
_BUFFER_BYTES = 1 << 20


def measure_gbit_per_s(receiver: Sequence[str], sender: Sequence[str], address: str) -> float:
    """Payload per second of one stream, in 1e9 bits.

    Args:
        receiver: words to put in front of a command to run it where the address is.
        sender: the same, for the other end.
        address: the receiver's.

    Raises:
        ValueError: no stream could be established.
    """
    # -S -E: a bare interpreter starts in a fraction of the time.
    script = [sys.executable, "-S", "-E", __file__]
    with subprocess.Popen(
        [*receiver, *script, "receive", address], stdout=subprocess.PIPE, text=True
    ) as receiving:
        assert receiving.stdout is not None
        receiving.stdout.readline()
        with subprocess.Popen([*sender, *script, "send", address]) as sending:
            rate = receiving.stdout.readline()
            sending.kill()  # it may not have got as far as a connection
    if not rate:
        raise ValueError(f"no TCP stream reaches {address} on the network just made")
    return float(rate)


def _receive(address: str) -> None:
    with socket.create_server((address, _PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    buffer = bytearray(_BUFFER_BYTES)
    with connection:
        _receive_for(connection, buffer, _WARM_UP_SECONDS)
        num_bytes, seconds = _receive_for(connection, buffer, _SECONDS)
    print(num_bytes * 8 / seconds / 1e9, flush=True)


def _receive_for(connection: socket.socket, buffer: bytearray, seconds: float) -> tuple[int, float]:
    start = time.perf_counter()
    num_bytes = 0
    while (elapsed := time.perf_counter() - start) < seconds:
        num_bytes += connection.recv_into(buffer)
    return num_bytes, elapsed


def _send(address: str) -> None:
    chunk = bytes(_BUFFER_BYTES)
    with socket.create_connection((address, _PORT)) as connection, suppress(ConnectionError):
        while True:
            connection.sendall(chunk)


if __name__ == "__main__":
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)
    {"receive": _receive, "send": _send}[sys.argv[1]](sys.argv[2])
