"""What test_ledger.py shares with other tests."""

from typing import Any

from accounting.canonical_json import encode
from accounting.journal import FIRST_PREV, line_hash

# --- tampering ---------------------------------------------------------------------------------


def rebuilt(lines: list[dict[str, Any]]) -> bytes:
    """The lines with a fresh, valid chain: what somebody with the file in hand can do."""
    out, previous = b"", FIRST_PREV
    for number, line in enumerate(lines):
        record = {**line, "seq": number, "prev": previous}
        text = encode(record)
        previous = line_hash(text)
        out += text + b"\n"
    return out
