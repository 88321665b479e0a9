"""Pictures for TensorBoard: functions from tensors and counts to uint8 arrays.

Rows of images are in [-1, 1], like network input; pictures are (height, width, 3) in 0..255. They
are drawn with Pillow and with matplotlib's Agg canvas, which needs no display and no global state.
"""

import io
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from generators.base import ConditionalGenerator
from generators.sampling import draw_samples
from privssl.core.agents import natural_order
from privssl.core.rows import IMAGE, kind_of
from privssl.data.column_values import Value
from privssl.runtime import randomness

Picture = NDArray[np.uint8]

TILE = 32  # least pixels of a row's shorter side
GAP = 2  # pixels between tiles
MARGIN_LEFT, MARGIN_TOP = 52, 18  # pixels for the labels
INK, PAPER = (60, 60, 60), (255, 255, 255)

LABELLED, UNLABELLED = "#d95f02", "#5b7fb5"
LARGEST_FIGURE = (24.0, 12.0)  # inches
CELL, LARGEST_MATRIX = 36, 1200  # pixels of a confusion matrix's cell, and of its side
FULL, LONGEST_LABEL = (8, 48, 107), 16  # colour of a share of 1; characters of a class name
LAMBDAS = (1.0, 0.75, 0.5, 0.25, 0.0)  # lines of a grid of mixes
SAMPLES = 8  # of each class on a contact sheet
MOST_COLUMNS, BARS, LONGEST_TITLE = 24, 12, 32  # of a table; of a column; characters of its name


@torch.no_grad()
def of_generator(
    generator: ConditionalGenerator, x: Tensor, y: Tensor, classes: int
) -> dict[str, Picture]:
    """Draw outputs of a generator by tag; none for rows that are not images.

    ``images/mixes`` and ``images/reconstruction`` of held-out rows, and ``images/samples``, which
    use no row.

    Args:
        generator: in eval mode, on the CPU.
        x: rows (N, *shape) in [-1, 1].
        y: their classes (N,).
        classes: C; the grid of mixes has a column for each target class.
    """
    if kind_of(tuple(x.shape[1:])) is not IMAGE:
        return {}
    # Column c starts from a row of the nearest class before c, so that lambda 1 and 0 differ.
    first_rows = [int(((c - 1 - y) % classes).argmin()) for c in range(classes)]
    names = torch.eye(classes)
    z = torch.rand(
        classes, generator.noise_size, generator=randomness.stream(0, 0, "world", "pictures")
    )
    lam = torch.tensor(LAMBDAS).expand(classes, -1)
    mixes = generator(x[first_rows], names[y[first_rows]], names, z, lam)
    originals, p = x[: 2 * classes], names[y[: 2 * classes]]
    # At lambda 1 the target and z have no effect.
    no_noise = torch.zeros(len(originals), generator.noise_size)
    reconstructed = generator(originals, p, p, no_noise, torch.ones(len(originals), 1))[:, 0]
    return {
        "images/mixes": mix_grid(x[first_rows], y[first_rows], mixes.transpose(0, 1), LAMBDAS),
        "images/reconstruction": reconstruction_grid(originals, reconstructed),
        "images/samples": samples_sheet(generator, classes, x.shape[1:]),
    }


def samples_sheet(generator: ConditionalGenerator, classes: int, shape: Sequence[int]) -> Picture:
    """Draw samples of a generator, a column per class: ``images/samples``."""
    labels = torch.arange(classes).repeat(SAMPLES)
    rng = randomness.stream(0, 0, "world", "samples on a sheet")
    return contact_sheet(draw_samples(generator, labels, classes, shape, rng), labels, classes)


def contact_sheet(rows: Tensor, labels: Tensor, classes: int) -> Picture:
    """Draw the first rows (N, channels, H, W) in [-1, 1] of each class, a column per class.

    Blank if a class has fewer. ``labels``: (N,).
    """
    groups = [rows[labels == c][:SAMPLES] for c in range(classes)]
    lines = max(len(group) for group in groups)
    blank = rows.new_full((classes, lines, *rows.shape[1:]), 1.0)
    for column, group in zip(blank, groups, strict=True):
        column[: len(group)] = group
    return _draw_tiles(blank.transpose(0, 1), [""] * lines, [str(c) for c in range(classes)])


