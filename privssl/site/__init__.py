"""A site: the process that holds one agent's rows on its own machine.

    settings.py           SITE.yaml, the operator's file: agent, rows, budget
    startup.py            from SITE.yaml and the experiment's config to a request handler
    socket_server.py      the Unix socket for requests and replies
    request_handler.py    one request: check, charge, run, store, reply
    storage.py            replies and memories on disk
    supernode.py          Flower's process that relays messages, inside sandbox.py

Everything that the guarantee depends on (noise, steps, networks, budget) comes from the operator's
own files, never from a request. A coordinator with another config is refused. The site does not use
the network, and the relay of its messages is untrusted; docs/deploy.md states the limits.
"""
