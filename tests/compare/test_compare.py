"""What ``python -m privssl.compare`` promises: one split, one table, one plot, and nothing lost.

Every run is real and tiny. The command is called in this process; interruptions are real signals,
raised at a chosen moment.
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
    """``python -m privssl.compare`` with these arguments."""
    return command_line.run_main(compare.main, *arguments)


@dataclass(frozen=True)
class Place:
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


def place(folder: Path) -> Place:
    made = Place(folder)
    for path, text in zip(made.configs, (PSEUDO, SUPERVISE), strict=True):
        path.write_text(text)
    return made


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Half of the time of these tiny runs would go into pictures that nobody looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "partition_plot", lambda *_: np.zeros((8, 8, 3), np.uint8))
        patch.setattr(files, "figure", lambda _: Figure())
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A comparison that was never interrupted. Tests that change anything take a copy."""
    return place(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module", autouse=True)
def shown(no_pictures: None, whole: Place) -> Outcome:
    """What the comparison in ``whole`` printed; it is carried out here, with its plot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "figure", plot.figure)
        outcome = whole.compare()
    assert outcome.status == 0, outcome
    return outcome


@pytest.fixture
def copy(whole: Place, tmp_path: Path) -> Place:
    copied = place(tmp_path)
    shutil.copytree(whole.output, copied.output)
    return copied


def values(of: Place, config: str, section: str, key: str) -> list[float]:
    return [float(of.results(f"{config}-{seed}")[section][key]) for seed in SEEDS]


# The table ----------------------------------------------------------------------------------


def test_the_table_has_mean_and_standard_deviation_of_what_results_json_has(whole: Place) -> None:
    columns = {
        "final_test_accuracy": ("test_accuracy", "final"),
        "best_on_test_rows": ("test_accuracy", "best"),
        "seconds": ("seconds", "total"),
        "bytes_up": ("bytes", "up"),
        "bytes_down": ("bytes", "down"),
    }
    table = whole.table()

    assert [line["config"] for line in table] == list(CONFIGS)
    assert [line["algorithm"] for line in table] == ["pseudo", "supervise"]
    for line in table:
        assert (line["labels"], line["rounds"], line["seeds"]) == ("40", "3", "0 1")
        assert (line["epsilon"], line["epsilon_kind"]) == ("", "none")
        for column, (section, key) in columns.items():
            one, two = values(whole, line["config"], section, key)
            assert float(line[f"{column}_mean"]) == pytest.approx((one + two) / 2, abs=1e-12)
            # Of two values: sqrt(((a - m)^2 + (b - m)^2) / (2 - 1)) = |a - b| / sqrt(2).
            std = abs(one - two) / math.sqrt(2)
            assert float(line[f"{column}_std"]) == pytest.approx(std, abs=1e-12)


def test_markdown_has_the_same_numbers_and_says_that_best_was_chosen_on_test_rows(
    whole: Place,
) -> None:
    text = (whole.output / "comparison.md").read_text()
    headings, _, *rows = [line for line in text.splitlines() if line.startswith("|")]

    assert "best test accuracy (chosen on test rows)" in headings
    assert "it is too high and is no result" in " ".join(text.split())
    for config, row in zip(CONFIGS, rows, strict=False):
        one, two = values(whole, config, "test_accuracy", "final")
        shown = f"{(one + two) / 2:.4f} ± {abs(one - two) / math.sqrt(2):.4f}"
        assert row.startswith(f"| {config} |")
        assert f"| {shown} |" in row
        assert row.endswith("| none | shared |")


def reaching(*accuracies: float) -> list[dict[str, Any]]:
    return [
        results(seed=i, test_accuracy={"final": a, "best": a}) for i, a in enumerate(accuracies)
    ]


def test_the_standard_deviation_is_that_of_a_sample() -> None:
    # 0.2, 0.4, 0.9: mean 0.5, squares 0.09 + 0.01 + 0.16 = 0.26; /2, not /3.
    spread = comparison_row.row("a", reaching(0.2, 0.4, 0.9)).values["final_test_accuracy"]

    assert spread.mean == pytest.approx(0.5)
    assert spread.std == pytest.approx(math.sqrt(0.13))
    assert spread.std != pytest.approx(math.sqrt(0.26 / 3))  # the control


def test_one_seed_has_no_standard_deviation_instead_of_one_of_zero() -> None:
    row = comparison_row.row("a", reaching(0.25))

    assert row.values["final_test_accuracy"].std is None
    assert "0.2500" in compare_table.cells(row, "a")
    assert "±" not in compare_table.markdown([row])
    assert "Seed 0 alone" in compare_table.markdown([row])
    line = next(csv.DictReader(compare_table.csv_text([row]).splitlines()))
    assert line["final_test_accuracy_std"] == ""


def guaranteed(epsilon: float) -> dict[str, Any]:
    claim = {"epsilon": epsilon, "delta": 1e-5, "unit": "record", "covers": ["F"]}
    return results(privacy={"guarantee": claim, "nominal_epsilon": None, "scope": "sound"})


def nominal(epsilon: float) -> dict[str, Any]:
    return results(privacy={"guarantee": None, "nominal_epsilon": epsilon, "scope": "as_published"})


def test_a_guarantee_is_the_largest_over_seeds_and_never_rounded_down() -> None:
    row = comparison_row.row("a", [guaranteed(7.25), guaranteed(7.91234), guaranteed(6.0)], 1e-5)

    assert str(row.epsilon) == "guarantee 7.9124 (delta 1e-05) for F"
    assert "can spend up to their sum" in compare_table.markdown([row])
    machine = compare_table.as_json([row])["rows"][0]["privacy"]
    assert machine == {
        "kind": "guarantee", "epsilon": 7.91234, "delta": 1e-5, "covers": ["F"], "of": "one run"
    }  # fmt: skip


def test_a_guarantee_has_the_largest_delta_over_seeds_where_some_are_pure() -> None:
    """As of accounts whose first run was a census, and a later one DP-SGD."""
    pure, noisy = guaranteed(8.0), guaranteed(8.0)
    pure["privacy"]["guarantee"]["delta"] = 0.0
    for runs in ([pure, noisy], [noisy, pure]):
        assert str(comparison_row.row("a", runs, 1e-5).epsilon).startswith(
            "guarantee 8.0000 (delta 1e-05)"
        )
    # The control: of pure ones alone it is 0.
    assert comparison_row.row("a", [pure, pure], 1e-5).epsilon.delta == 0.0


def test_the_epsilon_of_accounts_that_outlive_runs_is_not_said_to_be_of_one_run() -> None:
    row = comparison_row.row("a", [guaranteed(4.0), guaranteed(6.5)], 1e-5, lasting=True)

    shown = "guarantee 6.5000 (delta 1e-05, all runs of the account so far) for F"
    assert str(row.epsilon) == shown
    assert "one run" not in compare_table.markdown([row])
    assert compare_table.as_json([row])["rows"][0]["privacy"]["of"] != "one run"


def test_a_config_without_a_guarantee_on_the_rows_of_a_private_one_is_named() -> None:
    def told(*others: compare_table.Row) -> list[str]:
        rows = [comparison_row.row("private", [guaranteed(4.0)], 1e-5), *others]
        return [note for note in compare_table.notes(rows) if "bounded by no epsilon" in note]

    bound = comparison_row.row("bound", [results()])
    published = comparison_row.row("published", [nominal(3.0)], 1e-5)
    (note,) = told(bound, published)
    assert note.startswith(
        "bound, published: no guarantee, and rows of the same data set as private"
    )
    # The controls: other rows, or a guarantee.
    assert not told(comparison_row.row("bound", [results(dataset="another")]))
    assert not told(comparison_row.row("second", [guaranteed(2.0)], 1e-5))


def test_versions_that_differ_between_runs_are_told_with_the_runs() -> None:
    newer = {"privssl": "1.0", "torch": "2.1"}
    ours = comparison_row.row("ours", [results(seed=0), results(seed=1, versions=newer)])
    bound = comparison_row.row("bound", [results(seed=0), results(seed=1)])

    (told,) = [note for note in compare_table.notes([ours, bound]) if "ersions" in note]
    assert told.startswith(
        "Versions of torch differ (2.0: ours seed 0, bound seed 0, bound seed 1; 2.1: ours seed 1)"
    )
    assert "privssl" not in told  # the same for all
    assert f"- {told}\n" in compare_table.markdown([ours, bound])
    # The control: with the same versions nothing is told.
    assert not any("ersions" in note for note in compare_table.notes([bound]))


def test_notes_name_the_runs_that_have_warnings() -> None:
    """A sentence once, with its runs; older runs have no such key."""
    runs = [results(seed=0, warnings=["it learned nothing"]), results(seed=1, warnings=[])]
    ours = comparison_row.row("ours", runs)
    bound = comparison_row.row("bound", [results(seed=0, warnings=["it learned nothing"])])
    found = [note for note in compare_table.notes([ours, bound]) if "Warning" in note]
    assert found == ["Warning of ours seed 0, bound seed 0: it learned nothing"]
    # The control: nothing to name.
    plain = comparison_row.row("plain", [results()])
    assert not any("Warning" in note for note in compare_table.notes([plain]))


def test_a_package_that_one_run_does_not_name_is_unknown_there() -> None:
    old = comparison_row.row("old", [results(versions={"torch": "2.0"})])
    new = comparison_row.row("new", [results()])

    assert "Versions of privssl differ (unknown: old seed 0; 1.0: new seed 0)" in " ".join(
        compare_table.notes([old, new])
    )


def test_rows_that_were_not_evaluated_equally_often_are_told(whole: Place, copy: Place) -> None:
    text = (whole.output / "comparison.md").read_text()

    assert "Best is the highest of all evaluated rounds" in text
    assert (
        "run.evaluate_every differs (every 1: ours seed 0, ours seed 1; every 2: bound seed 0, "
        "bound seed 1)"
    ) in text
    # What a finished run did counts, not what its config says now.
    copy.change(1, "evaluate_every: 2", "evaluate_every: 1")
    assert copy.compare("--quiet").status == 0
    assert (copy.output / "comparison.md").read_text() == text
    # The control: equally often, nothing is told.
    alike = [comparison_row.row(n, [results()], evaluate_every=[2]) for n in CONFIGS]
    assert not any("evaluate_every" in note for note in compare_table.notes(alike))


def test_a_guarantee_of_zero_is_a_guarantee() -> None:
    row = comparison_row.row("a", [guaranteed(0.0)], 1e-5)

    assert (row.epsilon.kind, row.epsilon.value) == ("guarantee", 0.0)


@pytest.mark.parametrize(
    ("runs", "shown"),
    [
        ([nominal(2.0), nominal(3.0)], "NOMINAL 3.0000 (delta 0.001), no guarantee"),
        ([results(), results()], "none"),
        # A guarantee for some runs is none for the config.
        ([guaranteed(1.0), results()], "none"),
        ([nominal(1.0), results()], "none"),
    ],
)
def test_what_guarantees_nothing_is_never_called_a_guarantee(
    runs: Sequence[Mapping[str, Any]], shown: str
) -> None:
    row = comparison_row.row("a", runs, 1e-3)

    assert str(row.epsilon) == shown
    assert compare_table.as_json([row])["rows"][0]["privacy"]["kind"] != "guarantee"


def test_json_prints_the_table_on_standard_output_and_nothing_else(whole: Place) -> None:
    before = {run: tree(whole.output / run) for run in RUNS}

    outcome = whole.compare("--json")

    found = json.loads(outcome.out)
    assert outcome.status == 0
    assert found["seeds"] == [0, 1]
    assert [row["config"] for row in found["rows"]] == list(CONFIGS)
    for row in found["rows"]:
        finals = values(whole, row["config"], "test_accuracy", "final")
        assert row["final_test_accuracy"]["values"] == finals
        assert row["final_test_accuracy"]["mean"] == pytest.approx(sum(finals) / 2)
        assert row["best_test_accuracy"]["chosen_on"] == "test rows"
    # All runs were finished, so that none was touched.
    assert {run: tree(whole.output / run) for run in RUNS} == before


# One split ----------------------------------------------------------------------------------


def test_every_config_has_the_same_split_in_a_seed_and_another_one_in_another(
    whole: Place,
) -> None:
    hashes = [{whole.results(f"{name}-{seed}")["split_hash"] for name in CONFIGS} for seed in SEEDS]

    assert [len(of_seed) for of_seed in hashes] == [1, 1]
    assert hashes[0] != hashes[1]
    for run in RUNS:
        split = json.loads((whole.output / run / "split.json").read_text())
        assert split["hash"] == whole.results(run)["split_hash"]


def test_each_run_is_what_train_makes_of_the_same_config(whole: Place, tmp_path: Path) -> None:
    # ours-1 came third, after other runs in the same process.
    config, _ = whole.configs
    outcome = command_line.command(
        config, "run.seed=1", f"run.output={tmp_path / 'alone'}", "--quiet"
    )

    assert outcome.status == 0
    for name in ("metrics.csv", "classifier.safetensors", "split.json"):
        alone = (tmp_path / "alone" / name).read_bytes()
        assert (whole.output / "ours-1" / name).read_bytes() == alone
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (whole.output / "ours-1").iterdir()} == names


def test_different_splits_are_refused_with_the_keys_before_anything_runs(here: Place) -> None:
    here.change(1, "labelled: 40", "labelled: 30")
    here.change(1, "query: 2", "query: 3")

    outcome = here.compare()

    assert_refused(outcome, "bound.yaml", "data.labelled is 30, not 40", "agents.query is 3, not 2")
    assert "--allow-different-splits" in outcome.err
    assert "model" not in outcome.err  # keys that are the same are not named
    assert not here.output.exists()


def test_an_argument_counts_for_all_configs_and_can_make_the_splits_one(here: Place) -> None:
    here.change(1, "labelled: 40", "labelled: 30")

    assert here.compare("data.labelled=20", "--dry-run").status == 0


def test_a_dry_run_withholds_the_hashes_of_private_splits(here: Place) -> None:
    shown = here.compare("--dry-run").out
    assert "withheld" not in shown  # the control
    hashes = set(re.findall(r"\b[0-9a-f]{12}\b", shown))
    assert len(hashes) == 2  # of two seeds
    for path in here.configs:
        path.write_text(
            SPLIT + "algorithm: {name: fedavg, rounds: 1}\n"
            "privacy: {epsilon: 8.0, delta: 1.0e-3, sample_rate: 1.0, steps: 1}\n"
        )
    private = here.compare("--dry-run").out
    assert private.count("withheld") == len(RUNS)
    assert not any(one in private for one in hashes)


def test_allowed_different_splits_are_said_in_the_row(here: Place) -> None:
    here.change(1, "labelled: 40", "labelled: 30")

    outcome = here.compare("--allow-different-splits", "--quiet", "--json", "--seeds", "1")

    assert outcome.status == 0
    splits = [row["split"] for row in json.loads(outcome.out)["rows"]]
    assert [(of["shared"], of["differs_in"]) for of in splits] == [
        (True, []),
        (False, ["data.labelled"]),
    ]
    assert not set(splits[0]["hashes"]) & set(splits[1]["hashes"])
    assert [line["split"] for line in here.table()] == ["shared", "different"]
    text = (here.output / "comparison.md").read_text()
    assert "| DIFFERENT from ours: data.labelled |" in text
    assert "All configs had the same split" not in text


def test_the_same_rows_in_another_folder_are_the_same_split_and_other_rows_are_not(
    here: Place,
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (200, 8, 8), dtype=np.uint8)
    y = np.arange(200) % 10
    for name, rows in (("one", x), ("twin", x), ("other", 255 - x)):
        np.savez(here.folder / f"{name}.npz", x_train=rows, y_train=y, x_test=x, y_test=y)
    for number, name in enumerate(("one", "twin")):
        root = f"name: npz, root: '{here.folder / name}.npz'"
        here.change(number, "name: toy", root)

    assert here.compare("--dry-run").status == 0

    here.change(1, "twin.npz", "other.npz")
    assert_refused(here.compare("--dry-run"), "data.root is", "other.npz")


def test_a_seed_is_not_added_on_other_rows_than_those_of_finished_seeds(tmp_path: Path) -> None:
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
    assert drawn.status == 0  # test rows that each seed draws are no change of the data


# Going on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["none", "killed before results.json", "no checkpoint either"])
def test_after_ctrl_c_the_same_command_goes_on_and_ends_as_if_it_had_not_been(
    here: Place, whole: Place, damage: str
) -> None:
    with interrupted_in(3 + 3):  # round 3 of the second run
        stopped = here.compare("--quiet")

    assert (stopped.status, stopped.err) == (130, "")
    assert "The same command continues" in stopped.out
    assert here.results("ours-0")["status"] == "finished"
    begun = here.results("bound-0")
    assert (begun["status"], begun["rounds"]) == ("interrupted", 2)
    assert not (here.output / "ours-1").exists()
    assert not (here.output / "comparison.md").exists()
    if damage != "none":
        (here.output / "bound-0" / "results.json").unlink()
    if damage == "no checkpoint either":
        shutil.rmtree(here.output / "bound-0" / "checkpoints")
    planned = here.compare("--dry-run").out
    done = tree(here.output / "ours-0")

    again = here.compare()

    assert again.status == 0, again
    assert tree(here.output / "ours-0") == done  # a finished run is not run again
    restarted = damage == "no checkpoint either"
    words = [line.split("│")[-2].strip() for line in planned.splitlines() if "seed" in line]
    assert words == ["nothing: done", "start again" if restarted else "resume", "start", "start"]
    first_line = next(line for line in again.err.splitlines() if "bound seed 0" in line)
    assert f"round {1 if restarted else 3}/3" in first_line
    for run in RUNS:
        assert here.metrics(run) == whole.metrics(run)
    untimed = [
        {key: value for key, value in line.items() if not key.startswith("seconds")}
        for line in (*here.table(), *whole.table())
    ]
    assert untimed[:2] == untimed[2:]
    # The plot counts each round's seconds once, of whichever session they are.
    course, ended = plot.curve(here.output / "bound-0"), here.results("bound-0")
    assert course.seconds[-1] == pytest.approx(ended["seconds"]["total"], abs=1e-3)


def test_more_seeds_add_their_runs_and_touch_no_other(copy: Place) -> None:
    before = {run: tree(copy.output / run) for run in RUNS}

    outcome = command(*copy.configs, "--seeds", "1,7", "--output", copy.output)

    assert outcome.status == 0
    assert {run: tree(copy.output / run) for run in RUNS} == before
    assert [line["seeds"] for line in copy.table()] == ["1 7", "1 7"]
    assert copy.results("bound-7")["seed"] == 7
    assert "run 3/4 ours seed 7, round 1/3" in outcome.err  # two of the four were there already


def test_a_run_whose_config_changed_is_refused_with_the_key(copy: Place) -> None:
    copy.change(1, "local_steps: 2", "local_steps: 1")
    before = tree(copy.output)

    outcome = copy.compare()

    assert_refused(outcome, "bound.yaml, seed 0", "algorithm.local_steps is 1 here, but 2 there")
    assert "--output" in outcome.err
    assert tree(copy.output) == before


def test_finished_runs_of_a_plug_in_that_was_changed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept, as all finished runs are; also where the change is in a helper's file."""
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


def test_results_of_one_precision_are_not_handed_out_as_those_of_another(copy: Place) -> None:
    before = tree(copy.output)
    outcome = copy.compare("run.precision=bfloat16")
    assert_refused(outcome, "run.precision is bfloat16 here, but float32 there")
    assert tree(copy.output) == before


def test_a_folder_that_a_kill_left_empty_but_for_its_own_leftover_is_begun(here: Place) -> None:
    left = here.output / RUNS[0]
    left.mkdir(parents=True)
    (left / f"{atomic_files.TEMPORARY}split.json").write_text("{")
    assert "start" in here.compare("--dry-run").out
    (left / "notes.txt").write_text("mine")  # the control
    assert_refused(here.compare("--dry-run"), "is not a run of privssl")


def test_the_table_is_not_put_into_the_folder_of_a_run(whole: Place) -> None:
    run = whole.output / RUNS[0]
    before = tree(run)
    outcome = command(*whole.configs, "--seeds", "5,", "--output", run)
    assert_refused(outcome, str(run), "is the folder of a run", "--output")
    assert tree(run) == before


def test_a_setting_that_decides_over_no_result_may_change(copy: Place) -> None:
    # The control of the test above: not every change is one.
    copy.change(1, "checkpoint_every: 1", "checkpoint_every: 2")

    assert copy.compare("--quiet").status == 0


def test_a_run_that_fails_is_named_and_what_was_done_stays(
    here: Place, whole: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run_dir.create_run_dir

    def full_disk(prepared: Any) -> Any:
        if prepared.config.folder.name == "bound-0":
            raise RunFolderError("No space left on device")
        return real(prepared)

    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "create_run_dir", full_disk)
        outcome = here.compare("--quiet")

    assert_refused(outcome, "bound seed 0: No space left on device", "same command continues")
    assert here.metrics("ours-0") == whole.metrics("ours-0")


# What is refused, and what is told -----------------------------------------------------------


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
def test_a_mistake_is_told_in_words_and_nothing_is_written(
    here: Place, arguments: list[str], fragments: list[str]
) -> None:
    assert_refused(here.compare(*arguments), *fragments)
    assert not here.output.exists()


def test_a_mistake_in_the_last_config_stops_the_first_from_running(here: Place) -> None:
    here.change(1, "batch_size", "batchsize")

    assert_refused(here.compare(), "bound.yaml", "batchsize", "Did you mean batch_size?")
    assert not here.output.exists()


def test_a_config_that_is_not_there_and_no_config_at_all_are_told(here: Place) -> None:
    assert_refused(command(here.folder / "our.yaml"), "no such file", "ours.yaml")
    assert_refused(command("algorithm.rounds=1"), "No config was given")


def test_two_configs_of_one_name_would_share_folders_and_are_refused(here: Place) -> None:
    twin = here.folder / "more" / "OURS.yaml"
    twin.parent.mkdir()
    twin.write_text(PSEUDO)

    assert_refused(command(here.configs[0], twin), "both have the name", "run.name")


def test_a_folder_that_is_no_run_is_left_as_it_is(here: Place) -> None:
    precious = here.output / "bound-1" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")

    assert_refused(here.compare(), "bound-1", "not a run of privssl")
    assert [path.name for path in here.output.iterdir()] == ["bound-1"]
    assert precious.read_text() == "years of work"


def test_a_file_in_place_of_the_output_folder_is_refused_by_the_flag(here: Place) -> None:
    here.output.write_text("mine")
    assert_refused(here.compare(), "Not a directory", "another --output")
    assert here.output.read_text() == "mine"


@pytest.mark.parametrize("seeds", ["0", "-1", "1,1", "a", "1;2", "", "²"])
def test_seeds_that_are_none_are_a_mistake(here: Place, seeds: str) -> None:
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(io.StringIO()) as err:
        compare.main([str(here.configs[0]), f"--seeds={seeds}"])

    assert stopped.value.code == 2
    assert "--seeds" in err.getvalue()


def test_the_default_folder_is_named_after_the_configs_and_a_dry_run_does_not_make_it(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here.folder)
    before = tree(here.folder)

    outcome = command(*here.configs, "--dry-run")

    assert outcome.status == 0
    for seed in (0, 1, 2):  # three when --seeds is not given
        assert f"runs/compare-ours-bound/bound-{seed}" in outcome.out
    assert tree(here.folder) == before


def test_progress_says_which_run_which_round_and_what_accuracy(
    shown: Outcome, whole: Place
) -> None:
    lines = shown.err.splitlines()

    assert len(lines) == 8  # the first and last round of four runs
    assert lines[2].startswith("run 2/4 bound seed 0, round 1/3: ")
    reached = whole.results("bound-0")["test_accuracy"]["final"]
    assert lines[3].startswith("run 2/4 bound seed 0, round 3/3: ")
    assert f"test accuracy {reached:.4f}, 0:00:" in lines[3]
    assert lines[-1].endswith(", 0:00:00 left")


def test_the_screen_shows_the_results_and_where_the_table_is(shown: Outcome, whole: Place) -> None:
    rows = [line.split() for line in shown.out.splitlines()]

    for config in CONFIGS:
        one, two = values(whole, config, "test_accuracy", "final")
        (row,) = (row for row in rows if row[:1] == [config])
        assert row[1:4] == [f"{(one + two) / 2:.4f}", "±", f"{abs(one - two) / math.sqrt(2):.4f}"]
    assert "best" not in shown.out.partition("Best is")[0]  # never a headline
    assert str(whole.output) in shown.out.splitlines()[-1]


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


def test_each_panel_has_a_line_per_config_through_the_means_over_seeds() -> None:
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


def test_the_band_is_one_standard_deviation_and_one_seed_has_none() -> None:
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


def test_what_a_private_config_has_spent_is_a_panel_of_its_own() -> None:
    a = Curve((1, 2), (0.2, 0.6), (1.0, 2.0), (10.0, 20.0), (0.5, 1.0))
    b = Curve((1, 2), (0.4, 0.7), (1.0, 2.0), (10.0, 20.0))

    drawn = plot.figure({"private": [a, a], "plain": [b, b]})

    assert len(drawn.axes) == 4
    assert lines_of(drawn, 3) == {"private": ([0.5, 1.0], [0.2, 0.6])}
    assert drawn.axes[3].get_xlabel() == "epsilon spent, largest over agents"
    assert len(plot.figure({"plain": [b]}).axes) == 3


def test_the_epsilon_of_a_round_is_the_largest_over_agents_and_nominal_ones_are_left_out(
    whole: Place, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.output / "bound-0", run)
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


def test_many_configs_stay_apart() -> None:
    curve = Curve((1,), (0.5,), (1.0,), (1.0,))

    drawn = plot.figure({f"c{number}": [curve] for number in range(40)})

    looks = {(line.get_color(), line.get_linestyle()) for line in drawn.axes[0].get_lines()}
    assert len(looks) == 40


def test_the_course_of_a_run_is_that_of_its_metrics_and_ends_at_its_results(whole: Place) -> None:
    for run in RUNS:
        course, ended = plot.curve(whole.output / run), whole.results(run)

        assert course.rounds == ((1, 2, 3) if run.startswith("ours") else (2, 3))
        assert course.accuracy[-1] == ended["test_accuracy"]["final"]
        assert course.bytes[-1] == ended["bytes"]["up"] + ended["bytes"]["down"]
        # TensorBoard keeps seconds in 32 bits, results.json to the millisecond.
        assert course.seconds[-1] == pytest.approx(ended["seconds"]["total"], abs=1e-3)
        assert list(course.seconds) == sorted(course.seconds)


@pytest.mark.parametrize("lost", ["metrics.csv", "tensorboard"])
def test_a_run_that_lost_its_course_is_told_and_the_table_is_there(copy: Place, lost: str) -> None:
    path = copy.output / "bound-1" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for file in copy.output.glob("comparison.*"):
        file.unlink()

    assert_refused(copy.compare("--quiet"), "bound-1", "its course cannot be read")
    names = {path.name for path in copy.output.glob("comparison.*")}
    assert names == {"comparison.md", "comparison.csv", "comparison.tex"}


def test_the_plot_is_a_picture_that_opens(whole: Place) -> None:
    with Image.open(whole.output / "comparison.png") as picture:
        picture.verify()
        assert picture.width > picture.height > 100


def test_a_plan_is_in_the_order_of_seeds_so_that_each_seed_is_a_whole_comparison(
    here: Place,
) -> None:
    loaded = plan.load_configs([str(path) for path in here.configs])

    planned = plan.all_runs(loaded, SEEDS, here.output)

    assert tuple(run.config.folder.name for run in planned) == RUNS
