"""Cells run once, are resumed where they stopped, and are stored with their cost."""

import json
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from privssl.compare.table import epsilon_of
from privssl.core.federation import Federation, Round
from privssl.errors import RunFolderError
from privssl.experiment.config import load_config, to_yaml
from privssl.reporting import figures
from privssl.reproduce import __main__ as reproduce
from privssl.reproduce import runner as reproduce_runner
from privssl.reproduce import schedule
from privssl.reproduce.machine import gpu_name
from privssl.reproduce.runner import Ended, Interrupted, Runner
from privssl.reproduce.store import (
    Store,
    _find_changed_rows,
    _read_value,
    _remove_places,
    changed_keys,
)
from privssl.reproduce.table_page import _list_machines
from privssl.reproduce.tables import Cell
from tests.support.interruption import interrupted_in
from tests.support.product import ROOT
from tests.support.table_clone import Clone, make_clone, runner, train_here

CELLS = ("supervise--40-labels-2-2", "pseudo-all--40-labels-2-2")
TIMES = ("seconds", "peak_mb")
#: Configs, and the GPU that they use if there is one: private steps use none.
SHIPPED = {"fedssl": "GPU of cuda", "label_census": "GPU of cuda", "fedssl_dp": None}
PRIVATE = """\
data: {name: digits, labelled: 40}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
algorithm: {name: fedavg, rounds: 1}
privacy: {epsilon: 8.0, delta: 1.0e-3, sample_rate: 1.0, steps: 1}
"""


