"""The Flower app that relays messages between a coordinator and sites.

This is the only file that imports flwr. ``remote/flower_transport.py`` ships it to the SuperNodes
as ``relay.py``, with ``remote/framing.py`` beside it, so both need only flwr and Python, and no
other module imports this one.

    coordinator --- Unix socket --- server (ServerApp) --- Flower --- client (ClientApp) --- site

Messages are opaque here. The client gets the path of its site's socket from the site's operator
(``--node-config 'door="..."'``) and has no rows, budget or ledger. A failed relay gives no answer.

Replies are matched by the message that they answer, not by sender: an error that the SuperLink
reports for a node has the SuperLink's own node id.
"""

import json
import socket
import time
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from privssl.remote.framing import receive, send

POLL_SECONDS = 0.3

client = ClientApp()
server = ServerApp()


@client.query("relay")
def relay_to_site(message: Message, context: Context) -> Message:
    """Pass a message to the site and return its answer; empty if the site does not answer."""
    metadata = message.metadata
    seconds = max(1.0, metadata.created_at + metadata.ttl - time.time())
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(seconds)
            door.connect(str(context.node_config["door"]))
            send(door, _unwrap(message))
            answer = receive(door)
    except (OSError, KeyError):  # the reason is in the site's own log
        answer = b""
    return Message(_wrap(answer), reply_to=message)


@server.main()
def relay_server(grid: Grid, context: Context) -> None:
    """Serve the coordinator's requests until its socket closes.

    Requests are JSON: list the ``addresses`` of nodes with their public keys, or ``exchange`` the
    messages that follow.
    """
    with socket.socket(socket.AF_UNIX) as coordinator:
        coordinator.connect(str(context.run_config["coordinator"]))
        while True:
            try:
                request = json.loads(receive(coordinator))
            except OSError:
                return
            if request["do"] == "addresses":
                nodes = {
                    str(node.node_id): node.public_key.decode("ascii", errors="replace")
                    for node in grid.get_nodes()
                }
                send(coordinator, json.dumps(nodes, sort_keys=True).encode())
            else:
                frames = {address: receive(coordinator) for address in request["to"]}
                answers = _exchange(grid, frames, float(request["seconds"]))
                send(coordinator, json.dumps(list(answers)).encode())
                for answer in answers.values():
                    send(coordinator, answer)


def _exchange(grid: Grid, frames: dict[str, bytes], seconds: float) -> dict[str, bytes]:
    """Return the answers that arrive in time, by address."""
    deadline = time.monotonic() + seconds
    messages = [
        Message(_wrap(frame), dst_node_id=int(address), message_type="query.relay", ttl=seconds)
        for address, frame in frames.items()
    ]
    # Ids in the order of the messages; None: the node is not connected.
    pending: dict[Any, str] = dict(zip(grid.push_messages(messages), frames, strict=True))
    pending.pop(None, None)
    answers = {}
    while pending and time.monotonic() < deadline:
        for reply in grid.pull_messages(list(pending)):
            address = pending.pop(reply.metadata.reply_to_message_id, None)
            if address is not None and not reply.has_error() and (data := _unwrap(reply)):
                answers[address] = data
        if pending:
            time.sleep(POLL_SECONDS)
    return answers


def _wrap(frame: bytes) -> RecordDict:
    """Wrap bytes in an array, which Flower splits if it is large."""
    data = b"!" + frame  # an array may not be empty
    array = Array(dtype="bytes", shape=(len(data),), stype="privssl.frame", data=data)
    return RecordDict({"frame": ArrayRecord({"frame": array})})


def _unwrap(message: Message) -> bytes:
    record: Any = message.content.get("frame")
    try:
        return bytes(record["frame"].data[1:])
    except (KeyError, TypeError, AttributeError):
        return b""
