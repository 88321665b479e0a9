"""Fields of a table as text: missing values, numbers, equality, and warnings about columns."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

BY_CHANCE = 1e-4  # largest probability of a warning by chance
ABSENT = {"", "na", "n/a", "nan", "null", "none", "<na>"}  # missing numbers, in lower case
ADVICE = "Leave it out (data.columns; Python: columns=)"
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?(\D.*)?|\d\d?[./]\d\d?[./]\d{4}(\D.*)?")
_COMMA = re.compile(r"[+-]?\d+,\d+")


def is_absent(value: str) -> bool:
    """Return whether a number is missing."""
    return value.strip().lower() in ABSENT


def is_number(value: str) -> bool:
    """Return whether a field is a number, which may be infinite or NaN."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def plain(value: str) -> str:
    """Normalise a field, so that equal values have equal texts.

    Equal are 1 and 1.0, an empty field and NA, True and true, and fractions that are equal in
    single precision, as in frames.
    """
    if is_absent(value):
        return ""
    if not is_number(value):
        return value.casefold()
    number = float(value)  # an integer may be an id, which single precision would round
    return repr(number if number.is_integer() else float(np.float32(number)))


def places_of(values: Sequence[str], categories: Sequence[str]) -> list[int]:
    """Return the index of each value in the categories; -1 if absent.

    Other spellings are found by their normal form, if exactly one category has that form.
    """
    forms = [plain(category) for category in categories]
    by_form = {form: index for index, form in enumerate(forms) if form and forms.count(form) == 1}
    by_category = {category: index for index, category in enumerate(categories)}
    return [by_category[v] if v in by_category else by_form.get(plain(v), -1) for v in values]


def class_number(label: str, numbers: Mapping[str, int]) -> int | None:
    """Return the number of a class by its name; None if there is no such class. 1 and 1.0 are one
    name: pandas writes integers beside a missing one as 1.0."""
    if label in numbers or not is_number(label):
        return numbers.get(label)
    return numbers.get(label.removesuffix(".0"), numbers.get(f"{label}.0"))


def doubled(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the first two names that differ only in spelling: yes and Yes, or 1 and 1.0."""
    first: dict[str, str] = {}
    for name in names:
        if (other := first.setdefault(plain(name) or name, name)) != name:
            return other, name
    return None


def odd_numbers(values: Sequence[float]) -> str:
    """Return a warning about the numbers of a column, with advice; or an empty string."""
    if all(value.is_integer() for value in values) and len(set(values)) == len(values):
        return f"has another whole number in each row. {ADVICE} if it numbers rows or people"
    return ""


def odd_categories(values: Sequence[str]) -> str:
    """Return a warning about the categories of a column, with advice; or an empty string."""
    present = [value.strip() for value in values if not is_absent(value)]
    if present and all(map(_DATE.fullmatch, present)):
        return (
            "has dates. Each would be a category of its own, and other dates none: give a number, "
            "such as the days since a fixed date, or leave it out"
        )
    if present and all(_COMMA.fullmatch(value) or is_number(value) for value in present):
        return f"has numbers with a comma, such as {present[0]!r}. Write them with a point"
    if 2 * len(set(values)) > len(values):
        return (
            f"has {len(set(values))} different values in {len(values)} rows: an identifier cannot "
            f"help on other rows. {ADVICE}, or set data.text if it is a text"
        )
    return ""


def tells_classes(values: Sequence[str], labels: Sequence[str]) -> bool:
    """Return whether a column alone determines every label, and not by chance. Either equal values
    have one class, or the class changes as rarely as possible along sorted numbers."""
    labelled = [(value, label) for value, label in zip(values, labels, strict=True) if label]
    pairs, classes = set(labelled), Counter(label for _, label in labelled)
    if len({value for value, _ in pairs}) < len(pairs) or len(classes) < 2:
        return False  # a value with two classes, or a single class
    log_ways = len(pairs) * math.log(len(classes))  # log of the number of assignments
    if all(is_number(value) for value, _ in pairs):
        ordered = sorted(labelled, key=lambda pair: float(pair[0]))
        if len([*groupby(label for _, label in ordered)]) == len(classes):
            log_ways = min(log_ways, math.lgamma(len(classes) + 1))  # of the orders of classes
    log_total = math.lgamma(len(labelled) + 1) - sum(math.lgamma(n + 1) for n in classes.values())
    return log_ways - log_total < math.log(BY_CHANCE)
