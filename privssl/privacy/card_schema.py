"""The fields of ``privacy.json``, and its strict reader; ``privacy/privacy_card.py`` makes it."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from accounting.account_plan import Scope
from accounting.budget import Adjacency, Span, Unit
from accounting.canonical_json import decode_strictly

SCHEMA: Literal[3] = 3

Status = Literal["covered", "post-processing", "not covered"]
#: Meaning of an epsilon: covered by a guarantee, nominal, or only charged (damaged ledgers, or
#: visits other than those fixed beforehand).
Kind = Literal["guaranteed", "nominal", "charged"]


class NumericBounds(TypedDict):
    """Bounds on epsilon by numeric composition; None where there is none."""

    pld_lower: float | None
    pld_upper: float | None
    prv: float | None
    why_no_bounds: str | None


class AgentEpsilon(NumericBounds):
    """Epsilon of one agent."""

    kind: Kind
    value: float


class AgentEntry(TypedDict):
    """The card's entry of one agent. ``visit`` is the event of one visit; ``rows`` is None if
    private."""

    agent: str
    epsilon: AgentEpsilon
    budget: dict[Literal["epsilon", "delta"], float]
    visit: dict[str, Any]
    visits: int
    visits_left: int
    rows: int | None
    ledger_head: str


class FormerLedger(TypedDict):
    """The epsilon and budget of one agent in a replaced run; numbers are None if it is damaged.

    ``ledger`` is the name of its folder.
    """

    ledger: Annotated[str, Field(pattern="^[^/]*$")]
    agent: str
    kind: Literal["guaranteed", "nominal"]
    epsilon: float | None
    delta: float | None
    budget: float | None


class Claim(TypedDict):
    """The fields of ``accounting.budget.Guarantee``."""

    epsilon: float
    delta: float
    unit: Unit
    neighbours: Adjacency
    covers: list[str]
    rule: Literal["largest agent"]
    span: Span


class Headline(TypedDict):
    """The tightest epsilon of a numeric accountant. It is not used for enforcement."""

    kind: Kind
    epsilon: float
    by: str


class Totals(TypedDict):
    """Epsilon over agents: the largest, of one person at every agent, and the paper's sum."""

    kind: Kind
    overall: float
    person_across_agents: float
    paper_sum: float


Side = Annotated[int, Field(gt=0, lt=1 << 16)]


class TaskEntry(TypedDict):
    """The number of classes, and the shape of a row."""

    classes: Side
    shape: Annotated[list[Side], Field(min_length=1, max_length=3)]


class EncoderEntry(TypedDict):
    """The frozen public encoder, and its public training data."""

    name: str
    weights: str
    trained_on: str


class ReleaseEntry(TypedDict):
    """A release, see ``Release``."""

    name: str
    status: Status
    why: str


class PrivacyCard(TypedDict):
    """The contents of ``privacy.json``; see :func:`privacy_card`."""

    schema: Literal[3]
    algorithm: str
    dataset: str
    task: TaskEntry | None
    encoder: EncoderEntry | None
    network: dict[Literal["name", "weights"], str] | None
    scope: Scope
    kind: Kind
    guarantee: Claim | None
    nominal_epsilon: float | None
    unit: Unit
    adjacency: Adjacency
    delta: float
    record_counts: Literal["public", "private"]
    clip_norm: float | None
    update: list[str]
    protect: list[str]
    agents: list[AgentEntry]
    planned_visits: int | None
    this_run: dict[str, float] | None
    former_ledgers: list[FormerLedger]
    ledger_problems: list[str]
    weights: dict[Literal["file", "sha256"], str] | None
    epsilon: Totals
    releases: list[ReleaseEntry]
    not_sent: list[str]
    not_protected: list[str]
    attack_bounds: dict[str, float] | None
    versions: dict[str, str]
    headline: Headline | None
    sentence: str


# Set here, because a type checker would take a class variable of a TypedDict for a key.
setattr(PrivacyCard, "__pydantic_config__", ConfigDict(strict=True, extra="forbid"))  # noqa: B010


def parse_card(content: bytes) -> tuple[PrivacyCard, list[str]]:
    """Read ``privacy.json``; return the card and the places of unknown keys.

    Raises:
        accounting.errors.PlanError: it is not strict JSON.
        ValueError: it is not a card of this version.
    """
    card: Any = decode_strictly(content)
    if (schema := card.get("schema")) not in (None, SCHEMA):
        versions = card.get("versions")
        version = versions.get("privssl") if isinstance(versions, dict) else "another version"
        raise ValueError(
            f"schema {schema!r:.20} of privssl {version!s:.40}; this version reads {SCHEMA}. "
            "Audit it with that version, or remove privacy.json and results.json: --resume writes "
            "them anew"
        )
    unknown_keys = []
    try:
        TypeAdapter(PrivacyCard).validate_python(card)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            path = ".".join(map(str, problem["loc"]))
            if problem["type"] != "extra_forbidden":
                raise ValueError(f"not a privacy card ({path}: {problem['msg']})") from None
            unknown_keys.append(path)
    return card, unknown_keys