def mix_grid(real: Tensor, y: Tensor, mixes: Tensor, lambdas: Sequence[float]) -> Picture:
    """Draw interpolations from rows to each class: ``images/mixes``.

    Args:
        real: (C, channels, H, W) in [-1, 1], the inputs of G; the first line.
        y: (C,) their classes; column c is headed "y>c".
        mixes: (L, C, channels, H, W), from lambda 1 to 0; a column per class.
    """
    lines = torch.cat([real[None], mixes])
    labels = ["real", *(f"{lam:.2f}" for lam in lambdas)]
    headings = [f"{first}>{c}" for c, first in enumerate(y.tolist())]
    return _draw_tiles(lines, labels, headings, corner="lambda")


def reconstruction_grid(real: Tensor, rebuilt: Tensor) -> Picture:
    """Draw rows (N, channels, H, W) in [-1, 1] above their reconstructions by G at lambda 1."""
    return _draw_tiles(torch.stack([real, rebuilt]), ["real", "rebuilt"], [""] * len(real))


def _draw_tiles(
    grid: Tensor, row_labels: Sequence[str], column_labels: Sequence[str], corner: str = ""
) -> Picture:
    """Draw a labelled table of images. grid (R, K, channels, H, W) in [-1, 1]."""
    rows, columns, channels, height, width = grid.shape
    factor = max(1, math.ceil(TILE / min(height, width)))
    colours = grid if channels == 3 else grid.mean(dim=2, keepdim=True).expand(-1, -1, 3, -1, -1)
    levels = ((colours.detach().cpu().float() + 1) * 127.5).nan_to_num(0.0).round().clamp(0, 255)
    tiles = levels.to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()  # (R, K, H, W, 3)
    tiles = tiles.repeat(factor, axis=2).repeat(factor, axis=3)
    step_y, step_x = tiles.shape[2] + GAP, tiles.shape[3] + GAP
    sheet = Image.new("RGB", (MARGIN_LEFT + columns * step_x, MARGIN_TOP + rows * step_y), PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=12)
    draw.text((4, MARGIN_TOP / 2), corner, INK, font, anchor="lm")
    for c, label in enumerate(column_labels):
        centre = MARGIN_LEFT + c * step_x + (step_x - GAP) / 2
        draw.text((centre, MARGIN_TOP / 2), label, INK, font, anchor="mm")
    for r, label in enumerate(row_labels):
        top = MARGIN_TOP + r * step_y
        draw.text((4, top + (step_y - GAP) / 2), label, INK, font, anchor="lm")
        for c in range(columns):
            sheet.paste(Image.fromarray(tiles[r, c]), (MARGIN_LEFT + c * step_x, top))
    return np.asarray(sheet)


def census_plot(counts: NDArray[np.int64], cluster_classes: NDArray[np.int64]) -> Picture:
    """Draw a census: noisy counts, and the class of each cluster.

    Args:
        counts: (K, C), may be negative.
        cluster_classes: (K,) the class of each cluster.
    """
    clusters, classes = counts.shape
    figure = _make_figure(
        max(4.0, 1.5 + 0.4 * classes), min(1.6 + 0.3 * clusters, LARGEST_FIGURE[1])
    )
    axes = figure.add_subplot()
    image = axes.imshow(counts, cmap="Blues", vmin=0, vmax=max(int(counts.max()), 1), aspect="auto")
    axes.scatter(
        cluster_classes,
        np.arange(clusters),
        marker="s",
        s=90,
        facecolors="none",
        edgecolors=LABELLED,
    )
    axes.set_xticks(range(classes))
    axes.set_yticks(range(0, clusters, math.ceil(clusters / 50)))
    axes.set(
        xlabel="class", ylabel="cluster", title="released counts; square: class of the cluster"
    )
    figure.colorbar(image)
    return _render_pixels(figure)


