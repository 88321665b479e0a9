"""Messages between a coordinator and a site: bytes that are parsed and never executed.

    8 bytes    "privssl" and the number of this format
    4 bytes    the size of the header, little-endian
    header     canonical JSON (accounting/canonical_json.py), at most 64 KiB: the kind of message,
               the version of privssl, and the fields
    body       a message as ``messages.serialize`` writes it (safetensors), or nothing

The reader chooses the kinds that it accepts, and each kind has exactly the fields below. A message
of another version of privssl is refused before its fields are read.

Requests are idempotent: a step request is identified by a hash of everything but its deadline, and
a repeated request is answered from storage and executed once.

Sites report errors only as one of ``ERROR_CODES``, because a text could reveal rows.
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

FORMAT = 2
_MAGIC = b"privssl"
_START = len(_MAGIC) + 1 + 4  # bytes before the header
MAX_HEADER_BYTES = 1 << 16

#: Every error that a site may report, explained for the coordinator's operator.
ERROR_CODES: Mapping[str, str] = {
    "busy": "it is still running another step",
    "late": "the request came after its deadline, and was neither run nor charged. If this happens "
    "at once, compare the clocks of both machines",
    "refused": "its agent, role or algorithm has no such step",
    "version": "it has another version of privssl. Install the same one on both sides",
    "config": "it has another config, other classes, or rows of another shape or scaling. "
    "Compare its config, classes and rows with those here",
    "lost": "the step was charged and broke off, and is never run again",
    "failed": "the step raised an error. See the site's log",
    "diverged": "training produced numbers that are not finite. Lower the learning rate",
    "forgotten": "it no longer has the memory that this step builds on. Raise its keep_visits, or "
    "write checkpoints more often",
    "ledger": "its ledger is missing, damaged, in use or cannot be written. See the site's log",
    "disk": "it cannot write its files. Free some space there",
    "data": "its rows are missing, damaged or changed. See the site's log",
}

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MemoryVersion = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
RunName = Annotated[str, Field(pattern=r"^[0-9a-z]{1,32}$")]
CHARGE_ID_DIGITS = 32  # hex digits of a request's id that the ledger records
#: Metrics of agents begin with ``train/``, so a site cannot overwrite a metric of the coordinator.
NOTE = r"^train/[A-Za-z0-9_/-]{1,64}$"
NoteName = Annotated[str, Field(pattern=NOTE)]
#: Largest weight in a mean: the rows of a large site. Larger ones would dominate the mean.
MOST_SHARE = 1e6
Number = Annotated[int, Field(ge=0, le=10**9)]


class WireError(Exception):
    """Bytes are not an acceptable message; ``error_code`` is one of ERROR_CODES."""

    def __init__(self, error_code: str, text: str) -> None:
        super().__init__(text)
        self.error_code = error_code


@dataclass(frozen=True, config=strict)
class IdentifyRequest:
    """Asks a site for its identity; changes nothing."""


@dataclass(frozen=True, config=strict)
class Identity:
    """A site's identity. Only its role depends on rows."""

    agent: AgentName
    role: Annotated[str, Field(pattern="^(support|query|mixed)$")]
    agreement: Digest  # config.compatibility_hash
    shows_ledger: bool  # whether it sends its journal at the end of a run
    code: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]  # code_version.python_fingerprint


@dataclass(frozen=True, config=strict)
class StepRequest:
    """Asks a site to run one step of its agent."""

    run: RunName
    agreement: Digest
    agent: AgentName
    round: Number
    step: Name
    visit: Annotated[int, Field(ge=1, le=10**9)]
    memory: MemoryVersion  # id of the step whose memory this one starts from
    message: Name  # class of the message in the body
    deadline: Annotated[int, Field(ge=0, le=10**12)]  # Unix time in seconds
    body: bytes

    @property
    def id(self) -> str:
        """SHA-256 of all but the deadline, in hex."""
        header = {k: v for k, v in vars(self).items() if k not in ("deadline", "body")}
        return hashlib.sha256(encode(header) + hashlib.sha256(self.body).digest()).hexdigest()

    @property
    def charge_id(self) -> str:
        """The part of its id that the ledger records."""
        return self.id[:CHARGE_ID_DIGITS]


