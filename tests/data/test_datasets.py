"""Reading data sets: each format, and the errors about files that do not have it."""

import contextlib
import pickle  # noqa: TID251 - a small CIFAR-10 is written here; only torchvision reads it
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from privssl.data.datasets import Dataset, checksum, from_arrays, load_dataset
from privssl.data.downloads import default_root
from privssl.data.npz import Arrays, read_npz
from privssl.errors import DataError
from privssl.experiment import config as configs
from privssl.settings.schema import DataSettings, Positive
from privssl.training.local_training import network_input
from tests.support.fresh_imports import run_afresh

# Built in -----------------------------------------------------------------------------------


def test_rows_are_scaled_by_a_public_constant() -> None:
    rows = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    wanted = torch.tensor([-1.0, -0.6, 1.0]).view(1, 1, 1, 3)
    torch.testing.assert_close(network_input(rows), wanted)
    torch.testing.assert_close(network_input(rows / 255), wanted)


def digits_of_scikit_learn() -> dict[str, NDArray[np.uint8]]:
    """All images of scikit-learn with a fifth of each class held out, and 16 levels scaled to 255.

    ``np.savez_compressed("privssl/data/digits.npz", **digits_of_scikit_learn())`` made the file.
    """
    original = load_digits()
    x = np.round(original.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
    y = original.target.astype(np.uint8)
    parts = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    return dict(zip(("x_train", "x_test", "y_train", "y_test"), parts, strict=True))


def test_digits_equal_those_of_scikit_learn_with_a_fifth_of_each_class_held_out() -> None:
    found, wanted = load_dataset(DataSettings(name="digits")), digits_of_scikit_learn()
    assert (found.classes, found.shape, found.x_train.dtype) == (10, (1, 8, 8), torch.uint8)
    for name, array in wanted.items():
        assert np.array_equal(np.squeeze(getattr(found, name).numpy()), array)
    held_out = found.y_test.bincount() / torch.cat([found.y_train, found.y_test]).bincount()
    assert bool(((held_out - 0.2).abs() < 0.01).all())


def test_toy_rows_are_separable_and_always_the_same() -> None:
    toy = load_dataset(DataSettings(name="toy"))
    assert (len(toy.y_train), len(toy.y_test), toy.shape) == (1000, 200, (1, 8, 8))
    assert toy.y_train.bincount().tolist() == [100] * 10
    assert checksum(load_dataset(DataSettings(name="toy"))) == checksum(toy)
    # The nearest class mean is right for every test row.
    rows = network_input(toy.x_train).flatten(1)
    means = torch.stack([rows[toy.y_train == number].mean(dim=0) for number in range(10)])
    nearest = torch.cdist(network_input(toy.x_test).flatten(1), means).argmin(dim=1)
    assert torch.equal(nearest, toy.y_test)


def arrays(rows: int = 4, *, pixel: int = 0, label: int = 1) -> Arrays:
    x = np.zeros((rows, 1, 2, 2), np.uint8)
    y = np.arange(rows) % 2
    x[0, 0, 0, 0], y[-1] = pixel, label
    return Arrays(x, y, x.copy(), y.copy(), ("0", "1"))


def test_the_checksum_depends_on_every_pixel_every_label_and_the_shape() -> None:
    base = from_arrays("npz", arrays())
    assert checksum(from_arrays("other", arrays())) == checksum(base)
    others = [arrays(pixel=1), arrays(label=0), arrays(6)]
    flat = arrays()._replace(x_train=np.zeros((4, 1, 1, 4), np.uint8))
    assert len({checksum(from_arrays("npz", a)) for a in [arrays(), *others, flat]}) == 5


# NPZ ----------------------------------------------------------------------------------------


def npz(folder: Path, **changes: Any) -> Dataset:
    """Save four valid arrays with some of them changed (None: omitted), and load the file."""
    image = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
    parts: dict[str, Any] = {
        "x_train": image,
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": image[:2],
        "y_test": np.array([0, 1]),
    }
    parts = {name: value for name, value in {**parts, **changes}.items() if value is not None}
    np.savez(folder / "rows.npz", **parts)
    return load_dataset(DataSettings(name="npz", root=str(folder / "rows.npz")))


def test_an_npz_of_grey_images_gets_one_channel(tmp_path: Path) -> None:
    found = npz(tmp_path)
    assert found.x_train.shape == (6, 1, 4, 5)
    assert found.x_train.flatten().tolist() == list(range(120))
    assert found.class_names == ("0", "1", "2")
    assert found.y_train.dtype == torch.int64


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_may_come_first_or_last(tmp_path: Path, channels: int) -> None:
    first = np.arange(6 * channels * 20, dtype=np.uint8).reshape(6, channels, 4, 5)
    last = first.transpose(0, 2, 3, 1)
    a = npz(tmp_path, x_train=first, x_test=first[:2])
    b = npz(tmp_path, x_train=last, x_test=last[:2])
    assert a.shape == (channels, 4, 5)
    assert torch.equal(a.x_train, torch.from_numpy(first))
    assert checksum(a) == checksum(b)


def test_with_three_first_and_last_the_last_axis_has_the_channels(tmp_path: Path) -> None:
    x: NDArray[np.uint8] = np.zeros((6, 3, 7, 3), np.uint8)
    assert npz(tmp_path, x_train=x, x_test=x[:2]).shape == (3, 3, 7)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_floats_in_the_unit_interval_become_float32(tmp_path: Path, kind: type) -> None:
    x: NDArray[Any] = np.linspace(0, 1, 6 * 16, dtype=kind).reshape(6, 4, 4)
    found = npz(tmp_path, x_train=x, x_test=x[:2])
    assert found.x_train.dtype == torch.float32
    assert (found.x_train.min().item(), found.x_train.max().item()) == (0, 1)


def images(value: float, dtype: type = np.float32) -> NDArray[Any]:
    x: NDArray[Any] = np.full((6, 4, 5), 0.5, dtype)
    x[3, 2, 1] = value
    return x


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"y_test": None}, "has no y_test"),
        ({"x_train": images(1.5)}, "x_train is float32, from 0.5 to 1.5"),
        ({"x_train": images(-0.1)}, "Give uint8 in 0..255, or floats"),
        ({"x_train": images(float("nan"))}, "without NaN"),
        ({"x_train": images(float("inf"))}, "without NaN"),
        ({"x_train": images(3, np.int64)}, "x_train is int64"),
        ({"x_train": np.zeros(6, np.uint8)}, r"the shape \(6,\)"),
        ({"x_train": np.zeros((6, 4, 5, 2), np.uint8)}, "with 1 or 3 channels"),
        ({"x_train": np.zeros((6, 4, 4), np.uint8)}, "Make them alike"),
        ({"x_train": np.zeros((0, 4, 5), np.uint8), "y_train": np.zeros(0, int)}, "at least one"),
        ({"y_train": np.array([0, 1, 2, 0, 1])}, "6 rows and y_train 5"),
        ({"y_train": np.array([0.0, 1, 2, 0, 1, 2])}, "y_train is float64"),
        ({"y_train": np.zeros((6, 1), int)}, r"of shape \(6, 1\)"),
        ({"y_train": np.array([0, 1, -2, 0, 1, 2])}, "the label -2"),
        ({"y_test": np.array([0, -1])}, "y_test has the label -1"),
        ({"y_train": np.full(6, -1)}, "y_train is -1"),
        ({"x_unlabelled": np.zeros((2, 5, 4), np.uint8)}, "x_unlabelled .* Make them alike"),
        ({"x_unlabelled": np.zeros((2, 4, 5))}, "x_unlabelled .* of float32"),
        ({"x_unlabelled": np.zeros((0, 4, 5), np.uint8)}, "x_unlabelled has no rows"),
        ({"y_train": np.array([0, 1, 900, 0, 1, 2])}, "y_train is 900"),
        ({"y_train": np.zeros(6, int)}, "at least two"),
        ({"y_test": np.array([0, 3])}, "y_test has class 3"),
        (
            {"y_train": np.array([0, 1, "b", 0, 1, 2], object)},
            "y_train has Python objects. Give an",
        ),
    ],
    ids=str,
)
def test_an_invalid_npz_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said) as refusal:
        npz(tmp_path, **changes)
    assert "rows.npz" in str(refusal.value)
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def several(brightest: int) -> NDArray[np.uint8]:
    """Six rows that differ."""
    x = np.random.RandomState(0).randint(0, brightest, (6, 4, 5)).astype(np.uint8)
    x[:2, 0, 0] = brightest
    return x


