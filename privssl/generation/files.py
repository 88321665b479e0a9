"""Writing of synthetic rows: an NPZ file, images with a contact sheet, or a table's CSV file."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from privssl.data.column_values import Value, values_of
from privssl.data.npz import Scale
from privssl.errors import RunFolderError, UserError
from privssl.generation.rows import SyntheticRows
from privssl.reporting.figures import as_png, contact_sheet
from privssl.storage import atomic_files
from privssl.training.local_training import network_input

SHEET = "contact_sheet.png"
#: Endings of other file types: a folder of that name would be surprising.
OTHER_FILES = (".npy", ".json", ".pt", ".zip", ".parquet", ".png", ".jpg", ".jpeg")


def check_free(output: Path) -> None:
    """Raise RunFolderError if the output or its contact sheet exists.

    UserError if the name has the ending of another file type than NPZ.
    """
    if output.suffix.lower() in OTHER_FILES:
        raise UserError(
            f"--output {output}: rows are written as FILE.npz, or as PNG pictures into a folder; "
            "of a table as FILE.npz or FILE.csv. Give one of these"
        )
    for path in (output, _sheet_path_of(output)):
        if path.exists() or path.is_symlink():
            raise RunFolderError(f"{path} exists. Choose another --output")


def write_rows(synthetic: SyntheticRows, output: Path) -> None:
    """Write the rows, and for images a contact sheet.

    ``output``: ``FILE.npz`` with ``x``, ``y`` and ``class_names``, ``FILE.csv`` with the columns of
    a table and its classes, or a folder of ``CLASS/00000.png``. None may exist.
    """
    check_free(output)
    with atomic_files.writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        if _is_npz(output):
            buffer = io.BytesIO()
            np.savez_compressed(
                buffer, x=synthetic.x, y=synthetic.y, class_names=np.array(synthetic.class_names)
            )
            atomic_files.replace(output, buffer.getvalue())
        elif output.suffix.lower() == ".csv":
            atomic_files.replace(output, _render_csv(synthetic).encode())
        else:
            _write_images(synthetic, output)
        if synthetic.x.ndim != 4:
            return
        rows, labels = torch.from_numpy(synthetic.x), torch.from_numpy(synthetic.y)
        sheet = contact_sheet(network_input(rows), labels, len(synthetic.class_names))
        atomic_files.replace(_sheet_path_of(output), as_png(sheet))


def _render_csv(synthetic: SyntheticRows) -> str:
    """Return a line of column names and a line for each row."""
    if synthetic.columns is None:
        raise UserError("rows are no table, which a CSV file needs. Give --output FILE.npz")
    values = values_of(synthetic.x, synthetic.columns)
    columns = [_render_column(values[name], scale) for name, scale in synthetic.columns.items()]
    classes = [synthetic.class_names[c] for c in synthetic.y.tolist()]
    text = io.StringIO()
    # csv leaves a lone carriage return without quotes, and reads it as the end of a line
    odd = any("\r" in field for column in (values, *columns) for field in column)
    kind = csv.unix_dialect if odd else csv.excel  # unix_dialect quotes all fields
    writer = csv.writer(text, kind, lineterminator="\n")
    writer.writerow([*values, synthetic.label])
    writer.writerows(zip(*columns, classes, strict=True))
    return text.getvalue()


def _render_column(values: Sequence[Value], scale: Scale) -> list[str]:
    """Return the fields of a column: of numbers six digits of the distance of their bounds."""
    if not isinstance(scale[0], float):
        return ["" if value is None else str(value) for value in values]
    low, high = float(scale[0]), float(scale[1])
    whole, distance = (math.floor(math.log10(n)) for n in (max(-low, high), high - low))
    digits = min(17, 6 + max(0, whole - distance))
    fields = []
    for value in values:
        text = "" if value is None else f"{value:.{digits}g}"
        fields.append(text if not text or low <= float(text) <= high else repr(value))
    return fields


def _write_images(synthetic: SyntheticRows, folder: Path) -> None:
    if synthetic.x.ndim != 4:
        other = "FILE.npz" if synthetic.columns is None else "FILE.npz or FILE.csv"
        raise UserError(f"rows are no images, which PNG files need. Give --output {other}")
    channels = synthetic.x.shape[1]
    if channels not in (1, 3):
        raise UserError(f"rows have {channels} channels, which no PNG has. Give --output FILE.npz")
    for name in synthetic.class_names:
        if name in (".", "..") or set(name) & set('/\\:*?"<>|\0') or name != name.strip(" ."):
            raise UserError(f"class {name!r} cannot name a folder. Give --output FILE.npz")
    folder.mkdir()
    for number, (row, label) in enumerate(zip(synthetic.x, synthetic.y.tolist(), strict=True)):
        class_folder = folder / synthetic.class_names[label]
        class_folder.mkdir(exist_ok=True)
        pixels = row[0] if channels == 1 else row.transpose(1, 2, 0)
        atomic_files.write_new(class_folder / f"{number:05d}.png", as_png(pixels))


def _sheet_path_of(output: Path) -> Path:
    """Return ``NAME.contact_sheet.png`` beside the NPZ file or the folder. Not inside the folder,
    because ``predict`` reads every image in it."""
    return output.parent / f"{output.stem if _is_npz(output) else output.name}.{SHEET}"


def _is_npz(output: Path) -> bool:
    return output.suffix.lower() == ".npz"