def columns_figure(
    made: Mapping[str, Sequence[Value]], real: Mapping[str, Sequence[Value]]
) -> Picture:
    """Draw the shares of the values of each column, of synthetic and of real rows of a table.

    Args:
        made, real: the values of each column, at least one; both with the same columns. The first
            ``MOST_COLUMNS`` are drawn, and of a column the ``BARS`` most frequent real categories.
    """
    names = [*real][:MOST_COLUMNS]
    across = min(4, len(names))
    down = math.ceil(len(names) / across)
    figure = _make_figure(3.2 * across, 0.4 + 1.9 * down)
    for number, name in enumerate(names):
        axes = figure.add_subplot(down, across, number + 1)
        # a dollar sign is one, and begins no formula
        axes.set_title(_shorten(name, LONGEST_TITLE), fontsize="small", parse_math=False)
        axes.tick_params(labelsize="x-small")
        counts: dict[str, Any]
        both = {"test rows": real[name], "synthetic": made[name]}
        if any(isinstance(value, str) for value in real[name]):
            bars = [value for value, _ in Counter(real[name]).most_common(BARS)]
            rotation = 0 if len(bars) < 5 else 30
            texts = ["(none)" if v is None else _shorten(str(v) or "(empty)", 8) for v in bars]
            axes.set_xticks(range(len(bars)), texts, rotation=rotation, parse_math=False)
            edges = np.arange(len(bars) + 1) - 0.5
            counts = {label: list(map(values.count, bars)) for label, values in both.items()}
        else:
            numbers = {
                label: np.array([v for v in values if v is not None], dtype=np.float64)
                for label, values in both.items()
            }
            together = np.concatenate([*numbers.values()])
            low, high = (together.min(), together.max()) if len(together) else (0.0, 1.0)
            wider = 0.5 if low == high else 0.0
            # Those of NumPy, which refuses to make them for close numbers above 2**53.
            edges = np.linspace(low - wider, high + wider, BARS + 1)
            counts = {label: np.histogram(numbers[label], bins=edges)[0] for label in both}
        for (label, of_bars), colour in zip(counts.items(), (UNLABELLED, LABELLED), strict=True):
            shares = np.asarray(of_bars) / len(both[label])
            axes.stairs(shares, edges, color=colour, label=label, linewidth=1.5)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False,
        title=f"{len(names)} of {len(real)} columns" if len(names) < len(real) else None,
    )  # fmt: skip
    return _render_pixels(figure)