@dataclass(frozen=True, config=strict)
class StepResponse:
    """A site's reply to a step request, or its error code."""

    id: MemoryVersion  # of the request; empty if it could not be read
    error: Annotated[str, Field(max_length=16)] = ""
    message: Annotated[str, Field(pattern=r"^([A-Za-z][A-Za-z0-9_]{0,63})?$")] = ""
    weight: float = 1.0  # 1 if the step was charged
    notes: Mapping[NoteName, float] = dataclasses.field(default_factory=dict)
    memory: MemoryVersion = ""  # id of the agent's new memory
    charged: bool = False  # to the agent's ledger
    body: bytes = b""


@dataclass(frozen=True, config=strict)
class EndOfRun:
    """Notifies a site that a run stops; if it is over, the site deletes its stored data."""

    run: RunName
    agreement: Digest
    over: bool


@dataclass(frozen=True, config=strict)
class LedgerResponse:
    """A site's answer to EndOfRun: its journal, if its operator shares it."""

    agent: AgentName
    body: bytes = b""  # the journal; empty: none, or not shared


Frame = IdentifyRequest | Identity | StepRequest | StepResponse | EndOfRun | LedgerResponse
#: Names on the wire. They and the header's keys are part of the format, because stored replies have
#: them.
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
    """Serialise a message."""
    fields = dict(vars(frame))
    body = fields.pop("body", b"")
    if isinstance(frame, StepResponse):
        fields["weight"] = real(frame.weight)
        fields["notes"] = {name: real(value) for name, value in frame.notes.items()}
    header = {"letter": _NAMES[type(frame)], "privssl": __version__, "fields": fields}
    encoded = encode(header)
    start = _MAGIC + bytes([FORMAT]) + len(encoded).to_bytes(4, "little")
    return b"".join((start, encoded, body))


def from_bytes(data: bytes, *expected: type[Frame]) -> Any:
    """Parse a message of one of the expected kinds.

    Raises WireError if it is not one, or from another version of privssl.
    """
    header, body = _read_header(data)
    if header.get("privssl") != __version__:
        version = header.get("privssl")
        raise WireError("version", f"a message of privssl {version!r:.20}, this is {__version__}")
    try:
        only_keys(header, {"letter", "privssl", "fields"}, "message")
        kind = _KINDS[header["letter"]]
        if kind not in expected:
            raise WireError("refused", f"an unexpected {kind.__name__}")
        return kind(**_parse_fields(kind, header["fields"], body))
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(map(str, first_error["loc"]))
        raise WireError("refused", f"a message with an invalid {location}") from None
    except (PlanError, LookupError, TypeError, AttributeError) as error:
        raise WireError("refused", f"not a message: {error}") from None


def _parse_fields(kind: type[Any], fields: Json, body: bytes) -> Json:
    """Return the arguments of a message's dataclass."""
    names = {spec.name for spec in dataclasses.fields(kind)}
    if not isinstance(fields, dict):
        raise PlanError("its fields are not an object")
    only_keys(fields, names - {"body"}, kind.__name__)
    values = dict(fields)
    if kind is StepResponse:
        values["weight"] = read_real(values["weight"], "weight")
        values["notes"] = {name: read_real(v, "a metric") for name, v in values["notes"].items()}
    if "body" in names:
        return {**values, "body": body}
    if body:
        raise PlanError("bytes behind a message that has no body")
    return values


def _read_header(data: bytes) -> tuple[Json, bytes]:
    """Split a message into header and body."""
    if len(data) < _START or not data.startswith(_MAGIC):
        raise WireError("refused", "not a message of privssl")
    if data[len(_MAGIC)] != FORMAT:
        raise WireError("version", f"a message in format {data[len(_MAGIC)]}, this reads {FORMAT}")
    size = int.from_bytes(data[_START - 4 : _START], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - _START):
        raise WireError("refused", f"a message that declares a header of {size} bytes")
    try:
        return decode(data[_START : _START + size]), data[_START + size :]
    except PlanError as error:
        raise WireError("refused", f"not a message: {error}") from None
