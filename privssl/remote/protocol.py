"""What passes between a coordinator and a site: letters, as bytes that are read and never run.

    8 bytes    "privssl" and the number of this format
    4 bytes    the size of the header, little-endian
    header     canonical JSON (accounting/canonical_json.py), at most 64 KiB: what kind of letter,
               from which version of privssl, and its fields
    body       the rest: a message as ``messages.pack`` makes it (safetensors), or nothing

Whoever reads a letter decides what can come out of it: the fields below and no others, of the
given forms. Tensors travel as their own bytes, bfloat16 as well. A letter of another version of
privssl is refused with that word before anything else of it is looked at: the same step may be
another one there.

A visit is known by its ``id``, a hash over everything but its deadline. The same id is the same
work, so that a letter which comes twice is answered twice and done once.

What a site says of an error is one word out of ``ERROR_CODES``. A text could tell of rows.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from accounting.canonical_json import Json, decode, encode, only_keys, read_real, real
from accounting.errors import PlanError
from privssl import __version__
from privssl.settings.schema import strict

FORMAT = 1
_MAGIC = b"privssl"
_START = len(_MAGIC) + 1 + 4  # bytes before the header
MAX_HEADER_BYTES = 1 << 16

#: Every word that a site may answer with instead of a reply, and what it means to a coordinator.
ERROR_CODES: Mapping[str, str] = {
    "busy": "it is still at another visit",
    "late": "the visit came after its deadline, and was neither done nor charged. If that is so "
    "at once, compare the clocks of both machines",
    "refused": "the visit is not one that its agent, role or algorithm has",
    "version": "it has another version of privssl. Install the same one on both sides",
    "config": "it has another config, or another task. Compare its config with this one",
    "lost": "the visit was charged and broke off, and is never done again",
    "failed": "the step broke off with an error. Its own log has which",
    "diverged": "training came to numbers that are not finite. Lower the learning rate",
    "forgotten": "it no longer has what it remembered after the visit that this one builds on. "
    "Raise its keep_visits, or write checkpoints more often",
    "ledger": "its ledger is missing, damaged, in use or cannot be written. Its log has which",
    "disk": "it cannot write its files. Make room there",
    "data": "its rows are missing or damaged, or are not those that it had. Its log has which",
}

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MemoryVersion = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
RunName = Annotated[str, Field(pattern=r"^[0-9a-z]{1,32}$")]
CHARGE_ID_DIGITS = 32  # hex digits of a visit's id that stand in the ledger
#: What an agent notes is named under ``train/``: no site writes over a measure of the coordinator.
NOTE = r"^train/[A-Za-z0-9_/-]{1,64}$"
NoteName = Annotated[str, Field(pattern=NOTE)]
#: In a mean: the rows of a large site. One that names more would be all of the mean by itself.
MOST_SHARE = 1e6
Number = Annotated[int, Field(ge=0, le=10**9)]


class WireError(Exception):
    """Bytes are not a letter that can be read here; ``error_code`` is one of ERRORS."""

    def __init__(self, error_code: str, text: str) -> None:
        super().__init__(text)
        self.error_code = error_code


@dataclass(frozen=True, config=strict)
class IdentifyRequest:
    """To a site: who are you? Costs nothing and changes nothing."""


@dataclass(frozen=True, config=strict)
class Identity:
    """What a site says of itself. Nothing in it follows from rows but its role."""

    agent: AgentName
    role: Annotated[str, Field(pattern="^(support|query|mixed)$")]
    agreement: Digest  # config.agreement: of what both sides must have alike
    shows_ledger: bool  # at the end; without labels under a budget there is none to show


@dataclass(frozen=True, config=strict)
class StepRequest:
    """To a site: one whole visit of its agent."""

    run: RunName
    agreement: Digest
    agent: AgentName
    round: Number
    step: Name
    visit: Annotated[int, Field(ge=1, le=10**9)]
    memory: MemoryVersion  # of the visit after which the agent remembers what this one begins with
    message: Name  # class of the message in the body
    deadline: Annotated[int, Field(ge=0, le=10**12)]  # Unix time in seconds
    body: bytes

    @property
    def id(self) -> str:
        """Names this work: SHA-256 over all but the deadline, as hex digits."""
        header = {k: v for k, v in vars(self).items() if k not in ("deadline", "body")}
        return hashlib.sha256(encode(header) + hashlib.sha256(self.body).digest()).hexdigest()

    @property
    def charge_id(self) -> str:
        """The part of its id that stands in the ledger."""
        return self.id[:CHARGE_ID_DIGITS]


@dataclass(frozen=True, config=strict)
class StepResponse:
    """From a site: the reply to a visit, or the word for why there is none."""

    id: MemoryVersion  # of the visit; empty where it could not be read
    error: Annotated[str, Field(max_length=16)] = ""
    message: Annotated[str, Field(pattern=r"^([A-Za-z][A-Za-z0-9_]{0,63})?$")] = ""
    weight: float = 1.0  # 1 where the visit was charged
    notes: Mapping[NoteName, float] = dataclasses.field(default_factory=dict)
    memory: MemoryVersion = ""  # the token under which the agent's memory is now known
    charged: bool = False  # whether the agent's ledger has paid for it
    body: bytes = b""


@dataclass(frozen=True, config=strict)
class EndOfRun:
    """To a site: a run stops, so show your ledger; if it is over, what is stored of it can go."""

    run: RunName
    agreement: Digest
    over: bool


@dataclass(frozen=True, config=strict)
class LedgerResponse:
    """From a site that takes leave: its journal, where its operator lets it be seen."""

    agent: AgentName
    body: bytes = b""  # the journal as it is; empty: there is none, or it is not shown


Frame = IdentifyRequest | Identity | StepRequest | StepResponse | EndOfRun | LedgerResponse
#: Names on the wire are part of the format, those of the classes are not.
_KINDS: Mapping[str, type[Any]] = {
    "Hello": IdentifyRequest,
    "Introduction": Identity,
    "Visit": StepRequest,
    "Answer": StepResponse,
    "Farewell": EndOfRun,
    "Account": LedgerResponse,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_bytes(frame: Frame) -> bytes:
    """A letter as bytes."""
    fields = dict(vars(frame))
    body = fields.pop("body", b"")
    if isinstance(frame, StepResponse):
        fields["weight"] = real(frame.weight)
        fields["notes"] = {name: real(value) for name, value in frame.notes.items()}
    about = {"letter": _NAMES[type(frame)], "privssl": __version__, "fields": fields}
    header = encode(about)
    start = _MAGIC + bytes([FORMAT]) + len(header).to_bytes(4, "little")
    return b"".join((start, header, body))


def from_bytes(data: bytes, *expected: type[Frame]) -> Any:
    """The letter in the bytes, one of the expected kinds.

    Raises:
        WireError: it is none, not of these kinds, or of another version of privssl.
    """
    about, body = _opened(data)
    if about.get("privssl") != __version__:
        other = about.get("privssl")
        raise WireError("version", f"a letter of privssl {other!r:.20}, this is {__version__}")
    try:
        only_keys(about, {"letter", "privssl", "fields"}, "letter")
        kind = _KINDS[about["letter"]]
        if kind not in expected:
            raise WireError("refused", f"a letter of kind {kind.__name__}, not asked for here")
        return kind(**_values(kind, about["fields"], body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WireError("refused", f"a letter whose {where} is not in form") from None
    except (PlanError, LookupError, TypeError, AttributeError) as error:
        raise WireError("refused", f"not a letter: {error}") from None


def _values(kind: type[Any], fields: Json, body: bytes) -> Json:
    """What the dataclass of a letter is made from."""
    names = {spec.name for spec in dataclasses.fields(kind)}
    if not isinstance(fields, dict):
        raise PlanError("its fields are no object")
    only_keys(fields, names - {"body"}, kind.__name__)
    values = dict(fields)
    if kind is StepResponse:
        values["weight"] = read_real(values["weight"], "weight")
        values["notes"] = {name: read_real(v, "a note") for name, v in values["notes"].items()}
    if "body" in names:
        return {**values, "body": body}
    if body:
        raise PlanError("bytes behind a letter that has no body")
    return values


def _opened(data: bytes) -> tuple[Json, bytes]:
    """Header and body. What only an older or newer format can read is of another version."""
    if len(data) < _START or not data.startswith(_MAGIC):
        raise WireError("refused", "not a letter of privssl")
    if data[len(_MAGIC)] != FORMAT:
        raise WireError("version", f"a letter in format {data[len(_MAGIC)]}, this reads {FORMAT}")
    size = int.from_bytes(data[_START - 4 : _START], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - _START):
        raise WireError("refused", f"a letter that states a header of {size} bytes")
    try:
        return decode(data[_START : _START + size]), data[_START + size :]
    except PlanError as error:
        raise WireError("refused", f"not a letter: {error}") from None
