"""A site: the process that holds one agent's rows on a machine of its own.

    settings.py           SITE.yaml, the operator's file: agent, rows, budget
    startup.py            from SITE.yaml and the experiment's config to a request handler
    socket_server.py      the Unix socket for requests and replies
    request_handler.py    one request: check, charge, run, store, reply
    storage.py            replies and memories on disk
    supernode.py          Flower's process that relays messages, inside sandbox.py

Everything that the privacy claim depends on (noise, steps, networks, budget) comes from the
operator's own files, never from a request. A coordinator with another config is refused. The site
knows no network, and whatever relays its messages is untrusted; docs/deploy.md states the limits.
"""
