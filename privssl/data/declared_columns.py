"""Bounds and categories of a table's columns, declared in a file (``data.columns``) or in Python.

    age: [18, 90]                 lowest, highest
    weight: [30, 200, missing]    values may be missing
    colour: ["red", "green"]      categories

The file follows the rules of config files: duplicate columns are an error.
"""

import math
from pathlib import Path

from privssl.data.npz import Scale
from privssl.errors import DataError
from privssl.settings.yaml_reader import ExponentText, YamlError, read_document

MISSING = "missing"  # third value in the scale of a numeric column that may lack values
NUMBERS = (int, float, ExponentText)  # types of bounds, where 1e6 is a number


def read_columns(path: Path, label: str) -> dict[str, Scale]:
    """Read the declarations of a file. Raises DataError."""
    try:
        document = read_document(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Correct data.columns") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text. Save it as UTF-8") from None
    except YamlError as error:
        raise DataError(f"{path}, line {error.line}: cannot be read as YAML: {error}") from None
    if document.problems:
        problem = document.problems[0]
        raise DataError(f"{path}, line {problem.line}: {problem.key}: {problem.text}")
    return check_scales(path, document.value, label)


def check_scales(path: object, declared: object, label: str) -> dict[str, Scale]:
    """Check declared bounds and categories, from a file or Python. Raises DataError."""
    if not isinstance(declared, dict) or not declared:
        raise DataError(f"{path}: give a line for each column, name: [lowest, highest]")
    scales: dict[str, Scale] = {}
    for name, values in declared.items():
        entries = list(values) if isinstance(values, list | tuple) else []
        is_numeric = len(entries) > 1 and all(type(v) in NUMBERS for v in entries[:2])
        low, high = map(float, entries[:2]) if is_numeric else (0.0, 0.0)
        if -math.inf < low < high < math.inf and entries[2:] in ([], [MISSING]):
            scales[str(name)] = (low, high, MISSING) if entries[2:] else (low, high)
        elif entries and not is_numeric and all(isinstance(v, str) for v in entries):
            if repeated := sorted({v for v in entries if entries.count(v) > 1}):
                raise DataError(f"{path}: {name} has the category {repeated[0]!r} twice. Drop one")
            scales[str(name)] = tuple(map(str, entries))
        else:
            raise DataError(
                f"{path}: {name} is {entries or values!r}. Give [lowest, highest], two finite "
                f"numbers, with {MISSING} as a third where values may be, or a list of categories "
                "in quotes"
            )
    if label in scales:
        raise DataError(f"{path} declares {label}, which is data.label. Leave it out")
    return scales
