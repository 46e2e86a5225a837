"""Ports that nobody listens on."""

import socket
from contextlib import ExitStack


def free_ports(number: int) -> list[int]:
    """`number` different ports, free a moment ago."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [int(server.getsockname()[1]) for server in servers]
