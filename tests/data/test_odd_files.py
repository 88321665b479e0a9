"""Files and names that could hang, crash or mislead are refused or counted, with controls."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from privssl.data.datasets import Dataset, load_dataset
from privssl.data.downloads import default_root
from privssl.errors import DataError
from privssl.settings.schema import DataSettings

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> Any:
    return RNG.integers(0, 255, shape, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of colour images."""
    for place in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(2):
            Image.fromarray(pixels(8, 8, 3)).save(tmp_path / place / f"{number}.png")
    return tmp_path


def read(root: Path) -> Dataset:
    return load_dataset(DataSettings(name="image_folder", root=str(root)))


def ppm(depth: int) -> bytes:
    return b"P6 8 8 %d\n" % depth + bytes(8 * 8 * 3 * (2 if depth > 255 else 1))


def png16() -> bytes:
    """A colour PNG with 16 bits per channel, which Pillow cannot write."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    rows = zlib.compress(bytes(8 * (1 + 8 * 6)))
    parts = chunk(b"IHDR", head), chunk(b"IDAT", rows), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(("name", "content"), [("c.png", png16()), ("c.ppm", ppm(65535))])
def test_images_with_16_bits_per_channel_are_refused_and_not_truncated(
    folder: Path, name: str, content: bytes
) -> None:
    (folder / "train/a" / name).write_bytes(content)
    with pytest.raises(DataError, match="more than 8 bits per channel"):
        read(folder)


def test_images_with_8_bits_per_channel_or_fewer_are_read(folder: Path) -> None:
    (folder / "train/a/c.ppm").write_bytes(ppm(255))
    (folder / "train/a/d.ppm").write_bytes(ppm(15))
    assert len(read(folder).y_train) == 6


def test_a_named_pipe_is_counted_and_never_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(read(folder).y_train) == 4
    assert not caplog.records or "pipes" not in caplog.text  # the control
    os.mkfifo(folder / "train/a/p.png")
    assert len(read(folder).y_train) == 4
    assert "not read: 1 pipes and devices" in caplog.text


def rename(folder: Path, name: bytes) -> None:
    for part in ("train", "test"):
        place = os.fsencode(folder / part)
        os.rename(place + b"/a", place + b"/" + name)


@pytest.mark.parametrize(
    "name", [b"a\nb", b"a\x1b[31m", b"a\xff", b"a\tb", "a\u202eb".encode()], ids=repr
)
def test_a_class_name_that_cannot_be_printed_is_refused(folder: Path, name: bytes) -> None:
    rename(folder, name)
    with pytest.raises(DataError, match=r"cannot be printed.*Rename it") as refusal:
        read(folder)
    assert str(refusal.value).encode()  # and the error can be printed


def test_a_class_name_with_non_ascii_letters_is_read(folder: Path) -> None:
    rename(folder, "käse 1".encode())
    assert "käse 1" in read(folder).class_names


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [("caf\u00e9", "cafe\u0301", r"caf\\xe9"), ("a", "a ", "'a '"), ("a", "A", "'A'")],
)
def test_the_error_shows_the_difference_between_class_names_that_look_alike(
    folder: Path, one: str, other: str, said: str
) -> None:
    os.rename(folder / "train/a", folder / f"train/{one}")
    os.rename(folder / "test/a", folder / f"test/{other}")
    with pytest.raises(DataError, match="differ in the classes") as refusal:
        read(folder)
    assert said.replace("\\\\", "\\") in str(refusal.value)
    os.rename(folder / f"test/{other}", folder / f"test/{one}")
    assert len(read(folder).class_names) == 2  # the control


def truncated(kind: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        Image.fromarray(pixels(8, 8, 3)).save(path, kind)
        path.write_bytes(path.read_bytes()[:-30])

    return make


@pytest.mark.parametrize(
    "make",
    [
        truncated("JPEG"), truncated("PNG"), lambda path: path.write_bytes(b""),
        lambda path: path.write_text("<html>404</html>"), lambda path: path.symlink_to("c.png"),
        lambda path: path.symlink_to("absent.png"),
        lambda path: Image.fromarray(pixels(8, 8, 3)).save(path, "EPS"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_complete_image_is_named(
    folder: Path, make: Callable[[Path], None]
) -> None:
    make(folder / "train/a/c.png")
    with pytest.raises(DataError, match=r"c\.png cannot be read as an image"):
        read(folder)
    (folder / "train/a/c.png").unlink()
    assert len(read(folder).y_train) == 4  # the control


def npz(folder: Path, **changes: Any) -> Dataset:
    x = pixels(6, 4, 5)
    y = np.array([0, 1, 2, 0, 1, 2])
    arrays = {"x_train": x, "y_train": y, "x_test": x[:3] ^ 1, "y_test": y[:3], **changes}
    np.savez(folder / "rows.npz", **arrays)
    return load_dataset(DataSettings(name="npz", root=str(folder / "rows.npz")))


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_images_without_pixels_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="have no number"):
        npz(tmp_path, x_train=pixels(6, *shape), x_test=pixels(3, *shape))
    assert npz(tmp_path).shape == (1, 4, 5)  # the control


def test_ambiguous_channel_axes_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert npz(tmp_path, x_train=pixels(6, 3, 8, 3), x_test=pixels(3, 3, 8, 3)).shape == (3, 3, 8)
    assert "is read as (N, H, W, C)" in caplog.text
    caplog.clear()
    npz(tmp_path, x_train=pixels(6, 8, 8, 3), x_test=pixels(3, 8, 8, 3))
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []  # the control


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_train": pixels(6, 4, 5).astype(complex)}, "x_train is complex128"),
        ({"x_train": pixels(6, 4, 5) > 100}, "x_train is bool"),
        ({"y_train": np.array(["a", "b", "c"] * 2)}, "y_train is <U1"),
        ({"y_train": np.array([True, False] * 3)}, "y_train is bool"),
        ({"y_train": np.eye(3, dtype=int)[[0, 1, 2, 0, 1, 2]]}, r"of shape \(6, 3\)"),
        ({"y_train": np.array(3)}, r"of shape \(\)"),
        ({"x_train": np.zeros(6, [("a", "u1")])}, r"the shape \(6,\)"),
        ({"x_train": np.full((6, 4, 5), np.inf, np.float16)}, "6 rows have NaN or infinity"),
    ],
)
def test_arrays_of_other_types_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        npz(tmp_path, **changes)


def test_fortran_order_float16_and_big_endian_arrays_are_read_by_value(tmp_path: Path) -> None:
    x = pixels(6, 4, 5)
    plain = npz(tmp_path, x_train=x).x_train
    assert (npz(tmp_path, x_train=np.asfortranarray(x)).x_train == plain).all()
    floats = (x / 255).astype(np.float16)
    for kind in (np.float16, ">f4", ">f8"):
        found = npz(tmp_path, x_train=floats.astype(kind), x_test=floats[:3].astype(kind) / 2)
        assert (found.x_train[:, 0].numpy() == floats.astype(np.float32)).all()


def test_a_data_folder_below_an_unknown_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", "~nobody-has-this-name/data")
    with pytest.raises(DataError, match=r"home folder is unknown\. Set PRIVSSL_DATA"):
        default_root()
    monkeypatch.setenv("PRIVSSL_DATA", "~/data")
    assert default_root() == Path.home() / "data"  # the control