def confusion_plot(counts: NDArray[np.int64], names: Sequence[str]) -> Picture:
    """Draw a confusion matrix (C, C + 1): rows are true classes, columns predicted ones.

    The darker a cell, the larger the share of the true class. Drawn with Pillow, because matplotlib
    takes half a second.
    """
    classes, cell = len(names), max(1, min(CELL, LARGEST_MATRIX // len(names)))
    shares = counts[:, :classes] / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    colours = np.array(PAPER) + shares[..., None] * (np.array(FULL) - np.array(PAPER))
    grid = colours.round().astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
    step = math.ceil(20 / cell)  # a name needs 20 pixels
    labels = {c: _draw_label(names[c]) for c in range(0, classes, step)}
    margin = max(label.width for label in labels.values()) + 22
    sheet = Image.new("RGB", (margin + len(grid), margin + len(grid)), PAPER)
    sheet.paste(Image.fromarray(grid), (margin, margin))
    for c, label in labels.items():
        centre, rotated = margin + c * cell + cell // 2, label.rotate(90, expand=True)
        sheet.paste(label, (margin - 4 - label.width, centre - label.height // 2))
        sheet.paste(rotated, (centre - rotated.width // 2, margin - 4 - rotated.height))
    true, predicted = (
        _draw_label("true class").rotate(90, expand=True),
        _draw_label("predicted class"),
    )
    sheet.paste(true, (2, margin))
    sheet.paste(predicted, (margin, 2))
    if cell == CELL:
        draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
        for (row, column), count in np.ndenumerate(counts[:, :classes]):
            position = (margin + (column + 0.5) * cell, margin + (row + 0.5) * cell)
            ink = PAPER if shares[row, column] > 0.5 else INK
            if count:
                draw.text(position, str(count), ink, font, anchor="mm")
    return np.asarray(sheet)


def _draw_label(text: str) -> Image.Image:
    """Draw a name in one line."""
    shown, font = _shorten(text, LONGEST_LABEL), ImageFont.load_default(size=12)
    label = Image.new("RGB", (math.ceil(font.getlength(shown)) + 2, 16), PAPER)
    ImageDraw.Draw(label).text((1, 8), shown, INK, font, anchor="lm")
    return label


def _shorten(text: str, longest: int) -> str:
    """Return a name in one line; unprintable characters become question marks."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= longest else text[: longest - 1] + "~"


def as_png(picture: Picture) -> bytes:
    """Encode pixels (H, W) or (H, W, 3) as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def partition_plot(
    labelled: Mapping[str, NDArray[np.int64]], unlabelled: Mapping[str, NDArray[np.int64]]
) -> Picture:
    """Draw the classes of each agent: a disc per agent and class, its area the number of rows.

    Labelled and unlabelled rows have separate colours and scales, because labelled rows are few.

    Args:
        labelled: agent id -> (C,) rows of each class; agents without any may be absent.
        unlabelled: the same for rows without labels, by their true (hidden) classes. At least one
            agent in both together.
    """
    agents = sorted({*labelled, *unlabelled}, key=natural_order)
    classes = max(len(counts) for counts in (*labelled.values(), *unlabelled.values()))
    cell_x = min(0.5, LARGEST_FIGURE[0] / len(agents))  # inches
    cell_y = min(0.35, LARGEST_FIGURE[1] / classes)
    figure = _make_figure(max(5.0, 1.2 + cell_x * len(agents)), 1.6 + cell_y * classes)
    axes = figure.add_subplot()
    column = {agent: number for number, agent in enumerate(agents)}
    shared = labelled.keys() & unlabelled.keys()
    # Agents with both kinds have two discs side by side in their cell.
    diameter = 0.9 * 72 * min(cell_x / (2 if shared else 1), cell_y)  # points
    for kind, counts, colour, offset in (
        ("labelled", labelled, LABELLED, -0.25),
        ("unlabelled", unlabelled, UNLABELLED, 0.25),
    ):
        if not counts:
            continue
        table = np.stack(list(counts.values()))  # (agents, C)
        x = [column[a] + (offset if a in shared else 0.0) for a in counts]
        largest = max(int(table.max()), 1)
        axes.scatter(
            np.repeat(x, classes),
            np.tile(np.arange(classes), len(x)),
            s=diameter**2 * table.ravel() / largest,
            c=colour,
            linewidths=0,
            label=f"{kind}: {int(table.sum())} rows, largest disc {largest}",
        )
    axes.set(
        xlim=(-0.6, len(agents) - 0.4), ylim=(classes - 0.4, -0.6), xlabel="agent", ylabel="class"
    )
    step = math.ceil(len(agents) * 0.35 / LARGEST_FIGURE[0])  # a name needs 0.35 inches
    axes.set_xticks(range(0, len(agents), step), agents[::step])
    axes.set_yticks(range(0, classes, math.ceil(classes / 50)))
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    legend = figure.legend(loc="outside upper left", ncols=1, frameon=False, fontsize="small")
    for handle in legend.legend_handles:
        handle.set_sizes([60.0])
    return _render_pixels(figure)


def _make_figure(width: float, height: float) -> Any:
    """Create an empty figure of matplotlib, in inches, with an Agg canvas."""
    # Imported here: runs without pictures save half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    return FigureCanvasAgg(Figure(figsize=(width, height), dpi=100, layout="constrained")).figure


def _render_pixels(figure: Any) -> Picture:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for it
        figure.canvas.draw()
    pixels: Picture = np.asarray(figure.canvas.buffer_rgba())
    return pixels[..., :3].copy()