@pytest.fixture(scope="module", autouse=True)
def no_picture_of_the_partition() -> Iterator[None]:
    """Skip the picture of the partition, which takes half of the time of these tiny runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "partition_plot", lambda *_: np.zeros((8, 8, 3), np.uint8))
        yield


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    """A clone of the tables. Its cells are trained in this process."""
    monkeypatch.setattr(reproduce_runner, "train_in_a_process", train_here)
    return make_clone(tmp_path)


def cell(clone: Clone, row: str = "Supervise", column: str = "40 labels, 2 + 2") -> Cell:
    found = clone.table.cell(row, column)
    assert found is not None
    return found


def entries(clone: Clone) -> dict[str, dict[str, Any]]:
    """All entries of the store, without times, by path."""
    found = {}
    for path in sorted((clone.root / "results").rglob("*.json")):
        entry = json.loads(path.read_text())
        del entry["curve"]["seconds"]
        found[str(path.relative_to(clone.root))] = {
            key: value for key, value in entry.items() if key not in TIMES
        }
    return found


def command(clone: Clone, *arguments: str) -> int:
    return reproduce.main(list(arguments), root=clone.root)


# The store --------------------------------------------------------------------------------------


def test_an_entry_contains_what_was_run_its_results_and_its_cost(clone: Clone) -> None:
    entry = runner(clone).run(cell(clone), 1)

    assert isinstance(entry, dict)
    stored = json.loads((clone.root / "results" / "small" / CELLS[0] / "1.json").read_text())
    assert stored == entry
    assert (entry["schema"], entry["table"], entry["row"]) == (1, "small", "Supervise")
    assert (entry["column"], entry["seed"], entry["size"]) == ("40 labels, 2 + 2", 1, "paper")
    assert entry["curve"]["round"] == [1, 2, 3, 4]
    assert entry["curve"]["bytes"][-1] == entry["bytes"]["up"] + entry["bytes"]["down"]
    assert 0 <= entry["curve"]["seconds"][-1] <= entry["seconds"]["rounds"] + 0.1
    assert entry["curve"]["test_accuracy"][-1] == pytest.approx(entry["value"], abs=1e-6)
    assert entry["value"] == entry["final_test_accuracy"]
    assert entry["config"]["algorithm"]["name"] == "supervise"
    assert entry["config"]["run"]["seed"] == 1 and entry["config"]["run"]["workers"] == 1
    assert "root" not in entry["config"]["data"] and "output" not in entry["config"]["run"]
    assert entry["seconds"]["cpu"] == 0.5 and entry["peak_mb"] == 100
    assert entry["bytes"]["up"] > 0 and entry["bytes"]["down"] > 0
    assert entry["privacy"]["kind"] == "none"
    assert entry["commit"] is None and entry["dirty"] is None  # the folder is no git clone
    assert entry["processor"]["cores"] == os.cpu_count() and entry["threads"] == 1
    assert {"privssl", "torch", "opacus", "sources", "kernels"} <= entry["versions"].keys()
    assert len(entry["split_hash"]) == len(entry["config_hash"]) == 64


def test_an_entry_names_the_gpu_that_measured_it(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = runner(clone).run(cell(clone), 0)
    assert isinstance(plain, dict) and "gpu" not in plain  # the control: this machine has none
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU of {device}")
    shipped = {name: load_config(ROOT / "configs" / f"{name}.yaml") for name in SHIPPED}
    assert {name: gpu_name(config) for name, config in shipped.items()} == SHIPPED
    assert gpu_name(load_config(ROOT / "configs" / "fedssl.yaml", ["run.device=cpu"])) is None
    monkeypatch.setattr("privssl.reproduce.runner.gpu_name", lambda config: "GPU")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = runner(clone).run(cell(clone), 1)
    assert isinstance(found, dict) and found["gpu"] == "GPU"
    assert _list_machines([found])[0].startswith(f"GPU beside {found['processor']['name']} (")


def test_an_entry_of_a_private_run_contains_no_hash_of_its_split(clone: Clone) -> None:
    (clone.root / "configs" / "private.yaml").write_text(PRIVATE)
    clone.change('{name: "Pseudo (all)"}', '{name: "Pseudo (all)", config: configs/private.yaml}')
    entry = runner(clone, keep=True).run(cell(clone, "Pseudo (all)"), 0)
    assert isinstance(entry, dict) and entry["privacy"]["kind"] == "guarantee"
    assert entry["split_hash"] == "withheld"
    (split,) = (clone.root / "runs").rglob("split.json")
    secret = json.loads(split.read_text())
    stored = clone.store.path(cell(clone, "Pseudo (all)"), 0).read_text()
    assert secret["hash"] not in stored
    assert str(clone.root) not in stored  # no local path


def test_no_local_folder_is_stored() -> None:
    encoder = {"name": "csv", "encoder": "huggingface:/data/bert"}
    assert _remove_places({
        "data": encoder, "model": {"weights": "/data/w.safetensors"},
        "run": {"certificate": "/data/ca.pem", "keys": "/data/keys", "seed": 0},
    }) == {
        "data": {"name": "csv", "encoder": "huggingface:bert"},
        "model": {"weights": "w.safetensors"}, "run": {"seed": 0},
    }  # fmt: skip
    data = {"root": "/data", "columns": "/data/columns.yaml", "name": "csv", "text": ""}
    assert _remove_places({"data": data, "privacy": None}) == {
        "data": {"root": "data", "columns": "columns.yaml", "name": "csv", "text": ""},
        "privacy": None,
    }
    published = _remove_places({"data": {"root": "/data", "split": "", "name": "mnist"}})
    assert published == {"data": {"name": "mnist"}}
    stored = (ROOT / "results").rglob("*.json")
    assert [path for path in stored if re.search(r': "(/|~)', path.read_text())] == []


def with_a_row_again(clone: Clone, settings: str) -> None:
    """Replace the row Pseudo of the table by a row Again with these settings."""
    clone.change('  - {name: "Pseudo (all)"}', f"  - {{name: Again, set: {{{settings}}}}}")
    clone.change("Pseudo (all):", "Again:")
    clone.change('"Pseudo (all)"', "Again")


def test_cells_with_the_same_run_are_run_once(clone: Clone) -> None:
    with_a_row_again(clone, "algorithm.name: supervise")
    again = cell(clone, "Again")
    outcomes: list[object] = []

    def beside_another(*arguments: Any) -> Ended:
        outcomes.append(runner(clone).run(again, 0))
        outcomes.append(type(runner(clone).run(again, 1)))  # the control: another seed
        return train_here(*arguments)

    first = runner(clone, beside_another).run(cell(clone), 0)
    assert isinstance(first, dict) and outcomes == ["busy", dict]

    shared = Runner(clone.root, clone.store, train=_never).run(again, 0)
    assert isinstance(shared, dict)
    assert (shared["row"], shared["value"]) == ("Again", first["value"])
    assert shared["same_run_as"] == "small: Supervise/40 labels, 2 + 2"
    assert clone.store.state(again, 0) == "measured"
    for column, seed in (("20 labels", 0), ("40 labels, 2 + 2", 2)):  # the controls
        with pytest.raises(AssertionError, match="not the same run"):
            Runner(clone.root, clone.store, train=_never).run(cell(clone, "Again", column), seed)


def test_cells_with_other_rows_are_other_runs_and_make_entries_old(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two splits of one data set; the control above shares a run of one split."""
    monkeypatch.chdir(clone.root)  # the folder to which paths of a table are relative
    runner(clone, keep=True).run(cell(clone), 0)
    split = "runs/reproduce/small/" + CELLS[0] + "/0/split.json"
    for name in ("a.json", "b.json"):
        (clone.root / name).write_bytes((clone.root / split).read_bytes())
    with_a_row_again(clone, "algorithm.name: supervise, data.split: b.json")
    clone.change("{algorithm.name: supervise}}", "{algorithm.name: supervise, data.split: a.json}}")

    assert clone.store.state(cell(clone), 0) == "old"  # measured on the split that was drawn
    entry = runner(clone).run(cell(clone), 0)
    assert isinstance(entry, dict) and entry["config"]["data"]["split"] == "a.json"
    assert clone.store.state(cell(clone), 0) == "measured"
    with pytest.raises(AssertionError, match="not the same run"):
        Runner(clone.root, clone.store, train=_never).run(cell(clone, "Again"), 0)


