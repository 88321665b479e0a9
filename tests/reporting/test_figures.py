"""Pictures: positions of tiles, grey levels, and the partition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from privssl.data.column_values import Value
from privssl.reporting import figures
from privssl.reporting.figures import GAP, MARGIN_LEFT, MARGIN_TOP, partition_plot
from privssl.runs.summary import confusion_csv

pytestmark = pytest.mark.usefixtures("costs_of_users_in_file")

LAMBDAS = [1.0, 0.5, 0.0]


def flat(values: torch.Tensor, channels: int = 1, side: int = 8) -> torch.Tensor:
    """Images of one value each: values (...) -> (..., channels, side, side)."""
    return values[..., None, None, None].expand(*values.shape, channels, side, side)


def tile(picture: figures.Picture, row: int, column: int, side: int = 32) -> figures.Picture:
    top, left = MARGIN_TOP + row * (side + GAP), MARGIN_LEFT + column * (side + GAP)
    return picture[top : top + side, left : left + side]


def test_the_real_row_is_first_then_a_line_per_lambda_and_a_column_per_class() -> None:
    # real: -1 is black, 1 is white; mixes: line l, column c has its own level
    real = flat(torch.tensor([-1.0, 1.0]))
    levels = torch.tensor([[0, 51], [102, 153], [204, 255]])  # (L, C) in 0..255
    picture = figures.mix_grid(real, torch.tensor([1, 0]), flat(levels / 127.5 - 1), LAMBDAS)
    assert picture.dtype == np.uint8
    assert picture.shape == (MARGIN_TOP + 4 * 34, MARGIN_LEFT + 2 * 34, 3)  # 8 px, 4 times larger
    assert (tile(picture, 0, 0) == 0).all()
    assert (tile(picture, 0, 1) == 255).all()
    for row, line in enumerate(levels.tolist(), start=1):
        for column, level in enumerate(line):
            assert (tile(picture, row, column) == level).all()


def test_each_line_and_column_has_a_label() -> None:
    y = torch.tensor([2, 0, 1])
    picture = figures.mix_grid(flat(torch.ones(3)), y, flat(torch.ones(3, 3)), LAMBDAS)
    assert all((picture[MARGIN_TOP + r * 34 :][:32, :MARGIN_LEFT] < 200).any() for r in range(4))
    assert all((picture[:MARGIN_TOP, MARGIN_LEFT + c * 34 :][:, :32] < 200).any() for c in range(3))
    # a heading names the class of the real row as well
    other = figures.mix_grid(flat(torch.ones(3)), y.flip(0), flat(torch.ones(3, 3)), LAMBDAS)
    differs = (picture != other).any(axis=(0, 2))
    assert differs[MARGIN_LEFT:][:32].any() and not differs[MARGIN_LEFT + 34 :][:32].any()
    # the reconstruction has no classes to name: its top margin stays empty
    plain = figures.reconstruction_grid(flat(torch.ones(3)), flat(torch.ones(3)))
    assert (plain[:MARGIN_TOP, MARGIN_LEFT:] == 255).all()


def test_rows_stand_above_their_reconstructions_in_colour() -> None:
    red = torch.tensor([1.0, -1.0, -1.0])[None, :, None, None].expand(1, 3, 40, 40)
    picture = figures.reconstruction_grid(red, -red)
    assert picture.shape == (MARGIN_TOP + 2 * 42, MARGIN_LEFT + 42, 3)  # 40 px are large enough
    assert (tile(picture, 0, 0, side=40)[..., 0] == 255).all()
    assert (picture[MARGIN_TOP + 42 :, MARGIN_LEFT:][:40, :40] == [0, 255, 255]).all()


def test_values_out_of_range_and_nan_are_clamped() -> None:
    wild = flat(torch.tensor([7.0, -7.0, float("nan"), float("inf")]))
    picture = figures.reconstruction_grid(wild, wild)
    assert [int(tile(picture, 0, c)[0, 0, 0]) for c in range(4)] == [255, 0, 0, 255]


def test_an_integer_scale_keeps_pixels_square_and_sharp() -> None:
    checker = (torch.arange(28)[:, None] + torch.arange(28)) % 2 * 2.0 - 1
    picture = figures.reconstruction_grid(checker[None, None], checker[None, None])
    shown = tile(picture, 0, 0, side=56)[..., 0]  # 28 px, twice as large
    assert (shown[::2, ::2] == (checker.numpy() + 1) * 127.5).all()
    assert set(np.unique(shown)) == {0, 255}


def area(picture: figures.Picture, colour: str) -> int:
    """Pixels of exactly one colour, given as #rrggbb."""
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((picture[60:] == rgb).all(axis=2).sum())  # below the legend


