"""A port for a program of a test to listen on."""

import socket

HELD: list[socket.socket] = []


def free_port() -> int:
    """Nobody listens there now, and nobody else is given it while this process runs: it stays
    bound here, without listening, which whoever binds with SO_REUSEADDR, as servers do, may beside
    it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    HELD.append(held)
    port: int = held.getsockname()[1]
    return port
