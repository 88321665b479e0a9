"""A site: where one agent's rows are, on a machine of its own. It takes letters and gives letters.

    settings/schema.py   the operator's file SITE.yaml: who, which rows, which budget
    site/startup.py    from that file and the config of the experiment to a site that can answer
    site/socket_server.py       the socket through which letters come and answers go
    site/request_handler.py       what a site does with one letter: check, charge, work, store,
    answer
    site/storage.py      replies and memories on its disk, and one process at a time

A site trusts nobody. What its claim depends on (noise, steps, networks, budget) comes from the
operator's own files, never from a letter, and a coordinator whose config differs in one bit gets
no visit. It knows no network: whoever carries the letters need not be trusted with more than the
letters. What a carrier of code could do is another matter: docs/deploy.md.
"""
