"""Bounds and categories of a table's columns, declared in a file (``data.columns``) or in Python.

    age: [18, 90]                 lowest, highest
    weight: [30, 200, missing]    values may be missing
    colour: ["red", "green"]      categories

Read by the rules of config files: a column that is declared twice is an error.
"""

import math
from pathlib import Path

from privssl.data.npz import Scale
from privssl.errors import DataError
from privssl.settings.yaml_reader import ExponentText, YamlError, read_document

MISSING = "missing"  # third in the scale of a numeric column that may lack values


def read_columns(path: Path, label: str) -> dict[str, Scale]:
    """The declarations of a file. Raises DataError."""
    try:
        found = read_document(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Correct data.columns") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text. Save it as UTF-8") from None
    except YamlError as error:
        raise DataError(f"{path}, line {error.line}: cannot be read as YAML: {error}") from None
    if found.problems:
        first = found.problems[0]
        raise DataError(f"{path}, line {first.line}: {first.key}: {first.text}")
    return check_scales(path, _with_numbers(found.value), label)


def _with_numbers(found: object) -> object:
    """The value of a document, in which 1e6 is a number where it is a bound."""
    if not isinstance(found, dict):
        return found
    return {
        name: _bounds(values) if isinstance(values, tuple) else values
        for name, values in found.items()
    }


def _bounds(values: tuple[object, ...]) -> list[object]:
    if not all(isinstance(value, int | float | ExponentText) for value in values[:2]):
        return list(values)
    return [float(value) if isinstance(value, ExponentText) else value for value in values]


def check_scales(path: object, found: object, label: str) -> dict[str, Scale]:
    """Declared bounds and categories, as of a file. Raises DataError."""
    if not isinstance(found, dict) or not found:
        raise DataError(f"{path}: give a line for each column, name: [lowest, highest]")
    scales: dict[str, Scale] = {}
    for name, values in found.items():
        bounds = values[:2] if isinstance(values, list | tuple) else ()
        numbers = len(bounds) == 2 and all(type(v) in (int, float) for v in bounds)
        lacks = values[2:] if numbers else ()
        known = list(lacks) in ([], [MISSING])
        if numbers and known and -math.inf < bounds[0] < bounds[1] < math.inf:
            low, high = map(float, bounds)
            scales[str(name)] = (low, high, MISSING) if lacks else (low, high)
        elif (
            isinstance(values, list | tuple) and values and all(isinstance(v, str) for v in values)
        ):
            if twice := sorted({v for v in values if list(values).count(v) > 1}):
                raise DataError(f"{path}: {name} has the category {twice[0]!r} twice. Drop one")
            scales[str(name)] = tuple(map(str, values))
        else:
            raise DataError(
                f"{path}: {name} is {values!r}. Give [lowest, highest], two finite numbers, with "
                f"{MISSING} as a third where values may be, or a list of categories in quotes"
            )
    if label in scales:
        raise DataError(f"{path} declares {label}, which is data.label. Leave it out")
    return scales