@pytest.mark.parametrize(
    ("then", "now", "keys"),
    [
        ("a.npz", "a.npz", []),
        ("a.npz", "b.npz", ["data.root"]),
        ("a.npz", "/elsewhere/a.npz", []),  # the control: the local folder does not count
        (None, "b.npz", []),  # an entry without the recorded split
    ],
)
def test_a_file_of_rows_is_compared_by_its_name(
    then: str | None, now: str, keys: list[str]
) -> None:
    data = {"name": "npz"} | ({} if then is None else {"root": then})
    here = _remove_places({"data": {"name": "npz", "root": now}})["data"]
    assert list(_find_changed_rows(data, here)) == keys


def _never(*_: object) -> Ended:
    raise AssertionError("not the same run")


def test_the_folder_of_a_stored_run_is_removed_unless_keep_is_set(clone: Clone) -> None:
    folder = clone.root / "runs" / "reproduce" / "small" / CELLS[0]

    runner(clone).run(cell(clone), 0)
    assert [path.name for path in folder.iterdir()] == ["0.lock"]
    runner(clone, keep=True).run(cell(clone), 1)
    assert (folder / "1" / "results.json").is_file()


def test_the_rows_of_a_column_share_the_split_of_a_seed(clone: Clone) -> None:
    one = runner(clone).run(cell(clone), 0)
    other = runner(clone).run(cell(clone, "Pseudo (all)"), 0)
    seed = runner(clone).run(cell(clone, "Pseudo (all)"), 1)
    labels = runner(clone).run(cell(clone, "Pseudo (all)", "20 labels"), 0)
    hashes = [e["split_hash"] for e in (one, other, seed, labels) if not isinstance(e, str)]

    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3  # the controls: another seed, other labels


def test_the_number_of_a_table_may_be_a_column_of_the_metrics(clone: Clone) -> None:
    clone.change("priority: 5", "priority: 5\nmetric: comm/up_bytes")
    entry = runner(clone).run(cell(clone), 0)

    assert isinstance(entry, dict)
    assert entry["value"] == entry["bytes"]["up"] / 4  # of the last of four equal rounds
    clone.change("metric: comm/up_bytes", "metric: comm/nothing")
    with pytest.raises(RunFolderError, match="has no number in its column comm/nothing"):
        runner(clone).run(cell(clone), 0)


def test_the_number_is_that_of_the_last_round_and_not_the_best(clone: Clone) -> None:
    results = {"test_accuracy": {"final": 0.4, "best": 0.6, "best_round": 3}}

    assert _read_value("final", results, [], clone.root) == 0.4


