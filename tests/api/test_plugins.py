"""Plug-ins: one clear error for each mistake, and no import without permission."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privssl
from privssl.audit.__main__ import main as audit
from privssl.data import partition
from privssl.data.datasets import load_dataset
from privssl.encoders import Encoder
from privssl.errors import ConfigError, DataError
from privssl.experiment.json_schema import config_schema
from privssl.predict import main as predict
from privssl.runs.resume import other_file
from privssl.runtime import plugins
from privssl.settings.schema import DataSettings
from tests.api.digits import config
from tests.support.command_line import command
from tests.testing import own_method

OWN = "tests.testing.own_method:{}"
RUN = """\
data: {name: toy, labelled: 40, unlabelled: 60}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
algorithm: {name: 'tests.testing.own_method:Own', rounds: 2}
"""
PRIVACY = "privacy: {epsilon: 8.0, delta: 1.0e-3, sample_rate: 0.5, steps: 1}\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that adds a package with entry points to the path."""
    before = set(sys.modules)

    def put(name: str, points: str, module: str = "", version: str = "1.0") -> None:
        folder = tmp_path / f"site-of-{name}"
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")
        (about / "entry_points.txt").write_text(points)
        (folder / f"{name}.py").write_text(module)
        monkeypatch.syspath_prepend(str(folder))

    yield put
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", "") and str(tmp_path) in str(
            sys.modules[module].__file__
        ):
            del sys.modules[module]


# Mistakes -----------------------------------------------------------------------------------------


MISTAKES = [
    ("algorithm.name", "no_such_module:Own", "there is no module no_such_module here"),
    ("algorithm.name", OWN.format("Owm"), "has no Owm. Did you mean Own?"),
    ("algorithm.name", "tests.api.failing_module:Own", "OSError: the driver is not there"),
    ("algorithm.name", OWN.format("OwnConfig"), "Name a class of privssl.algorithms.base.Algor"),
    ("algorithm.name", OWN.format("OwnPlan"), "only privssl's plans carry a claim"),
    ("algorithm.name", OWN.format("FixedName"), "needs a Config with name: str"),
    ("algorithm.name", "fedavgg", "unknown algorithm. Did you mean fedavg?"),
    ("model.name", "smal_cnn", "or an installed plug-in, got 'smal_cnn'. Did you mean small_cnn?"),
    ("data.name", "no_such_module:rows", "there is no module no_such_module here"),
    ("data.name", "tests.api.test_plugins:nothing", "returns a NoneType. Return a privssl.Dataset"),
    ("data.name", "tests.api.test_plugins:broken", "cannot be read: ValueError: no such table"),
    ("data.name", "tests.api.test_plugins:RUN", "Name a function of (root)"),
    ("data.name", "tests.api.test_plugins:federated", "says which agent has which rows"),
    ("data.partition", "idd", "or an installed plug-in, got 'idd'. Did you mean iid?"),
    ("data.partition", "tests.api.test_plugins:Twice", "each row at most once"),
    ("data.partition", "tests.api.test_plugins:Raises", "fails: KeyError: 'age'"),
    ("data.partition", "tests.api.test_plugins:RUN", "Name a class of privssl.data.partition"),
    ("data.encoder", "tests.api.test_plugins:nothing", "Return a privssl.encoders.Encoder"),
    ("data.encoder", "tests.api.test_plugins:fitted", "other features after other rows"),
    ("data.encoder", "tests.api.test_plugins:random_encoder", "or draws numbers"),
    ("data.encoder", "tests.api.test_plugins:drifting_encoder", "other features after other rows"),
    ("data.encoder", "tests.api.test_plugins:of_texts", "takes texts, and rows of toy are image"),
    ("run.trackers", "[tensorbord]", "got [tensorbord]"),
    ("run.trackers", "['tests.api.test_plugins:RUN']", "Name a class or function of (TrackedRun)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "error_text"),
    MISTAKES,
    ids=[f"{key}-{value.strip('[]').rpartition(':')[2]}" for key, value, _ in MISTAKES],
)
def test_a_mistake_in_a_plug_in_raises_one_clear_error(
    key: str, value: str, error_text: str, tmp_path: Path
) -> None:
    given = [f"{key}={value}", f"run.output={tmp_path / 'run'}"]
    if key == "data.encoder":
        given.append("model.name=linear")
    outcome = command(config(tmp_path, RUN), *given)
    assert outcome.status == 2
    assert error_text in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "run").exists()


