"""``python -m privssl.compare``: splits, table, plot, interruptions and errors.

Runs are tiny. The command runs in this process; tests raise signals at a chosen moment.
"""

import contextlib
import csv
import io
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from PIL import Image

from privssl.compare import __main__ as compare
from privssl.compare import files, plan, plot
from privssl.compare import table as compare_table
from privssl.compare.plot import Curve
from privssl.errors import RunFolderError
from privssl.reporting import figures
from privssl.runs import run_dir
from privssl.storage import atomic_files
from tests.support import command_line, comparison_row
from tests.support.command_line import Outcome, assert_refused, tree
from tests.support.comparison_row import results
from tests.support.interruption import interrupted_in

SPLIT = """\
data: {name: toy, labelled: 40, unlabelled: 80}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
"""
PSEUDO = SPLIT + "algorithm: {name: pseudo, rounds: 3, local_steps: 2, batch_size: 8}\n"
# Evaluated in rounds 2 and 3 of 3, and a checkpoint after each.
SUPERVISE = PSEUDO.replace("name: pseudo", "name: supervise") + (
    "run: {evaluate_every: 2, checkpoint_every: 1}\n"
)
CONFIGS, SEEDS = ("ours", "bound"), (0, 1)
RUNS = tuple(f"{name}-{seed}" for seed in SEEDS for name in CONFIGS)  # in the order of the command


def command(*arguments: object) -> Outcome:
    """Run ``python -m privssl.compare`` with these arguments."""
    return command_line.run_main(compare.main, *arguments)


@dataclass(frozen=True)
class Comparison:
    """Two configs and the folder of their comparison."""

    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def configs(self) -> tuple[Path, ...]:
        return tuple(self.folder / f"{name}.yaml" for name in CONFIGS)

    def compare(self, *arguments: object) -> Outcome:
        return command(*self.configs, "--seeds", "2", "--output", self.output, *arguments)

    def results(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / run / "results.json").read_text())
        return found

    def metrics(self, run: str) -> bytes:
        return (self.output / run / "metrics.csv").read_bytes()

    def table(self) -> list[dict[str, str]]:
        with (self.output / "comparison.csv").open() as file:
            return list(csv.DictReader(file))

    def change(self, config: int, old: str, new: str) -> None:
        text = self.configs[config].read_text()
        assert old in text
        self.configs[config].write_text(text.replace(old, new))


