"""Canonical JSON: one encoding per record, and a reader that refuses every other.

Sorted keys, no spaces, UTF-8, one line, without raw reals: a real is an object with its decimal
text and its exact bits (``float.hex``). The reader refuses NaN and Infinity, duplicate keys,
integers beyond 53 bits and any text that the writer would not have produced.
:func:`decode_strictly` reads other JSON, with raw reals.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from accounting.errors import PlanError

Json = dict[str, Any]

MAX_LINE_BYTES = 1 << 16
MAX_INTEGER = 1 << 53  # beyond it other JSON readers lose digits


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode a record as canonical bytes, without a newline."""
    form: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    return json.dumps(record, sort_keys=True, **form).encode()


def decode(line: bytes) -> Json:
    """Read one canonical record.

    Raises PlanError for bytes that :func:`encode` would not have written.

    >>> decode(b'{"count":2}')
    {'count': 2}
    """
    if len(line) > MAX_LINE_BYTES:
        raise PlanError(f"a record of {len(line)} bytes; at most {MAX_LINE_BYTES} are read")
    record = decode_strictly(line, parse_float=_refuse_real)
    try:
        is_canonical = encode(record) == line
    except (ValueError, RecursionError):
        is_canonical = False
    if not is_canonical:
        raise PlanError("not in canonical form: keys sorted, no spaces, plain UTF-8")
    return record


def finite(text: str) -> float:
    """Parse a decimal number. Raises PlanError beyond the range of floats (1e999 would be
    Infinity)."""
    number = float(text)
    if not math.isfinite(number):
        raise PlanError(f"{text[:40]} is beyond the numbers that are read")
    return number


def bounded(text: str) -> int:
    """Parse an integer. Raises PlanError beyond 53 bits, where other readers lose digits."""
    if len(text) > 17 or abs(int(text)) > MAX_INTEGER:
        raise PlanError(f"an integer of {len(text)} digits is out of range")
    return int(text)


def decode_strictly(text: bytes, *, parse_float: Callable[[str], float] = finite) -> Json:
    """Read one JSON object without NaN, Infinity, duplicate keys, huge numbers or lone surrogates.

    Raises PlanError for anything else.
    """
    try:
        value = json.loads(
            text.decode(), object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant,
            parse_float=parse_float, parse_int=bounded,
        )  # fmt: skip
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates fail here
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not a JSON record ({error})") from error
    if not isinstance(value, dict):
        raise PlanError("not a JSON object")
    return value


def real(number: float) -> Json:
    """Encode a finite real number as decimal text and exact bits.

    >>> real(0.1)
    {'decimal': '0.1', 'hex': '0x1.999999999999ap-4'}
    """
    return {"decimal": repr(float(number)), "hex": float(number).hex()}


def read_real(value: object, where: str) -> float:
    """Read a number written by :func:`real`. Raises PlanError for anything else."""
    try:
        if not isinstance(value, dict) or value != real(number := float.fromhex(value["hex"])):
            raise PlanError(f"{where}: decimal and hex do not name the same number")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{where}: not a number with decimal and hex") from error
    if not math.isfinite(number):
        raise PlanError(f"{where}: not a finite number")
    return number


def only_keys(record: Mapping[str, Any], keys: set[str], where: str) -> None:
    """Raise PlanError unless the record has exactly these keys."""
    if set(record) != keys:
        raise PlanError(f"{where}: has keys {sorted(record)}, should have {sorted(keys)}")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> Json:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise PlanError("a key is given twice")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise PlanError(f"{name} is not a number")


def _refuse_real(text: str) -> NoReturn:
    raise PlanError(f"a raw real number ({text[:40]}); reals are written as decimal and hex")