def test_a_guarantee_a_nominal_epsilon_and_no_epsilon_are_distinguished() -> None:
    claim = {"epsilon": 7.9, "delta": 1e-5, "unit": "record", "covers": ["F"]}

    def printed(
        guarantee: dict[str, Any] | None, nominal: float | None, delta: float | None
    ) -> Any:
        privacy = {"guarantee": guarantee, "nominal_epsilon": nominal}
        return epsilon_of([{"privacy": privacy}], delta).as_json()

    assert printed(claim, None, 1e-5) == {
        "kind": "guarantee", "epsilon": 7.9, "delta": 1e-5, "covers": ["F"], "unit": "record"
    }  # fmt: skip
    assert printed(None, 8.0, 1e-5) == {
        "kind": "nominal", "epsilon": 8.0, "delta": 1e-5, "covers": [], "unit": "record"
    }  # fmt: skip
    assert printed(None, None, None)["kind"] == "none"


def test_a_damaged_entry_is_reported_with_its_file(clone: Clone) -> None:
    path = clone.put("Supervise", "20 labels", 0, 0.5)
    path.write_text("{}")

    with pytest.raises(RunFolderError, match=r"0\.json is not an entry of the store"):
        clone.store.state(cell(clone, column="20 labels"), 0)


# Plug-ins ---------------------------------------------------------------------------------------

METHOD = "from tests.testing.own_method import Own\nclass Mine(Own):\n    pass\n"
NETWORK = """\
import math
import torch
def net(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), classes))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a method and a network, beside a module that nothing imports."""
    folder = tmp_path / "site" / "ownpack"
    folder.mkdir(parents=True)
    for name, text in (("__init__", ""), ("method", METHOD), ("net", NETWORK), ("beside", "")):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownpack"]:
        del sys.modules[name]


@pytest.mark.parametrize("settings", [
    "{algorithm.name: 'ownpack.method:Mine'}",
    "{algorithm.name: supervise, model.name: 'ownpack.net:net'}",
])  # fmt: skip
def test_a_table_may_name_plug_ins_whose_package_changes_make_entries_old(
    clone: Clone, package: Path, settings: str
) -> None:
    (clone.root / "configs" / "tiny.yaml").write_text(
        "data: {name: digits, labelled: 40, unlabelled: 80}\nagents: {support: 2, query: 2}\n"
        "algorithm: {name: supervise, rounds: 1}\n"
    )
    clone.change("{algorithm.name: supervise}", settings)
    assert command(clone, "small", "--cells", "Supervise/40*", "--seeds", "1") == 0

    assert clone.store.state(cell(clone), 0) == "measured"
    (package / "beside.py").write_text("# a neighbour\nx = 1\n")
    assert clone.store.state(cell(clone), 0) == "old"


# Old entries ------------------------------------------------------------------------------------


def state_after(clone: Clone, **changes: Any) -> str:
    clone.put("Supervise", "40 labels, 2 + 2", 0, 0.5, **changes)
    return clone.store.state(cell(clone), 0)


def test_an_entry_is_old_when_its_method_has_changed(clone: Clone) -> None:
    assert state_after(clone) == "measured"
    assert state_after(clone, sources="of former code") == "old"


def test_an_entry_is_old_when_a_value_of_its_config_has_changed(clone: Clone) -> None:
    assert state_after(clone) == "measured"
    clone.change("name: supervise}", "name: supervise, algorithm.rounds: 5}")

    store = clone.store
    assert store.state(cell(clone), 0) == "old"
    entry = store.read(cell(clone), 0)
    assert entry is not None
    why = store.why_old(cell(clone), 0, entry)
    assert why == "its config has changed (algorithm.rounds)"


