"""Attacks by files and messages that privssl reads: tests 28 to 32 of the specification, where
other test files leave a gap.

Every reader gets the same hostile contents, and must raise one of our errors, which commands print
without a traceback, and do nothing else. A control shows that the content would do harm elsewhere.
"""

import ast
import hashlib
import io
import json
import math
import os
import pickle  # noqa: TID251 - the attacks
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import EpsImagePlugin, Image
from torch import Tensor

from accounting.canonical_json import MAX_INTEGER, decode_strictly
from accounting.errors import AccountingError, PlanError
from accounting.journal import read_content
from accounting.ledger import read_journal
from privssl.algorithms.fedssl.algorithm import FedSSL, FedSSLRequest, FedSSLUpdate
from privssl.audit import __main__ as audit
from privssl.core.aggregation import average
from privssl.core.messages import Declined, MessageError, deserialize, serialize
from privssl.data import build as build_federation
from privssl.data import image_folder, npz
from privssl.data import split_manifest as manifests
from privssl.data.datasets import load_dataset
from privssl.errors import DataError, RunFolderError, UserError
from privssl.experiment import config
from privssl.experiment.prepare import Prepared, prepare
from privssl.models import build_classifier
from privssl.ops import dispatch
from privssl.privacy import clipping
from privssl.privacy.noisy_optimizer import SecureNoiseOptimizer
from privssl.runs import checkpoint
from privssl.runs.checkpoint import Snapshot
from privssl.settings.schema import AgentSettings, DataSettings, ModelSettings
from privssl.settings.yaml_reader import YamlError
from privssl.settings.yaml_reader import read_document as read_yaml
from privssl.storage import atomic_files
from privssl.training.local_training import load_weights as into_network
from tests.support.command_line import PLAIN, assert_refused, command
from tests.support.ledger import visits_left
from tests.support.messages import Note, reply
from tests.support.privacy import CLASSES, SHAPE
from tests.support.private_fedssl import PRIVATE, accounts, context, make_request
from tests.support.private_visit import ALL, ONE_STEP, visit_with, with_row
from tests.support.product import Module, dotted, imports, inside, nodes, product_modules
from tests.support.toy_worlds import without_noise

REFUSALS = (UserError, AccountingError)


# 28: contents that run code when they are loaded --------------------------------------------------


class Harm:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def npz_of(**values: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **values)
    return buffer.getvalue()


def torch_file(harm: Harm) -> bytes:
    buffer = io.BytesIO()
    torch.save(harm, buffer)  # noqa: TID251 - the attack
    return buffer.getvalue()


def npy_file(harm: Harm) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([harm], object), allow_pickle=True)
    return buffer.getvalue()


def npz_file(harm: Harm) -> bytes:
    rows, y = np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2
    return npz_of(x_train=np.array([harm], object), y_train=y, x_test=rows, y_test=y)


PICKLES: dict[str, Callable[[Harm], bytes]] = {
    "a pickle": pickle.dumps,
    "a file of torch.save": torch_file,
    "an npy of objects": npy_file,
    "an npz of objects": npz_file,
}


def unpickle(name: str, content: bytes) -> None:
    """How a careless reader would load them."""
    if name == "a pickle":
        pickle.loads(content)  # noqa: S301
    elif name == "a file of torch.save":
        torch.load(io.BytesIO(content), weights_only=False)  # noqa: TID251
    else:
        found: Any = np.load(io.BytesIO(content), allow_pickle=True)
        _ = found["x_train"] if name.endswith("npz of objects") else found


def as_npz(path: Path, content: bytes) -> object:
    path.write_bytes(content)
    return load_dataset(DataSettings(name="npz", root=str(path)))


def as_image(path: Path, content: bytes) -> object:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (path / part / name).mkdir(parents=True)
            (path / part / name / "a.png").write_bytes(content)
    return load_dataset(DataSettings(name="image_folder", root=str(path)))


def as_published(path: Path, content: bytes) -> object:
    path.mkdir()
    for part in ("train", "test"):
        (path / f"{part}_32x32.mat").write_bytes(content)
    return load_dataset(DataSettings(name="svhn", root=str(path)))


def as_split(path: Path, content: bytes) -> object:
    path.write_bytes(content)
    return manifests.read_manifest(path)


def as_config(path: Path, content: bytes) -> object:
    path.write_bytes(content)
    return config.load_config(path)


def as_ledger(path: Path, content: bytes) -> object:
    path.write_bytes(content)
    # read without a lock, so problems are returned, not raised
    problems = read_journal(path).problems
    if problems:
        raise PlanError(str(problems[0]))
    return problems


def as_card(path: Path, content: bytes) -> object:
    path.mkdir()
    (path / "privacy.json").write_bytes(content)
    return audit.audit(path)


