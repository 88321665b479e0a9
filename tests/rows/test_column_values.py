"""From a table's numbers back to values in their own units."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from privssl.data.column_values import read_scales, snap_to_columns, values_of
from privssl.data.csv_rows import numbers_of, part_of
from privssl.data.npz import Scale

SCALES: dict[str, Scale] = {
    "age": (18.0, 90.0),
    "weight": (30.0, 200.0, "missing"),
    "colour": ("red", "green", "a, b"),
    "smokes": ("no", "yes"),
}
WIDTH = 1 + 2 + 3 + 2


def encoded(values: Mapping[str, Sequence[object]]) -> NDArray[np.float32]:
    texts = {n: ["" if v is None else str(v) for v in column] for n, column in values.items()}
    return numbers_of(part_of("rows", texts, "", range(len(texts["age"]))), SCALES)


def test_values_are_those_that_the_numbers_were_made_of() -> None:
    values: dict[str, list[Any]] = {
        "age": [18.0, 90.0, 36.5],
        "weight": [None, 200.0, 31.0],
        "colour": ["green", "red", "a, b"],
        "smokes": ["no", "yes", "yes"],
    }
    back = values_of(encoded(values), SCALES)
    assert {name: back[name] for name in ("colour", "smokes")} == {
        name: values[name] for name in ("colour", "smokes")
    }
    assert back["age"] == pytest.approx(values["age"], abs=1e-4)
    assert back["weight"][0] is None
    assert back["weight"][1:] == pytest.approx(values["weight"][1:], abs=1e-4)


def test_any_numbers_become_the_nearest_line_of_a_table_by_hand() -> None:
    x = np.array([[1.7, 0.4, 0.1, -0.2, 0.3, 0.1, -3.0, -2.0]], dtype=np.float32)
    snapped = snap_to_columns(x, SCALES)
    # age is cut, weight is missing (0 and 1), green and yes are the largest of their columns
    assert snapped.tolist() == [[1, 0, 1, -1, 1, -1, -1, 1]]
    assert x[0, 0] == np.float32(1.7)  # the input is not changed
    assert values_of(x, SCALES) == {
        "age": [90.0], "weight": [None], "colour": ["green"], "smokes": ["yes"],
    }  # fmt: skip


def test_a_category_that_is_none_of_the_column_stays_none() -> None:
    values: dict[str, list[Any]] = {
        "age": [20.0], "weight": [40.0], "colour": ["blue"], "smokes": ["no"]
    }  # fmt: skip
    assert encoded(values)[0, 3:6].tolist() == [-1, -1, -1]
    assert values_of(encoded(values), SCALES)["colour"] == [None]
    assert np.array_equal(snap_to_columns(encoded(values), SCALES), encoded(values))


@given(st.lists(st.floats(-3, 3, width=32), min_size=WIDTH, max_size=WIDTH))
def test_values_read_as_a_table_give_the_same_numbers(numbers: list[float]) -> None:
    x = np.array([numbers], dtype=np.float32)
    snapped = snap_to_columns(x, SCALES)
    assert np.array_equal(snap_to_columns(snapped, SCALES), snapped)
    assert encoded(values_of(x, SCALES)) == pytest.approx(snapped, abs=1e-5)


def test_no_rows_have_no_values() -> None:
    empty = np.zeros((0, WIDTH), dtype=np.float32)
    assert values_of(empty, SCALES) == {name: [] for name in SCALES}


def test_columns_are_read_from_results_and_other_rows_have_none() -> None:
    assert read_scales({"columns": {"age": [18.0, 90.0], "c": ["a", "b"]}}) == {
        "age": (18.0, 90.0), "c": ("a", "b"),
    }  # fmt: skip
    assert read_scales({"shape": [30]}) is None