def test_the_partition_shows_both_kinds_of_rows_in_their_colours() -> None:
    labelled = {"s0": np.array([5, 0, 5])}
    unlabelled = {"q0": np.array([9, 9, 9]), "q10": np.array([0, 0, 9])}
    both = partition_plot(labelled, unlabelled)
    assert both.dtype == np.uint8
    assert both.shape[2] == 3
    # four equal discs of the one kind, two of the other
    ratio = area(both, figures.UNLABELLED) / area(both, figures.LABELLED)
    assert ratio == pytest.approx(2, rel=0.15)
    alone = partition_plot({}, unlabelled)
    assert area(alone, figures.LABELLED) == 0


def test_an_agent_with_both_kinds_shows_both_colours() -> None:
    counts = {"m0": np.array([4, 4])}
    picture = partition_plot(counts, counts)
    assert area(picture, figures.LABELLED) > 50
    assert area(picture, figures.UNLABELLED) > 50


@pytest.mark.slow
@given(agents=st.integers(1, 120), classes=st.integers(1, 100))
@settings(max_examples=4, deadline=None)
def test_a_partition_of_any_number_of_agents_and_classes_has_a_bounded_size(
    agents: int, classes: int
) -> None:
    counts = {f"q{i}": np.full(classes, i) for i in range(agents)}
    height, width, _ = partition_plot({}, counts).shape
    assert height <= 1400
    assert width <= 2600


# The confusion matrix -----------------------------------------------------------------------


COUNTS = np.array([[4, 0, 0], [1, 1, 2]])  # two classes; two rows whose outputs are not finite


def test_a_cell_of_a_confusion_matrix_is_darker_for_a_larger_share_of_the_true_class() -> None:
    picture, cell = figures.confusion_plot(COUNTS, ["a", "b"]), figures.CELL
    margin = picture.shape[0] - 2 * cell
    corner = {(r, c): picture[margin + r * cell, margin + c * cell] for r in (0, 1) for c in (0, 1)}
    assert tuple(corner[0, 0]) == figures.FULL  # 4 of 4
    assert tuple(corner[0, 1]) == figures.PAPER  # none
    quarter = [round(255 + (full - 255) / 4) for full in figures.FULL]  # 1 of 4 rows
    assert corner[1, 0].tolist() == corner[1, 1].tolist() == quarter


@pytest.mark.parametrize("classes", [2, 33, 34, 700])
def test_a_confusion_matrix_has_a_bounded_size_and_accepts_any_name(classes: int) -> None:
    names = ["$x$", "a\nb", "щ", "very " * 9, *map(str, range(classes))][:classes]
    picture = figures.confusion_plot(np.ones((classes, classes + 1), dtype=np.int64), names)
    assert picture.shape[0] == picture.shape[1] <= figures.LARGEST_MATRIX + 150
    assert figures.as_png(picture)[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.filterwarnings("error")
def test_names_of_columns_and_categories_are_text_and_never_formulas() -> None:
    def draw(name: str, category: str) -> figures.Picture:
        values: dict[str, list[Value]] = {name: [category, "b", "b"], "number": [1.0, 2.0, None]}
        return figures.columns_figure(values, values)

    for odd in ("$\\frac{income$", "$^$", "cost in $ or $", "語", "two\nlines", ""):
        assert draw(odd, odd).shape == draw("name", "a").shape
    assert not np.array_equal(draw("a$b$c", "a"), draw("abc", "a"))  # a formula hides the signs


@pytest.mark.parametrize("numbers", [[1e17, 1e17 + 16], [1e17, 1e17], [3.0, 3.0], [None, None]])
def test_a_column_of_any_numbers_is_drawn(numbers: list[float | None]) -> None:
    values = {"id": numbers}
    assert figures.columns_figure(values, values).shape == (230, 320, 3)


def test_confusion_csv_has_a_column_for_non_finite_outputs_if_there_are_any() -> None:
    text = confusion_csv(COUNTS, ["a", "b, c"])
    assert text == 'true class,a,"b, c",not finite\na,4,0,0\n"b, c",1,1,2\n'
    finite = np.array([[4, 0, 0], [1, 1, 0]])
    assert confusion_csv(finite, ["a", "b"]) == "true class,a,b\na,4,0\nb,1,1\n"