@pytest.mark.parametrize(("has_instructions", "trained"), [(False, "float32"), (True, "bfloat16")])
def test_a_cell_in_bfloat16_runs_in_float32_if_the_processor_lacks_bfloat16_instructions(
    has_instructions: bool, trained: str, clone: Clone, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    clone.change("name: supervise}", "name: supervise, run.precision: bfloat16}")
    monkeypatch.setattr("privssl.ops.precision.has_instructions", lambda: has_instructions)
    assert command(clone, "small", "--cells", "Supervise/40*", "--seeds", "1") == 0

    store = clone.store
    entry = store.read(cell(clone), 0)
    assert entry is not None and entry["config"]["run"]["precision"] == trained
    printed = "in float32, for want of bfloat16 instructions" in capsys.readouterr().out
    assert printed is not has_instructions
    for there in (False, True):  # on every machine that reads the entry
        monkeypatch.setattr("privssl.ops.precision.has_instructions", lambda there=there: there)
        assert clone.store.state(cell(clone), 0) == "measured"


def test_an_entry_in_bfloat16_does_not_count_for_a_cell_in_float32(clone: Clone) -> None:
    clone.change("name: supervise}", "name: supervise, run.precision: bfloat16}")
    assert state_after(clone) == "measured"
    clone.change("run.precision: bfloat16}", "run.precision: float32}")
    assert clone.store.state(cell(clone), 0) == "old"


def test_a_new_config_key_makes_no_entry_old_unless_it_is_set(clone: Clone) -> None:
    path = clone.put("Supervise", "40 labels, 2 + 2", 0, 0.5, config_hash="of fewer keys")
    entry = json.loads(path.read_text())
    del entry["config"]["algorithm"]["momentum"]
    path.write_text(json.dumps(entry))

    assert clone.store.state(cell(clone), 0) == "measured"
    clone.change("name: supervise}", "name: supervise, algorithm.momentum: 0.123}")
    assert clone.store.state(cell(clone), 0) == "old"


def test_a_setting_that_is_null_in_entry_and_config_has_not_changed() -> None:
    # FedMatch's profile says what null means; once it was a number
    overrides = ["data.name=digits", "algorithm.profile=fedmatch-release"]
    config = load_config(ROOT / "configs" / "fedmatch.yaml", overrides)
    stored = yaml.safe_load(to_yaml(config))
    assert stored["algorithm"]["weight_decay"] is None
    assert changed_keys(stored, config) == []
    stored["algorithm"]["weight_decay"] = 0.0
    assert changed_keys(stored, config) == []
    stored["algorithm"]["weight_decay"] = 0.1
    assert changed_keys(stored, config) == ["algorithm.weight_decay"]


def test_old_entries_are_rerun_after_all_missing_cells(
    clone: Clone, capsys: pytest.CaptureFixture[str]
) -> None:
    state_after(clone, sources="of former code")
    assert command(clone, "--next", "--seeds", "1", "--cells", "*/40*") == 0

    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.split(": ")[1].split("/")[0] for line in printed] == ["Pseudo (all)", "Supervise"]
    assert clone.store.state(cell(clone), 0) == "measured"


# Interrupted and resumed runs -------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The entries of a column that was never interrupted."""
    clone = make_clone(tmp_path_factory.mktemp("whole"))
    for row in ("Supervise", "Pseudo (all)"):
        for seed in clone.table.file.seeds:
            runner(clone).run(cell(clone, row), seed)
    return entries(clone)


ROUNDS = 4 * 2 * 2  # of a column: rounds, rows, seeds
CHANCES = sorted(random.Random(39).sample(range(1, ROUNDS + 1), 10))


def test_a_column_interrupted_at_ten_random_moments_has_the_same_entries(
    clone: Clone, whole: dict[str, dict[str, Any]]
) -> None:
    before = 0
    for chance in CHANCES:  # each time it resumes, and is interrupted in a later round
        with interrupted_in(chance - before):
            assert command(clone, "small", "--cells", "*/40*") == 130
        before = chance - 1  # the interrupted round is repeated
    assert command(clone, "small", "--cells", "*/40*") == 0

    assert len(whole) == 4
    assert entries(clone) == whole


def test_control_another_number_of_rounds_has_other_entries(
    clone: Clone, whole: dict[str, dict[str, Any]]
) -> None:
    clone.change("name: supervise}", "name: supervise, algorithm.rounds: 3}")
    runner(clone).run(cell(clone), 0)

    ((path, entry),) = entries(clone).items()
    assert entry["curve"] != whole[path]["curve"]


