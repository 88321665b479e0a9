"""The plot of a comparison: test accuracy against rounds, seconds, bytes and epsilon.

metrics.csv has accuracy, bytes and the epsilon of each account. The seconds of a round are in the
TensorBoard events, because metrics.csv only has values that the seed determines.
"""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

from privssl.errors import RunFolderError
from privssl.runtime.process import without_tensorflow

DASHES = ("-", "--", ":", "-.")  # line style after ten colours
COLOURS = 10  # of matplotlib's default cycle
AXES = {"bytes": "bytes, up and down", "epsilon": "epsilon spent, largest over agents"}
MARKED = 30  # lines of at most this many points show them


@dataclass(frozen=True)
class Curve:
    """A run with a value per evaluated round. Seconds and bytes (both ways) are cumulative."""

    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]  # on test rows
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    #: The largest epsilon of an account; empty without a guarantee.
    epsilon: tuple[float, ...] = ()


def curve(folder: Path, guaranteed: bool = False) -> Curve:
    """Read metrics.csv and tensorboard/ of a finished run.

    ``guaranteed``: include epsilon, which is a guarantee. Raises RunFolderError if a file is
    missing or damaged.
    """
    path = folder / "metrics.csv"
    round_seconds = _read_round_seconds(folder / "tensorboard")
    rounds, accuracy, seconds, sent = list[int](), list[float](), list[float](), list[float]()
    spent = list[float]()
    elapsed = traffic = 0.0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                number = int(line["round"])
                elapsed += round_seconds[number]
                traffic += float(line["comm/up_bytes"]) + float(line["comm/down_bytes"])
                if line["test/accuracy"]:
                    rounds.append(number)
                    accuracy.append(float(line["test/accuracy"]))
                    seconds.append(elapsed)
                    sent.append(traffic)
                    values = [v for name, v in line.items() if name.startswith("dp/epsilon/") and v]
                    spent += [max(map(float, values))] if values and guaranteed else []
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{folder}: its course cannot be read from metrics.csv and tensorboard ({error!r}). "
            "Put the files back, or remove the folder and the run is done again"
        ) from error
    return Curve(tuple(rounds), tuple(accuracy), tuple(seconds), tuple(sent), tuple(spent))


def _read_round_seconds(folder: Path) -> dict[int, float]:
    """Map rounds to wall seconds; a round repeated after a resume counts once."""
    without_tensorflow()
    sizes = {event_accumulator.SCALARS: 0, event_accumulator.IMAGES: 1}  # 0: all of them
    events = event_accumulator.EventAccumulator(str(folder), size_guidance=sizes)
    if folder.is_dir():
        events.Reload()
    if "time/round_s" not in events.Tags()["scalars"]:
        return {}
    return {int(event.step): float(event.value) for event in events.Scalars("time/round_s")}


def figure(curves: Mapping[str, Sequence[Curve]]) -> Figure:
    """Plot panels with a line per config: the mean over seeds with a band of one standard
    deviation.

    Each config has at least one run; one seed has no band. Without a guarantee there is no panel
    for epsilon.
    """
    private = any(run.epsilon for runs in curves.values() for run in runs)
    axes_names = ("rounds", "seconds", "bytes", *(["epsilon"] if private else []))
    fig = Figure(figsize=(4.35 * len(axes_names), 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(fig)
    panels = fig.subplots(1, len(axes_names), sharey=True)
    for number, (name, runs) in enumerate(curves.items()):
        rounds = sorted(set.intersection(*(set(run.rounds) for run in runs)))
        accuracy = _collect_by_round(runs, rounds, "accuracy")
        y = [statistics.fmean(values) for values in accuracy]
        style: dict[str, Any] = {
            "color": f"C{number % COLOURS}",
            "linestyle": DASHES[number // COLOURS % len(DASHES)],
            "marker": "." if len(rounds) <= MARKED else "",
        }
        for panel, quantity in zip(panels, axes_names, strict=True):
            if not all(getattr(run, quantity) for run in runs):
                continue
            x = [statistics.fmean(values) for values in _collect_by_round(runs, rounds, quantity)]
            panel.plot(x, y, label=name, **style)
            if len(runs) > 1:
                deviations = [statistics.stdev(values) for values in accuracy]
                low = [mean - std for mean, std in zip(y, deviations, strict=True)]
                high = [mean + std for mean, std in zip(y, deviations, strict=True)]
                panel.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    for panel, quantity in zip(panels, axes_names, strict=True):
        panel.set_xlabel(AXES.get(quantity, quantity))
        panel.grid(alpha=0.25)
        panel.set_axisbelow(True)
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[2].xaxis.set_major_formatter(EngFormatter(unit="B"))
    panels[0].set_ylabel("test accuracy")
    seeds = max(map(len, curves.values()))
    title = f"mean over {seeds} seeds; band: one standard deviation" if seeds > 1 else "one seed"
    fig.suptitle(title, fontsize="small")
    columns = min(4, len(curves))
    handles = panels[0].get_lines()
    fig.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return fig


def _collect_by_round(
    runs: Sequence[Curve], rounds: Sequence[int], quantity: str
) -> list[tuple[float, ...]]:
    """Return for each round the quantity of every run."""
    by_round = [dict(zip(run.rounds, getattr(run, quantity), strict=True)) for run in runs]
    return [tuple(values[number] for values in by_round) for number in rounds]
