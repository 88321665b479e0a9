"""Notes of a comparison on private runs: a record that one run protects may be used without noise
in another."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from privssl.compare import __main__ as compare
from privssl.compare import table as compare_table
from privssl.data.split_manifest import read_manifest
from tests.compare.test_compare import guaranteed_results, nominal_results
from tests.support import comparison_row
from tests.support.comparison_row import results

PRIVATE = (
    "data: {name: toy, labelled: 40, unlabelled: 80}\n"
    "agents: {support: 2, query: 2}\n"
    "model: {name: small_cnn, width: 4}\n"
    "privacy: {epsilon: 8.0, delta: 1.0e-3, sample_rate: 1.0, steps: 1}\n"
)
FEDSSL = PRIVATE + "algorithm: {name: fedssl, rounds: 1, local_steps: 1, generator_width: 4}\n"
FEDAVG = PRIVATE + "algorithm: {name: fedavg, rounds: 1}\n"


def notes_of(*rows: compare_table.Row) -> list[str]:
    return [note for note in compare_table.notes(rows) if "nor by their sum" in note]


def row(name: str, *splits: str, **more: Any) -> compare_table.Row:
    runs = [guaranteed_results(4.0) | {"seed": seed} for seed in range(len(splits))]
    return comparison_row.row(name, runs, 1e-5, splits=splits, **more)


def test_a_note_says_that_private_runs_on_several_splits_have_no_joint_bound() -> None:
    (note,) = notes_of(row("ours", "one", "two"))
    assert note.startswith("ours: private runs on several splits")
    # Also if each config has one split: a row of the first may be unlabelled in the second.
    (note,) = notes_of(row("ours", "one"), row("theirs", "two", unprotected=False))
    assert note.startswith("ours: ")


def test_a_note_adds_up_the_epsilons_of_private_runs_on_one_split() -> None:
    """The controls: one split, no unprotected rows, other data, and no guarantee at all."""
    assert not notes_of(row("ours", "one", "one"), row("theirs", "one", "one"))
    assert not notes_of(row("ours", "one", "two", unprotected=False))
    elsewhere = comparison_row.row(
        "theirs", [guaranteed_results(4.0) | {"dataset": "another"}], 1e-5, splits=("two",)
    )
    assert not notes_of(row("ours", "one"), elsewhere)
    bound = comparison_row.row("bound", [results(), results(seed=1)], splits=("one", "two"))
    assert not notes_of(bound)


def test_a_note_says_that_accounts_in_several_folders_add_up() -> None:
    def notes_of_accounts(*folders: str, lasting: bool = True) -> list[str]:
        rows = [row(f"of {f}", "one", lasting=lasting, accounts=f) for f in folders]
        return [note for note in compare_table.notes(rows) if "pays in each" in note]

    assert len(notes_of_accounts("here", "there")) == 1
    # The controls: one shared folder counts all, and runs with separate accounts have another note.
    assert not notes_of_accounts("here", "here")
    assert not notes_of_accounts("here", "there", lasting=False)


def test_no_note_adds_up_nominal_epsilons() -> None:
    published = comparison_row.row("published", [nominal_results(3.0), nominal_results(3.0)], 1e-5)
    assert not any("up to their sum" in note for note in compare_table.notes([published]))
    # The control: guaranteed_results epsilons are added.
    assert any("up to their sum" in note for note in compare_table.notes([row("ours", "one")]))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "unprotected"), [(FEDSSL, True), (FEDAVG, False)])
def test_the_command_prints_the_note_if_seeds_draw_different_splits(
    tmp_path: Path, config: str, unprotected: bool
) -> None:
    file, output = tmp_path / "ours.yaml", tmp_path / "out"
    file.write_text(config)

    def notes(*arguments: str) -> list[str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            assert compare.main([str(file), "--json", "--quiet", *arguments]) == 0
        found = json.loads(out.getvalue())["notes"]
        return [note for note in found if "nor by their sum" in note]

    assert bool(notes("--seeds", "2", "--output", str(output))) == unprotected
    one, two = (read_manifest(output / f"ours-{seed}" / "split.json") for seed in (0, 1))
    labelled = {row for held in one.agents.values() for row in held.labelled}
    without = {row for held in two.agents.values() for row in held.unlabelled}
    assert labelled & without  # the note is justified
    # The control: one split for all seeds.
    split = f"data.split={output / 'ours-0' / 'split.json'}"
    assert not notes("--seeds", "2", "--output", str(tmp_path / "again"), split)


@pytest.mark.ci
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("folders", [("one", "two"), ("one", "one/../one")])
def test_the_command_prints_the_note_if_accounts_are_in_several_folders(
    tmp_path: Path, folders: tuple[str, str]
) -> None:
    (tmp_path / "one").mkdir()
    files = []
    for name, folder in zip("ab", folders, strict=True):
        lasting = f"ledger: {tmp_path / folder}, ledger_epsilon: 20.0, steps"
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(FEDAVG.replace("steps", lasting))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        arguments = ["--json", "--quiet", "--seeds", "1", "--output", str(tmp_path / "out")]
        assert compare.main([*map(str, files), *arguments]) == 0
    said = [note for note in json.loads(out.getvalue())["notes"] if "pays in each" in note]
    assert bool(said) == (folders == ("one", "two"))
