"""Fields of a table as text: which are absent, numbers or equal, and what is odd about a column."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

BY_CHANCE = 1e-4  # at most, of what a column tells
ABSENT = {"", "na", "n/a", "nan", "null", "none", "<na>"}  # a missing number, in small letters
ADVICE = "Leave it out (data.columns; Python: columns=)"
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?(\D.*)?|\d\d?[./]\d\d?[./]\d{4}(\D.*)?")
_COMMA = re.compile(r"[+-]?\d+,\d+")


def is_absent(value: str) -> bool:
    """Whether a number is missing."""
    return value.strip().lower() in ABSENT


def is_number(value: str) -> bool:
    """Whether a field is a number, which may be infinite or NaN."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def plain(value: str) -> str:
    """A field in one form: equal are 1 and 1.0, an empty field and NA, True and true, and numbers
    with a fraction that are equal in single precision, as frames may have them."""
    if is_absent(value):
        return ""
    if not is_number(value):
        return value.casefold()
    number = float(value)  # a whole one may be an id, which single precision would round
    return repr(number if number.is_integer() else float(np.float32(number)))


def places_of(values: Sequence[str], categories: Sequence[str]) -> list[int]:
    """The place of each value in the categories; -1: it is none of them. One that is spelt
    otherwise is found by its plain form, if a single category has that form."""
    forms = [plain(category) for category in categories]
    places = {form: at for at, form in enumerate(forms) if form and forms.count(form) == 1}
    exact = {category: at for at, category in enumerate(categories)}
    return [exact[v] if v in exact else places.get(plain(v), -1) for v in values]


def class_number(label: str, numbers: Mapping[str, int]) -> int | None:
    """The number of a class by its name; None: there is no such class. 1 and 1.0 are one name:
    pandas writes whole numbers beside a missing one as 1.0."""
    if label in numbers or not is_number(label):
        return numbers.get(label)
    return numbers.get(label.removesuffix(".0"), numbers.get(f"{label}.0"))


def doubled(names: Sequence[str]) -> tuple[str, str] | None:
    """The first two names that differ in spelling alone, as yes and Yes do, or 1 and 1.0."""
    first: dict[str, str] = {}
    for name in names:
        if (other := first.setdefault(plain(name) or name, name)) != name:
            return other, name
    return None


def odd_numbers(values: Sequence[float]) -> str:
    """What is odd about the numbers of a column, and what to do; or empty."""
    if all(value.is_integer() for value in values) and len(set(values)) == len(values):
        return f"has another whole number in each row. {ADVICE} if it numbers rows or people"
    return ""


def odd_categories(values: Sequence[str]) -> str:
    """What is odd about the values of a column without numbers, and what to do; or empty."""
    there = [value.strip() for value in values if not is_absent(value)]
    if there and all(map(_DATE.fullmatch, there)):
        return (
            "has dates. Each would be a category of its own, and other dates none: give a number, "
            "such as the days since a fixed date, or leave it out"
        )
    if there and all(_COMMA.fullmatch(value) or is_number(value) for value in there):
        return f"has numbers with a comma, such as {there[0]!r}. Write them with a point"
    if 2 * len(set(values)) > len(values):
        return (
            f"has {len(set(values))} different values in {len(values)} rows: an identifier cannot "
            f"help on other rows. {ADVICE}, or set data.text if it is a text"
        )
    return ""


def tells_classes(values: Sequence[str], labels: Sequence[str]) -> bool:
    """Whether a column alone tells the class of every row with a label, and not by chance: equal
    values have one class, or numbers in their order change it as rarely as they can."""
    known = [(value, label) for value, label in zip(values, labels, strict=True) if label]
    pairs, classes = set(known), Counter(label for _, label in known)
    if len({value for value, _ in pairs}) < len(pairs) or len(classes) < 2:
        return False  # a value with two classes, or a single class
    ways = len(pairs) * math.log(len(classes))  # classes for each value
    if all(is_number(value) for value, _ in pairs):
        order = sorted(known, key=lambda pair: float(pair[0]))
        if len([*groupby(label for _, label in order)]) == len(classes):
            ways = min(ways, math.lgamma(len(classes) + 1))  # orders of the classes
    every = math.lgamma(len(known) + 1) - sum(math.lgamma(n + 1) for n in classes.values())
    return ways - every < math.log(BY_CHANCE)
