"""A port for a program of a test to listen on."""

import socket


def free_port() -> int:
    """Nobody listens there now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
