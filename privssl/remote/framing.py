"""Length-prefixed messages on a socket: 8 bytes, little-endian, give the number of bytes."""

import socket

MAX_BYTES = 2**31  # of one message
_CHUNK = 2**20


def send(wire: socket.socket, frame: bytes) -> None:
    """Send a message after its length. Raises OSError."""
    wire.sendall(len(frame).to_bytes(8, "little") + frame)


def receive(wire: socket.socket) -> bytes:
    """Read one message; memory is bounded by the bytes received. Raises OSError."""
    size = int.from_bytes(_receive_exactly(wire, 8), "little")
    if size > MAX_BYTES:
        raise OSError(f"a message of {size} bytes")
    return _receive_exactly(wire, size)


def _receive_exactly(wire: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = wire.recv(min(_CHUNK, size - len(data)))
        if not piece:
            raise OSError("the message broke off")
        data += piece
    return bytes(data)
