"""Persons: whose row a training row is, for splits and guarantees by person.

A person is a name or a number. All rows of one go to one agent, so settings of a split count
persons. Rows without persons are split one by one.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from privssl.core.agents import Agent, LabelledRows
from privssl.data.fields import is_absent
from privssl.errors import DataError

PREFIX = "person_"  # of arrays: person_train beside x_train


def read_persons(
    where: object, arrays: Mapping[str, NDArray[Any]], rows: Mapping[str, int]
) -> tuple[str, ...] | None:
    """Return the person of each row, part after part; None if the arrays name none.

    Args:
        where: their origin, for errors.
        arrays: by name; ``person_PART`` of each part, or of none.
        rows: part -> its number of rows.

    Raises:
        DataError: a part without persons beside one with them, or not one for each row.
    """
    given = [name.removeprefix(PREFIX) for name in arrays if name.startswith(PREFIX)]
    if not given:
        return None
    if set(given) != set(rows):
        names = ", ".join(PREFIX + part for part in rows)
        raise DataError(
            f"{where} has {', '.join(PREFIX + part for part in given)}, where its rows need "
            f"{names}. Give all of them, or none"
        )
    parts = [_names_of(where, part, arrays[PREFIX + part], n) for part, n in rows.items()]
    return tuple(chain.from_iterable(parts))


def _names_of(where: object, part: str, values: NDArray[Any], rows: int) -> tuple[str, ...]:
    if values.shape != (rows,) or (rows and values.dtype.kind not in "iuU"):
        raise DataError(
            f"{where}: {PREFIX}{part} is {values.dtype} of shape {values.shape}. Give one whole "
            f"number or name for each of the {rows} rows, equal for rows of one person"
        )
    return check_names(f"{where}: {PREFIX}{part}", map(str, values.tolist()))


def check_names(where: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return names of persons in one spelling: 7 is 7.0, and Ann is ann. Raises DataError for an
    absent one."""
    spelt = tuple(map(_spell, names))
    if "" in spelt:
        raise DataError(
            f"{where}: row {spelt.index('')} (from 0) has no person. Name one for each row; a row "
            "of nobody else's is a person of its own"
        )
    return spelt


def _spell(name: str) -> str:
    """Return a name in its usual spelling; empty if it is absent. 1.1 and 1.10 are two names.

    >>> _spell(" Ann  LEE"), _spell("007"), _spell("7.0"), _spell("1.10"), _spell("NaN")
    ('ann lee', '7', '7', '1.10', '')
    """
    normal = unicodedata.normalize("NFKC", name)
    visible = "".join(c for c in normal if unicodedata.category(c) != "Cf")
    text = " ".join(visible.split()).casefold()
    if whole := re.fullmatch(r"0*([0-9]+)(\.0+)?", text):
        return whole[1]
    return "" if is_absent(text) else text


def count_persons(persons: Sequence[str] | None, ids: Collection[int]) -> int:
    """Count the persons of some rows; the rows, if no persons are known."""
    return len(ids) if persons is None else len({persons[row] for row in ids})


def find_shared_person(
    agents: Iterable[Agent], validation: LabelledRows | None
) -> tuple[str, str] | None:
    """Return two places that both have rows of one person, if a labelled row is among them.

    Places are the labelled rows and the unlabelled rows of each agent, and validation rows.
    """
    places = [("the validation rows", validation)] if validation else []
    labelled = list[tuple[str, LabelledRows]]()
    others = [(name, set(rows.persons or ())) for name, rows in places]
    for agent in agents:
        if agent.held_labelled is not None:
            labelled.append((f"the labelled rows of {agent.id}", agent.held_labelled))
        if agent.held_unlabelled is not None:
            persons = set(agent.held_unlabelled.persons or ())
            others.append((f"the unlabelled rows of {agent.id}", persons))
    for name, rows in labelled:
        here = set(rows.persons or ())
        for other, there in others:
            if here & there:
                return name, other
        others.append((name, here))
    return None