def as_message(path: Path, content: bytes) -> object:
    return deserialize(Note, content)


def as_header(path: Path, content: bytes) -> object:
    return deserialize(Note, len(content).to_bytes(8, "little") + content)


SNAPSHOT = Snapshot(
    1, {"F": {"w": torch.ones(2)}}, {"q0": {}, "q1": {"m": torch.ones(3)}}, "d", {"best": 0.1}
)


def as_snapshot(path: Path, content: bytes) -> object:
    folder = checkpoint.save_snapshot(path, SNAPSHOT)
    (folder / "snapshot.json").write_bytes(content)
    return checkpoint.load_snapshot(path, "d")


def as_tensors(path: Path, content: bytes) -> object:
    """With a valid checksum, as an attacker would write it."""
    folder = checkpoint.save_snapshot(path, SNAPSHOT)
    (folder / "state.safetensors").write_bytes(content)
    about = json.loads((folder / "snapshot.json").read_text())
    checksum = hashlib.sha256(content).hexdigest()
    about["state"] |= {"bytes": len(content), "sha256": checksum}
    (folder / "snapshot.json").write_bytes(checkpoint.with_checksum(about))
    return checkpoint.load_snapshot(path, "d")


READERS: dict[str, Callable[[Path, bytes], object]] = {
    **{"npz": as_npz, "image": as_image, "published": as_published, "split": as_split},
    **{"config": as_config, "ledger": as_ledger, "card": as_card, "message": as_message},
    **{"header": as_header, "snapshot": as_snapshot, "tensors": as_tensors},
}


@pytest.mark.parametrize("kind", PICKLES)
def test_no_reader_runs_code_from_a_file(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    content = PICKLES[kind](Harm(mark))
    for name, reader in READERS.items():
        with pytest.raises(REFUSALS):
            reader(tmp_path / name, content)
        assert not mark.exists(), name
    unpickle(kind, content)  # the control: loading it carelessly runs the code
    assert mark.exists()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_a_postscript_file_named_like_an_image_does_not_reach_ghostscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []

    def run(*given: object, **named: object) -> object:
        called.append(given)
        return Image.new("RGB", (8, 8)).im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    with pytest.raises(DataError, match="cannot be read as an image"):
        as_image(tmp_path / "data", POSTSCRIPT)
    assert called == []
    Image.open(io.BytesIO(POSTSCRIPT)).load()  # the control: Pillow by default runs it
    assert len(called) == 1


def test_an_image_or_array_larger_than_the_memory_is_refused_by_its_stated_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, y = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 2
    content = npz_of(x_train=rows, y_train=y, x_test=rows, y_test=y)
    picture = io.BytesIO()
    Image.new("L", (8, 8)).save(picture, "PNG")
    as_npz(tmp_path / "npz", content)  # the control: below the bounds both are read
    as_image(tmp_path / "images", picture.getvalue())
    monkeypatch.setattr(npz, "MAX_BYTES", 1000)
    monkeypatch.setattr(image_folder, "MAX_PIXELS", 63)
    # 40 x 64 and a header of 128
    with pytest.raises(DataError, match=r"x_train.npy has 2688 bytes"):
        as_npz(tmp_path / "npz", content)
    with pytest.raises(DataError, match="8x8 pixels, more than 63"):
        as_image(tmp_path / "again", picture.getvalue())


def test_an_npz_entry_that_is_no_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.npz"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(name, b"import os")
    with pytest.raises(DataError, match="an entry is no array"):
        load_dataset(DataSettings(name="npz", root=str(path)))


# Calls that no module may contain, in addition to tests/test_architecture.py, which bans
# torch.load, pickle, eval, exec and yaml.load with any arguments.
STARTS_OR_LOADS = (
    *("os.system", "os.popen", "os.spawnl", "os.execv", "subprocess", "pty", "ctypes", "compile"),
    *("torch.jit", "torch.hub", "torch.package", "numpy.fromfile", "tempfile.mktemp"),
    *("yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CLoader"),
)
# Functions that are safe only with an argument, and its value.
NEEDS = {"load": ("numpy", "allow_pickle", "False"), "open": ("PIL.Image", "formats", None)}


def careless(module: Module) -> Iterator[str]:
    """Calls that start programs, load code, or omit the argument that makes them safe."""
    full = {here: name for _, here, name in imports(module.source)}
    for node in nodes(module.source):
        if isinstance(node, ast.Name | ast.Attribute):
            head, dot, rest = dotted(node).partition(".")
            if inside(full.get(head, head) + dot + rest, *STARTS_OR_LOADS):
                yield f"{module.name}:{node.lineno} uses {dotted(node)}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in NEEDS
        ):
            origin, key, value = NEEDS[node.func.attr]
            owner = ast.unparse(node.func.value)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if full.get(owner) == origin and (key not in given or value not in (None, given[key])):
                yield f"{module.name}:{node.lineno} leaves out {key} of {ast.unparse(node.func)}"


