"""The pages that are written from the store."""

from collections.abc import Sequence
from pathlib import Path

from privssl.errors import UserError
from privssl.reproduce.store import Store
from privssl.reproduce.tables import Table


def render(tables: Sequence[Table], store: Store, root: Path) -> list[Path]:
    """Write all pages; returns their paths."""
    raise UserError("--render is not there yet")
