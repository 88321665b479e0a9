"""What makes rows look as if something went wrong on the way to them: equal ones, odd ranges.

Nothing here refuses; each finding is a warning, once, with numbers.
"""

import logging
from typing import Any

from numpy.typing import NDArray

from privssl.data.npz import NO_LABEL, Arrays

log = logging.getLogger("privssl")


def warn_of_equal_rows(where: object, arrays: Arrays) -> None:
    """Warn of training rows that are all equal, or equal with different labels, or test rows."""
    train, test = _hashes(arrays.x_train), _hashes(arrays.x_test)
    known = set(train)
    if seen := sum(row in known for row in test):
        log.warning(
            "%s: %d of %d test rows are training rows as well, so test accuracy says too much. "
            "Remove them from one of the two.",
            where, seen, len(test),
        )  # fmt: skip
    if len(train) > 1 and len(set(train)) == 1:
        log.warning(
            "%s: all %d training rows are equal, so nothing can be learned. Look at what was read.",
            where, len(train),
        )  # fmt: skip
        return
    labels: dict[int, set[int]] = {}
    for row, label in zip(train, arrays.y_train.tolist(), strict=True):
        labels.setdefault(row, set()).update({label} - {NO_LABEL})
    torn = sum(len(labels[row]) > 1 for row in train)
    if torn:
        log.warning(
            "%s: %d of %d training rows are equal to rows of another class. Remove doubled rows, "
            "or mend their labels.",
            where, torn, len(train),
        )  # fmt: skip


def _hashes(x: NDArray[Any]) -> list[int]:
    """A number for each row; two rows of one number are equal but for a chance of 2^-64."""
    return [hash(row.tobytes()) for row in x]
