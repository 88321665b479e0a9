"""What Flower runs for us: letters between a coordinator and the doors of sites, and nothing else.

This is the one file that imports flwr, and the one that a SuperLink ships to SuperNodes
(``remote/flower_transport.py`` puts it into an app as ``relay.py``). So it needs flwr and Python
alone, is never imported by the rest of privssl, and can be read by a site's operator in a minute.

    coordinator --- Unix socket --- server (ServerApp) --- Flower --- client (ClientApp) --- door

Neither side looks into a letter. The client has the path of its site's door from the operator
(``--node-config 'door="..."'``), never from a letter, and no rows, budget or ledger: those are
behind the door, with another process. What a letter's way costs or breaks is for the two ends
to notice (``engines/remote.py``, ``site/request_handler.py``): here, what fails has no answer.

Replies are known by the message that they answer, never by who sent them: what a SuperLink says
in place of a node carries its own number.
"""

import json
import socket
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

POLL = 0.3  # seconds between two looks for replies
_CHUNK = 2**20

client = ClientApp()
server = ServerApp()


# At a site -----------------------------------------------------------------------------------


@client.query("letter")
def relay_to_site(message: Message, context: Context) -> Message:
    """Bring a letter to the door and the answer back; an empty one where nobody answered."""
    about = message.metadata
    seconds = max(1.0, about.created_at + about.ttl - time.time())
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(seconds)
            door.connect(str(context.node_config["door"]))
            _send(door, _frame(message))
            answer = _receive(door)
    except (OSError, KeyError):  # what went wrong is in the site's own log
        answer = b""
    return Message(_record(answer), reply_to=message)


# Beside the coordinator ------------------------------------------------------------------------


@server.main()
def relay_server(grid: Grid, context: Context) -> None:
    """Do what the coordinator asks for, until it is gone.

    It asks in JSON: for the ``addresses`` of nodes, which come with the keys that the SuperLink
    knows them by, or to ``exchange`` letters, which follow.
    """
    with socket.socket(socket.AF_UNIX) as counter:
        counter.connect(str(context.run_config["counter"]))
        while True:
            try:
                order = json.loads(_receive(counter))
            except OSError:
                return
            if order["do"] == "addresses":
                nodes = {str(node.node_id): _pem(node.public_key) for node in grid.get_nodes()}
                _send(counter, json.dumps(nodes, sort_keys=True).encode())
            else:
                frames = {address: _receive(counter) for address in order["to"]}
                answers = _exchange(grid, frames, float(order["seconds"]))
                _send(counter, json.dumps(list(answers)).encode())
                for answer in answers.values():
                    _send(counter, answer)


def _exchange(grid: Grid, frames: dict[str, bytes], seconds: float) -> dict[str, bytes]:
    """The answers that come in time, by address."""
    end = time.monotonic() + seconds
    sent = [
        Message(_record(frame), dst_node_id=int(address), message_type="query.letter", ttl=seconds)
        for address, frame in frames.items()
    ]
    # In the order of the letters; None: its node is not there.
    open_: dict[Any, str] = dict(zip(grid.push_messages(sent), frames, strict=True))
    open_.pop(None, None)
    answers = {}
    while open_ and time.monotonic() < end:
        for reply in _pull(grid, open_):
            address = open_.pop(reply.metadata.reply_to_message_id, None)
            if address is not None and not reply.has_error() and (data := _frame(reply)):
                answers[address] = data
        if open_:
            time.sleep(POLL)
    return answers


def _pem(key: bytes) -> str:
    """A key in text, as Flower writes it; what is none is nobody's."""
    return key.decode("ascii", errors="replace")


def _pull(grid: Grid, open_: Iterable[str]) -> list[Message]:
    return list(grid.pull_messages(list(open_)))


# Bytes -----------------------------------------------------------------------------------------


def _record(frame: bytes) -> RecordDict:
    """A letter as Flower carries it: in an array, which it cuts into pieces where it is large."""
    # A byte in front: an array may not be empty.
    data = b"!" + frame
    array = Array(dtype="bytes", shape=(len(data),), stype="privssl.letter", data=data)
    return RecordDict({"letter": ArrayRecord({"letter": array})})


def _frame(message: Message) -> bytes:
    record: Any = message.content.get("letter")
    try:
        return bytes(record["letter"].data[1:])
    except (KeyError, TypeError, AttributeError):
        return b""


def _send(wire: socket.socket, data: bytes) -> None:
    wire.sendall(len(data).to_bytes(8, "little") + data)


def _receive(wire: socket.socket) -> bytes:
    return _exactly(wire, int.from_bytes(_exactly(wire, 8), "little"))


def _exactly(wire: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = wire.recv(min(_CHUNK, size - len(data)))
        if not piece:
            raise OSError("the other side is gone")
        data += piece
    return bytes(data)
