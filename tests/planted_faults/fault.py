"""What a planted fault is: a few lines of the package in other words, and who has to notice."""

from dataclasses import dataclass

Edit = tuple[str, str, str]  # file, text that is there exactly once, text in its place


@dataclass(frozen=True)
class Fault:
    """One mistake that an author could make.

    Args:
        name: in a few words.
        edits: made together.
        tests: every one of them fails.
        seen_by_attack: whether ``audit --empirical`` is not CONSISTENT any more, on a run that was
            trained with the fault. Those that it cannot see are listed in docs/privacy.md.
        protect: the networks that this run protects.
    """

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    seen_by_attack: bool
    protect: str = "F"
