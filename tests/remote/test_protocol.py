"""The wire protocol: round trips, refused input, and no execution of received code."""

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting.canonical_json import encode, real
from privssl import __version__
from privssl.core.messages import Message, MessageError, StateDict, deserialize, serialize
from privssl.experiment import config as configs
from privssl.remote import protocol
from privssl.remote.protocol import (
    EndOfRun,
    IdentifyRequest,
    Identity,
    LedgerResponse,
    StepRequest,
    StepResponse,
    WireError,
)

VISIT = StepRequest(
    run="r1", agreement="a" * 64, agent="s0", round=3, step="support_pass", visit=2,
    memory="b" * 64, message="Lesson", deadline=1000, body=b"\x00tensors\xff",
)  # fmt: skip
ANSWER = StepResponse(
    VISIT.id, message="Networks", weight=1 / 3, memory="c" * 64, body=b"x",
    notes={"train/loss_F": 5e-324, "train/z": -0.0, "train/big": 1.7e308},
)  # fmt: skip
FRAMES = (
    IdentifyRequest(),
    Identity("q10", "query", "d" * 64, False, "e" * 12),
    VISIT,
    ANSWER,
    StepResponse("", error="lost"),
    EndOfRun("r1", "a" * 64, True),
    LedgerResponse("s0", b'{"seq":0}\n'),
    LedgerResponse("q0"),
)
ALL_KINDS = (IdentifyRequest, Identity, StepRequest, StepResponse, EndOfRun, LedgerResponse)


def error_code_of(data: bytes, *expected: Any) -> str:
    with pytest.raises(WireError) as error:
        protocol.from_bytes(data, *(expected or ALL_KINDS))
    return error.value.error_code


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_every_message_survives_serialisation(frame: Any) -> None:
    back = protocol.from_bytes(protocol.to_bytes(frame), *ALL_KINDS)
    assert type(back) is type(frame) and back == frame
    if isinstance(frame, StepResponse):  # -0.0 == 0.0
        assert [struct.pack("d", v) for v in back.notes.values()] == [
            struct.pack("d", frame.notes[name]) for name in back.notes
        ]


# The id of a visit ---------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "run": "r2", "agreement": "e" * 64, "agent": "s1", "round": 4, "step": "other", "visit": 1,
    "memory": "", "message": "Other", "body": b"\x01tensors\xff",
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_the_id_of_a_visit_depends_on_every_field_that_affects_its_result(field: str) -> None:
    assert dataclasses.replace(VISIT, **{field: CHANGES[field]}).id != VISIT.id


def test_the_id_of_a_visit_does_not_depend_on_its_deadline() -> None:
    assert dataclasses.replace(VISIT, deadline=2000).id == VISIT.id
    assert {*CHANGES, "deadline"} == {spec.name for spec in dataclasses.fields(StepRequest)}


# What is refused -----------------------------------------------------------------------------


def test_another_version_or_format_is_refused_with_the_code_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = protocol.to_bytes(VISIT)
    assert error_code_of(data[:7] + bytes([protocol.FORMAT + 1]) + data[8:]) == "version"
    monkeypatch.setattr(protocol, "__version__", "9.9.9")
    assert error_code_of(data) == "version"
    # Also if the other version has messages that this one does not know.
    newer = protocol.to_bytes(VISIT)
    assert newer.count(b'"Visit"') == 1
    newer = newer.replace(b'"Visit"', b'"Lisit"')
    monkeypatch.undo()
    assert error_code_of(newer) == "version"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: b"",
        lambda d: d[:11],
        lambda d: d[:40],
        lambda d: b"PK" + d[2:],
        lambda d: d[:8] + (2**32 - 1).to_bytes(4, "little") + d[12:],
        lambda d: d.replace(b'"round":3', b'"round":-'),
        lambda d: d.replace(b'"agent":"s0"', b'"agent":"/s"'),
        lambda d: d.replace(b'"agent":"s0"', b'"agent":".."'),
        lambda d: d.replace(b'"run":"r1"', b'"run":"R1"'),
        lambda d: d.replace(b'"round":3', b'"round":3.'),
        lambda d: d.replace(b'"round"', b'"ruond"'),
        lambda d: d.replace(b'"letter":"Visit"', b'"letter":"Visib"'),
        lambda d: d.replace(b'"step":"support_pass"', b'"step":"support.pass"'),
        lambda d: d.replace(b'"step":"support_pass"', b'"step":"__init__pass"'),
    ],
    ids=range(14),
)
def test_a_malformed_message_is_refused(change: Callable[[bytes], bytes]) -> None:
    data = protocol.to_bytes(VISIT)
    assert change(data) != data
    assert error_code_of(change(data)) == "refused"