def floats(divisor: float) -> dict[str, NDArray[np.float64]]:
    """Rows in [0, 1]; the test rows are divided by ``divisor`` once more."""
    return {"x_train": several(200) / 255, "x_test": (several(200)[:2] ^ 1) / 255 / divisor}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_train": several(16)}, "x_train has bytes up to 16. They are"),
        ({"x_val": several(200)}, "not read: x_val. Read are"),
        (floats(255), "x_test has floats up to 0.0030911. They are"),  # x_train is unchanged
        ({"x_test": several(90)[:2]}, "x_test goes up to 90 and x_train up to 200. Scale both"),
        ({"x_test": several(200)[2:4]}, "2 of 2 test rows are also training rows"),
        ({"y_train": np.array([1, 2, 3, 1, 2, 3])}, "no training row has class 0, but"),
        ({}, ""),
    ],
    ids=str,
)
def test_an_npz_that_is_probably_a_mistake_causes_a_warning(
    tmp_path: Path, changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    bright = several(200)
    npz(tmp_path, **{"x_train": bright, "x_test": bright[:2] ^ 1, **changes})
    assert [said for _ in caplog.records] == [said] * bool(said)
    assert said in caplog.text


def test_floats_that_were_divided_twice_cause_a_warning_for_each_array(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    twice = {name: x / 255 for name, x in floats(1).items()}
    npz(tmp_path, **twice)
    assert [record.getMessage().split(": ")[1].split()[0] for record in caplog.records] == [
        "x_train", "x_test",
    ]  # fmt: skip
    caplog.clear()
    npz(tmp_path, **floats(1))
    assert not caplog.records  # the control


@pytest.mark.parametrize("kind", [np.uint64, np.uint32, np.uint16, np.uint8])
def test_minus_one_stored_as_an_unsigned_integer_is_refused(tmp_path: Path, kind: type) -> None:
    y: np.ndarray = np.array([0, 1, -1, 0, 1, 2]).astype(kind)
    with pytest.raises(DataError, match=rf"label {y.max()} \(-1, stored without a sign\?\)"):
        npz(tmp_path, y_train=y)
    with pytest.raises(DataError, match=rf"y_test has the label {y.max()}"):
        npz(tmp_path, y_test=y[1:3])
    assert npz(tmp_path, y_train=np.array([0, 1, 2, 0, 1, 2], kind)).classes == 3  # the control


def test_the_largest_label_of_a_type_is_a_class_if_the_class_below_it_exists(
    tmp_path: Path,
) -> None:
    """The control has no class 254: then 255 is -1 stored without a sign."""
    y, x = np.arange(256).astype(np.uint8), np.arange(256 * 16).reshape(256, 4, 4) % 251
    parts = {"x_train": x.astype(np.uint8), "x_test": x[:2].astype(np.uint8)}
    assert npz(tmp_path, y_train=y, **parts).classes == 256
    with pytest.raises(DataError, match=r"label 255 \(-1, stored without a sign\?\)"):
        npz(tmp_path, y_train=np.where(y == 254, 0, y).astype(np.uint8), **parts)


def test_files_other_than_npz_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not an archive")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04" + bytes(40))
    for name in ("text.npz", "one.npy", "cut.npz", "absent.npz"):
        with pytest.raises(DataError):
            load_dataset(DataSettings(name="npz", root=str(tmp_path / name)))
    with pytest.raises(DataError, match=r"a folder\. Give the NPZ file itself"):
        load_dataset(DataSettings(name="npz", root=str(tmp_path)))


@given(where=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_a_flipped_bit_is_detected_or_harmless_and_never_a_crash(where: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npz"
        x = np.zeros((4, 2, 2), np.uint8)
        y = np.array([0, 1, 0, 1])
        np.savez_compressed(path, x_train=x, y_train=y, x_test=x, y_test=y)
        content = bytearray(path.read_bytes())
        content[where % len(content)] ^= 1 << bit
        path.write_bytes(content)
        with contextlib.suppress(DataError):
            assert read_npz(path).x_train.tolist() == x[:, None].tolist()


# Image folder -------------------------------------------------------------------------------


def save_image(path: Path, shade: int = 0, mode: str = "L", size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training images of each of two classes and one test image of each."""
    for shade, name in enumerate(["train/cat/a.png", "train/cat/b.png", "train/dog/a.png"]):
        save_image(tmp_path / name, 10 * shade)
    save_image(tmp_path / "train/dog/b.BMP", 30)
    save_image(tmp_path / "test/cat/x.png", 40)
    save_image(tmp_path / "test/dog/x.png", 50)
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    (tmp_path / "train/.thumbnails").mkdir()
    return tmp_path


def read(folder: Path, image_size: Positive | None = None) -> Dataset:
    return load_dataset(DataSettings(name="image_folder", root=str(folder), image_size=image_size))


def test_images_come_in_the_order_of_their_names_with_the_classes_of_their_folders(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="privssl"):
        found = read(folder)
    assert found.class_names == ("cat", "dog")
    assert found.shape == (1, 4, 6)  # all are grey; height before width
    assert found.x_train[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
    assert found.y_train.tolist() == [0, 0, 1, 1]
    assert (found.x_test[:, 0, 0, 0].tolist(), found.y_test.tolist()) == ([40, 50], [0, 1])
    assert "4 training and 2 test images of 2 classes" in caplog.text


def test_one_colour_image_gives_all_images_three_channels(folder: Path) -> None:
    red = Image.new("RGB", (6, 4), (200, 20, 2))
    red.save(folder / "train/cat/c.png")
    found = read(folder)
    assert found.shape == (3, 4, 6)
    assert found.x_train[:, :, 0, 0].tolist() == [
        [0, 0, 0],
        [10, 10, 10],
        [200, 20, 2],
        [20, 20, 20],
        [30, 30, 30],
    ]


def test_different_image_sizes_are_refused_unless_a_size_is_set(folder: Path) -> None:
    save_image(folder / "test/dog/y.png", 60, size=(9, 9))
    with pytest.raises(DataError, match=r"y.png is 9x9 pixels .* Set data.image_size"):
        read(folder)
    found = read(folder, image_size=5)
    assert found.shape == (1, 5, 5)
    assert found.x_test[:, 0, 2, 2].tolist() == [40, 50, 60]


def test_a_folder_without_its_parts_or_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold train/CLASS/\* and test/CLASS/\*"):
        read(tmp_path)
    save_image(tmp_path / "train/a.png")
    with pytest.raises(DataError, match="train has 0 folders"):
        read(tmp_path)


def test_classes_of_train_and_test_must_be_the_same(folder: Path) -> None:
    save_image(folder / "test/bird/x.png")
    with pytest.raises(DataError, match="train and test differ in the classes 'bird'"):
        read(folder)


def test_a_class_without_images_is_refused(folder: Path) -> None:
    (folder / "test/cat/x.png").unlink()
    with pytest.raises(DataError, match="cat holds no image"):
        read(folder)


def test_an_unreadable_image_is_named(folder: Path) -> None:
    good = (folder / "train/cat/b.png").read_bytes()
    for damage in (b"not an image", b"", good[:50], good[:30]):
        (folder / "train/cat/b.png").write_bytes(damage)
        with pytest.raises(DataError, match="cannot be read as an image"):
            read(folder)


def test_images_with_more_than_8_bits_are_refused_and_not_truncated(folder: Path) -> None:
    Image.new("I;16", (6, 4), 3000).save(folder / "train/dog/c.png")
    with pytest.raises(DataError, match="is an image of Pillow's mode I;16"):
        read(folder)


# Published sets -----------------------------------------------------------------------------


def svhn_file(folder: Path, part: str, labels: list[int]) -> NDArray[np.uint8]:
    """A small file of SVHN's format: X (32, 32, 3, N), y (N, 1) with 10 for the digit 0."""
    rng = np.random.RandomState(len(labels))
    x = rng.randint(0, 256, (32, 32, 3, len(labels))).astype(np.uint8)
    savemat(folder / f"{part}_32x32.mat", {"X": x, "y": np.array(labels)[:, None]})
    return x


def test_svhn_is_read_from_its_files_and_its_label_10_is_digit_0(tmp_path: Path) -> None:
    x = svhn_file(tmp_path, "train", [10, 1, 9, 10])
    svhn_file(tmp_path, "test", [3])
    found = load_dataset(DataSettings(name="svhn", root=str(tmp_path)))
    assert found.y_train.tolist() == [0, 1, 9, 0]
    assert (found.y_test.tolist(), found.shape) == ([3], (3, 32, 32))
    assert found.x_train[2, 1, 30, 4] == x[30, 4, 1, 2]


@pytest.mark.parametrize("labels", [[11], [-1]])
def test_svhn_with_labels_other_than_digits_is_refused(tmp_path: Path, labels: list[int]) -> None:
    svhn_file(tmp_path, "train", labels)
    svhn_file(tmp_path, "test", [3])
    with pytest.raises(DataError, match="not from 0 to 9"):
        load_dataset(DataSettings(name="svhn", root=str(tmp_path)))


def test_a_damaged_file_is_refused_with_the_files_to_remove(tmp_path: Path) -> None:
    svhn_file(tmp_path, "train", [1])
    (tmp_path / "test_32x32.mat").write_bytes(b"MATLAB 5.0 MAT-file, but not really" * 9)
    with pytest.raises(DataError, match=r"damaged .* Remove train_32x32.mat, test_32x32.mat"):
        load_dataset(DataSettings(name="svhn", root=str(tmp_path)))


def idx_files(folder: Path, x: NDArray[np.uint8], y: NDArray[np.uint8]) -> None:
    """The four files of MNIST, as its page describes them: magic number, sizes, bytes."""
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            head = bytes([0, 0, 8, array.ndim]) + sizes
            (raw / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())


def test_mnist_is_read_from_its_files(tmp_path: Path) -> None:
    x = np.random.RandomState(0).randint(0, 256, (5, 28, 28)).astype(np.uint8)
    idx_files(tmp_path, x, np.array([3, 1, 4, 1, 5], np.uint8))
    found = load_dataset(DataSettings(name="mnist", root=str(tmp_path)))
    assert found.x_train.tolist() == x[:, None].tolist()
    assert found.y_test.tolist() == [3, 1, 4, 1, 5]


def test_mnist_is_read_without_torchvision(tmp_path: Path) -> None:
    # Importing torchvision takes as long as importing torch, most of the start-up time of a run on
    # MNIST.
    idx_files(tmp_path, np.zeros((5, 28, 28), np.uint8), np.arange(5, dtype=np.uint8))
    code = (
        "import sys; "
        "from privssl.data.datasets import load_dataset; from privssl.settings.schema import *\n"
        f"load_dataset(DataSettings(name='mnist', root={str(tmp_path)!r})); "
        "said = 'torchvision' in sys.modules"
    )
    assert run_afresh(code, also=["torchvision"]) == "False"
    # The control, without the import: any module of that name is detected.
    assert run_afresh(f"import sys; sys.modules['torchvision'] = sys; {code}") == "True"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-1], "has 3919 bytes for 5 x 28 x 28"),
        (lambda content: content + b"0", "has 3921 bytes for 5 x 28 x 28"),
        (lambda content: content[:12], "does not begin as an IDX file of bytes with 3 axes"),
        (lambda content: b"", "does not begin as an IDX file of bytes with 3 axes"),
        (lambda content: b"\x00\x00\x0d" + content[3:], "does not begin"),  # of float32
        (lambda content: content[:3] + b"\x01" + content[4:], "does not begin"),
        (lambda content: b"\x1f\x8b" + content, "does not begin"),  # as gzip does
        # More than the memory, and more than 64 bits.
        (
            lambda content: content[:4] + b"\xff" * 12 + content[16:],
            r"has 3920 bytes for 4294967295 x 42\d+ x",
        ),
    ],
)
def test_an_idx_file_that_contradicts_its_header_is_refused(
    change: Callable[[bytes], bytes], said: str, tmp_path: Path
) -> None:
    idx_files(tmp_path, np.zeros((5, 28, 28), np.uint8), np.zeros(5, np.uint8))
    path = tmp_path / "MNIST/raw/t10k-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"damaged \(t10k-images-idx3-ubyte {said}"):
        load_dataset(DataSettings(name="mnist", root=str(tmp_path)))


def test_mnist_files_with_different_numbers_of_rows_are_refused(tmp_path: Path) -> None:
    idx_files(tmp_path, np.zeros((5, 28, 28), np.uint8), np.zeros(4, np.uint8))
    with pytest.raises(DataError, match="with 4 labels"):
        load_dataset(DataSettings(name="mnist", root=str(tmp_path)))


def cifar_files(folder: Path, content: bytes) -> None:
    (folder / "cifar-10-batches-py").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (folder / "cifar-10-batches-py" / name).write_bytes(content)


def test_cifar10_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    # One file serves as all seven. torchvision recognises the published files by their MD5, so it
    # gets that of ours.
    x = np.random.RandomState(0).randint(0, 256, (2, 3072)).astype(np.uint8)
    content = pickle.dumps({"data": x, "labels": [7, 2], "label_names": list("abcdefghij")})
    cifar_files(tmp_path, content)
    digest = md5(content).hexdigest()
    for parts in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, parts, [[n, digest] for n, _ in getattr(CIFAR10, parts)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": digest})
    found = load_dataset(DataSettings(name="cifar10", root=str(tmp_path)))
    # A row of the file is the red, then the green, then the blue plane.
    assert found.x_train.tolist() == np.tile(x, (5, 1)).reshape(10, 3, 32, 32).tolist()
    assert found.y_test.tolist() == [7, 2]
    assert found.class_names == tuple("abcdefghij")


def jpeg_copies(folder: Path, classes: int, side: int) -> Path:
    for part in ("train", "test"):
        for number in range(classes):
            place = folder / part / f"c{number}"
            place.mkdir(parents=True)
            colour = (20 * number, 9, 200 if part == "test" else 100)
            Image.new("RGB", (side, side), colour).save(place / "0.jpg", quality=95)
    return folder


def test_cifar10_may_be_a_folder_of_image_copies_and_a_log_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = jpeg_copies(tmp_path / "copies", 10, 32)
    found = load_dataset(DataSettings(name="cifar10", root=str(root)))
    assert (found.shape, found.classes, len(found.y_train)) == ((3, 32, 32), 10, 10)
    assert "a folder of images is read as cifar10" in caplog.text
    for name, classes, side in (("few", 3, 32), ("small", 10, 28)):
        other = jpeg_copies(tmp_path / name, classes, side)
        with pytest.raises(DataError, match=rf"has {classes} classes .* and cifar10 ten of"):
            load_dataset(DataSettings(name="cifar10", root=str(other)))


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("config", sorted(CONFIGS.rglob("*cifar10*.yaml")), ids=str)
def test_configs_of_cifar10_name_it_and_no_local_folder(config: Path) -> None:
    data = configs.load_config(config).data
    assert (data.name, data.root) == ("cifar10", "")
    assert configs.load_config(config, ["data.root=copies"]).data.root == str(
        Path("copies").resolve()
    )


def test_a_pickle_other_than_the_published_one_is_never_opened(tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    # An example of a harmful pickle: it calls os.mkdir with a name of its choice.
    harmful = b"cos\nmkdir\n(S" + repr(str(mark)).encode() + b"\ntR."
    cifar_files(tmp_path, harmful)
    with pytest.raises(DataError, match=r"cifar10: a file in .* is damaged"):
        load_dataset(DataSettings(name="cifar10", root=str(tmp_path)))
    assert not mark.exists()
    pickle.loads(harmful)  # noqa: S301 - the control: it would have worked
    assert mark.exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte"),
        ("fashion_mnist", "FashionMNIST/raw/t10k-labels-idx1-ubyte"),
        ("cifar10", "cifar-10-batches-py/test_batch"),
        ("svhn", "test_32x32.mat"),
    ],
)
def test_without_files_and_network_the_error_names_folder_files_and_command(
    name: Any,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise urllib.error.URLError("the cable is out")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    with pytest.raises(DataError) as refusal:
        load_dataset(DataSettings(name=name, root=str(tmp_path / "data")))
    said = str(refusal.value)
    assert str(tmp_path / "data") in said
    assert file in said
    assert "python -c 'import torchvision; get = torchvision.datasets." in said
    assert refusal.value.__suppress_context__
    assert capsys.readouterr().out == ""  # --json uses standard output


def test_the_command_in_the_error_downloads_both_parts_into_that_folder(tmp_path: Path) -> None:
    # It runs as in a shell, with a torchvision that prints its arguments.
    stub = "class datasets:\n    def SVHN(*args, **named): print(args, named)\n"
    (tmp_path / "torchvision.py").write_text(stub)
    root = str(tmp_path / "file" / "it's here")
    (tmp_path / "file").touch()  # no folder can be made below a file, so nothing is downloaded
    with pytest.raises(DataError) as refusal:
        load_dataset(DataSettings(name="svhn", root=root))
    [line] = [s for s in str(refusal.value).splitlines() if s.strip().startswith("python -c")]
    _, *arguments = shlex.split(line)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"{(root,)} {{'download': True}}",
        f"{(root, 'test')} {{'download': True}}",
    ]


def test_data_is_read_from_the_folder_of_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", "somewhere/else")
    assert default_root() == Path("somewhere/else")
    monkeypatch.delenv("PRIVSSL_DATA")
    assert default_root() == Path.home() / ".cache/privssl/data"


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "folder", "mean"),
    # Means of the training pixels in [0, 1], as in many tutorials.
    [("mnist", "MNIST", 0.1307), ("fashion_mnist", "FashionMNIST", 0.2860)],
)
def test_downloaded_data_sets_have_their_known_mean(name: Any, folder: str, mean: float) -> None:
    if not (default_root() / folder / "raw").is_dir():
        pytest.skip(f"{folder} is not in {default_root()}")
    found = load_dataset(DataSettings(name=name))
    assert (len(found.y_train), len(found.y_test)) == (60_000, 10_000)
    assert found.x_train.double().mean().item() / 255 == pytest.approx(mean, abs=1e-4)
