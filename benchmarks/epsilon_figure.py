"""Accuracy against epsilon: a panel for each number of labels, a line for each private method.

    python -m benchmarks.epsilon_figure OUTPUT.png RUN_OR_FILE...

Takes run folders of ``privssl.train`` (results.json and config.yaml) and the files that
``benchmarks.census_curve --output`` writes. Runs that differ only by the seed are one point, at
their mean, with a bar from the worst seed to the best. A guarantee is a filled marker on a line, a
NOMINAL epsilon a hollow one, and a run without privacy a horizontal line. The accuracy axis is
stretched towards 1, where methods differ. Prints the points as a Markdown table.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

MARKERS = "osD^vP*X"
TICKS = (0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.985)


@dataclass(frozen=True)
class Point:
    """One run."""

    method: str
    labels: int
    epsilon: float | None  # None: without privacy
    nominal: bool
    accuracy: float  # on test rows, after the last round


def points_of(path: Path) -> Iterator[Point]:
    """Yield the runs of a folder or a file. Raises OSError, KeyError or ValueError for others."""
    if path.is_file():
        for record in json.loads(path.read_text()):
            no_noise = math.isinf(record["epsilon"])
            name = "label census, no noise" if no_noise else "label census"
            epsilon = None if no_noise else record["epsilon"]
            yield Point(name, record["labels"], epsilon, False, record["test"])
        return
    results = json.loads((path / "results.json").read_text())
    config = yaml.safe_load((path / "config.yaml").read_text())
    guarantee, nominal = results["privacy"]["guarantee"], results["privacy"]["nominal_epsilon"]
    epsilon = nominal if guarantee is None else guarantee["epsilon"]
    yield Point(
        _method_of(results["algorithm"], config), results["labels"], epsilon, nominal is not None,
        results["test_accuracy"]["final"],
    )  # fmt: skip


def _method_of(algorithm: str, config: Any) -> str:
    private = config["privacy"]
    if private is None:
        return str(algorithm)
    if algorithm == "label_census":
        return "label census"
    trained = ", ".join(private["update_at_support"])
    noisy = ", ".join(private["protect"])
    unprotected = set(private["update_at_support"]) - set(private["protect"])
    protected = "as published (NOMINAL)" if unprotected else noisy or trained
    return f"{algorithm}-dp, {protected}"


def draw(points: Sequence[Point], output: Path) -> list[str]:
    """Write the figure; return the table's lines."""
    numbers, methods = sorted({p.labels for p in points}), sorted({p.method for p in points})
    figure = Figure(figsize=(4.2 * len(numbers), 4.4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    lines = [
        "| method | labels | epsilon | runs | mean | sd | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for panel, labels in zip(panels, numbers, strict=True):
        for index, method in enumerate(methods):
            selected = [p for p in points if (p.labels, p.method) == (labels, method)]
            grouped: dict[float | None, list[float]] = {}
            for p in selected:
                # Calibration stops a little below its target: 7.9986 belongs to epsilon 8
                key = None if p.epsilon is None else round(p.epsilon, 2)
                grouped.setdefault(key, []).append(p.accuracy)
            if not grouped:
                continue
            nominal = any(p.nominal for p in selected)
            colour = f"C{index}"
            for epsilon, accuracies in sorted(grouped.items(), key=lambda g: g[0] or 0.0):
                mean = statistics.mean(accuracies)
                spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
                epsilon_text = "-" if epsilon is None else f"{epsilon:g}" + " NOMINAL" * nominal
                lines.append(
                    f"| {method} | {labels} | {epsilon_text} | {len(accuracies)} | {mean:.4f} | "
                    f"{spread:.4f} | {min(accuracies):.4f} |"
                )
                if epsilon is None:
                    panel.axhline(mean, color=colour, linestyle=":", label=method)
            private = sorted((e, v) for e, v in grouped.items() if e is not None)
            if private:
                means = [statistics.mean(v) for _, v in private]
                worst = [mean - min(v) for mean, (_, v) in zip(means, private, strict=True)]
                best = [max(v) - mean for mean, (_, v) in zip(means, private, strict=True)]
                panel.errorbar(
                    [e for e, _ in private], means, yerr=[worst, best],
                    color=colour, marker=MARKERS[index % len(MARKERS)], capsize=3, label=method,
                    fillstyle="none" if nominal else "full", linestyle="" if nominal else "-",
                )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set(title=f"{labels} labels", xlabel="epsilon of each support agent's records")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_yscale("logit")
        panel.set_ylim(min(0.9 * min(p.accuracy for p in points), 0.8), 0.99)
        panel.set_yticks([tick for tick in TICKS if tick > panel.get_ylim()[0]])
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
    handles = {
        name: handle
        for panel in panels
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize="small"
    )
    panels[0].set_ylabel("test accuracy after the last round")
    canvas.print_png(str(output))  # type: ignore[no-untyped-call]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if an argument is not a run."""
    parser = argparse.ArgumentParser(prog="benchmarks.epsilon_figure", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    points: list[Point] = []
    for path in options.runs:
        try:
            points += points_of(path)
        except (OSError, KeyError, TypeError, ValueError) as error:
            print(
                f"{path}: no finished run and no file of census_curve ({error!r})", file=sys.stderr
            )
            return 2
    print("\n".join(draw(points, options.output)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
