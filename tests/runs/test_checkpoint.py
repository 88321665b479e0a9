"""Snapshots: round trips, damaged files and failed writes."""

import errno
import hashlib
import json
import logging
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import Tensor

from privssl.errors import RunFolderError
from privssl.runs import checkpoint
from privssl.runs.checkpoint import (
    Snapshot,
    load_snapshot,
    save_snapshot,
    update_pointer,
    with_checksum,
)
from privssl.runs.state_tree import StateTree
from privssl.storage import atomic_files
from privssl.storage.tensor_files import save_weights
from tests.support.forked_command import ForkedCommand


def snapshot(round_number: int, digest: str = "d") -> Snapshot:
    state: StateTree = {
        "F": {"weight": torch.full((2, 3), float(round_number))},
        "step": round_number,
    }
    memories = {"q0": {"mean": torch.arange(4)}, "q1": {}}
    return Snapshot(round_number, state, memories, digest, {"best": 0.1, "up": 3, "note": "x"})


def same_tree(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, dict):
        return (
            isinstance(b, Mapping)  # or a mapping that reads tensors lazily
            and a.keys() == b.keys()
            and all(same_tree(item, b[key]) for key, item in a.items())
        )
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same_tree, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


keys = st.text("ab/~_.é0", max_size=4) | st.just("__metadata__")
tensors = st.sampled_from(
    [
        torch.tensor(3.5),
        torch.zeros(0, 2),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([0.1, math.inf, -0.0], dtype=torch.bfloat16),
        torch.tensor([1e-300], dtype=torch.float64),
        torch.tensor([[0, 255]], dtype=torch.uint8),
    ]
)
leaves = tensors | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
trees = st.recursive(
    leaves,
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=40, deadline=None)
def test_any_state_tree_is_restored_with_its_types_and_bits(
    tmp_path_factory: pytest.TempPathFactory, tree: Any
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_snapshot(
        folder, Snapshot(1, tree, {"q0": {"__metadata__": torch.ones(1)}, "a/b": {}}, "d")
    )
    back = load_snapshot(folder, "d")
    assert same_tree(tree, back.state)
    assert same_tree({"q0": {"__metadata__": torch.ones(1)}, "a/b": {}}, back.memories)


def test_control_the_comparison_of_trees_notices_differences() -> None:
    assert not same_tree({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)})
    assert not same_tree((1,), (1.0,))
    assert not same_tree({"a": {}}, {"a": None})


def test_every_part_of_a_snapshot_is_restored(tmp_path: Path) -> None:
    written = save_snapshot(tmp_path / "checkpoints", snapshot(10))
    assert written == tmp_path / "checkpoints/round_00010"
    assert names(tmp_path / "checkpoints") == ["latest", "round_00010"]
    back = load_snapshot(tmp_path / "checkpoints", "d")
    assert (back.round, back.config_digest) == (10, "d")
    assert back.extra == {"best": 0.1, "up": 3, "note": "x"}
    assert same_tree(snapshot(10).state, back.state)
    assert same_tree(snapshot(10).memories, back.memories)


def test_tensors_that_share_memory_are_restored_as_separate_tensors(tmp_path: Path) -> None:
    both = torch.arange(6.0)
    save_snapshot(tmp_path, Snapshot(1, {"F": both, "teacher": both, "part": both[2:4]}, {}, "d"))
    back: Any = load_snapshot(tmp_path, "d").state
    back["F"].zero_()
    assert back["teacher"].tolist() == [0, 1, 2, 3, 4, 5]
    assert back["part"].tolist() == [2, 3]


def test_a_tree_with_unsupported_values_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    for tree in ({"a": object()}, {"a": [1]}, {1: 2}):
        with pytest.raises(TypeError):
            save_snapshot(tmp_path, Snapshot(1, tree, {}, "d"))  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_old_snapshots_are_deleted_except_the_best_one(tmp_path: Path) -> None:
    for number in (10, 20, 30, 40):
        save_snapshot(tmp_path, snapshot(number), keep=2)
        if number == 10:
            update_pointer(tmp_path, "best", 10)
    assert names(tmp_path) == ["best", "latest", "round_00010", "round_00030", "round_00040"]
    assert (tmp_path / "latest").read_text() == "round_00040\n"
    assert (tmp_path / "best").read_text() == "round_00010\n"


