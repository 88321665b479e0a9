"""What a planted fault is: a few lines of the product in other words, and who has to notice."""

from dataclasses import dataclass
from pathlib import Path

Edit = tuple[str, str, str]  # file, text that is there exactly once, text in its place

ROOT = Path(__file__).parents[2]


class StaleFaultError(Exception):
    """The product has changed: a fault's old text is no longer there exactly once."""


@dataclass(frozen=True)
class Fault:
    """One mistake that an author could make.

    Args:
        name: in a few words.
        edits: made together, in this order.
        tests: fast ones, by node id; every one of them fails.
        seen_by_attack: whether ``audit --empirical`` is not CONSISTENT any more, on a run that was
            trained with the fault. Those that it cannot see are listed in docs/privacy.md. None:
            it is no fault of private training, and no attack is made.
        protect: the networks that this run protects.
    """

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    seen_by_attack: bool | None = None
    protect: str = "F"

    def sources(self, tree: Path) -> tuple[dict[str, str], dict[str, str]]:
        """Its files in a tree as they are, and with its edits.

        Raises:
            StaleFaultError: an old text is not there exactly once.
        """
        before = {path: (tree / path).read_text(encoding="utf-8") for path, _, _ in self.edits}
        after = dict(before)
        for path, old, new in self.edits:
            if (count := after[path].count(old)) != 1 or old == new:
                raise StaleFaultError(f"{self.name}: {path} has {count} times\n{old}")
            after[path] = after[path].replace(old, new)
        return before, after