def make_comparison(folder: Path) -> Comparison:
    made = Comparison(folder)
    for path, text in zip(made.configs, (PSEUDO, SUPERVISE), strict=True):
        path.write_text(text)
    return made


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return make_comparison(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def without_figures() -> Iterator[None]:
    """Skip figures, which take half of the time of these tiny runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "partition_plot", lambda *_: np.zeros((8, 8, 3), np.uint8))
        patch.setattr(files, "figure", lambda _: Figure())
        yield


@pytest.fixture(scope="module")
def finished_comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A comparison without interruption. Tests that change it use a copy."""
    return make_comparison(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module", autouse=True)
def shown(without_figures: None, finished_comparison: Comparison) -> Outcome:
    """The output of the comparison in ``finished_comparison``, which runs here, with its plot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "figure", plot.figure)
        outcome = finished_comparison.compare()
    assert outcome.status == 0, outcome
    return outcome


@pytest.fixture
def copy(finished_comparison: Comparison, tmp_path: Path) -> Comparison:
    copied = make_comparison(tmp_path)
    shutil.copytree(finished_comparison.output, copied.output)
    return copied


def values(of: Comparison, config: str, section: str, key: str) -> list[float]:
    return [float(of.results(f"{config}-{seed}")[section][key]) for seed in SEEDS]


# The table ----------------------------------------------------------------------------------


def test_the_table_has_mean_and_standard_deviation_of_the_results_json_values(
    finished_comparison: Comparison,
) -> None:
    columns = {
        "final_test_accuracy": ("test_accuracy", "final"),
        "best_on_test_rows": ("test_accuracy", "best"),
        "seconds": ("seconds", "total"),
        "bytes_up": ("bytes", "up"),
        "bytes_down": ("bytes", "down"),
    }
    table = finished_comparison.table()

    assert [line["config"] for line in table] == list(CONFIGS)
    assert [line["algorithm"] for line in table] == ["pseudo", "supervise"]
    for line in table:
        assert (line["labels"], line["rounds"], line["seeds"]) == ("40", "3", "0 1")
        assert (line["epsilon"], line["epsilon_kind"]) == ("", "none")
        for column, (section, key) in columns.items():
            one, two = values(finished_comparison, line["config"], section, key)
            assert float(line[f"{column}_mean"]) == pytest.approx((one + two) / 2, abs=1e-12)
            # Of two values: sqrt(((a - m)^2 + (b - m)^2) / (2 - 1)) = |a - b| / sqrt(2).
            std = abs(one - two) / math.sqrt(2)
            assert float(line[f"{column}_std"]) == pytest.approx(std, abs=1e-12)


def test_the_markdown_table_has_the_same_numbers_and_a_note_on_best(
    finished_comparison: Comparison,
) -> None:
    text = (finished_comparison.output / "comparison.md").read_text()
    headings, _, *rows = [line for line in text.splitlines() if line.startswith("|")]

    assert "best test accuracy (chosen on test rows)" in headings
    assert "it is too high and is no result" in " ".join(text.split())
    for config, row in zip(CONFIGS, rows, strict=False):
        one, two = values(finished_comparison, config, "test_accuracy", "final")
        shown = f"{(one + two) / 2:.4f} ± {abs(one - two) / math.sqrt(2):.4f}"
        assert row.startswith(f"| {config} |")
        assert f"| {shown} |" in row
        assert row.endswith("| none | shared |")


def results_with_accuracy(*accuracies: float) -> list[dict[str, Any]]:
    return [
        results(seed=i, test_accuracy={"final": a, "best": a}) for i, a in enumerate(accuracies)
    ]


def test_the_standard_deviation_is_the_sample_standard_deviation() -> None:
    # 0.2, 0.4, 0.9: mean 0.5, squares 0.09 + 0.01 + 0.16 = 0.26; /2, not /3.
    spread = comparison_row.row("a", results_with_accuracy(0.2, 0.4, 0.9)).values[
        "final_test_accuracy"
    ]

    assert spread.mean == pytest.approx(0.5)
    assert spread.std == pytest.approx(math.sqrt(0.13))
    assert spread.std != pytest.approx(math.sqrt(0.26 / 3))  # the control


def test_one_seed_has_no_standard_deviation() -> None:
    row = comparison_row.row("a", results_with_accuracy(0.25))

    assert row.values["final_test_accuracy"].std is None
    assert "0.2500" in compare_table.cells(row, "a")
    assert "±" not in compare_table.markdown([row])
    assert "Seed 0 alone" in compare_table.markdown([row])
    line = next(csv.DictReader(compare_table.csv_text([row]).splitlines()))
    assert line["final_test_accuracy_std"] == ""


def guaranteed_results(epsilon: float) -> dict[str, Any]:
    claim = {"epsilon": epsilon, "delta": 1e-5, "unit": "record", "covers": ["F"]}
    return results(privacy={"guarantee": claim, "nominal_epsilon": None, "scope": "sound"})


def nominal_results(epsilon: float) -> dict[str, Any]:
    return results(privacy={"guarantee": None, "nominal_epsilon": epsilon, "scope": "as_published"})


def test_a_guarantee_is_the_largest_over_seeds_and_never_rounded_down() -> None:
    row = comparison_row.row(
        "a", [guaranteed_results(7.25), guaranteed_results(7.91234), guaranteed_results(6.0)], 1e-5
    )

    assert str(row.epsilon) == "guarantee 7.9124 (delta 1e-05) for F"
    assert "can spend up to their sum" in compare_table.markdown([row])
    machine = compare_table.as_json([row])["rows"][0]["privacy"]
    assert machine == {
        "kind": "guarantee", "epsilon": 7.91234, "delta": 1e-5, "covers": ["F"], "of": "one run",
        "unit": "record",
    }  # fmt: skip
    for run in row.runs:
        run["privacy"]["guarantee"]["unit"] = "person"
    assert str(compare_table.epsilon_of(row.runs, 1e-5)).startswith("guarantee of a person 7.9124")


def test_a_guarantee_has_the_largest_delta_over_seeds() -> None:
    """As for shared accounts with a label census first and DP-SGD later."""
    pure, noisy = guaranteed_results(8.0), guaranteed_results(8.0)
    pure["privacy"]["guarantee"]["delta"] = 0.0
    for runs in ([pure, noisy], [noisy, pure]):
        assert str(comparison_row.row("a", runs, 1e-5).epsilon).startswith(
            "guarantee 8.0000 (delta 1e-05)"
        )
    # The control: if all are pure it is 0.
    assert comparison_row.row("a", [pure, pure], 1e-5).epsilon.delta == 0.0


def test_the_epsilon_of_shared_accounts_is_not_labelled_per_run() -> None:
    row = comparison_row.row(
        "a", [guaranteed_results(4.0), guaranteed_results(6.5)], 1e-5, lasting=True
    )

    shown = "guarantee 6.5000 (delta 1e-05, all runs of the account so far) for F"
    assert str(row.epsilon) == shown
    assert "one run" not in compare_table.markdown([row])
    assert compare_table.as_json([row])["rows"][0]["privacy"]["of"] != "one run"


def test_a_note_names_a_config_that_uses_private_rows_without_a_guarantee() -> None:
    def notes_of(*others: compare_table.Row) -> list[str]:
        rows = [comparison_row.row("private", [guaranteed_results(4.0)], 1e-5), *others]
        return [note for note in compare_table.notes(rows) if "bounded by no epsilon" in note]

    bound = comparison_row.row("bound", [results()])
    published = comparison_row.row("published", [nominal_results(3.0)], 1e-5)
    (note,) = notes_of(bound, published)
    assert note.startswith(
        "bound, published: no guarantee, and rows of the same data set as private"
    )
    # The controls: other rows, or a guarantee.
    assert not notes_of(comparison_row.row("bound", [results(dataset="another")]))
    assert not notes_of(comparison_row.row("second", [guaranteed_results(2.0)], 1e-5))


def test_a_note_names_runs_with_different_versions() -> None:
    newer = {"privssl": "1.0", "torch": "2.1"}
    ours = comparison_row.row("ours", [results(seed=0), results(seed=1, versions=newer)])
    bound = comparison_row.row("bound", [results(seed=0), results(seed=1)])

    (notes_of,) = [note for note in compare_table.notes([ours, bound]) if "ersions" in note]
    assert notes_of.startswith(
        "Versions of torch differ (2.0: ours seed 0, bound seed 0, bound seed 1; 2.1: ours seed 1)"
    )
    assert "privssl" not in notes_of  # the same for all
    assert f"- {notes_of}\n" in compare_table.markdown([ours, bound])
    # The control: equal versions give no note.
    assert not any("ersions" in note for note in compare_table.notes([bound]))


def test_notes_name_the_runs_with_warnings() -> None:
    """Each warning appears once, with its runs; older runs have no such key."""
    runs = [results(seed=0, warnings=["it learned nothing"]), results(seed=1, warnings=[])]
    ours = comparison_row.row("ours", runs)
    bound = comparison_row.row("bound", [results(seed=0, warnings=["it learned nothing"])])
    found = [note for note in compare_table.notes([ours, bound]) if "Warning" in note]
    assert found == ["Warning of ours seed 0, bound seed 0: it learned nothing"]
    # The control: no warnings, no note.
    plain = comparison_row.row("plain", [results()])
    assert not any("Warning" in note for note in compare_table.notes([plain]))


def test_a_package_missing_in_one_runs_versions_is_unknown_there() -> None:
    old = comparison_row.row("old", [results(versions={"torch": "2.0"})])
    new = comparison_row.row("new", [results()])

    assert "Versions of privssl differ (unknown: old seed 0; 1.0: new seed 0)" in " ".join(
        compare_table.notes([old, new])
    )


def test_a_note_names_configs_that_were_evaluated_at_different_intervals(
    finished_comparison: Comparison, copy: Comparison
) -> None:
    text = (finished_comparison.output / "comparison.md").read_text()

    assert "Best is the highest of all evaluated rounds" in text
    assert (
        "run.evaluate_every differs (every 1: ours seed 0, ours seed 1; every 2: bound seed 0, "
        "bound seed 1)"
    ) in text
    # The interval of the finished run counts, not that of its current config.
    copy.change(1, "evaluate_every: 2", "evaluate_every: 1")
    assert copy.compare("--quiet").status == 0
    assert (copy.output / "comparison.md").read_text() == text
    # The control: equal intervals give no note.
    alike = [comparison_row.row(n, [results()], evaluate_every=[2]) for n in CONFIGS]
    assert not any("evaluate_every" in note for note in compare_table.notes(alike))


def test_a_guarantee_of_zero_is_a_guarantee() -> None:
    row = comparison_row.row("a", [guaranteed_results(0.0)], 1e-5)

    assert (row.epsilon.kind, row.epsilon.value) == ("guarantee", 0.0)


@pytest.mark.parametrize(
    ("runs", "shown"),
    [
        (
            [nominal_results(2.0), nominal_results(3.0)],
            "NOMINAL 3.0000 (delta 0.001), no guarantee",
        ),
        ([results(), results()], "none"),
        # A guarantee for only some of its runs is no guarantee of the config.
        ([guaranteed_results(1.0), results()], "none"),
        ([nominal_results(1.0), results()], "none"),
    ],
)
def test_a_nominal_epsilon_is_never_called_a_guarantee(
    runs: Sequence[Mapping[str, Any]], shown: str
) -> None:
    row = comparison_row.row("a", runs, 1e-3)

    assert str(row.epsilon) == shown
    assert compare_table.as_json([row])["rows"][0]["privacy"]["kind"] != "guarantee"


def test_with_json_standard_output_has_only_the_table(finished_comparison: Comparison) -> None:
    before = {run: tree(finished_comparison.output / run) for run in RUNS}

    outcome = finished_comparison.compare("--json")

    found = json.loads(outcome.out)
    assert outcome.status == 0
    assert found["seeds"] == [0, 1]
    assert [row["config"] for row in found["rows"]] == list(CONFIGS)
    for row in found["rows"]:
        finals = values(finished_comparison, row["config"], "test_accuracy", "final")
        assert row["final_test_accuracy"]["values"] == finals
        assert row["final_test_accuracy"]["mean"] == pytest.approx(sum(finals) / 2)
        assert row["best_test_accuracy"]["chosen_on"] == "test rows"
    # All runs were finished, so none changed.
    assert {run: tree(finished_comparison.output / run) for run in RUNS} == before


# One split ----------------------------------------------------------------------------------


def test_all_configs_share_one_split_per_seed_and_seeds_differ(
    finished_comparison: Comparison,
) -> None:
    hashes = [
        {finished_comparison.results(f"{name}-{seed}")["split_hash"] for name in CONFIGS}
        for seed in SEEDS
    ]

    assert [len(of_seed) for of_seed in hashes] == [1, 1]
    assert hashes[0] != hashes[1]
    for run in RUNS:
        split = json.loads((finished_comparison.output / run / "split.json").read_text())
        assert split["hash"] == finished_comparison.results(run)["split_hash"]


def test_each_run_equals_the_train_commands_run_of_its_config(
    finished_comparison: Comparison, tmp_path: Path
) -> None:
    # ours-1 came third, after other runs in the same process.
    config, _ = finished_comparison.configs
    outcome = command_line.command(
        config, "run.seed=1", f"run.output={tmp_path / 'alone'}", "--quiet"
    )

    assert outcome.status == 0
    for name in ("metrics.csv", "classifier.safetensors", "split.json"):
        alone = (tmp_path / "alone" / name).read_bytes()
        assert (finished_comparison.output / "ours-1" / name).read_bytes() == alone
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (finished_comparison.output / "ours-1").iterdir()} == names


def test_configs_with_different_splits_are_refused_with_the_differing_keys(
    comparison: Comparison,
) -> None:
    comparison.change(1, "labelled: 40", "labelled: 30")
    comparison.change(1, "query: 2", "query: 3")

    outcome = comparison.compare()

    assert_refused(outcome, "bound.yaml", "data.labelled is 30, not 40", "agents.query is 3, not 2")
    assert "--allow-different-splits" in outcome.err
    assert "model" not in outcome.err  # equal keys are not named
    assert not comparison.output.exists()


def test_an_override_applies_to_all_configs_and_can_equalise_their_splits(
    comparison: Comparison,
) -> None:
    comparison.change(1, "labelled: 40", "labelled: 30")

    assert comparison.compare("data.labelled=20", "--dry-run").status == 0


def test_a_dry_run_prints_no_hash_of_a_private_split(comparison: Comparison) -> None:
    shown = comparison.compare("--dry-run").out
    assert "withheld" not in shown  # the control
    hashes = set(re.findall(r"\b[0-9a-f]{12}\b", shown))
    assert len(hashes) == 2  # of two seeds
    for path in comparison.configs:
        path.write_text(
            SPLIT + "algorithm: {name: fedavg, rounds: 1}\n"
            "privacy: {epsilon: 8.0, delta: 1.0e-3, sample_rate: 1.0, steps: 1}\n"
        )
    private = comparison.compare("--dry-run").out
    assert private.count("withheld") == len(RUNS)
    assert not any(one in private for one in hashes)


def test_the_row_of_a_config_notes_an_allowed_different_split(comparison: Comparison) -> None:
    comparison.change(1, "labelled: 40", "labelled: 30")

    outcome = comparison.compare("--allow-different-splits", "--quiet", "--json", "--seeds", "1")

    assert outcome.status == 0
    splits = [row["split"] for row in json.loads(outcome.out)["rows"]]
    assert [(of["shared"], of["differs_in"]) for of in splits] == [
        (True, []),
        (False, ["data.labelled"]),
    ]
    assert not set(splits[0]["hashes"]) & set(splits[1]["hashes"])
    assert [line["split"] for line in comparison.table()] == ["shared", "different"]
    text = (comparison.output / "comparison.md").read_text()
    assert "| DIFFERENT from ours: data.labelled |" in text
    assert "All configs had the same split" not in text


def test_splits_are_compared_by_rows_and_not_by_the_data_folder(
    comparison: Comparison,
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (200, 8, 8), dtype=np.uint8)
    y = np.arange(200) % 10
    for name, rows in (("one", x), ("twin", x), ("other", 255 - x)):
        np.savez(comparison.folder / f"{name}.npz", x_train=rows, y_train=y, x_test=x, y_test=y)
    for number, name in enumerate(("one", "twin")):
        root = f"name: npz, root: '{comparison.folder / name}.npz'"
        comparison.change(number, "name: toy", root)

    assert comparison.compare("--dry-run").status == 0

    comparison.change(1, "twin.npz", "other.npz")
    assert_refused(comparison.compare("--dry-run"), "data.root is", "other.npz")


def test_a_further_seed_with_changed_data_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y, data = rng.random((60, 8, 8)), np.arange(60) % 3, tmp_path / "rows.npz"
    np.savez(data, x_train=x, y_train=y, x_test=x, y_test=y)
    config, output = tmp_path / "mine.yaml", tmp_path / "out"
    config.write_text(
        f"data: {{name: npz, root: '{data}', labelled: 12}}\nagents: {{support: 2, query: 2}}\n"
        "model: {width: 4}\nalgorithm: {name: fedavg, rounds: 1}\n"
    )
    assert command(config, "--seeds", "1", "--output", output).status == 0
    assert command(config, "--seeds", "2", "--output", output, "--dry-run").status == 0  # control

    np.savez(data, x_train=1 - x, y_train=y, x_test=x, y_test=y)
    refused = command(config, "--seeds", "2", "--output", output)
    assert_refused(refused, "seed 1 has other rows than seed 0: npz was changed between runs")
    drawn = command(
        config, "--seeds", "2", "--output", tmp_path / "drawn", "data.test=20", "--dry-run"
    )
    assert drawn.status == 0  # test rows drawn per seed are not changed data


# Resuming -----------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("damage", ["none", "killed before results.json", "no checkpoint either"])
def test_after_ctrl_c_the_same_command_resumes_to_the_same_results(
    comparison: Comparison, finished_comparison: Comparison, damage: str
) -> None:
    with interrupted_in(3 + 3):  # round 3 of the second run
        stopped = comparison.compare("--quiet")

    assert (stopped.status, stopped.err) == (130, "")
    assert "The same command continues" in stopped.out
    assert comparison.results("ours-0")["status"] == "finished"
    begun = comparison.results("bound-0")
    assert (begun["status"], begun["rounds"]) == ("interrupted", 2)
    assert not (comparison.output / "ours-1").exists()
    assert not (comparison.output / "comparison.md").exists()
    if damage != "none":
        (comparison.output / "bound-0" / "results.json").unlink()
    if damage == "no checkpoint either":
        shutil.rmtree(comparison.output / "bound-0" / "checkpoints")
    planned = comparison.compare("--dry-run").out
    done = tree(comparison.output / "ours-0")

    again = comparison.compare()

    assert again.status == 0, again
    assert tree(comparison.output / "ours-0") == done  # a finished run is not run again
    restarted = damage == "no checkpoint either"
    words = [line.split("│")[-2].strip() for line in planned.splitlines() if "seed" in line]
    assert words == ["nothing: done", "start again" if restarted else "resume", "start", "start"]
    first_line = next(line for line in again.err.splitlines() if "bound seed 0" in line)
    assert f"round {1 if restarted else 3}/3" in first_line
    for run in RUNS:
        assert comparison.metrics(run) == finished_comparison.metrics(run)
    untimed = [
        {key: value for key, value in line.items() if not key.startswith("seconds")}
        for line in (*comparison.table(), *finished_comparison.table())
    ]
    assert untimed[:2] == untimed[2:]
    # The plot counts the seconds of each round once, over all sessions.
    course, ended = plot.curve(comparison.output / "bound-0"), comparison.results("bound-0")
    assert course.seconds[-1] == pytest.approx(ended["seconds"]["total"], abs=1e-3)


def test_more_seeds_add_runs_and_do_not_change_others(copy: Comparison) -> None:
    before = {run: tree(copy.output / run) for run in RUNS}

    outcome = command(*copy.configs, "--seeds", "1,7", "--output", copy.output)

    assert outcome.status == 0
    assert {run: tree(copy.output / run) for run in RUNS} == before
    assert [line["seeds"] for line in copy.table()] == ["1 7", "1 7"]
    assert copy.results("bound-7")["seed"] == 7
    assert "run 3/4 ours seed 7, round 1/3" in outcome.err  # two of the four were finished already


def test_a_run_whose_config_changed_is_refused_with_the_key(copy: Comparison) -> None:
    copy.change(1, "local_steps: 2", "local_steps: 1")
    before = tree(copy.output)

    outcome = copy.compare()

    assert_refused(outcome, "bound.yaml, seed 0", "algorithm.local_steps is 1 here, but 2 there")
    assert "--output" in outcome.err
    assert tree(copy.output) == before


def test_a_note_names_finished_runs_of_a_changed_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished runs are kept; also if the change is in another file of the plug-in."""
    package = tmp_path / "comparedpack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("STEPS = 1\n")
    (package / "method.py").write_text(
        "from tests.testing.own_method import Own\nclass Mine(Own):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config, output = tmp_path / "mine.yaml", tmp_path / "out"
    config.write_text(SPLIT + "algorithm: {name: 'comparedpack.method:Mine', rounds: 1}\n")
    arguments = (config, "--seeds", "1", "--output", output)
    said = (
        "mine seed 0: made by other code of algorithm.name comparedpack.method:Mine than the one "
        "here. Remove these run folders"
    )

    assert command(*arguments).status == command(*arguments).status == 0
    assert said not in (output / "comparison.md").read_text()  # the control
    (package / "helper.py").write_text("STEPS = 2\n")
    assert command(*arguments).status == 0
    assert said in (output / "comparison.md").read_text()


def test_finished_runs_of_another_precision_are_refused(copy: Comparison) -> None:
    before = tree(copy.output)
    outcome = copy.compare("run.precision=bfloat16")
    assert_refused(outcome, "run.precision is bfloat16 here, but float32 there")
    assert tree(copy.output) == before


def test_a_folder_with_only_the_temporary_file_of_a_killed_start_is_reused(
    comparison: Comparison,
) -> None:
    left = comparison.output / RUNS[0]
    left.mkdir(parents=True)
    (left / f"{atomic_files.TEMPORARY}split.json").write_text("{")
    assert "start" in comparison.compare("--dry-run").out
    (left / "notes.txt").write_text("mine")  # the control
    assert_refused(comparison.compare("--dry-run"), "is not a run of privssl")


def test_a_run_folder_is_refused_as_output_of_the_table(finished_comparison: Comparison) -> None:
    run = finished_comparison.output / RUNS[0]
    before = tree(run)
    outcome = command(*finished_comparison.configs, "--seeds", "5,", "--output", run)
    assert_refused(outcome, str(run), "is the folder of a run", "--output")
    assert tree(run) == before


def test_control_a_setting_without_effect_on_results_may_change(copy: Comparison) -> None:
    # The control of the test above: some settings may change.
    copy.change(1, "checkpoint_every: 1", "checkpoint_every: 2")

    assert copy.compare("--quiet").status == 0


def test_the_error_names_a_failed_run_and_finished_runs_are_kept(
    comparison: Comparison, finished_comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run_dir.create_run_dir

    def raise_disk_full(prepared: Any) -> Any:
        if prepared.config.folder.name == "bound-0":
            raise RunFolderError("No space left on device")
        return real(prepared)

    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "create_run_dir", raise_disk_full)
        outcome = comparison.compare("--quiet")

    assert_refused(outcome, "bound seed 0: No space left on device", "same command continues")
    assert comparison.metrics("ours-0") == finished_comparison.metrics("ours-0")


# Errors and output ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["algorithm.roundz=5"], ["ours.yaml", "bound.yaml", "Did you mean rounds?"]),
        (["run.seed=3"], ["run.seed", "--seeds"]),
        (["run.output=x"], ["run.output", "--output"]),
        (["run.overwrite=true"], ["run.overwrite", "never replaces a run"]),
        (["data.labelled=2000"], ["ours.yaml, seed 0", "1000 training rows"]),
        (["seed=3"], ["write section.key=value"]),
    ],
)
def test_a_mistake_is_reported_and_nothing_is_written(
    comparison: Comparison, arguments: list[str], fragments: list[str]
) -> None:
    assert_refused(comparison.compare(*arguments), *fragments)
    assert not comparison.output.exists()


def test_a_mistake_in_the_last_config_is_found_before_the_first_run(comparison: Comparison) -> None:
    comparison.change(1, "batch_size", "batchsize")

    assert_refused(comparison.compare(), "bound.yaml", "batchsize", "Did you mean batch_size?")
    assert not comparison.output.exists()


def test_a_missing_config_file_and_a_missing_argument_are_reported(comparison: Comparison) -> None:
    assert_refused(command(comparison.folder / "our.yaml"), "no such file", "ours.yaml")
    assert_refused(command("algorithm.rounds=1"), "No config was given")


def test_two_configs_with_one_name_are_refused(comparison: Comparison) -> None:
    twin = comparison.folder / "more" / "OURS.yaml"
    twin.parent.mkdir()
    twin.write_text(PSEUDO)

    assert_refused(command(comparison.configs[0], twin), "both have the name", "run.name")


def test_a_folder_that_is_no_run_is_refused_and_not_changed(comparison: Comparison) -> None:
    precious = comparison.output / "bound-1" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")

    assert_refused(comparison.compare(), "bound-1", "not a run of privssl")
    assert [path.name for path in comparison.output.iterdir()] == ["bound-1"]
    assert precious.read_text() == "years of work"


def test_the_error_about_an_output_that_is_a_file_names_the_flag(comparison: Comparison) -> None:
    comparison.output.write_text("mine")
    assert_refused(comparison.compare(), "Not a directory", "another --output")
    assert comparison.output.read_text() == "mine"


@pytest.mark.parametrize("seeds", ["0", "-1", "1,1", "a", "1;2", "", "²"])
def test_invalid_seeds_are_refused(comparison: Comparison, seeds: str) -> None:
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(io.StringIO()) as err:
        compare.main([str(comparison.configs[0]), f"--seeds={seeds}"])

    assert stopped.value.code == 2
    assert "--seeds" in err.getvalue()


def test_the_default_folder_has_the_configs_names_and_a_dry_run_does_not_create_it(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(comparison.folder)
    before = tree(comparison.folder)

    outcome = command(*comparison.configs, "--dry-run")

    assert outcome.status == 0
    for seed in (0, 1, 2):  # three when --seeds is not given
        assert f"runs/compare-ours-bound/bound-{seed}" in outcome.out
    assert tree(comparison.folder) == before


def test_progress_shows_run_round_and_accuracy(
    shown: Outcome, finished_comparison: Comparison
) -> None:
    lines = shown.err.splitlines()

    assert len(lines) == 8  # the first and last round of four runs
    assert lines[2].startswith("run 2/4 bound seed 0, round 1/3: ")
    reached = finished_comparison.results("bound-0")["test_accuracy"]["final"]
    assert lines[3].startswith("run 2/4 bound seed 0, round 3/3: ")
    assert f"test accuracy {reached:.4f}, 0:00:" in lines[3]
    assert lines[-1].endswith(", 0:00:00 left")


def test_the_output_shows_the_results_and_the_path_of_the_table(
    shown: Outcome, finished_comparison: Comparison
) -> None:
    rows = [line.split() for line in shown.out.splitlines()]

    for config in CONFIGS:
        one, two = values(finished_comparison, config, "test_accuracy", "final")
        (row,) = (row for row in rows if row[:1] == [config])
        assert row[1:4] == [f"{(one + two) / 2:.4f}", "±", f"{abs(one - two) / math.sqrt(2):.4f}"]
    assert "best" not in shown.out.partition("Best is")[0]  # the summary never shows it
    assert str(finished_comparison.output) in shown.out.splitlines()[-1]


# The plot -----------------------------------------------------------------------------------


def lines_of(drawn: Figure, panel: int) -> dict[str, tuple[list[float], list[float]]]:
    """Label -> x and y of each line of a panel."""
    return {
        str(line.get_label()): (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
        )
        for line in drawn.axes[panel].get_lines()
    }


def test_each_plot_panel_has_a_line_per_config_of_means_over_seeds() -> None:
    a = Curve((1, 2), (0.2, 0.6), (1.0, 2.0), (10.0, 20.0))
    b = Curve((1, 2), (0.4, 0.7), (3.0, 6.0), (30.0, 60.0))
    c = Curve((2,), (0.9,), (5.0,), (50.0,))

    drawn = plot.figure({"ours": [a, b], "bound": [c, c]})

    expected_x = {0: [1, 2], 1: [2.0, 4.0], 2: [20.0, 40.0]}
    for panel, x in expected_x.items():
        lines = lines_of(drawn, panel)
        assert list(lines) == ["ours", "bound"]
        assert lines["ours"][0] == pytest.approx(x)
        assert lines["ours"][1] == pytest.approx([0.3, 0.65])
        assert lines["bound"][1] == [0.9]
    assert [axes.get_xlabel() for axes in drawn.axes] == ["rounds", "seconds", "bytes, up and down"]
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ours", "bound"]


def test_the_plot_band_is_one_standard_deviation_and_absent_for_one_seed() -> None:
    a = Curve((1, 2), (0.2, 0.6), (1.0, 2.0), (10.0, 20.0))
    b = Curve((1, 2), (0.4, 0.6), (1.0, 2.0), (10.0, 20.0))

    several = plot.figure({"ours": [a, b]})
    alone = plot.figure({"ours": [a]})

    for axes in several.axes:
        (band,) = (c for c in axes.collections if isinstance(c, PolyCollection))
        box = band.get_paths()[0].get_extents()
        half = 0.2 / math.sqrt(2)  # |0.2 - 0.4| / sqrt(2), in round 1; in round 2 there is none
        assert (box.ymin, box.ymax) == pytest.approx((0.3 - half, 0.6))
    assert [len(axes.collections) for axes in alone.axes] == [0, 0, 0]


def test_the_spent_epsilon_of_private_configs_has_its_own_panel() -> None:
    a = Curve((1, 2), (0.2, 0.6), (1.0, 2.0), (10.0, 20.0), (0.5, 1.0))
    b = Curve((1, 2), (0.4, 0.7), (1.0, 2.0), (10.0, 20.0))

    drawn = plot.figure({"private": [a, a], "plain": [b, b]})

    assert len(drawn.axes) == 4
    assert lines_of(drawn, 3) == {"private": ([0.5, 1.0], [0.2, 0.6])}
    assert drawn.axes[3].get_xlabel() == "epsilon spent, largest over agents"
    assert len(plot.figure({"plain": [b]}).axes) == 3


def test_the_plotted_epsilon_is_the_largest_over_agents_without_nominal_ones(
    finished_comparison: Comparison, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_comparison.output / "bound-0", run)
    with (run / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    for number, line in enumerate(lines, 1):
        line |= {"dp/epsilon/s0": str(number / 2), "dp/epsilon/s1": str(number)}
    with (run / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    assert plot.curve(run, guaranteed=True).epsilon == (2.0, 3.0)  # rounds 2 and 3 are evaluated
    assert plot.curve(run).epsilon == ()


def test_many_configs_have_distinct_plot_styles() -> None:
    curve = Curve((1,), (0.5,), (1.0,), (1.0,))

    drawn = plot.figure({f"c{number}": [curve] for number in range(40)})

    looks = {(line.get_color(), line.get_linestyle()) for line in drawn.axes[0].get_lines()}
    assert len(looks) == 40


def test_a_plotted_line_follows_metrics_csv_and_ends_at_results_json(
    finished_comparison: Comparison,
) -> None:
    for run in RUNS:
        course, ended = (
            plot.curve(finished_comparison.output / run),
            finished_comparison.results(run),
        )

        assert course.rounds == ((1, 2, 3) if run.startswith("ours") else (2, 3))
        assert course.accuracy[-1] == ended["test_accuracy"]["final"]
        assert course.bytes[-1] == ended["bytes"]["up"] + ended["bytes"]["down"]
        # TensorBoard keeps seconds in 32 bits, results.json to the millisecond.
        assert course.seconds[-1] == pytest.approx(ended["seconds"]["total"], abs=1e-3)
        assert list(course.seconds) == sorted(course.seconds)


@pytest.mark.parametrize("lost", ["metrics.csv", "tensorboard"])
def test_a_run_without_metrics_csv_is_reported_and_the_table_is_written(
    copy: Comparison, lost: str
) -> None:
    path = copy.output / "bound-1" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for file in copy.output.glob("comparison.*"):
        file.unlink()

    assert_refused(copy.compare("--quiet"), "bound-1", "its course cannot be read")
    names = {path.name for path in copy.output.glob("comparison.*")}
    assert names == {"comparison.md", "comparison.csv", "comparison.tex"}


def test_the_plot_file_is_a_valid_image(finished_comparison: Comparison) -> None:
    with Image.open(finished_comparison.output / "comparison.png") as picture:
        picture.verify()
        assert picture.width > picture.height > 100


def test_runs_are_ordered_by_seed_so_each_seed_completes_a_comparison(
    comparison: Comparison,
) -> None:
    loaded = plan.load_configs([str(path) for path in comparison.configs])

    planned = plan.all_runs(loaded, SEEDS, comparison.output)

    assert tuple(run.config.folder.name for run in planned) == RUNS
