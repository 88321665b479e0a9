"""Repeated imports of our packages, without the seconds in which a new process loads torch.

Code runs in a fork of this process whose ``sys.modules`` lacks our packages.
"""

import sys
from collections.abc import Collection

from tests.support.transports import in_a_fork

OURS = ("privssl", "accounting", "generators")


def run_afresh(code: str, *, also: Collection[str] = ()) -> str:
    """Run code in a fork in which neither our packages nor those of ``also`` are imported.

    Returns:
        The value that the code assigned to ``said``, as a string.

    Raises:
        AssertionError: the code fails; its traceback is on standard error.
    """

    def work() -> bytes:
        forgotten = tuple(f"{name}." for name in (*OURS, *also))
        for name in [n for n in sys.modules if f"{n}.".startswith(forgotten)]:
            del sys.modules[name]
        names: dict[str, object] = {}
        exec(code, names)  # noqa: S102
        return str(names["said"]).encode()

    answer = in_a_fork(work)
    assert answer is not None, "the code failed"
    return answer.decode()
