"""Images of every kind are read as they look, and skipped or changed files are counted."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from privssl.data import image_folder
from privssl.data.datasets import Dataset, load_dataset
from privssl.errors import DataError, PrivacyError
from privssl.experiment.row_checks import refuse_classes_of_labels_alone
from privssl.settings.schema import DataSettings

Save = Callable[[Path, NDArray[np.uint8]], None]
SHADES = np.random.default_rng(0).integers(0, 256, (8, 6, 9), dtype=np.uint8)


def write(root: Path, save: Save, suffix: str = ".png", shades: NDArray[Any] = SHADES) -> Path:
    """Two training and two test images of each of two classes."""
    names = [f"{part}/{c}/{n}" for part in ("train", "test") for c in "ab" for n in "01"]
    for name, picture in zip(names, shades, strict=True):
        path = root / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, picture)
    return root


def plainly(path: Path, picture: NDArray[np.uint8]) -> None:
    Image.fromarray(picture).save(path)


def read(root: Path, **settings: Any) -> Dataset:
    return load_dataset(DataSettings(name="image_folder", root=str(root), **settings))


def log_text(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


# Transparency -----------------------------------------------------------------------------------


def in_alpha(mode: str, colour: int = 0) -> Save:
    def save(path: Path, picture: NDArray[np.uint8]) -> None:
        grey, alpha = np.full_like(picture, colour), 255 - picture
        Image.fromarray(np.stack([grey] * (len(mode) - 1) + [alpha], axis=-1), mode).save(path)

    return save


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@pytest.mark.parametrize("suffix", [".png", ".webp", ".tif"])
def test_drawings_in_the_alpha_channel_are_laid_over_white(
    mode: str, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(path: Path, picture: NDArray[np.uint8]) -> None:
        in_alpha(mode)(path.with_suffix(".png"), picture)
        if suffix != ".png":
            options: dict[str, Any] = {"lossless": True, "exact": True} if suffix == ".webp" else {}
            Image.open(path.with_suffix(".png")).save(path, **options)
            path.with_suffix(".png").unlink()

    caplog.set_level("INFO", "privssl")
    found = read(write(tmp_path, save, suffix))
    # Black with opacity 255 - v over white has the shade v.
    assert np.abs(found.x_train[:, 0].numpy().astype(int) - SHADES[:4]).max() <= 1
    assert "8 images have transparent pixels, which became white" in log_text(caplog)


def test_without_a_background_these_images_would_be_equal_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The control of the test above; white shapes on a transparent background end like this.
    read(write(tmp_path / "white", in_alpha("RGBA", 255)))
    assert "all 4 training rows are equal" in log_text(caplog)
    caplog.clear()
    monkeypatch.setattr(image_folder, "_compose_over_white", lambda image: (image, False))
    read(write(tmp_path / "black", in_alpha("RGBA")))
    assert "all 4 training rows are equal" in log_text(caplog)


def test_a_transparent_palette_colour_becomes_white(tmp_path: Path) -> None:
    def save(path: Path, picture: NDArray[np.uint8]) -> None:
        image = Image.fromarray((picture > 99).astype(np.uint8), "P")
        image.putpalette([9, 9, 9, 80, 80, 80])
        image.save(path, transparency=0)

    found = read(write(tmp_path, save))
    assert found.x_train[:, 1].tolist() == np.where(SHADES[:4] > 99, 80, 255).tolist()


def test_an_opaque_alpha_channel_changes_nothing_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(path: Path, picture: NDArray[np.uint8]) -> None:
        Image.fromarray(np.stack([picture, np.full_like(picture, 255)], axis=-1), "LA").save(path)

    caplog.set_level("INFO", "privssl")
    found = read(write(tmp_path, save))
    assert found.x_train[:, 0].tolist() == SHADES[:4].tolist()
    assert "white" not in caplog.text


def test_equal_rows_with_different_classes_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shades = SHADES.copy()
    shades[1] = shades[0]  # of one class: no mistake
    read(write(tmp_path / "one", plainly, shades=shades))
    assert not log_text(caplog)
    shades[2] = shades[0]
    read(write(tmp_path / "two", plainly, shades=shades))
    assert "3 of 4 training rows are equal to rows of another class" in log_text(caplog)


# Orientation ------------------------------------------------------------------------------------

# What the camera did to the image before it wrote the number: the inverse of the displayed
# transform.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270,
}  # fmt: skip


def turned(number: int) -> Save:
    def save(path: Path, picture: NDArray[np.uint8]) -> None:
        exif = Image.Exif()
        exif[0x0112] = number
        options: dict[str, Any] = {".webp": {"lossless": True}, ".jpg": {"quality": 100}}
        image = Image.fromarray(picture).transpose(TURNS[number])
        image.save(path, exif=exif, **options.get(path.suffix, {}))

    return save


@pytest.mark.fast_cases(10)
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif"])
@pytest.mark.parametrize("number", TURNS)
def test_an_image_is_upright_for_every_orientation_tag(
    number: int, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "privssl")
    upright, other = tmp_path / "upright", tmp_path / "other"
    smooth = np.kron(SHADES // 2 + 60, np.ones((1, 8, 8), np.uint8))  # so that JPEG keeps it
    wanted = read(write(upright, plainly, ".png", smooth)).x_train.float()
    write(other, turned(number), suffix, smooth)
    found = read(other).x_train.float().mean(dim=1, keepdim=True)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().mean() < 2
    if suffix != ".tif":  # Pillow has already rotated it
        assert "8 images were rotated by their EXIF orientation" in caplog.text


def test_rotated_and_upright_images_of_one_displayed_size_can_be_mixed(tmp_path: Path) -> None:
    write(tmp_path, plainly)
    turned(6)(tmp_path / "train/a/2.png", SHADES[0])  # 9 high and 6 wide in its file
    found = read(tmp_path)
    assert found.x_train[2].tolist() == found.x_train[0].tolist()
    # The control: without the tag their sizes differ.
    Image.fromarray(SHADES[0]).rotate(90, expand=True).save(tmp_path / "train/a/2.png")
    with pytest.raises(DataError, match=r"Set data\.image_size"):
        read(tmp_path)


def test_damaged_exif_data_does_not_prevent_reading_an_image(tmp_path: Path) -> None:
    write(tmp_path, plainly)
    Image.fromarray(SHADES[0]).save(tmp_path / "train/a/0.png", exif=b"Exif\0\0MM\0*\xff\xff\xff")
    assert read(tmp_path).x_train[0, 0].tolist() == SHADES[0].tolist()


# Several frames ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".gif", ".png", ".apng", ".webp", ".tif"])
def test_frames_that_are_not_read_are_counted(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(path: Path, picture: NDArray[np.uint8]) -> None:
        frames = [Image.fromarray(np.roll(picture, shift)) for shift in range(5)]
        kind = "PNG" if suffix == ".apng" else None
        frames[0].save(path, kind, save_all=True, append_images=frames[1:])

    read(write(tmp_path / "many", save, suffix))
    assert "8 images have several frames or pages (0" in log_text(caplog)
    assert "has 5)" in log_text(caplog) and "32 frames were not" in log_text(caplog)
    caplog.clear()  # the control
    read(write(tmp_path / "one", plainly, suffix.replace(".apng", ".png")))
    assert not log_text(caplog)


# Which files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [(".ppm", "PPM"), (".pgm", "PPM"), (".pnm", "PPM"), (".jfif", "JPEG"), (".jpe", "JPEG"),
     (".JPG", "JPEG"), (".dib", "DIB"), (".BMP", "BMP"), (".TIFF", "TIFF")],
)  # fmt: skip
def test_an_image_is_read_by_each_of_its_suffixes(
    suffix: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(path: Path, picture: NDArray[np.uint8]) -> None:
        Image.fromarray(picture).save(path, kind)

    found = read(write(tmp_path, save, suffix))
    assert (len(found.y_train), len(found.y_test)) == (4, 4)
    assert not log_text(caplog)


def test_images_in_nested_folders_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    write(tmp_path, plainly)
    for folder, shade in (("session10", 10), ("session2/left", 2)):
        (tmp_path / "train/a" / folder).mkdir(parents=True)
        Image.new("L", (9, 6), shade).save(tmp_path / "train/a" / folder / "x.png")
    found = read(tmp_path)
    assert found.y_train.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.x_train[:4, 0, 0, 0].tolist() == [*SHADES[:2, 0, 0].tolist(), 10, 2]


def test_every_file_that_is_not_read_is_counted_by_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, plainly)
    read(tmp_path)
    assert not log_text(caplog)  # the control
    for name in ("train/a/x.heic", "train/a/y.HEIC", "test/b/notes.txt", "train/b/README"):
        (tmp_path / name).write_text("")
    (tmp_path / "train/loose.png").write_bytes((tmp_path / "train/a/0.png").read_bytes())
    (tmp_path / "train/b/.hidden.png").write_text("")
    (tmp_path / "val/a").mkdir(parents=True)
    (tmp_path / "train/a/again").symlink_to(tmp_path / "train/a")
    assert len(read(tmp_path).y_train) == 4
    [line] = log_text(caplog).splitlines()
    assert line.startswith(
        f"{tmp_path}: not read: 2 .heic, 1 .txt, 1 folder val, 1 hidden, 1 linked folders, 1 "
        "outside of the folders of classes, 1 without a suffix. Images are "
    )


def test_a_symbolic_link_to_a_class_folder_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, plainly)
    (tmp_path / "train/b").rename(tmp_path / "elsewhere")
    (tmp_path / "train/b").symlink_to(tmp_path / "elsewhere")
    assert read(tmp_path).y_train.tolist() == [0, 0, 1, 1]
    assert "linked folders" not in log_text(caplog)


# Colour in private runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coloured", "refused"),
    [
        (("train/a/1",), True),
        ((), False),
        (("train/a/1", "test/b/0"), False),
        (("unlabelled/0",), False),  # the claim covers labelled rows
    ],
)
def test_a_private_run_is_refused_if_only_training_images_have_colour(
    coloured: tuple[str, ...], refused: bool, tmp_path: Path
) -> None:
    root = write(tmp_path, plainly)
    (root / "unlabelled").mkdir()
    plainly(root / "unlabelled/0.png", SHADES[0])
    for name in coloured:
        Image.open(root / f"{name}.png").convert("RGB").save(root / f"{name}.png")
    found = read(root)
    assert found.shape[0] == (3 if coloured else 1)  # of every row: one image changes all others
    of = SimpleNamespace(name="image_folder", root=root)
    refuse_classes_of_labels_alone(SimpleNamespace(privacy=None, data=of), found)
    problem = pytest.raises(PrivacyError, match=f"{root}: images in train/ alone have colour")
    with problem if refused else nullcontext():
        refuse_classes_of_labels_alone(SimpleNamespace(privacy=object(), data=of), found)