def nothing(_: object) -> None:
    """Neither a data set nor an encoder."""


def broken(root: Path) -> None:
    raise ValueError("no such table")


def federated(root: Path) -> privssl.Dataset:
    x = np.zeros((4, 8, 8), dtype=np.uint8)
    y = np.array([0, 1, 0, 1])
    return privssl.Dataset.federated({"s0": (x, y), "q0": x}, test=(x, y))


class Twice(partition.Partition):
    def divide(self, labels: Any, agents: int, rng: Any) -> Any:
        return [np.arange(len(labels))] * agents


class Raises(partition.Partition):
    def divide(self, labels: Any, agents: int, rng: Any) -> Any:
        columns: dict[str, Any] = {}
        return columns["age"]


def _encoder(build: Any, takes: Any = "images") -> Encoder:
    return Encoder("", (64,), "0" * 64, "nothing", lambda: build, cached=False, takes=takes)


def random_encoder(weights: str) -> Encoder:
    return _encoder(lambda x: x.float().flatten(1) / 255 + 1e-6 * torch.rand(1, 64))


class _Centred:
    """Subtracts the mean of all rows so far, or of the first batch."""

    def __init__(self, share: float) -> None:
        self.share, self.mean = share, None

    def __call__(self, x: Any) -> Any:
        x = x.float().flatten(1) / 255
        if self.mean is None:
            self.mean = x.mean(dim=0) if self.share == 0 else 0 * x[0]
        self.mean = self.mean + self.share * (x.mean(dim=0) - self.mean)
        return x - self.mean


def fitted(weights: str) -> Encoder:
    return dataclasses.replace(_encoder(None), build=lambda: _Centred(0.0))


def drifting_encoder(weights: str) -> Encoder:
    return dataclasses.replace(_encoder(None), build=lambda: _Centred(1e-7))


def apart(weights: str) -> Encoder:
    return _encoder(lambda x: x.float().flatten(1) / 255)


def of_texts(weights: str) -> Encoder:
    return _encoder(None, "texts")


def test_control_an_encoder_that_maps_each_row_by_itself_is_accepted() -> None:
    # The control of the encoders that store something of rows.
    with plugins.imports_allowed():
        made = load_dataset(DataSettings("toy", encoder="tests.api.test_plugins:apart"))
    assert made.shape == (64,) and made.unencoded is not None
    assert made.unencoded.encoder.name == "tests.api.test_plugins:apart"


def test_an_entry_point_with_a_name_of_privssl_or_of_another_package_is_refused(
    install: Any, tmp_path: Path
) -> None:
    given = [f"run.output={tmp_path / 'run'}"]
    points = "[privssl.algorithms]\n{} = tests.testing.own_method:{}\n"
    install("one", points.format("own", "Own"))
    path = config(tmp_path, RUN)
    assert command(path, *given, "algorithm.name=own", "--dry-run").status == 0  # the control
    install("two", points.format("own", "Resume"))
    outcome = command(path, *given, "algorithm.name=own")
    assert outcome.status == 2
    assert "a name that" in outcome.err and "two 1.0" in outcome.err and "one 1.0" in outcome.err
    install("three", points.format("fedavg", "Own"))
    outcome = command(path, *given)
    assert outcome.status == 2
    assert "three 1.0 installs a plug-in fedavg (privssl.algorithms), a name that" in " ".join(
        outcome.err.split()
    )


@pytest.mark.parametrize(("key", "group"), [
    ("algorithm.name", "algorithms"), ("model.name", "models"), ("data.partition", "partitions"),
])  # fmt: skip
def test_the_error_about_a_misspelt_plug_in_suggests_the_installed_name(
    key: str, group: str, install: Any, tmp_path: Path
) -> None:
    install("quokka", f"[privssl.{group}]\nquokka_one = quokka:One\n")
    outcome = command(config(tmp_path, RUN), f"{key}=quoka_one")
    assert outcome.status == 2 and "Did you mean quokka_one?" in " ".join(outcome.err.split())


