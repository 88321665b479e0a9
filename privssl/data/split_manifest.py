"""The split of a run as a file to check, show and replay: ``split.json``.

The file is one line of canonical JSON (keys sorted, no spaces) without paths. Its ``hash`` is the
SHA-256 of the rest, so runs with the same hash have the same split of the same data.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field, StrictStr
from pydantic.dataclasses import dataclass

from accounting.canonical_json import decode_strictly
from accounting.errors import PlanError
from privssl.data.datasets import Dataset, persons_checksum
from privssl.errors import DataError
from privssl.storage import atomic_files

SCHEMA = "privssl/split/1"
MAX_BYTES = 2**27  # ten million rows need about 90 MB

Whole = Annotated[int, Field(ge=0, strict=True)]
Rows = tuple[Whole, ...]
Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_exact = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_exact)
class AgentRows:
    """Ids of an agent's labelled and unlabelled rows: sorted, or in the order of ``data.order``."""

    labelled: Rows
    unlabelled: Rows


@dataclass(frozen=True, config=_exact)
class Manifest:
    """A split. Every row id occurs at most once.

    ``rows`` is the size N of the training set, ``settings`` those of the split (without folders of
    this machine), ``checksum`` that of the data set, ``persons`` that of the persons of its rows.
    """

    dataset: StrictStr
    checksum: Hex
    rows: Whole
    seed: Whole
    settings: Mapping[
        StrictStr,
        pydantic.StrictBool | pydantic.StrictInt | pydantic.StrictFloat | StrictStr | None,
    ]
    agents: Mapping[StrictStr, AgentRows]
    validation: Rows
    persons: Hex | None = None

    @cached_property
    def hash(self) -> str:
        """SHA-256 over everything, in hex."""
        return hashlib.sha256(_as_canonical_json(_as_json(self)).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the file, replacing an existing one. Raises DataError if it cannot be written."""
        try:
            # readable only by its owner: the file lists the labelled rows
            content = _as_canonical_json({**_as_json(self), "hash": self.hash}) + "\n"
            atomic_files.replace(path, content.encode())
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}") from None

    def check(self, dataset: Dataset, checksum: str) -> None:
        """Raise DataError unless this is a split of exactly these rows, with their checksum."""
        if (self.checksum, self.rows) != (checksum, len(dataset.y_train)):
            rows = len(dataset.y_train)  # errors omit the checksum: rows could be tried
            other = f"{rows} other ones" if rows == self.rows else rows
            raise DataError(
                f"the split was drawn for {self.dataset} with {self.rows} training rows, but "
                f"{dataset.name} here has {other}. Use the same data, or leave data.split out to "
                "draw a new split"
            )
        if self.persons != persons_checksum(dataset):
            raise DataError(
                f"the split was drawn for {self.dataset} with other persons, or without them. Give "
                "the same persons, or leave data.split out to draw a new split"
            )


def read_manifest(path: Path) -> Manifest:
    """Read a manifest, and check it without the data.

    Raises DataError if it is missing, not in this format, changed since it was written, or if a row
    id is out of range or duplicate.
    """
    content = _read_content(path)
    schema, stated_hash = content.pop("schema", None), content.pop("hash", None)
    if schema != SCHEMA:
        raise DataError(f"{path} is not a split.json of the form {SCHEMA}: its schema is {schema}")
    try:
        manifest = _FORM.validate_python(content)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        location = ".".join(map(str, problem["loc"])) or "top"
        raise DataError(f"{path} is not a split.json: {location}: {problem['msg']}") from None
    if stated_hash != manifest.hash:  # without the hash: labels could be tried
        raise DataError(
            f"{path} was changed after it was written: its content has another hash than it "
            "states. Take the original file"
        )
    _check_ids(path, manifest)
    return manifest


_FORM = pydantic.TypeAdapter(Manifest)


def _as_json(manifest: Manifest) -> dict[str, Any]:
    fields = {"schema": SCHEMA, **_FORM.dump_python(manifest)}
    if manifest.persons is None:  # as in versions without persons, so that hashes stay the same
        del fields["persons"]
    return fields


def _as_canonical_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read_content(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file: no duplicate keys, no NaN, bounded file and numbers."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise PlanError(f"it has more than {MAX_BYTES} bytes")
        return decode_strictly(text)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. data.split names a split.json") from None
    except PlanError as error:
        raise DataError(f"{path} is not a split.json: {error}") from None


def _check_ids(path: Path, manifest: Manifest) -> None:
    """Raise DataError if a row id is out of range or duplicate."""
    owners: dict[int, str] = {}
    holdings = [("validation", manifest.validation)]
    for agent, rows in manifest.agents.items():
        holdings += [(agent, rows.labelled), (agent, rows.unlabelled)]
    for owner, ids in holdings:
        for row in ids:
            if row >= manifest.rows:
                raise DataError(
                    f"{path}: {owner} holds the row {row}, but the data set has rows 0 to "
                    f"{manifest.rows - 1}"
                )
            if row in owners:
                raise DataError(
                    f"{path}: the row {row} is held by {owners[row]} and by {owner}. Each row may "
                    "occur once"
                )
            owners[row] = owner
