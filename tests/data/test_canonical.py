"""A row has one content for its account, whatever file it came from (privssl/data/canonical.py)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from accounting import row_registry
from accounting.errors import LedgerError
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.data.canonical import as_loaded, as_loaded_of, canonical, contents_of
from privssl.data.datasets import load_dataset
from privssl.data.image_folder import read_folder
from privssl.data.npz import read_rows
from privssl.experiment import account_rows
from privssl.settings.schema import DataSettings

GREY = np.random.default_rng(0).integers(0, 256, (6, 9, 8), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (6, 9, 8, 3), dtype=np.uint8)


def contents(x: NDArray[Any] | Tensor) -> list[bytes]:
    return list(canonical(torch.as_tensor(x)))


def from_npz(path: Path, x: NDArray[Any]) -> Tensor:
    np.savez(path, x_unlabelled=x)
    rows = read_rows(path, labelled=False, unlabelled=True).unlabelled
    assert rows is not None
    return torch.from_numpy(rows)


def from_png(root: Path, x: NDArray[Any]) -> Tensor:
    """Rows read from a folder of images, in their order: all but one of class 0."""
    for part in ("train", "test"):
        for name in "ab":
            (root / part / name).mkdir(parents=True)
            Image.fromarray(x[-1]).save(root / part / name / "0.png")
    (root / "train/a/0.png").unlink()
    for number, row in enumerate(x[:-1]):
        Image.fromarray(row).save(root / f"train/a/{number}.png")
    return torch.from_numpy(read_folder(root, None).x_train)


def forms(x: NDArray[np.uint8], path: Path) -> dict[str, Tensor]:
    """The same images in every file format that can be read."""
    found = {
        "png": from_png(path / "png", x),
        "bytes": from_npz(path / "x.npz", x),
        "double": from_npz(path / "x.npz", x / 255),
        "single": from_npz(path / "x.npz", x.astype(np.float32) / np.float32(255)),
        "half": from_npz(path / "x.npz", (x / 255).astype(np.float16)),
    }
    if x.ndim == 4:
        found["channels first"] = from_npz(path / "x.npz", x.transpose(0, 3, 1, 2))
    else:
        found["grey as RGB"] = from_npz(path / "x.npz", np.stack([x] * 3, axis=-1))
        found["grey as RGB floats"] = from_npz(path / "x.npz", np.stack([x / 255] * 3, axis=1))
    scaled = found["double"] * 2 - 1
    return {**found, "scaled": scaled, "scaled half": scaled.half().float()}


@pytest.mark.parametrize("x", [GREY, COLOUR], ids=["grey", "colour"])
def test_an_image_has_one_content_whatever_file_it_came_from(
    x: NDArray[np.uint8], tmp_path: Path
) -> None:
    ways = forms(x, tmp_path)
    expected = contents(ways["bytes"])
    assert len(set(expected)) == len(x)
    assert {name: contents(rows) == expected for name, rows in ways.items()} == dict.fromkeys(
        ways, True
    )
    # The control: as loaded, floats and bytes are different rows.
    assert list(as_loaded(ways["double"])) != list(as_loaded(ways["bytes"]))


def test_the_content_of_single_channel_bytes_equals_that_of_version_0_1() -> None:
    rows = torch.from_numpy(GREY[:, None])
    by_hand = [f"torch.uint8 {(1, 9, 8)} ".encode() + row.tobytes() for row in GREY]
    assert contents(rows) == list(as_loaded(rows)) == by_hand


@pytest.mark.parametrize("x", [GREY[:, None], COLOUR.transpose(0, 3, 1, 2)])
@pytest.mark.parametrize("divisor", [1, 255.0])
def test_one_level_in_one_pixel_makes_another_row(x: NDArray[np.uint8], divisor: float) -> None:
    other = x.copy()
    other[:, -1, 4, 5] ^= 1
    pairs = zip(contents(x / divisor), contents(other / divisor), strict=True)
    assert all(one != two for one, two in pairs)


def test_the_same_bytes_in_another_shape_are_another_row() -> None:
    assert contents(GREY[:, None]) != contents(GREY.reshape(6, 1, 8, 9))


def test_floats_between_levels_have_the_content_of_the_nearest_level() -> None:
    x = np.random.default_rng(2).random((2000, 1, 4, 4), dtype=np.float32)
    assert len(set(contents(x))) == len(x)
    nearest = contents(np.round(x * np.float32(255)).astype(np.uint8))
    assert len(set(contents(x)) ^ set(nearest)) == 0
    # The control: as loaded they are other rows.
    assert not set(as_loaded(torch.from_numpy(x))) & set(contents(x))


def test_a_digit_has_one_content_as_built_in_bytes_and_divided_by_16() -> None:
    shades = load_digits().images[:, None]  # as README.md gives them from Python
    built_in = load_dataset(DataSettings(name="digits"))
    known = {*canonical(built_in.x_train), *canonical(built_in.x_test)}
    for floats in (shades / 16, (shades / 16).astype(np.float32)):
        assert len(known ^ set(contents(floats))) == 0  # pytest takes minutes to compare the sets


def test_floats_with_few_levels_keep_their_bits() -> None:
    x = np.random.default_rng(3).random((2000, 1, 4, 4), dtype=np.float32) / 255
    assert len(set(contents(x))) == len(x)
    nudged = np.nextafter(x, np.float32(2))
    assert not set(contents(x)) & set(contents(nudged))


# Accounts -------------------------------------------------------------------------------------


def agent(name: str, x: Tensor) -> Agent:
    numbers = torch.arange(len(x))
    return Agent(id=name, held_labelled=LabelledRows(x, torch.zeros_like(numbers), numbers))


def unprotected(x: Tensor) -> list[UnlabelledRows]:
    return [UnlabelledRows(x, torch.arange(len(x)))]


BYTES = torch.from_numpy(GREY[:, None])
FLOATS = torch.from_numpy((GREY[:, None] / 255).astype(np.float32))


def test_one_image_as_bytes_and_as_floats_gets_only_one_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account_rows.claim_rows(tmp_path, [agent("s0", BYTES)], [])
    before = {path.name: path.read_bytes() for path in (tmp_path / "registry").iterdir()}
    with pytest.raises(LedgerError, match="6 rows would be in the accounts of s0 and of s1"):
        account_rows.claim_rows(tmp_path, [agent("s1", FLOATS)], [])
    with pytest.raises(LedgerError, match=r"6 rows in the account of s0 .* without"):
        account_rows.claim_rows(tmp_path, [], unprotected(FLOATS))
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "registry").iterdir()}
    # The control: compared by their bytes, they would get two.
    monkeypatch.setattr(account_rows, "contents_of", as_loaded_of)
    account_rows.claim_rows(tmp_path, [agent("s1", FLOATS)], [])


def test_a_registry_of_version_0_1_still_refuses_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, rest = FLOATS[:3], FLOATS[3:]
    row_registry.claim(
        tmp_path, {"s0": as_loaded(half)}, unprotected=as_loaded(rest)
    )  # as that version did
    with pytest.raises(LedgerError, match="3 rows would be in the accounts of s0 and of s1"):
        account_rows.claim_rows(tmp_path, [agent("s1", half)], [])
    with pytest.raises(LedgerError, match=r"3 rows in the account of s1 .* without"):
        account_rows.claim_rows(tmp_path, [agent("s1", rest)], [])
    with pytest.raises(LedgerError, match=r"3 rows in the account of s0 .* without"):
        account_rows.claim_rows(tmp_path, [], unprotected(half))
    account_rows.claim_rows(
        tmp_path, [agent("s0", half)], unprotected(rest)
    )  # the same use is accepted again
    # The control: by the new content alone, the old registry would recognise none of its rows.
    other = tmp_path / "other"
    row_registry.claim(other, {"s0": as_loaded(half)})
    monkeypatch.setattr(account_rows, "as_loaded_of", contents_of)
    account_rows.claim_rows(other, [agent("s1", half)], [])