#: Modules that start Flower's programs and ours, or ask the kernel for a sandbox. Only an operator
#: starts them: no file and no request names the program, and no shell is used.
MAY = {
    **dict.fromkeys(
        ("privssl.remote.flower_transport", "privssl.site.demo", "privssl.site.supernode"),
        "subprocess",
    ),
    # `privssl reproduce` starts `privssl.train` and asks git for the commit
    **dict.fromkeys(("privssl.reproduce.machine", "privssl.reproduce.runner"), "subprocess"),
    "privssl.site.sandbox": "ctypes",
    # compiled kernels in the installed package
    **dict.fromkeys(
        (
            "privssl.ops.dispatch",
            "privssl.ops.fused_conv_binding",
            "privssl.ops.image_transforms",
            "privssl.ops.gaussian_noise",
            "privssl.ops.per_example_conv",
            "privssl.ops.clipping",
        ),
        "ctypes",
    ),
    # two functions of the loaded C library, with constants
    "privssl.runtime.process": "ctypes",
}


def test_no_module_starts_a_program_or_omits_what_makes_a_reader_safe() -> None:
    found = [(module.name, text) for module in product_modules() for text in careless(module)]
    allowed = [(name, text) for name, text in found if f"uses {MAY.get(name, 'nothing')}" in text]
    assert [text for name, text in found if (name, text) not in allowed] == []
    assert {name for name, _ in allowed} == set(MAY)
    assert [m.name for m in product_modules() if m.name in MAY and "shell=" in m.source] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.system('x')", True),
        ("from os import system as s\ns('x')", True),
        ("import subprocess as sp\nsp.run(['x'])", True),
        ("import torch\ntorch.jit.load('x')", True),
        ("import yaml\nyaml.compose('x', Loader=yaml.FullLoader)", True),
        ("import numpy as np\nnp.load('x')", True),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", True),
        ("import numpy as np\nnp.load('x', allow_pickle=False)", False),
        ("from PIL import Image\nImage.open('x')", True),
        ("from PIL import Image\nImage.open('x', formats=('PNG',))", False),
        ("import os\nos.open('x', 0)\nself.load()", False),
    ],
)
def test_the_rule_finds_exactly_the_planted_calls(source: str, found: bool) -> None:
    assert bool(list(careless(Module("privssl.training.local_training", source)))) == found


# 29: YAML -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/name:os.system", "a: !!python/module:os", "a: !!python/object/new:dict []",
        "a: !!binary aGk=", "a: !!set {x}", "a: !local 1", "!!map {a: 1}", "a: &x 1", "*x",
        "a: {<<: *x}", "%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system",
        "a: " + "{b: " * 9 + "1" + "}" * 9, "- " * 100_000, "? " * 100_000,
        "a: 1\n...\nb: 2\n---\n", "a: \ud800",
    ],
    ids=lambda text: ascii(text)[:30],
)  # fmt: skip
def test_yaml_beyond_plain_values_is_refused(text: str) -> None:
    with pytest.raises(YamlError):
        read_yaml(text)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("0x10", None), ("0b11", None), ("0o17", "0o17"), ("017", None), ("1_000", None),
        ("1:30", None), ("190:20:30", None), ("yes", None), ("Off", None), ("y", "y"),
        ("=", None), ("2001-12-14t21:59:43.10-05:00", None), ("1" * 101, None),
        ("<<", None), ("True", True), ("NULL", None), ("-0", 0), ("1.0e+3", 1000.0),
    ],
)  # fmt: skip
def test_a_scalar_is_read_literally_or_reported_with_its_key(written: str, value: object) -> None:
    document = read_yaml(f"a:\n  b: {written}\n")
    assert document.value == {"a": {"b": value}}
    surprising = value is None and written != "NULL"
    assert [(f.line, f.key) for f in document.problems] == [(2, "a.b")] * surprising