def test_an_unknown_field_is_refused() -> None:
    data = protocol.to_bytes(VISIT)
    size = int.from_bytes(data[8:12], "little")
    about = json.loads(data[12 : 12 + size])

    def frame(fields: dict[str, Any]) -> bytes:
        header = encode({**about, "fields": fields})
        return data[:8] + len(header).to_bytes(4, "little") + header + data[12 + size :]

    assert frame(about["fields"]) == data  # the control
    assert error_code_of(frame({**about["fields"], "more": 1})) == "refused"


def test_a_header_above_its_size_limit_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(_: bytes) -> dict[str, object]:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(protocol, "decode", decoded)
    start, most = protocol.to_bytes(VISIT)[:8], protocol.MAX_HEADER_BYTES
    for size in (most + 1, 10 * most):
        assert error_code_of(start + size.to_bytes(4, "little") + b" " * size) == "refused"
    with pytest.raises(AssertionError, match="decoded"):  # the control
        error_code_of(start + most.to_bytes(4, "little") + b" " * most)


def test_a_message_of_an_unexpected_kind_is_refused() -> None:
    data = protocol.to_bytes(ANSWER)
    assert error_code_of(data, IdentifyRequest, StepRequest) == "refused"
    assert protocol.from_bytes(data, StepResponse) == ANSWER  # the control


@given(st.integers(0, len(protocol.to_bytes(VISIT)) - 1), st.integers(1, 255), st.booleans())
def test_a_damaged_message_gives_an_error_code_or_another_visit_and_no_other_error(
    place: int, change: int, cut: bool
) -> None:
    data = bytearray(protocol.to_bytes(VISIT))
    data[place] ^= change
    try:
        found = protocol.from_bytes(bytes(data[:place] if cut else data), *ALL_KINDS)
    except WireError as error:
        assert error.error_code in protocol.ERROR_CODES
    else:
        assert found != VISIT


def handmade_frame(kind: str, fields: Any) -> bytes:
    header = encode({"letter": kind, "privssl": __version__, "fields": fields})
    start = b"privssl" + bytes([protocol.FORMAT])
    return start + len(header).to_bytes(4, "little") + header


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.__name__)
def test_a_list_of_field_names_is_no_message(kind: Any) -> None:
    names = [spec.name for spec in dataclasses.fields(kind) if spec.name != "body"]
    assert error_code_of(handmade_frame(kind.__name__, names)) == "refused"


@pytest.mark.parametrize(
    "name", ["test/accuracy", "round", "loss", "train/a,b", "train/\x1b[2J", "train/a\n", "train/"]
)
def test_a_site_can_report_only_training_metrics(name: str) -> None:
    fields = {
        "id": "",
        "error": "",
        "message": "",
        "weight": real(1.0),
        "memory": "",
        "charged": False,
    }
    assert (
        error_code_of(handmade_frame("Answer", fields | {"notes": {name: real(0.5)}})) == "refused"
    )
    own = handmade_frame("Answer", fields | {"notes": {"train/loss": real(0.5)}})
    assert protocol.from_bytes(own, StepResponse).notes == {"train/loss": 0.5}  # the control


def test_a_metric_that_is_not_finite_is_refused() -> None:
    data = protocol.to_bytes(StepResponse("", notes={"train/loss": float("nan")}))
    assert error_code_of(data) == "refused"