def test_saving_an_earlier_round_deletes_later_snapshots(tmp_path: Path) -> None:
    for number in (10, 20, 30):
        save_snapshot(tmp_path, snapshot(number), keep=3)
    save_snapshot(tmp_path, snapshot(20, "again"), keep=3)  # after a resume from round 10
    assert names(tmp_path) == ["latest", "round_00010", "round_00020"]
    assert load_snapshot(tmp_path, "again").round == 20


def test_a_snapshot_of_another_format_is_refused_with_the_formats(tmp_path: Path) -> None:
    edit_json(format=2)(save_snapshot(tmp_path, snapshot(10)))
    with pytest.raises(RunFolderError, match="format 2, this version of privssl reads 3"):
        load_snapshot(tmp_path, "d")


def test_another_config_is_refused(tmp_path: Path) -> None:
    save_snapshot(tmp_path, snapshot(10, digest="mine"))
    with pytest.raises(RunFolderError, match=r"round_00010 belongs to another config. Compare run"):
        load_snapshot(tmp_path, "theirs")


def test_loading_from_a_folder_without_a_snapshot_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunFolderError, match="there is no checkpoint to resume from"):
            load_snapshot(folder, "d")


def edit_json(**changes: Any) -> Any:
    def damage(folder: Path) -> None:
        path = folder / "snapshot.json"
        path.write_bytes(with_checksum(json.loads(path.read_text()) | changes))

    return damage


def truncate(name: str, size: int) -> Any:
    return lambda folder: os.truncate(folder / name, size)