@pytest.mark.parametrize("written", [".nan", ".inf", "-.inf", "1.0e+999"])
@pytest.mark.parametrize("key", ["epsilon", "delta", "clip_norm", "sample_rate", "learning_rate"])
def test_no_number_of_the_privacy_section_may_be_infinite_or_nan(
    key: str, written: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(PRIVATE)
    with pytest.raises(UserError, match=f"privacy.{key}"):
        config.load_config(path, [f"privacy.{key}={written}"])


# 30: paths and modes ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["root", "split"])
@pytest.mark.parametrize(
    "text", ["../" * 40 + "x", "x" * 3000, "~nobody-of-that-name/x", "loop", "folder", "a\nb"]
)
def test_an_invalid_data_path_is_refused_and_nothing_is_created(
    key: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("folder").mkdir()
    Path("tiny.yaml").write_text(PLAIN)
    given = "data.name=npz" if key == "root" else "data.name=toy"
    outcome = command("tiny.yaml", given, f"data.{key}={json.dumps(text)}", "run.output=run")
    assert_refused(outcome, "")
    assert sorted(os.listdir()) == ["folder", "loop", "tiny.yaml"]


HOSTILE_NAMES = ["../s0", "/etc/s0", "s0/../../x", "s0\0", "s" * 300, "CON", "nul.txt", "s0.", ""]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_a_split_cannot_rename_or_add_an_agent(name: str, tmp_path: Path) -> None:
    settings, agents = DataSettings(name="toy", labelled=20, unlabelled=30), AgentSettings(2, 1, 0)
    honest = build_federation(settings, agents, 0).manifest
    path = tmp_path / "split.json"
    replayed = DataSettings(name="toy", labelled=20, unlabelled=30, split=str(path))
    honest.write(path)
    build_federation(replayed, agents, 0)  # the control
    # Once instead of s0, and once in addition, without rows, where it has no effect.
    holdings = dict(honest.agents)
    beside = {**holdings, name: manifests.AgentRows((), ())}
    holdings[name] = holdings.pop("s0")
    write_split(path, honest, holdings)
    with pytest.raises(DataError, match="gives labelled rows to"):
        build_federation(replayed, agents, 0)
    write_split(path, honest, beside)
    assert [a.id for a in build_federation(replayed, agents, 0).agents] == ["s0", "s1", "q0"]


def write_split(path: Path, like: manifests.Manifest, agents: dict[str, Any]) -> None:
    manifests.Manifest(
        like.dataset, like.checksum, like.rows, like.seed, like.settings, agents, like.validation
    ).write(path)


def loose(folder: Path) -> list[str]:
    """Files that are not 0600, folders that are not 0700, and links."""
    found = []
    for path in [folder, *folder.rglob("*")]:
        mode = path.lstat().st_mode
        wanted = stat.S_IFDIR | 0o700 if stat.S_ISDIR(mode) else stat.S_IFREG | 0o600
        if mode != wanted:
            found.append(f"{path.name} {mode:o}")
    return found


def test_files_and_folders_of_a_private_run_are_readable_by_their_owner_only_under_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "tiny.yaml", tmp_path / "deep/run"
    arguments = (path, "algorithm.rounds=2", "--quiet")
    path.write_text(PRIVATE)
    real = FedSSL.round

    def stop(self: Any, state: Any, federation: Any) -> Any:
        if federation.round.number == 2:
            raise KeyboardInterrupt
        return real(self, state, federation)

    before = os.umask(0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(FedSSL, "round", stop)
            assert command(*arguments, f"run.output={folder}").status == 130
        assert loose(folder) == []
        assert command(*arguments, "--resume", folder).status == 0
        (tmp_path / "theirs").mkdir()  # the control: this umask restricts nothing
    finally:
        os.umask(before)
    assert len(list(folder.rglob("*"))) > 15
    assert loose(folder) == []
    assert loose(tmp_path / "theirs") == ["theirs 40777"]


def test_a_split_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    settings = DataSettings(name="toy", labelled=20, unlabelled=30)
    before = os.umask(0)
    try:
        build_federation(settings, AgentSettings(2, 1, 0), 0).manifest.write(tmp_path / "s.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["s.json"]


def test_a_symbolic_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    for name in ("file", f"{atomic_files.TEMPORARY}file"):
        precious.write_text("years of work")
        (tmp_path / name).symlink_to(precious)
        atomic_files.replace(tmp_path / "file", b"ours")
        assert (precious.read_text(), (tmp_path / "file").read_text()) == ("years of work", "ours")
        assert not (tmp_path / "file").is_symlink()
        (tmp_path / "file").unlink()


def test_a_named_pipe_in_place_of_a_file_does_not_block_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s0.jsonl")
    with pytest.raises(AccountingError, match="not a regular file"):
        read_content(tmp_path / "s0.jsonl")
    folder = checkpoint.save_snapshot(tmp_path / "checkpoints", SNAPSHOT)
    for name in ("snapshot.json", "state.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(RunFolderError, match="is not a regular file"):
            checkpoint.load_snapshot(tmp_path / "checkpoints", "d")
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    assert checkpoint.load_snapshot(tmp_path / "checkpoints", "d").round == 1  # the control


# 31: a hostile peer -------------------------------------------------------------------------------


def bytes_of(header: dict[str, Any], body: bytes = b"", fields: str = "{}") -> bytes:
    """A message as an attacker who knows the format writes it."""
    text = json.dumps({"__metadata__": {"fields": fields}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + body


WEIGHTS = (
    '{"w": {"state_dict": ["a"]}, "t": null, "number": 1.0, "count": 0, "flag": true, "text": ""}'
)
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BODY = np.float32(1.0).tobytes()


def fields(**changes: Any) -> str:
    return json.dumps({**json.loads(WEIGHTS), **changes})


HOSTILE_MESSAGES: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\x10\x00\x00",
    "a header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
    "a header beyond the end": (100).to_bytes(8, "little") + b"{}",
    "a header that is a list": (2).to_bytes(8, "little") + b"[]",
    "a deep header": (50_000).to_bytes(8, "little") + b"[" * 50_000,
    "no fields": bytes_of({"w/a": ONE}, BODY),
    "fields that are a list": bytes_of({"w/a": ONE}, BODY, "[]"),
    "fields with NaN": bytes_of({"w/a": ONE}, BODY, fields(number=math.nan)),
    "fields with a key twice": bytes_of({"w/a": ONE}, BODY, WEIGHTS[:-1] + ', "count": 1}'),
    "ten gigabytes that are not there": bytes_of(
        {"w/a": {"dtype": "F32", "shape": [2_500_000_000], "data_offsets": [0, 10**10]}},
        BODY, WEIGHTS,
    ),
    "a shape larger than its bytes": bytes_of({"w/a": {**ONE, "shape": [10**12]}}, BODY, WEIGHTS),
    "a negative shape": bytes_of({"w/a": {**ONE, "shape": [-1]}}, BODY, WEIGHTS),
    "bytes outside of the file": bytes_of({"w/a": {**ONE, "data_offsets": [4, 8]}}, BODY, WEIGHTS),
    "an unknown type": bytes_of({"w/a": {**ONE, "dtype": "OBJ"}}, BODY, WEIGHTS),
    "a type without maths": bytes_of(
        {"w/a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, BODY, WEIGHTS
    ),
    "a missing tensor": bytes_of({"w/b": ONE}, BODY, WEIGHTS),
    "a tensor for a number": bytes_of(
        {"w/a": ONE, "number": {**ONE, "data_offsets": [4, 8]}}, 2 * BODY,
        WEIGHTS.replace('"number": 1.0, ', ""),
    ),
    "text for a number": bytes_of({"w/a": ONE}, BODY, fields(number="os.system")),
    "a number for weights": bytes_of({"w/a": ONE}, BODY, fields(w=5)),
    "truth for a whole number": bytes_of({"w/a": ONE}, BODY, fields(count=True)),
    "half a pair of surrogates": bytes_of({"w/a": ONE}, BODY, fields(text="\ud800")),
    "a whole number of 400 digits": bytes_of({"w/a": ONE}, BODY, fields(count=10**400)),
    "weights that are no list": bytes_of({"w/a": ONE}, BODY, fields(w={"state_dict": 7})),
    "an object": bytes_of({"w/a": ONE}, BODY, fields(w={"object": ["os.system"]})),
    "NaN": bytes_of({"w/a": ONE}, np.float32(math.nan).tobytes(), WEIGHTS),
    "infinity": bytes_of({"w/a": ONE}, np.float32(-math.inf).tobytes(), WEIGHTS),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_MESSAGES)
def test_invalid_messages_are_refused_without_allocating_their_claimed_sizes(
    what: str,
) -> None:
    with pytest.raises(MessageError):
        deserialize(Note, HOSTILE_MESSAGES[what])


def test_the_same_bytes_without_the_damage_are_a_valid_message() -> None:
    note = deserialize(Note, bytes_of({"w/a": ONE}, BODY, WEIGHTS))
    assert note.w is not None and note.w["a"].tolist() == [1.0]
    assert (note.number, note.flag) == (1.0, True)
    # An unknown field of a message is ignored, and so is its tensor.
    bytes_with_more = bytes_of(
        {"w/a": ONE, "x": {**ONE, "data_offsets": [4, 8]}}, 2 * BODY, fields(epsilon=100.0)
    )
    assert vars(deserialize(Note, bytes_with_more)).keys() == vars(note).keys()


@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_an_infinite_number_is_sent_in_strict_json(number: float) -> None:
    assert deserialize(Note, serialize(Note(None, number=number))).number == number
    assert b"Infinity" not in serialize(Note(None, number=number))


UNLIKE = {
    "a shape that would be broadcast": torch.tensor(5.0),
    "a longer one": torch.ones(4),
    "a wider type": torch.ones(3, dtype=torch.float64),
    "another kind of number": torch.ones(3, dtype=torch.int64),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("what", UNLIKE)
def test_weights_of_another_form_are_refused_in_an_average_in_any_order(
    what: str, first: bool
) -> None:
    honest, hostile = ("q1", "q0") if first else ("q0", "q1")
    replies = [reply(honest, torch.ones(3)), reply(hostile, UNLIKE[what])]
    with pytest.raises(MessageError, match="unlike forms: w is"):
        average(replies, "w", otherwise={})
    replies[1] = reply(hostile, torch.ones(3))
    assert average(replies, "w", otherwise={})["w"].tolist() == [1, 1, 1]  # the control


@pytest.mark.parametrize("missing", [True, False])
def test_additional_or_missing_keys_are_refused_in_an_average(missing: bool) -> None:
    odd = reply("q1", torch.ones(3))
    other = Note({} if missing else {"w": torch.ones(3), "z": torch.ones(1)})
    object.__setattr__(odd, "content", other)
    with pytest.raises(MessageError, match="absent"):
        average([reply("q0", torch.ones(3)), odd], "w", otherwise={})


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_negative_or_not_finite_is_refused_in_an_average(weight: float) -> None:
    with pytest.raises(MessageError, match=f"q1 has the weight {weight} in the mean of w"):
        average([reply("q0", [1.0]), reply("q1", [1.0], weight)], "w", otherwise={})


@pytest.mark.parametrize("damage", ["shape", "more", "fewer"])
def test_weights_that_do_not_fit_a_network_are_not_loaded_into_it(damage: str) -> None:
    network = build_classifier(ModelSettings("small_cnn", 4), SHAPE, CLASSES)
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    into_network(network, weights)  # the control
    key = next(iter(weights))
    changed = {
        "shape": {**weights, key: torch.ones(1)},
        "more": {**weights, "x": torch.ones(1)},
        "fewer": {k: v for k, v in weights.items() if k != key},
    }[damage]
    with pytest.raises(RuntimeError, match=r"Error.s. in loading state_dict"):
        into_network(network, changed)
    wide = {k: v.double() for k, v in weights.items()}  # a wider type costs only its sender
    assert {p.dtype for p in into_network(network, wide).parameters()} == {torch.float32}


@pytest.fixture
def protected(tmp_path: Path) -> Prepared:
    path = tmp_path / "tiny.yaml"
    path.write_text(PRIVATE)
    return prepare(config.load_config(path, [*ONE_STEP, *ALL]))


def damaged(came: FedSSLRequest, value: float, share: float) -> FedSSLRequest:
    """A request in which the server has set a share of all weights to a number."""
    generator = torch.Generator().manual_seed(0)

    def plant(weights: Any) -> dict[str, Tensor]:
        masks = {k: torch.rand(v.shape, generator=generator) < share for k, v in weights.items()}
        return {key: torch.where(masks[key], value, v) for key, v in weights.items()}

    F, G, D = (plant(weights) for weights in (came.F, came.G, came.D))
    return FedSSLRequest(F, G, D, came.teacher, came.train_classifier, came.train_on_mixes)


HOSTILE_WEIGHTS = [(math.nan, 1.0), (math.nan, 0.001), (math.inf, 0.01), (1e30, 0.01), (1e10, 1.0)]


class Released:
    """The sum of each private step, and the released result, parameter by parameter."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sums: list[Tensor] = []
        self.noisy: list[Tensor] = []
        real = SecureNoiseOptimizer.add_noise

        def look(optimizer: Any) -> None:
            self.sums.append(torch.cat([p.summed_grad.flatten() for p in optimizer.params]))
            real(optimizer)
            self.noisy.append(torch.cat([p.grad.flatten() for p in optimizer.params]))

        patch.setattr(SecureNoiseOptimizer, "add_noise", look)

    def noise_is_whole(self) -> bool:
        """Whether every released number has noise of the planned size: 4 x 0.5."""
        added = [n - s for n, s in zip(self.noisy, self.sums, strict=True)]
        scales = [float(a.std()) for a in added]
        return all(abs(scale - 2.0) < 0.1 for scale in scales)  # NaN is not


@pytest.mark.parametrize(("value", "share"), HOSTILE_WEIGHTS)
def test_no_weights_from_the_server_make_a_support_agent_send_a_number_without_noise(
    value: float, share: float, protected: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = Released(monkeypatch)
    came = damaged(make_request(protected), value, share)
    visit_with(protected, tmp_path / "visit", lambda rows: rows, came)
    [total] = released.sums
    assert bool(total.isfinite().all())
    assert float(total.norm()) <= 12 * 0.5 * (1 + 1e-4)  # rows x clipping norm
    assert released.noise_is_whole()


def test_the_check_of_released_numbers_detects_rows_with_non_finite_gradients(
    protected: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = Released(monkeypatch)
    monkeypatch.setattr(dispatch, "_find_latest", lambda: None)  # our kernel cannot be patched here
    monkeypatch.setattr(Tensor, "nan_to_num_", lambda self, **_: self)
    monkeypatch.setattr(
        clipping,
        "_compute_factors",
        lambda norms, drawn, clip: (clip / norms).clamp(max=1.0) * drawn,
    )
    came = damaged(make_request(protected), math.nan, 1.0)
    visit_with(protected, tmp_path / "visit", lambda rows: rows, came)
    assert not released.noise_is_whole()


@pytest.mark.parametrize(("value", "share"), [(1e30, 0.01), (1e10, 1.0), (1e4, 0.1)])
def test_under_hostile_weights_one_row_moves_the_sum_by_at_most_the_clip_norm(
    value: float, share: float, protected: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    released = Released(monkeypatch)
    came = damaged(make_request(protected), value, share)
    for number, shade in enumerate((0.3, math.nan)):
        visit_with(protected, tmp_path / str(number), with_row(shade), came)
    one, other = released.sums
    assert float((one.double() - other.double()).norm()) <= 0.5 * (1 + 1e-4)


def test_no_message_changes_the_budget_of_an_agent(tmp_path: Path) -> None:
    # The budget belongs to the agent: a request has no field for it, and bytes cannot add one.
    path = tmp_path / "tiny.yaml"
    path.write_text(PRIVATE)
    prepared = prepare(config.load_config(path, [*ONE_STEP, "privacy.epsilon=2.0"]))
    packed = serialize(make_request(prepared))
    size = int.from_bytes(packed[:8], "little")
    header = json.loads(packed[8 : 8 + size])
    told = {**json.loads(header["__metadata__"]["fields"]), "epsilon": 1e6, "budget": 100}
    header["__metadata__"]["fields"] = json.dumps(told)
    text = json.dumps(header).encode()
    came = deserialize(FedSSLRequest, len(text).to_bytes(8, "little") + text + packed[8 + size :])
    assert vars(came).keys() == vars(make_request(prepared)).keys()
    assert isinstance(prepared.algorithm, FedSSL)
    step = prepared.algorithm.support_pass
    with accounts(prepared, tmp_path) as agents:
        account = agents["s0"].account
        assert account is not None
        allowed = visits_left(account)
        answers = [step(agents["s0"], came, context("s0", str(n))) for n in range(allowed + 2)]
        assert [isinstance(answer, FedSSLUpdate) for answer in answers] == [True] * allowed + [
            False
        ] * 2
        assert 0 < allowed < 10 and account.spent() <= account.plan.budget.epsilon == 2.0
    assert isinstance(answers[-1], Declined)


# Checkpoints are untrusted as well: whoever can write one can give it a valid checksum.


def forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    snapshot = checkpoint.save_snapshot(folder, SNAPSHOT)
    about = json.loads((snapshot / "snapshot.json").read_text())
    change(about)
    (snapshot / "snapshot.json").write_bytes(checkpoint.with_checksum(about))
    return folder


def deep(about: dict[str, Any]) -> None:
    for _ in range(460):
        about["extra"] = {"mapping": {"a": about["extra"]}}


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a size that would fill the memory": lambda a: a["state"].update(bytes=50 * 10**9),
    "a size of 2^52": lambda a: a["state"].update(bytes=2**52),
    "a negative size": lambda a: a["state"].update(bytes=-2),
    "a size that is no whole number": lambda a: a["state"].update(bytes=1.5),
    "a round that is true": lambda a: a.update(round=True),
    "a digest that is a number": lambda a: a.update(config_digest=5),
    "a memory that is a number": lambda a: a["memories"].update(outline={"mapping": {"q0": 3}}),
    "a memory of numbers": lambda a: a["memories"].update(
        outline={"mapping": {"q0": {"mapping": {"x": 3}}}}
    ),
    "a memory longer than its bytes": lambda a: a.update(forms=[{"m": ["F32", [4]]}]),
    "a memory shorter than its bytes": lambda a: a.update(forms=[{"m": ["F32", [2]]}]),
    "a memory of negative sizes": lambda a: a.update(forms=[{"m": ["F32", [-1, -3]]}]),
    "a memory of nothing, endless": lambda a: a.update(
        forms=[{"m": ["F32", [3]], "n": ["F32", [0, 2**62]]}]
    ),
    "a memory of an unknown type": lambda a: a.update(forms=[{"m": ["object", [3]]}]),
    "a memory in a form that is not there": lambda a: a.update(forms=[]),
    "a memory where no bytes are": lambda a: a["memories"].update(
        outline={"mapping": {"q1": {"packed": ["/q2", 0]}}}
    ),
    "a memory of two kinds of bytes": lambda a: a["state"].update(
        outline={"mapping": {"F": {"packed": ["/F/w", 1]}}}
    ) or a["forms"].append({"w": ["F64", [1]]}),
    "a form from the end": lambda a: a["memories"].update(
        outline={"mapping": {"q1": {"packed": ["/q1", -1]}}}
    ),
    "a form that is true": lambda a: a["memories"].update(
        outline={"mapping": {"q1": {"packed": ["/q1", True]}}}
    ) or a["forms"].append(a["forms"][0]),
    "a form of a hundred sizes": lambda a: a.update(forms=[{"m": ["F32", [3] + [1] * 100]}]),
    "a memory that is a tensor": lambda a: a["memories"].update(
        outline={"mapping": {"q1": {"tensor": "/q1"}}}
    ),
    "memories that are a tensor": lambda a: a["memories"].update(outline={"tensor": "/q1"}),
    "memories that are one": lambda a: a["memories"].update(outline={"packed": ["/q1", 0]}),
    "a format that is true": lambda a: a.update(format=True),
    "forms that are no list": lambda a: a.update(forms=3),
    "extra that is a text": lambda a: a.update(extra="x"),
    "extra with a tree": lambda a: a.update(
        extra={"mapping": {"round": {"mapping": {}}}}
    ),
    "extra that is deep": deep,
    "a number of an unknown form": lambda a: a.update(extra={"mapping": {"x": {"int": "0x"}}}),
    "a tensor that is not there": lambda a: a["state"].update(outline={"tensor": "/G"}),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_snapshot_is_skipped_with_a_message(what: str, tmp_path: Path) -> None:
    assert checkpoint.load_snapshot(forged(tmp_path / "good", lambda about: None), "d").round == 1
    with pytest.raises(RunFolderError, match="no checkpoint is intact"):
        checkpoint.load_snapshot(forged(tmp_path / "bad", FORGED[what]), "d")


def test_tensors_of_a_snapshot_cannot_claim_more_than_their_bytes(tmp_path: Path) -> None:
    claims = bytes_of({"w": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}})
    with pytest.raises(RunFolderError, match="is not safetensors"):
        as_tensors(tmp_path / "1", claims)
    good = safetensors.torch.save({"/F/w": torch.ones(2)})
    as_tensors(tmp_path / "2", good)  # the control


# 32: JSON -----------------------------------------------------------------------------------------

STRANGE: dict[str, str] = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "minus Infinity": "-Infinity",
    "Infinity by another name": "1e999",
    "a whole number beyond 53 bits": str(MAX_INTEGER + 1),
    "a whole number of 400 digits": "9" * 400,
    "a whole number of 5000 digits": "9" * 5000,
    "a key twice": '{"k":1,"k":2}',
    "half a pair of surrogates": '"\\ud800"',
    "a deep list": "[" * 100_000,
    "a list that is almost too deep": "[" * 980 + "]" * 980,
}
TEXT_READERS: tuple[Literal["split", "ledger", "card", "header", "snapshot"], ...] = (
    "split", "ledger", "card", "header", "snapshot",
)  # fmt: skip


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("reader", TEXT_READERS)
def test_every_reader_of_json_refuses_invalid_content_and_never_crashes(
    reader: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(REFUSALS):
        READERS[reader](tmp_path / "s0.jsonl", f'{{"a":{STRANGE[what]}}}'.encode())


@pytest.mark.parametrize("what", [w for w in STRANGE if "almost" not in w])
def test_the_strict_reader_names_invalid_content_and_reads_valid_content(what: str) -> None:
    with pytest.raises(PlanError):
        decode_strictly(f'{{"a":{STRANGE[what]}}}'.encode())
    assert decode_strictly(b'{"a":[0.5,9007199254740992,"\\ud83d\\ude00"]}') == {
        "a": [0.5, MAX_INTEGER, "\N{GRINNING FACE}"]
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seed": 10**400}, "out of range"),
        ({"rows": MAX_INTEGER + 1}, "out of range"),
        ({"settings": {"alpha": 1e308 * 10}}, "is not a split.json: Infinity is not a number"),
    ],
)
def test_a_split_with_numbers_out_of_range_is_refused_even_with_a_valid_hash(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    plain = build_federation(DataSettings(name="toy", labelled=20), AgentSettings(2, 1, 0), 0)
    path = tmp_path / "split.json"
    plain.manifest.write(path)
    found = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match=why):
        manifests.read_manifest(path)
    path.write_text(json.dumps(found).replace("Infinity", "1e999"))
    with pytest.raises(DataError, match=r"out of range|beyond the numbers"):
        manifests.read_manifest(path)


def test_numbers_too_large_for_json_are_restored_from_a_snapshot(tmp_path: Path) -> None:
    extra = {"up": MAX_INTEGER, "down": 3 * MAX_INTEGER, "least": -(10**40)}
    checkpoint.save_snapshot(tmp_path, Snapshot(1, {}, {}, "d", extra))
    assert checkpoint.load_snapshot(tmp_path, "d").extra == extra