# Tensors -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Weights(Message):
    w: StateDict


def test_bfloat16_keeps_its_bits_in_a_message() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    assert len(finite) == 2**16 - 2 * 2**7  # all but two exponents' worth of mantissas
    sent = dataclasses.replace(VISIT, body=serialize(Weights({"w": finite})))
    back = deserialize(Weights, protocol.from_bytes(protocol.to_bytes(sent), StepRequest).body).w[
        "w"
    ]
    assert back.dtype == torch.bfloat16
    assert torch.equal(back.view(torch.int16), finite.view(torch.int16))


def test_equal_messages_have_equal_bytes_whatever_the_strides_of_their_tensors() -> None:
    plain = torch.arange(12.0).reshape(3, 4)
    turned = plain.t().contiguous().t()
    assert plain.stride() != turned.stride()
    assert serialize(Weights({"w": plain})) == serialize(Weights({"w": turned}))


def test_a_pickle_in_place_of_a_message_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    # The pickle of an object whose __reduce__ calls os.mkdir.
    bomb = b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR."
    body = protocol.from_bytes(
        protocol.to_bytes(dataclasses.replace(VISIT, body=bomb)), StepRequest
    ).body
    with pytest.raises(MessageError):
        deserialize(Weights, body)
    assert not mark.exists()


# The compatibility hash ----------------------------------------------------------------------

CONFIG = """
data: {name: toy, labelled: 24, unlabelled: 30}
agents: {support: 2, query: 1}
model: {name: small_cnn, width: 4}
algorithm: {name: fedssl, rounds: 2}
privacy: {epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 1.0, steps: 2}
"""
TASK = (tuple("0123456789"), (1, 8, 8), "[-1, 1]")


def compatibility_hash(folder: Path, *arguments: str) -> str:
    (folder / "c.yaml").write_text(CONFIG)
    return configs.compatibility_hash(configs.load_config(folder / "c.yaml", arguments), *TASK)


@pytest.mark.parametrize(
    "argument",
    ["run.seed=1", "run.precision=bfloat16", "data.labelled=25", "agents.query=2", "model.width=5",
     "algorithm.rounds=3", "privacy.noise_multiplier=3.9", "privacy.epsilon=51.0",
     "privacy.steps=3", "privacy.clip_norm=1.1", "privacy.sample_rate=0.9", "privacy=null",
     "privacy.delta=1.0e-6", "privacy.record_counts=private"],
)  # fmt: skip
def test_the_compatibility_hash_depends_on_settings_that_affect_results(
    tmp_path: Path, argument: str
) -> None:
    more = ["privacy=null"] if "precision" in argument else []  # privacy excludes bfloat16
    assert compatibility_hash(tmp_path, argument, *more) != compatibility_hash(tmp_path, *more)


@pytest.mark.parametrize(
    "argument",
    ["data.split=s.json", "run.name=other", "run.checkpoint_every=3",
     "run.workers=1"],
)  # fmt: skip
def test_the_compatibility_hash_does_not_depend_on_settings_of_one_machine(
    tmp_path: Path, argument: str
) -> None:
    assert compatibility_hash(tmp_path, argument) == compatibility_hash(tmp_path)


def test_the_compatibility_hash_does_not_depend_on_the_data_folder(tmp_path: Path) -> None:
    here, there = (
        compatibility_hash(tmp_path, "data.name=npz", f"data.root={root}") for root in "ab"
    )
    assert here == there


def test_the_compatibility_hash_depends_on_class_names_and_rows(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    config = configs.load_config(tmp_path / "c.yaml")
    names, shape, scaling = TASK
    tasks = [
        TASK, (("cat", "dog"), shape, scaling), (("dog", "cat"), shape, scaling),
        (names, (1, 8, 9), scaling), (names, shape, "as stored"),
    ]  # fmt: skip
    assert len({configs.compatibility_hash(config, *task) for task in tasks}) == 5
