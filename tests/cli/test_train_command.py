"""``python -m privssl.train``: the commands and the run folder documented in the README.

Runs are tiny. The command runs in this process with its output captured; test_resume.py tests
processes that are killed and resumed.
"""

import contextlib
import csv
import errno
import itertools
import json
import math
import os
import re
import resource
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from PIL import Image
from scipy.stats import norm
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch import Tensor

import privssl
from accounting.ledger import read_journal
from privssl.audit import __main__ as audit
from privssl.data import FederatedDataset
from privssl.errors import RunFolderError
from privssl.ops import dispatch
from privssl.privacy.card_text import render_markdown
from privssl.privacy.privacy_card import privacy_card
from privssl.remote.discovery import SiteError
from privssl.runs import checkpoint, round_loop, run_dir
from privssl.storage import atomic_files
from tests.support.command_line import PLAIN, Outcome, assert_refused, command, tree

PRIVATE = PLAIN + "privacy: {epsilon: 4.0, delta: 1.0e-3, sample_rate: 1.0, steps: 2, visits: 2}\n"
PUBLISHED = PLAIN + (
    "privacy: {epsilon: 4.0, delta: 1.0e-3, sample_rate: 1.0, steps: 2,\n"
    "  update_at_support: [F, D, G], protect: [G], acknowledge_unsound: true}\n"
)


