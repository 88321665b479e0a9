"""A message on a socket: 8 bytes, little-endian, say how many bytes follow."""

import socket

MAX_BYTES = 2**31  # of one letter
_CHUNK = 2**20


def send(wire: socket.socket, frame: bytes) -> None:
    """A letter behind its length. Raises OSError."""
    wire.sendall(len(frame).to_bytes(8, "little") + frame)


def receive(wire: socket.socket) -> bytes:
    """The letter behind its length. Raises OSError. Memory is taken for bytes that came, never for
    a stated size."""
    size = int.from_bytes(_exactly(wire, 8), "little")
    if size > MAX_BYTES:
        raise OSError(f"a letter of {size} bytes")
    return _exactly(wire, size)


def _exactly(wire: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = wire.recv(min(_CHUNK, size - len(data)))
        if not piece:
            raise OSError("the letter broke off")
        data += piece
    return bytes(data)