def test_the_error_about_a_failing_entry_point_names_its_package(
    install: Any, tmp_path: Path
) -> None:
    install("fails", "[privssl.algorithms]\nfails = fails:Own\n", "import no_such_dependency")
    with pytest.raises(privssl.UserError, match=r"of fails 1\.0, and importing fails failed: Mod"):
        privssl.train(config(tmp_path, RUN), {"algorithm.name": "fails"})
    with pytest.raises(privssl.UserError, match=r"of fails 1\.0, and importing fails failed"):
        config_schema()


# Imports of code ----------------------------------------------------------------------------------

HARM = """\
import os
os.mkdir(os.environ["MARK"])
from tests.testing.own_method import Own
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that exists once ``harmful_method`` was imported."""
    (tmp_path / "harmful_method.py").write_text(HARM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    yield tmp_path / "mark"
    sys.modules.pop("harmful_method", None)


def test_the_audit_of_a_users_algorithm_imports_it_only_if_the_caller_names_it(
    mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = privssl.train(config(tmp_path, RUN + PRIVACY), output=tmp_path / "run")
    card = json.loads((run.folder / "privacy.json").read_text())
    assert card["guarantee"]["covers"] == ["F"]
    assert any("its code is not of privssl" in text for text in card["not_protected"])
    assert run.audit()["verdict"] == "consistent"
    for name in ("config.yaml", "privacy.json", "privacy.md", "results.json"):
        path = run.folder / name
        path.write_text(path.read_text().replace("tests.testing.own_method", "harmful_method"))
    capsys.readouterr()
    assert audit([str(run.folder)]) == 2  # without the algorithm the cost of a visit is unknown
    assert "then give --plugin harmful_method:Own" in capsys.readouterr().err
    other = privssl.open_run(run.folder)
    assert other.predict(np.zeros((1, 8, 8), dtype=np.uint8)).shape == (1,)
    for use in (other.audit, lambda: other.generate(1, acknowledge_query_rows=True)):
        with pytest.raises(privssl.UserError, match=r"open the run with it: privssl\.open_run"):
            use()
    assert not mark.exists()
    # The control: a plug-in named by the caller is imported; another name permits nothing.
    assert audit([str(run.folder), "--plugin", "harmful_method:Other"]) == 2
    assert not mark.exists()
    assert audit([str(run.folder), "--plugin", "harmful_method:Own"]) == 3  # an edited config
    assert mark.exists()


def test_predict_imports_an_encoder_only_if_the_caller_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "tests.api.test_plugins:apart"
    given = {"data.encoder": own, "model.name": "linear", "model.width": 16}
    run = privssl.train(config(tmp_path), given, output=tmp_path / "run")
    np.save(tmp_path / "rows.npy", np.zeros((2, *run.form.picture_shape[1:]), dtype=np.uint8))
    asked = [str(run.folder), str(tmp_path / "rows.npy")]
    assert predict([*asked, "--plugin", own]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3  # a header, and a line per row
    for more in ([], ["--plugin", "another:encoder"]):  # the control
        assert predict([*asked, *more]) == 2
        assert f"in a command --plugin {own}" in capsys.readouterr().err


def test_the_audit_finds_a_card_that_hides_the_users_algorithm(tmp_path: Path) -> None:
    from privssl.privacy.card_text import render_markdown

    run = privssl.train(config(tmp_path, RUN + PRIVACY), output=tmp_path / "run")
    card = json.loads((run.folder / "privacy.json").read_text())
    card["algorithm"] = "fedavg"
    card["not_protected"] = [t for t in card["not_protected"] if "is not of privssl" not in t]
    (run.folder / "privacy.json").write_text(json.dumps(card, indent=2) + "\n")
    (run.folder / "privacy.md").write_text(render_markdown(card))
    report = run.audit()
    assert report["verdict"] == "violated"
    assert any("the card another" in problem for problem in report["problems"])


def test_a_resumed_run_folder_chooses_no_code(mark: Path, tmp_path: Path) -> None:
    path = config(tmp_path, RUN)
    run = privssl.train(path, output=tmp_path / "run")
    recorded = run.folder / "config.yaml"
    recorded.write_text(recorded.read_text().replace("tests.testing.own_method", "harmful_method"))
    outcome = command(path, "--resume", run.folder)
    assert outcome.status == 2 and "belongs to another config: algorithm.name" in outcome.err
    assert not mark.exists()
    command("--resume", run.folder)  # the control: training with its config imports it
    assert mark.exists()


def test_no_plug_in_is_imported_without_permission(mark: Path) -> None:
    name = "harmful_method:Own"
    for names in ((), ["harmful_method:Other"]):
        with (
            plugins.imports_allowed(names, "say so"),
            pytest.raises(ConfigError, match=r"nobody allowed it\. Read that code; then say so"),
        ):
            plugins.load("algorithms", "algorithm.name", name)
    with pytest.raises(ConfigError, match="nobody allowed it"):
        plugins.load("algorithms", "algorithm.name", name)
    assert not mark.exists()
    with plugins.imports_allowed([name]):
        plugins.load("algorithms", "algorithm.name", name)
    assert mark.exists()
    with pytest.raises(ConfigError, match="nobody allowed it"):  # the permission has ended
        plugins.load("algorithms", "algorithm.name", name)


# Working plug-ins ---------------------------------------------------------------------------------


def test_a_run_records_its_users_algorithm_and_resumes_only_with_it(tmp_path: Path) -> None:
    run = privssl.train(config(tmp_path, RUN), output=tmp_path / "run")
    [about] = run.results["plugins"].values()
    assert about["name"] == OWN.format("Own") and about["version"] is None
    assert "name: tests.testing.own_method:Own" in (run.folder / "config.yaml").read_text()
    (run.folder / "results.json").unlink()  # as after a kill at its end
    outcome = command("--resume", run.folder, f"algorithm.name={OWN.format('Resume')}")
    assert outcome.status == 2 and "belongs to another config: algorithm.name" in outcome.err
    assert command("--resume", run.folder).status == 0


def test_a_change_in_any_file_of_the_plug_in_package_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "recordedpack"
    (package / "methods").mkdir(parents=True)
    for name in ("__init__", "helper", "methods/__init__", "methods/method"):
        (package / f"{name}.py").write_text("class Named:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "recordedpack.methods.method:Named"
    with plugins.imports_allowed([name]):
        plugins.load("models", "model.name", name)
    before = plugins.describe("models", name)
    assert other_file(before, plugins.describe("models", name)) == ""  # the control
    (package / "helper.py").write_text("class Other:\n    pass\n")
    now = plugins.describe("models", name)
    assert other_file(before, now) == "The package"
    of_an_older_run = {key: text for key, text in before.items() if key != "package_sha256"}
    assert other_file(of_an_older_run, now) == ""
    (package / "methods/method.py").write_text("class Named:\n    other = True\n")
    assert other_file(before, plugins.describe("models", name)) == "The file"


def test_a_partition_plug_in_gets_the_settings_that_it_accepts() -> None:
    with plugins.provided("partitions", "first", First):
        rule = partition.from_settings("first", k=3)
        parts = rule.split(np.zeros(10, dtype=np.int64), 2, np.random.default_rng(0))
        assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
        with pytest.raises(ConfigError, match="cannot be made: TypeError"):
            partition.from_settings("first", alpha=1.0)
        with pytest.raises(DataError, match="3 agents are to share 2 rows"):
            rule.split(np.zeros(2, dtype=np.int64), 3, np.random.default_rng(0))


class First(partition.Partition):
    """The first agent gets the first k rows."""

    def __init__(self, k: int) -> None:
        self.k = k

    def divide(self, labels: Any, agents: int, rng: Any) -> Any:
        return [list(range(self.k, len(labels)))[::-1], list(range(self.k))][::-1]


def test_listing_installed_plug_ins_imports_nothing(install: Any, mark: Path) -> None:
    install("lazy", "[privssl.datasets]\nlazy = harmful_method:Own\n")
    assert plugins.is_known("datasets", "lazy")
    plugins.check_names("datasets", ["toy"])
    assert not mark.exists() and "lazy" not in sys.modules
    assert os.environ["MARK"] and own_method.HERE