def flip_last_bit(folder: Path) -> None:
    data = bytearray((folder / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "state.safetensors").write_bytes(data)


def replace_in_json(old: str, new: str) -> Any:
    """Change snapshot.json to other values of valid types."""

    def damage(folder: Path) -> None:
        path = folder / "snapshot.json"
        before = path.read_text()
        assert before.count(old) == 1
        path.write_text(before.replace(old, new))

    return damage


def replace_json(content: str) -> Any:
    return lambda folder: (folder / "snapshot.json").write_text(content)


DAMAGES = {
    "one bit flipped": flip_last_bit,
    "tensors cut": truncate("state.safetensors", 20),
    "tensors empty": truncate("memories.safetensors", 0),
    "one bit of a number flipped": replace_in_json('"best": 0.1', '"best": 0.3'),
    "one bit of a name flipped": replace_in_json('"up"', '"uq"'),
    "one bit of the format flipped": replace_in_json('"format": 3', '"format": 2'),
    "one bit of its checksum's name flipped": replace_in_json('\n "sha256": "', '\n "sha257": "'),
    "json cut": truncate("snapshot.json", 40),
    "tensors longer": lambda folder: os.truncate(folder / "state.safetensors", 10**6),
    "file gone": lambda folder: (folder / "memories.safetensors").unlink(),
    "json gone": lambda folder: (folder / "snapshot.json").unlink(),
    "not a number": replace_json('{"format": NaN}'),
    "key twice": replace_json('{"format": 1, "format": 1}'),
    "a list": replace_json("[]"),
    "deep": replace_json("[" * 100_000),
    "another format": edit_json(format=4),
    "another round": edit_json(round=21),
    "round no number": edit_json(round="20"),
    "state of no kind": edit_json(state=3),
    "outline of unknown kind": edit_json(extra={"object": "os.system"}),
    "outline with a list": edit_json(extra=[1]),
    "size beyond all": edit_json(state={"bytes": 10**30, "sha256": "", "outline": None}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_snapshot_is_skipped_for_the_previous_one(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_snapshot(tmp_path, snapshot(10))
    save_snapshot(tmp_path, snapshot(20))
    assert load_snapshot(tmp_path, "d").round == 20  # the control: without damage
    damage(tmp_path / "round_00020")
    with caplog.at_level(logging.WARNING):
        assert load_snapshot(tmp_path, "d").round == 10
    assert "checkpoint round_00020 is damaged" in caplog.text
    damage(tmp_path / "round_00010")
    with pytest.raises(RunFolderError, match="no checkpoint is intact"):
        load_snapshot(tmp_path, "d")


def test_a_pickle_in_place_of_tensors_is_not_executed_even_with_a_valid_checksum(
    tmp_path: Path,
) -> None:
    pickled = f"cposix\nsystem\n(S'touch {tmp_path}/pwned'\ntR.".encode()
    folder = save_snapshot(tmp_path, snapshot(10))
    (folder / "state.safetensors").write_bytes(pickled)
    checksum = hashlib.sha256(pickled).hexdigest()
    edit_json(state={"bytes": len(pickled), "sha256": checksum, "outline": {"tensor": "/"}})(folder)
    with pytest.raises(RunFolderError, match="is not safetensors"):
        load_snapshot(tmp_path, "d")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [None, "", "../../etc", "round_00099\n", "\xff"])
def test_without_a_valid_latest_pointer_the_newest_snapshot_is_loaded(
    tmp_path: Path, content: str | None
) -> None:
    save_snapshot(tmp_path, snapshot(10))
    save_snapshot(tmp_path, snapshot(20))
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_text(content, encoding="latin-1")
    assert load_snapshot(tmp_path, "d").round == 20


def test_the_latest_pointer_selects_the_snapshot(tmp_path: Path) -> None:
    save_snapshot(tmp_path, snapshot(10))
    save_snapshot(tmp_path, snapshot(20))
    update_pointer(tmp_path, "latest", 10)
    assert load_snapshot(tmp_path, "d").round == 10


@pytest.mark.parametrize("failing_call", range(1, 8))
@pytest.mark.parametrize("function", ["fsync", "rename", "replace"])
def test_a_full_disk_is_reported_and_leaves_the_previous_snapshot_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, failing_call: int
) -> None:
    save_snapshot(tmp_path, snapshot(10))
    calls = 0
    real = getattr(os, function)

    def fail_on_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail_on_call)
        try:
            save_snapshot(tmp_path, snapshot(20))
        except RunFolderError as error:
            assert "cannot be written: No space left on device" in str(error)
            assert str(tmp_path) in str(error)
        else:
            assert calls < failing_call  # the write makes fewer such calls
    assert same_tree(snapshot(10).state, load_round(tmp_path, 10).state)
    assert load_snapshot(tmp_path, "d").round in (10, 20)
    save_snapshot(tmp_path, snapshot(20))  # the disk has space again
    assert names(tmp_path) == ["latest", "round_00010", "round_00020"]
    assert load_snapshot(tmp_path, "d").round == 20


def load_round(folder: Path, number: int) -> Snapshot:
    update_pointer(folder, "latest", number)
    return load_snapshot(folder, "d")


def test_a_killed_write_is_ignored_and_removed_by_the_next_save(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    save_snapshot(tmp_path, snapshot(10))

    def kill_this_process(folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def save(_: object) -> int:
        with patch.object(checkpoint, "sync_directory", kill_this_process):
            save_snapshot(tmp_path, Snapshot(20, {"w": torch.ones(3)}, {}, "d"))
        return 0

    assert ForkedCommand(save, [], tmp_path_factory.mktemp("printed")).wait(300) == -signal.SIGKILL
    assert any(name.startswith(atomic_files.TEMPORARY) for name in names(tmp_path))
    assert load_snapshot(tmp_path, "d").round == 10
    save_snapshot(tmp_path, snapshot(20))
    assert names(tmp_path) == ["latest", "round_00010", "round_00020"]


def test_a_write_interrupted_by_ctrl_c_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_snapshot(tmp_path, snapshot(10))

    def raise_interrupt(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_files, "write_new", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_snapshot(tmp_path, snapshot(20))
    assert names(tmp_path) == ["latest", "round_00010"]


def test_only_the_owner_can_read_snapshots(tmp_path: Path) -> None:
    folder = save_snapshot(tmp_path, snapshot(10))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_saved_weights_are_a_plain_state_dict_for_safetensors(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    path = tmp_path / "released/classifier.safetensors"
    save_weights(path, layer.state_dict())
    save_weights(path, layer.state_dict())  # the second file replaces the first
    again = torch.nn.Linear(3, 2)
    again.load_state_dict(safetensors.torch.load_file(path))
    assert torch.equal(again.weight, layer.weight)
    assert names(path.parent) == ["classifier.safetensors"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        save_weights(tmp_path / "file/weights.safetensors", layer.state_dict())