def write_config(folder: Path, text: str, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@dataclass(frozen=True)
class FinishedRun:
    """A finished run and its config."""

    config: Path
    folder: Path
    outcome: Outcome

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        return safetensors.torch.load_file(self.folder / "classifier.safetensors")


def train_config(folder: Path, text: str, *arguments: str) -> FinishedRun:
    config = write_config(folder, text)
    outcome = command(config, f"run.output={folder / 'run'}", *arguments)
    assert outcome.status == 0, outcome
    return FinishedRun(config, folder / "run", outcome)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return train_config(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return train_config(tmp_path_factory.mktemp("private"), PRIVATE, "--json")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return train_config(tmp_path_factory.mktemp("published"), PUBLISHED, "algorithm.rounds=1")


# Refused commands ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "fragments"),
    [
        (PLAIN, ["algorithm.roundz=5"], ["algorithm.roundz", "Did you mean rounds?"]),
        (PLAIN + "run: {seed: 1, seed: 2}\n", [], ["line 11", "run.seed", "given twice"]),
        (PLAIN, ["run.seed=1", "run.seed=2"], ["run.seed", "given twice"]),
        (PRIVATE, ["privacy.delta='1e-5'"], ["privacy.delta", "text", "1.0e-5"]),
        (PRIVATE, ["privacy.epsilon=-1"], ["privacy.epsilon", "-1", ">= 0"]),
        (PRIVATE, ["privacy.epsilon=.nan"], ["privacy.epsilon", "nan"]),
        (PRIVATE, ["privacy.noise_multiplier=0.0"], ["privacy.noise_multiplier", "calibrated"]),
        (PRIVATE, ["privacy.delta=0.05"], ["privacy.delta", "less than 1 / 20"]),
        (PRIVATE, ["model.norm=batch"], ["model.norm", "group"]),
        (PLAIN, ["agents.support=41"], ["41 agents", "40 labelled rows"]),
        (PLAIN, ["data.labelled=1"], ["2 agents", "1 labelled rows"]),
        (PLAIN, ["data.labelled=950"], ["data.labelled 950", "1000 training rows"]),
        (PLAIN, ["agents.support=0"], ["agents.support", "at least 1"]),
        (PLAIN, ["run.device=warp9"], ["run.device", "'warp9'", "cpu", "auto"]),
        (PLAIN, ["algorithm.name=fedavg"], ["line", "fedavg has no such key", "config of fedavg"]),
        (PLAIN, ["not an override"], ["not an override", "section.key=value"]),
    ],
)
def test_a_mistake_is_reported_with_its_key_or_line_and_no_run_folder_is_created(
    tmp_path: Path, text: str, overrides: list[str], fragments: list[str]
) -> None:
    run = tmp_path / "run"

    assert_refused(
        command(write_config(tmp_path, text), f"run.output={run}", *overrides), *fragments
    )

    assert not run.exists()


def test_a_delta_above_one_over_the_rows_of_the_largest_agent_is_refused(tmp_path: Path) -> None:
    # 40 rows at 2 agents are 20 on average, and 0.045 < 1 / 20. But two agents with 40 rows
    # between them that do not share evenly have one with 23 or more, and 1 / 23 < 0.045.
    config = write_config(tmp_path, PRIVATE)
    uneven = ["data.labelled_partition=dirichlet", "data.labelled_alpha=0.1"]
    arguments = [config, f"run.output={tmp_path / 'run'}", "privacy.delta=0.045", *uneven]

    assert_refused(command(*arguments), "delta 0.045 is not below 1 / ")

    assert not (tmp_path / "run").exists()


def test_the_error_names_a_missing_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()

    assert_refused(command("absent.yaml"), "absent.yaml: no such file")
    assert_refused(command("configs"), "configs: a folder, not a config file", "no YAML file")
    no_run = "configs is not the folder of a run: it has no config.yaml. Give --resume the folder"
    assert_refused(command("--resume", "configs"), no_run)


def test_the_error_about_missing_data_without_a_network_shows_the_download_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", offline)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    folder = tmp_path / "data"
    config = write_config(tmp_path, PLAIN.replace("toy", "mnist"))

    outcome = command(config, f"data.root={folder}", f"run.output={tmp_path / 'run'}")

    assert_refused(outcome, str(folder), "train-images-idx3-ubyte", "python -c", "data.name=digits")
    assert not (tmp_path / "run").exists()


def _without_classes(folder: Path) -> None:
    (folder / "train").mkdir(parents=True)
    (folder / "test").mkdir()


def _npz(**changes: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        rows = np.zeros((20, 8, 8), np.uint8)
        y = np.arange(20) % 2
        arrays = {"x_train": rows, "y_train": y, "x_test": rows, "y_test": y, **changes}
        with path.open("wb") as file:  # given a name, NumPy would append .npz
            np.savez(file, **{k: v for k, v in arrays.items() if v is not None})

    return write


@pytest.mark.parametrize(
    ("name", "make", "fragments"),
    [
        ("image_folder", _without_classes, ["one for each class"]),
        ("npz", _npz(y_test=None), ["has no y_test", "it has x_train"]),
        ("npz", _npz(y_train=np.arange(19) % 2), ["20 rows", "19"]),
        ("npz", _npz(x_train=np.zeros((20, 64), np.uint8)), ["(64,)", "(1, 8, 8)"]),
    ],
)
def test_the_error_about_unusable_user_data_says_what_is_expected(
    tmp_path: Path, name: str, make: Callable[[Path], None], fragments: list[str]
) -> None:
    data = tmp_path / "data"
    make(data)
    config = write_config(tmp_path, PLAIN.replace("toy", name))

    outcome = command(config, f"data.root={data}", f"run.output={tmp_path / 'run'}")

    assert_refused(outcome, str(data), *fragments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sides", "needs"), [((10, 8), "multiples of 4"), ((8, 10), "multiples of 4"), ((4, 8), "8x8")]
)
def test_images_of_unsupported_sizes_are_refused(
    tmp_path: Path, sides: tuple[int, int], needs: str
) -> None:
    x, y = np.zeros((130, *sides), np.uint8), np.arange(130) % 2
    _npz(x_train=x, y_train=y, x_test=x, y_test=y)(tmp_path / "data")
    config = write_config(tmp_path, PLAIN.replace("toy", "npz"))

    outcome = command(config, f"data.root={tmp_path / 'data'}", f"run.output={tmp_path / 'run'}")

    assert_refused(outcome, f"{sides[0]}x{sides[1]} pixels", needs, "data.image_size")
    assert not (tmp_path / "run").exists()


def test_overrides_may_precede_the_config_file(tmp_path: Path) -> None:
    outcome = command("run.seed=x", write_config(tmp_path, PLAIN))

    assert_refused(outcome, "tiny.yaml", "run.seed", "whole number")


# Existing run folders ------------------------------------------------------------------------


def test_an_existing_run_folder_is_refused_with_three_options_and_not_changed(
    plain: FinishedRun,
) -> None:
    before = tree(plain.folder)

    outcome = command(plain.config, f"run.output={plain.folder}")

    assert_refused(outcome, "--resume", "run.output", "run.overwrite=true")
    assert tree(plain.folder) == before


@pytest.mark.parametrize("overwrite", ["true", "false"])
@pytest.mark.parametrize("entries", [["thesis.txt"], ["config.yaml"], ["split.json", "notes.txt"]])
def test_a_folder_that_is_not_a_run_is_never_replaced(
    tmp_path: Path, overwrite: str, entries: list[str]
) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    for entry in entries:
        (folder / entry).write_text("years of work")
    before = tree(folder)

    outcome = command(
        write_config(tmp_path, PLAIN), f"run.output={folder}", f"run.overwrite={overwrite}"
    )

    assert_refused(outcome, str(folder), "is not a run of privssl", "run.output")
    assert tree(folder) == before


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_an_output_that_cannot_be_a_folder_is_refused(tmp_path: Path, below: str) -> None:
    file = write_config(tmp_path, "not a folder", "file")

    outcome = command(write_config(tmp_path, PLAIN), f"run.output={file / below}")

    assert_refused(outcome, str(file), "run.output")
    assert file.read_text() == "not a folder"


def test_an_output_on_a_read_only_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests may run as root, which ignores permissions, so the error is simulated.
    def refuse(self: Path, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    config = write_config(tmp_path, PLAIN)
    monkeypatch.setattr(Path, "mkdir", refuse)

    outcome = command(config, f"run.output={tmp_path / 'run'}")

    assert_refused(outcome, "Read-only file system", "run.output")


def test_the_ledger_of_a_replaced_run_is_kept_beside_the_new_run(tmp_path: Path) -> None:
    arguments = [
        write_config(tmp_path, PRIVATE),
        f"run.output={tmp_path / 'run'}",
        "algorithm.rounds=1",
    ]
    assert command(*arguments, "--quiet").status == 0
    spent = {p.name: p.read_bytes() for p in (tmp_path / "run" / "ledger").glob("*.jsonl")}
    assert spent

    outcome = command(*arguments, "run.overwrite=true", "--quiet")

    assert outcome.status == 0
    assert "run.ledger-001" in outcome.err
    kept = {p.name: p.read_bytes() for p in (tmp_path / "run.ledger-001").glob("*.jsonl")}
    assert kept == spent


@pytest.mark.ci
@pytest.mark.parametrize("name", ["run", "q[1]"])
def test_a_run_can_be_replaced_repeatedly_even_if_former_ledgers_are_deleted(
    tmp_path: Path, name: str
) -> None:
    arguments = [
        write_config(tmp_path, PRIVATE), f"run.output={tmp_path / name}", "algorithm.rounds=1",
        "run.overwrite=true", "--quiet",
    ]  # fmt: skip
    for _ in range(4):
        assert command(*arguments).status == 0
    kept = [tmp_path / f"{name}.ledger-00{number}" for number in (1, 2, 3)]
    assert all(path.is_dir() for path in kept)
    shutil.rmtree(kept[0])
    assert command(*arguments).status == 0
    assert all(path.is_dir() for path in kept)


def test_the_replaced_run_is_restored_with_its_ledger_if_the_new_run_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    arguments = [
        write_config(tmp_path, PRIVATE),
        f"run.output={run}",
        "algorithm.rounds=1",
        "--quiet",
    ]
    assert command(*arguments).status == 0
    before, file_names = tree(run), sorted(os.listdir(tmp_path))
    assert any("ledger" in str(name) for name in before)
    replace = [*arguments, "run.overwrite=true"]

    def absent(*_: object) -> None:
        raise SiteError("s1 is missing")

    with monkeypatch.context() as patch:
        patch.setattr(round_loop, "make_engine", absent)
        assert_refused(command(*replace), "s1 is missing", "contains the former run again")
        assert (tree(run), sorted(os.listdir(tmp_path))) == (before, file_names)
        patch.setattr(
            run_dir, "_restore_replaced", lambda folder: None
        )  # as if killed before the restore
        assert_refused(command(*replace), "s1 is missing")
    assert not (run / "results.json").exists()
    assert_refused(command(*arguments), "contains the former run again", "exists and holds a run")
    assert (tree(run), sorted(os.listdir(tmp_path))) == (before, file_names)

    assert command(*replace).status == 0  # the control: a run that starts replaces it
    assert sorted(os.listdir(tmp_path)) == sorted([*file_names, "run.ledger-001"])
    assert tree(run) != before


def test_running_the_config_of_a_run_folder_does_not_replace_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [f"run.output={run}", "algorithm.rounds=1", "run.overwrite=true", "--quiet"]
    assert command(write_config(tmp_path, PLAIN), *arguments).status == 0
    before = tree(run)
    assert_refused(command(run / "config.yaml"), "exists and holds a run")
    assert tree(run) == before


def test_an_existing_run_is_refused_before_rows_are_read_and_noise_is_calibrated(
    plain: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> NoReturn:
        raise AssertionError("rows were read")

    monkeypatch.setattr("privssl.experiment.prepare.prepare", read)
    monkeypatch.setattr("privssl.api.experiment.prepare", read)
    assert_refused(command(plain.config, f"run.output={plain.folder}"), "exists and holds a run")
    with pytest.raises(RunFolderError, match="exists and holds a run"):
        privssl.train(plain.config, output=plain.folder)
    with pytest.raises(AssertionError, match="rows were read"):  # the control
        privssl.train(plain.config, output=tmp_path / "new")


def test_a_run_over_sites_without_a_superlink_does_not_change_the_former_run(
    plain: FinishedRun,
) -> None:
    before = tree(plain.folder)
    where = [f"run.output={plain.folder}", "run.overwrite=true"]
    outcome = command(plain.config, *where, "run.engine=flower", "run.superlink=127.0.0.1:1")
    assert_refused(outcome, "run.superlink: nobody answers at 127.0.0.1:1", "flower-superlink")
    assert tree(plain.folder) == before


def test_a_visit_that_costs_more_than_the_budget_is_refused_before_the_run(tmp_path: Path) -> None:
    arguments = [write_config(tmp_path, PRIVATE), f"run.output={tmp_path / 'run'}"]
    outcome = command(*arguments, "privacy.noise_multiplier=0.3", "privacy.visits=null")
    assert_refused(outcome, "one visit to a support agent costs epsilon", "noise_multiplier")
    assert not (tmp_path / "run").exists()
    dearest = command(*arguments, "privacy.noise_multiplier=1.7", "--dry-run")
    assert dearest.status == 0, dearest  # the control: one visit is within the budget


@pytest.mark.ci
def test_a_dry_run_reports_why_a_run_would_be_refused(plain: FinishedRun, tmp_path: Path) -> None:
    taken = command(plain.config, f"run.output={plain.folder}", "--dry-run")
    assert taken.status == 0
    assert "The run would be refused" in taken.err
    assert "exists and holds a run" in taken.err
    assert command(plain.config, f"run.output={tmp_path / 'new'}", "--dry-run").err == ""
    config = write_config(tmp_path, PRIVATE)
    account = [f"privacy.ledger={tmp_path / 'accounts'}", f"run.output={tmp_path / 'run'}"]
    assert command(config, *account, "privacy.ledger_epsilon=4.0", "--quiet").status == 0
    dry = command(
        config, account[0], f"run.output={tmp_path / 'next'}", "privacy.ledger_epsilon=9.0",
        "--dry-run",
    )  # fmt: skip
    assert dry.status == 2 and "cannot rise" in dry.err


def test_the_log_and_the_output_call_epsilons_of_the_published_scheme_nominal(
    published: FinishedRun, private: FinishedRun
) -> None:
    for of, word in ((published, "NOMINAL "), (private, "")):
        labels = re.findall(r"(\S+ )dp/epsilon/s\d", (of.folder / "train.log").read_text())
        assert labels and all((text == "NOMINAL ") == bool(word) for text in labels)
        printed = re.findall(r"(\S+ )epsilon left", of.outcome.err)
        assert printed and all((text == "NOMINAL ") == bool(word) for text in printed)


def test_class_names_with_markup_are_printed_verbatim(tmp_path: Path) -> None:
    for part, label in itertools.product(("train", "test"), ("dog [x]", "cat")):
        (tmp_path / "data" / part / label).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((8, 8), 20 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / part / label / f"{number}.png")
    config = write_config(
        tmp_path, PLAIN.replace("toy, labelled: 40, unlabelled: 80", "image_folder")
    )
    outcome = command(config, f"data.root={tmp_path / 'data'}", "data.labelled=4", "--dry-run")
    assert outcome.status == 0, outcome
    assert "dog [x]" in outcome.out


def test_only_the_user_can_read_the_run_folder(plain: FinishedRun) -> None:
    assert stat.S_IMODE(plain.folder.stat().st_mode) == 0o700
    for path in plain.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


# A full disk --------------------------------------------------------------------------------


@contextlib.contextmanager
def file_size_limited(size: int) -> Iterator[None]:
    """Limit the size of files to ``size`` bytes, so that larger writes fail."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def assert_resumes_to(config: Path, folder: Path, like: FinishedRun) -> None:
    """Assert that, with space on the disk, the run is resumed to the same results."""
    if (folder / "checkpoints" / "latest").exists():
        again = command(config, "--resume", folder, "--quiet")
    else:
        again = command(config, f"run.output={folder}", "run.overwrite=true", "--quiet")
    assert again.status == 0, again
    assert (folder / "metrics.csv").read_bytes() == (like.folder / "metrics.csv").read_bytes()
    weights = safetensors.torch.load_file(folder / "classifier.safetensors")
    assert weights.keys() == like.weights().keys()
    assert all(torch.equal(weights[name], value) for name, value in like.weights().items())


# Limits too small for split.json, then the log and config, the images, and a checkpoint.
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("size", [100, 900, 30_000, 90_000])
def test_a_full_disk_is_reported_and_the_run_can_be_resumed_later(
    tmp_path: Path, plain: FinishedRun, size: int
) -> None:
    config, folder = write_config(tmp_path, PLAIN), tmp_path / "run"

    with file_size_limited(size):
        outcome = command(config, f"run.output={folder}", "--quiet")

    assert_refused(outcome, "File too large", str(folder))
    assert_resumes_to(config, folder, like=plain)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("write", [1, 3, 6, 9, 12])
def test_a_disk_that_fills_at_any_write_leaves_complete_checkpoints(
    tmp_path: Path, plain: FinishedRun, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    config, folder, count = write_config(tmp_path, PLAIN), tmp_path / "run", 0
    real = atomic_files.write_new

    def fills_up(path: Path, data: bytes | Iterable[bytes]) -> None:
        nonlocal count
        count += 1
        data = data if isinstance(data, bytes) else b"".join(data)
        if count >= write:
            path.write_bytes(data[: len(data) // 2])  # half of it was written
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "write_new", fills_up)
        outcome = command(config, f"run.output={folder}", "--quiet", "run.checkpoint_every=1")

    assert_refused(outcome, "No space left on device", str(folder))
    assert_resumes_to(config, folder, like=plain)


# Output -------------------------------------------------------------------------------------


def test_the_last_line_states_the_guarantee_or_that_there_is_none(
    plain: FinishedRun, published: FinishedRun
) -> None:
    assert plain.outcome.out.splitlines()[-1].startswith("NO GUARANTEE: this run is not private.")
    assert published.outcome.out.splitlines()[-1].startswith("NOMINAL epsilon")


def test_with_json_standard_output_has_only_results_json(private: FinishedRun) -> None:
    assert json.loads(private.outcome.out) == private.results()
    assert private.outcome.err.splitlines()[-1].startswith("GUARANTEE: for every support agent")


def test_progress_without_a_terminal_is_two_lines_and_none_with_quiet(
    tmp_path: Path, plain: FinishedRun
) -> None:
    lines = plain.outcome.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["round 1/3", "round 3/3"]

    quiet = train_config(tmp_path, PLAIN, "--quiet", "algorithm.rounds=1")

    assert quiet.outcome.err == ""


def test_a_dry_run_prints_the_plan_and_writes_no_file(tmp_path: Path) -> None:
    config = write_config(tmp_path, PRIVATE)

    outcome = command(config, "--dry-run", f"run.output={tmp_path / 'run'}", "run.seed=7")

    assert outcome.status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]
    resolved, _, rest = outcome.out.partition("\n\n")
    assert yaml.safe_load(resolved)["run"]["seed"] == 7
    for agent, role, rows in (("s0", "support", "20"), ("q1", "query", "40")):
        assert any({agent, role, rows} <= set(line.split()) for line in rest.splitlines())
    # Two visits are planned, and the noise is calibrated so that they spend the budget.
    assert "2 visits of 2 private steps" in rest
    planned = re.search(r"epsilon ([0-9.]+) of 4 at delta 0.001", rest)
    assert planned is not None
    assert 3.99 < float(planned[1]) <= 4
    assert "nothing is guaranteed" in command(config, "--dry-run", "privacy=null").out


def test_overrides_take_precedence_over_the_config_file_in_any_position(tmp_path: Path) -> None:
    config = write_config(tmp_path, PLAIN + "run: {seed: 3, name: from-file}\n")

    outcome = command(config, "--dry-run", "run.seed=4", "--quiet", "model.width=8")

    printed = yaml.safe_load(outcome.out.partition("\n\n")[0])
    assert (printed["run"]["seed"], printed["run"]["name"]) == (4, "from-file")
    assert printed["model"]["width"] == 8  # the file says 4
    assert printed["run"]["checkpoint_every"] == 10  # neither sets it


# The run folder -----------------------------------------------------------------------------

ALWAYS = {"config.yaml", "split.json", "metrics.csv", "results.json", "tensorboard"}
ALWAYS |= {"checkpoints", "train.log", "classifier.safetensors", "confusion.csv", "confusion.png"}
ALWAYS |= {"model_card.md"}


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_run_folder_has_the_documented_files(plain: FinishedRun, private: FinishedRun) -> None:
    assert file_names(plain.folder) == ALWAYS
    assert file_names(private.folder) == ALWAYS | {"privacy.json", "privacy.md", "ledger"}
    assert {"s0.jsonl", "s1.jsonl"} <= file_names(private.folder / "ledger")
    assert {"latest", "round_00003"} <= file_names(plain.folder / "checkpoints")


def test_results_json_has_the_documented_fields(plain: FinishedRun, private: FinishedRun) -> None:
    results, private_results = plain.results(), private.results()

    assert set(results) == {
        *("name", "algorithm", "dataset", "seed", "status", "rounds", "agents", "labels"),
        *("test_accuracy", "seconds", "bytes", "privacy", "split_hash", "versions"),
        *("rows", "class_names", "metrics", "warnings"),
    }
    assert set(results["metrics"]) == {"macro_f1", "recall", "calibration_error", "loss"}
    assert results["agents"] == {"support": 2, "query": 2}
    assert (results["status"], results["rounds"], results["labels"]) == ("finished", 3, 40)
    assert set(results["test_accuracy"]) == {"final", "best", "best_round"}
    assert set(results["seconds"]) == {"total", "round_median"}
    assert set(results["versions"]) == {"privssl", "sources", "torch", "opacus", "kernels"}
    assert results["versions"]["kernels"] in ("torch", *dispatch.INSTRUCTION_SETS)
    assert results["privacy"] == {"guarantee": None, "nominal_epsilon": None, "scope": "none"}
    split = json.loads((plain.folder / "split.json").read_text())
    assert results["split_hash"] == split["hash"]
    guarantee = private_results["privacy"]["guarantee"]
    assert guarantee["epsilon"] <= 4.0
    assert (guarantee["delta"], guarantee["unit"]) == (1e-3, "record")
    assert guarantee["covers"] == ["F"]
    assert private_results["privacy"]["scope"] == "sound"


def _another_plan(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    assert "  steps: 2\n" in text
    (run / "config.yaml").write_text(text.replace("  steps: 2\n", "  steps: 9\n"))


def _an_agent_less(run: Path) -> None:
    (run / "ledger" / "s1.jsonl").unlink()
    shutil.rmtree(run / "checkpoints")
    _rewrite_card(run, ["s0"])


def _a_visit_less(run: Path) -> None:
    for path in (run / "ledger").glob("*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        assert len(lines) == 5  # the plan, and a reserve and a settle of each visit
        path.write_bytes(b"".join(lines[:3]))
    shutil.rmtree(run / "checkpoints")
    _rewrite_card(run, ["s0", "s1"])


def _nothing(run: Path) -> None:
    _rewrite_card(run, ["s0", "s1"])


def _rewrite_card(run: Path, agents: list[str]) -> None:
    """Rewrite the card, its page and the results to match changed ledgers."""
    journals = [(name, read_journal(run / "ledger" / f"{name}.jsonl")) for name in agents]
    plan = journals[0][1].plan
    old = json.loads((run / "privacy.json").read_text())
    card = privacy_card(
        [(name, of.plan, tuple(of.events), of.head) for name, of in journals],
        scope=plan.scope, delta=plan.budget.delta,
        releases=[(r["name"], r["status"], r["why"]) for r in old["releases"]],
        algorithm=old["algorithm"], dataset=old["dataset"],
        task=old["task"],
        planned=len(journals[0][1].events), weights=old["weights"], clip_norm=old["clip_norm"],
    )  # fmt: skip
    results = json.loads((run / "results.json").read_text())
    results["privacy"]["guarantee"] = card["guarantee"]
    (run / "privacy.json").write_text(json.dumps(card))
    (run / "privacy.md").write_text(render_markdown(card))
    (run / "results.json").write_text(json.dumps(results))


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (_another_plan, "config.yaml asks for a visit of"),
        (_an_agent_less, "config.yaml gives labels to s1, which has no ledger"),
        (_a_visit_less, "metrics.csv records that it had spent"),
        (_nothing, None),  # the control: a rewritten card alone is no problem
    ],
)
def test_the_audit_finds_a_ledger_that_contradicts_other_files_of_the_run(
    private: FinishedRun, tmp_path: Path, forge: Callable[[Path], None], said: str | None
) -> None:
    run = tmp_path / "run"
    shutil.copytree(private.folder, run)
    forge(run)
    report = audit.audit(run)
    problems = report.problems + [text for agent in report.agents for text in agent.problems]
    assert report.verdict.name == ("VIOLATED" if said else "CONSISTENT"), problems
    assert any(said in text for text in problems) if said else not problems


def test_an_audit_without_read_permission_reports_it_and_gives_no_verdict(
    private: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(name: str, method: str) -> None:
        real = getattr(Path, method)

        def refuse(self: Path, *given: Any) -> Any:
            if self.name == name:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return real(self, *given)

        monkeypatch.setattr(Path, method, refuse)

    for name, method in (("ledger", "iterdir"), ("privacy.json", "exists")):
        refusing(name, method)
        assert audit.main([str(private.folder)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "cannot be read" in printed.err and "Permission denied" in printed.err


def test_the_audit_of_a_private_run_that_never_started_does_not_call_it_not_private(
    private: FinishedRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(private.folder / "config.yaml", run)
    report = audit.audit(run)
    assert report.claim == "no claim was written"
    assert any("never came to its first visit" in note for note in report.notes)
    assert report.verdict.name == "NO_GUARANTEE"


def test_an_audit_reports_that_it_did_not_compare_damaged_results(
    private: FinishedRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(private.folder, run)
    (run / "results.json").write_text("{")
    assert "results.json cannot be read, so it was not compared" in audit.audit(run).doubts


def test_an_audit_without_the_config_reports_what_it_did_not_check(
    private: FinishedRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(private.folder, run)
    assert not audit.audit(run).doubts
    (run / "config.yaml").unlink()
    assert any(doubt.startswith("config.yaml is missing") for doubt in audit.audit(run).doubts)


def test_only_split_json_of_a_private_run_contains_the_split_hash(
    plain: FinishedRun, private: FinishedRun
) -> None:
    """An attacker who knows everything except one label could try labels until the hash matches."""

    def files_with_split_hash(of: FinishedRun) -> set[str]:
        start = json.loads((of.folder / "split.json").read_text())["hash"][:12].encode()
        files = [path for path in of.folder.rglob("*") if path.is_file()]
        return {path.name for path in files if start in path.read_bytes()}

    assert files_with_split_hash(private) == {"split.json"}
    assert private.results()["split_hash"] == "withheld"
    others = {"results.json", "model_card.md", "train.log", "snapshot.json"}
    assert files_with_split_hash(plain) == {"split.json", *others}  # the control


def test_results_agree_with_metrics(plain: FinishedRun) -> None:
    lines = list(csv.DictReader((plain.folder / "metrics.csv").read_text().splitlines()))
    results = plain.results()

    accuracies = [float(line["test/accuracy"]) for line in lines]
    assert [int(line["round"]) for line in lines] == [1, 2, 3]
    assert results["test_accuracy"] == {
        "final": accuracies[-1],
        "best": max(accuracies),
        "best_round": 1 + accuracies.index(max(accuracies)),
    }
    for way in ("up", "down"):
        assert results["bytes"][way] == sum(int(line[f"comm/{way}_bytes"]) for line in lines)


def test_released_weights_are_a_plain_state_dict(plain: FinishedRun) -> None:
    weights = plain.weights()

    assert all(not name.startswith(("module.", "_orig_mod.", "F.")) for name in weights)
    assert "head.weight" in weights


def test_the_config_in_a_run_folder_repeats_the_run(tmp_path: Path, plain: FinishedRun) -> None:
    recorded = plain.folder / "config.yaml"

    outcome = command(recorded, f"run.output={tmp_path / 'again'}", "--quiet")

    assert outcome.status == 0
    again = FinishedRun(recorded, tmp_path / "again", outcome)
    assert (again.folder / "metrics.csv").read_bytes() == (
        plain.folder / "metrics.csv"
    ).read_bytes()
    assert all(torch.equal(again.weights()[k], v) for k, v in plain.weights().items())
    assert again.results()["name"] == plain.results()["name"] == "tiny"


@pytest.mark.slow
def test_control_another_seed_gives_another_run(tmp_path: Path, plain: FinishedRun) -> None:
    # The control of the test above: results can differ.
    other = train_config(tmp_path, PLAIN, "run.seed=1", "--quiet")

    assert not all(torch.equal(other.weights()[k], v) for k, v in plain.weights().items())


def test_a_private_run_looks_for_copies_among_unlabelled_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rows = list[bool](), FederatedDataset.measured_rows

    def record(held: FederatedDataset, *, private: bool) -> list[Tensor]:
        asked.append(private)
        return rows(held, private=private)

    monkeypatch.setattr(FederatedDataset, "measured_rows", record)
    for text, private in ((PRIVATE, True), (PLAIN, False)):  # the second is the control
        (tmp_path / str(private)).mkdir()
        train_config(tmp_path / str(private), text, "algorithm.rounds=1")
        assert set(asked) == {private}
        asked.clear()


def test_tensorboard_has_the_documented_tags(plain: FinishedRun, private: FinishedRun) -> None:
    tags, private_tags = (_tags(run.folder) for run in (plain, private))

    numbers = {"test/accuracy", "pseudo/coverage", "pseudo/accuracy", "comm/up_bytes"}
    numbers |= {"comm/down_bytes", "time/round_s", "train/loss_F/support"}
    numbers |= {"test/loss", "test/macro_f1", "test/calibration_error", "test/recall/9"}
    assert numbers <= tags["scalars"]
    assert tags["images"] == {
        *("images/mixes", "images/reconstruction", "images/samples", "images/partition"),
        "images/confusion",
    }
    assert {"gen/right_by_judge", "gen/nearest_training_row"} <= tags["scalars"]
    # Of a private run no metric and no figure uses labelled rows; unlabelled ones are not covered.
    assert {"gen/right_by_judge", "gen/nearest_training_row"} <= private_tags["scalars"]
    assert "images/partition" not in private_tags["images"]
    budgets = {f"dp/{what}/s{n}" for what in ("epsilon", "budget_left") for n in (0, 1)}
    assert budgets <= private_tags["scalars"]
    # Losses on private rows are not charged, so they must not be logged.
    assert not any(tag.endswith("/support") for tag in private_tags["scalars"])


def _tags(run: Path) -> dict[str, set[str]]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {kind: set(events.Tags()[kind]) for kind in ("scalars", "images")}


def test_the_log_has_the_start_the_warnings_each_evaluation_and_the_end(
    plain: FinishedRun, published: FinishedRun
) -> None:
    lines = (plain.folder / "train.log").read_text().splitlines()

    assert "fedssl on toy, seed 0" in lines[0]
    assert "s0 (support)" in lines[1] and "q1 (query)" in lines[1]
    evaluations = [line for line in lines if "test/accuracy" in line]
    assert [f"Round {n} of 3" in line for n, line in enumerate(evaluations, 1)] == [True] * 3
    assert "finished after 3 rounds. NO GUARANTEE" in lines[-1]
    assert "WARNING NOMINAL epsilon" in (published.folder / "train.log").read_text()


def test_the_log_has_the_error_that_ended_a_run(tmp_path: Path) -> None:
    with file_size_limited(30_000):
        outcome = command(
            write_config(tmp_path, PLAIN), f"run.output={tmp_path / 'run'}", "--quiet"
        )

    log = (tmp_path / "run" / "train.log").read_text()
    assert f"ERROR {outcome.err.strip()}" in log


@pytest.mark.slow
def test_without_validation_rows_no_checkpoint_is_marked_best(tmp_path: Path) -> None:
    # Test rows must not select a checkpoint.
    run = train_config(tmp_path, PLAIN, "run.checkpoint_every=1", "--quiet")

    assert not (run.folder / "checkpoints" / "best").exists()


def test_the_pointer_best_names_the_best_checkpoint_on_validation_rows(tmp_path: Path) -> None:
    run = train_config(tmp_path, PLAIN, "run.checkpoint_every=1", "data.validation=50", "--quiet")

    with (run.folder / "metrics.csv").open() as file:
        reached = [float(line["validation/accuracy"]) for line in csv.DictReader(file)]
    best = 1 + reached.index(max(reached))
    assert (run.folder / "checkpoints" / "best").read_text() == f"round_{best:05d}\n"
    assert (run.folder / "checkpoints" / f"round_{best:05d}").is_dir()


@pytest.mark.slow
def test_image_logging_works_if_the_first_rows_are_all_of_one_class(tmp_path: Path) -> None:
    # Test rows of a folder are sorted by class: 600 of class 0 come before the first of class 1.
    y = np.repeat([0, 1], [600, 20])
    x = np.zeros((620, 8, 8), np.uint8)
    x[y == 1] = 200
    np.savez(tmp_path / "sorted.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    sorted_rows = PLAIN.replace("name: toy", "name: npz")

    run = train_config(tmp_path, sorted_rows, f"data.root={tmp_path / 'sorted.npz'}", "--quiet")

    assert "images/mixes" in _tags(run.folder)["images"]


# Private runs and their audit ----------------------------------------------------------------


def test_the_audit_confirms_the_claim_of_each_run(
    plain: FinishedRun,
    private: FinishedRun,
    published: FinishedRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert audit.main([str(private.folder)]) == 0
    assert audit.main([str(published.folder)]) == 4
    assert audit.main([str(plain.folder)]) == 4
    capsys.readouterr()


def test_every_output_calls_the_epsilon_of_the_published_scheme_nominal(
    published: FinishedRun,
) -> None:
    privacy = published.results()["privacy"]

    assert (privacy["guarantee"], privacy["scope"]) == (None, "as_published")
    assert privacy["nominal_epsilon"] > 0
    assert "Warning: NOMINAL epsilon" in published.outcome.err


def affordable_visits(budget: float, delta: float, noise: float, steps: int) -> int:
    """How many visits of full-batch steps a budget pays for, by the exact formula.

    Balle and Wang 2018, theorem 8: n steps with noise s are (e, d)-DP exactly when
    d >= Phi(m/2 - e/m) - exp(e) Phi(-m/2 - e/m), with m = sqrt(n) / s.
    """
    visits = 0
    while True:
        m = math.sqrt((visits + 1) * steps) / noise
        needed = norm.cdf(m / 2 - budget / m) - math.exp(budget) * norm.cdf(-m / 2 - budget / m)
        if needed > delta:
            return visits
        visits += 1


def test_a_run_ends_normally_when_its_budget_is_spent(tmp_path: Path) -> None:
    expected = affordable_visits(budget=4.0, delta=1e-3, noise=1.5, steps=2)
    assert 0 < expected < 3  # otherwise nothing would be tested

    run = train_config(
        tmp_path, PRIVATE, "privacy.noise_multiplier=1.5", "privacy.visits=3", "--quiet"
    )

    assert run.results()["status"] == "budget_exhausted"
    assert run.results()["rounds"] == 3  # query agents continue
    assert "budget ended visits" in run.outcome.out
    for path in (run.folder / "ledger").glob("*.jsonl"):
        journal = read_journal(path)
        assert len(journal.events) == expected
        assert 0 < journal.epsilon <= 4.0
    assert run.results()["privacy"]["guarantee"]["epsilon"] <= 4.0
    assert audit.main([str(run.folder)]) == 0


def test_a_run_with_budget_zero_reads_no_labelled_row_and_guarantees_zero(tmp_path: Path) -> None:
    run = train_config(tmp_path, PRIVATE, "privacy.epsilon=0.0", "algorithm.rounds=1", "--quiet")

    assert run.results()["privacy"]["guarantee"]["epsilon"] == 0
    assert all(not read_journal(p).events for p in (run.folder / "ledger").glob("*.jsonl"))


def test_a_checkpoint_of_a_run_can_be_loaded(plain: FinishedRun) -> None:
    digest = json.loads(
        (plain.folder / "checkpoints" / "round_00003" / "snapshot.json").read_text()
    )["config_digest"]

    assert checkpoint.load_snapshot(plain.folder / "checkpoints", digest).round == 3