def test_a_run_whose_method_changes_in_between_starts_anew(
    clone: Clone, whole: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted_in(3), pytest.raises(Interrupted):
        runner(clone).run(cell(clone), 0)
    monkeypatch.setattr(Store, "sources", lambda *_: "of later code")
    begun = []
    real = Federation.begin

    def begin(self: Federation, now: Round) -> None:
        begun.append(now.number)
        real(self, now)

    monkeypatch.setattr(Federation, "begin", begin)
    entry = runner(clone).run(cell(clone), 0)

    assert isinstance(entry, dict)
    assert [number for number in begun if number] == [1, 2, 3, 4]
    assert entry["sources"] == "of later code"


def test_a_finished_run_that_was_not_stored_is_stored_without_training(
    clone: Clone, whole: dict[str, dict[str, Any]]
) -> None:
    runner(clone, keep=True).run(cell(clone), 0)
    ((path, entry),) = entries(clone).items()
    (clone.root / path).unlink()

    def never(*_: object) -> Ended:
        raise AssertionError("it is finished")

    runner(clone, never).run(cell(clone), 0)
    assert entries(clone) == {path: entry}


def test_times_add_up_over_the_sessions_of_a_run(clone: Clone) -> None:
    with interrupted_in(3), pytest.raises(Interrupted):
        runner(clone).run(cell(clone), 0)
    entry = runner(clone).run(cell(clone), 0)

    assert isinstance(entry, dict)
    assert entry["seconds"]["cpu"] == 1.0  # half a second a session (train_here)


# Order, time, failures, and two processes -------------------------------------------------------


def test_next_takes_one_seed_of_all_tables_by_priority_and_then_the_next_seed(
    clone: Clone, capsys: pytest.CaptureFixture[str]
) -> None:
    text = clone.file.read_text()
    (clone.file.parent / "first.yaml").write_text(text.replace("priority: 5", "priority: 4"))

    def done(*arguments: object) -> Ended:
        return Ended(2, False, 1.0, 1.0, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce_runner, "train_in_a_process", done)
        patch.setattr(reproduce_runner, "_describe_failure", lambda *_: "it failed")
        assert command(clone, "--next", "--cells", "Sup*/*") == 1
        out = capsys.readouterr().out
    printed = [line.partition("] ")[2].split(" (")[0] for line in out.splitlines() if "] " in line]

    assert printed == [
        f"{name}: Supervise/{column}, seed {seed}"
        for seed in (0, 1)
        for name in ("first", "small")
        for column in ("40 labels, 2 + 2", "20 labels")
    ]
    assert "0 measured, 8 failed" in out


def test_a_failing_cell_is_reported_with_its_last_lines_and_others_continue(
    clone: Clone, capsys: pytest.CaptureFixture[str]
) -> None:
    clone.change("name: supervise}", "name: supervise, data.labelled: 5000}")  # too many

    assert command(clone, "--next", "--seeds", "1", "--cells", "*/40*") == 1
    out = capsys.readouterr().out
    assert "small, Supervise/40 labels, 2 + 2, seed 0 failed (exit status 2)" in out
    assert "Traceback" not in out and "labelled" in out
    assert "1 measured, 1 failed" in out
    assert clone.store.state(cell(clone, "Pseudo (all)"), 0) == "measured"


def test_a_cell_with_an_invalid_config_is_reported_before_the_first_run(
    clone: Clone, capsys: pytest.CaptureFixture[str]
) -> None:
    clone.change("{algorithm.name: supervise}", "{algorithm.name: supervise, agents.mixed: 2}")

    assert command(clone, "small", "--seeds", "1", "--cells", "*/40*") == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Left out: small, cell 'Supervise/40 labels, 2 + 2':")
    assert "agents.mixed" in second  # and only then the other cell
    assert clone.store.state(cell(clone, "Pseudo (all)"), 0) == "measured"


def test_no_cell_starts_after_the_time_limit(clone: Clone) -> None:
    minutes = [0.0]

    def slow(*arguments: Any) -> Ended:
        minutes[0] += 3
        return train_here(*arguments)

    clock = SimpleNamespace(monotonic=lambda: 60 * minutes[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce_runner, "train_in_a_process", slow)
        patch.setattr(reproduce, "time", clock)
        patch.setattr(schedule, "time", clock)
        assert command(clone, "small", "--minutes", "2") == 0

    assert len(entries(clone)) == 1


def test_two_processes_do_not_run_the_same_cell(clone: Clone) -> None:
    outcomes: list[object] = []

    def other(*arguments: Any) -> Ended:
        outcomes.append(runner(clone).run(cell(clone), 0))  # beside the first
        outcomes.append(type(runner(clone).run(cell(clone), 1)))  # the control: another seed
        return train_here(*arguments)

    assert isinstance(runner(clone, other).run(cell(clone), 0), dict)
    assert outcomes == ["busy", dict]
