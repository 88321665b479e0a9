"""Inputs that make a run meaningless: each is refused, or gives a warning in every output."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privssl import models
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.local_ssl import ModelUpdate, TrainRequest
from privssl.core.agents import AgentRef
from privssl.core.federation import _has_trained
from privssl.core.messages import BUDGET_EXHAUSTED, Ack
from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from privssl.runs.result_warnings import (
    cluster_warnings,
    idle_agent_warnings,
    score_warnings,
    warm_up_warnings,
)
from privssl.testing.federations import make_algorithm
from privssl.training.evaluation import Scores
from tests.support.command_line import Outcome, assert_refused, command

FEDAVG = """\
data: {name: toy, labelled: 40}
agents: {support: 2}
model: {width: 4}
algorithm: {name: fedavg, rounds: 1}
"""
NPZ = FEDAVG.replace("name: toy, labelled: 40", "name: npz, root: {root}, labelled: 12")
PRIVATE = "privacy: {epsilon: 8, delta: 1e-2, steps: 1}\n"


def run(folder: Path, text: str, *arguments: str) -> Outcome:
    path = folder / "tiny.yaml"
    path.write_text(text.replace("{root}", str(folder / "rows.npz")))
    return command(path, f"run.output={folder / 'run'}", "--quiet", "run.workers=1", *arguments)


def warnings_of(folder: Path, outcome: Outcome) -> list[str]:
    """The warnings of a finished run, which are in results.json, the last lines and train.log."""
    assert outcome.status == 0, outcome
    assert "Traceback" not in outcome.err
    found: list[str] = json.loads((folder / "run" / "results.json").read_text())["warnings"]
    log = (folder / "run" / "train.log").read_text()
    for text in found:
        assert f"Warning: {text}\n" in outcome.out
        assert text in log
    assert outcome.out.splitlines()[-1].startswith(("NO GUARANTEE", "GUARANTEE"))
    return found


def rows(folder: Path, **changed: Any) -> None:
    """An NPZ file of 40 training and 20 test rows in two classes, with some arrays changed."""
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.random((40, 8, 8)), "y_train": np.arange(40) % 2,
        "x_test": rng.random((20, 8, 8)), "y_test": np.arange(20) % 2,
    }  # fmt: skip
    np.savez(folder / "rows.npz", **(arrays | changed))


def output(words: str, texts: list[str]) -> bool:
    return any(words in text for text in texts)


# Rows ---------------------------------------------------------------------------------------

HALF = np.random.default_rng(1).random((20, 8, 8))
TEST_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "a single test row": ({"x_test": HALF[:1], "y_test": [1]}, "there is a single test row"),
    "equal test rows": ({"x_test": np.tile(HALF[:1], (20, 1, 1))}, "all 20 test rows are equal"),
    "one class": ({"y_test": np.ones(20, int)}, "all 20 test rows are of class 1"),
    "a class without test rows": (
        {"y_train": np.arange(40) % 3, "y_test": np.arange(20) % 2 * 2},
        "1 of 3 classes have no test row (1)",
    ),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("name", TEST_ROWS)
def test_unsuitable_test_rows_give_a_warning_also_in_private_runs(
    name: str, private: bool, tmp_path: Path
) -> None:
    """Test rows belong to no agent, so a private run may report it."""
    changed, words = TEST_ROWS[name]
    rows(tmp_path, **changed)
    text = NPZ + (PRIVATE if private else "")
    assert output(words, warnings_of(tmp_path, run(tmp_path, text)))


def test_control_ordinary_test_rows_give_no_warning(tmp_path: Path) -> None:
    rows(tmp_path)
    found = warnings_of(tmp_path, run(tmp_path, NPZ))
    assert not [words for _, words in TEST_ROWS.values() if output(words, found)]


TRAINING_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "equal training rows": ({"x_train": np.tile(HALF[:1], (40, 1, 1))}, "all 40 training rows"),
    "one class with labels": ({"y_train": np.arange(40) // 39}, "all labelled rows are of class 0"),
}


@pytest.mark.parametrize("name", TRAINING_ROWS)
def test_useless_training_rows_give_a_warning_unless_the_run_is_private(
    name: str, tmp_path: Path
) -> None:
    """The control: no private results depend on labelled rows."""
    changed, words = TRAINING_ROWS[name]
    rows(tmp_path, **changed)
    text = NPZ.replace("labelled: 12", "labelled: 12, stratified: false")
    assert output(words, warnings_of(tmp_path, run(tmp_path, text)))
    if name == "equal training rows":  # duplicate rows are refused in private runs
        return
    private = run(tmp_path, text + PRIVATE, "run.overwrite=true")
    assert private.status == 0, private
    assert "all labelled rows" not in (tmp_path / "run" / "results.json").read_text()
    assert "all labelled rows" not in private.out + private.err


def with_pixel(value: float) -> dict[str, Any]:
    x = np.random.default_rng(2).random((40, 8, 8))
    x[7, 3, 3] = value
    return {"x_train": x}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (with_pixel(np.nan), "1 rows have NaN or infinity (the first: row 7, from 0). Give uint8"),
        (with_pixel(np.inf), "1 rows have NaN or infinity (the first: row 7, from 0). Give uint8"),
        (with_pixel(-0.5), "from -0.5"),
        ({"x_test": np.full((20, 8, 8), np.nan)}, "x_test is float64, and 20 rows have NaN"),
        ({"y_test": np.full(20, -1)}, "y_test has the label -1"),
        ({"y_train": np.zeros(40, int), "y_test": np.zeros(20, int)}, "give at least two"),
    ],
)  # fmt: skip
def test_rows_that_are_not_finite_and_test_rows_without_labels_are_refused(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    rows(tmp_path, **changed)
    assert_refused(run(tmp_path, NPZ), words)
    assert not (tmp_path / "run").exists()


# Outputs that are not finite ----------------------------------------------------------------


def infinite_for_bright_rows(*arguments: Any) -> nn.Module:
    """A classifier with infinite outputs for rows whose first pixel is bright."""
    network = build(*arguments)
    forward = network.forward

    def broken(x: Tensor) -> Tensor:
        logits: Tensor = forward(x)
        bright = (x.flatten(1)[:, :1] > 0) & torch.tensor(not network.training)
        return torch.where(bright, torch.inf, logits)

    network.forward = broken
    return network


build: Callable[..., nn.Module] = models.build_classifier


@pytest.mark.parametrize("private", [False, True])
def test_a_warning_counts_test_rows_with_infinite_outputs(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "build_classifier", infinite_for_bright_rows)
    x = np.zeros((20, 8, 8))
    x[:7, 0, 0] = 1.0
    rows(tmp_path, x_test=x)
    outcome = run(tmp_path, NPZ + (PRIVATE if private else ""))
    found = warnings_of(tmp_path, outcome)
    words = "outputs on 7 of 20 test rows are not finite (NaN or infinite); they count as wrong"
    assert output(f"round 1: the classifier's {words}", found)
    assert output(f"at the end the classifier's {words}", found)
    assert (
        "Warning: round 1: the classifier's" in outcome.err
    )  # logged at once, so the user can stop a long run
    table = (tmp_path / "run" / "confusion.csv").read_text().splitlines()
    assert table[0] == "true class,0,1,not finite"
    assert sum(int(line.split(",")[-1]) for line in table[1:]) == 7


def test_a_diverged_network_ends_the_run_with_an_error_message(tmp_path: Path) -> None:
    text = FEDAVG.replace("width: 4", "width: 4, norm: none")
    text = text.replace("rounds: 1", "rounds: 1, local_epochs: 20")
    outcome = run(tmp_path, text, "algorithm.learning_rate=1000")
    assert_refused(outcome, "not finite. Its sender's training diverged (lower the learning rate)")
    # The control: a learning rate with which it trains.
    outcome = run(tmp_path, text, "algorithm.learning_rate=0.01", "run.overwrite=true")
    assert not output("not finite", warnings_of(tmp_path, outcome))


def test_warnings_of_rounds_are_kept_across_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(tmp_path, x_test=np.ones((20, 8, 8)) - np.arange(20).reshape(-1, 1, 1) / 100)
    with monkeypatch.context() as patch:
        patch.setattr(models, "build_classifier", infinite_for_bright_rows)
        warnings_of(tmp_path, run(tmp_path, NPZ))
    first = json.loads((tmp_path / "run" / "results.json").read_text())
    assert first["test_accuracy"]["final"] == 0.0  # if NaN counted as class 0 it would be 0.5
    assert first["metrics"]["loss"] is None
    (tmp_path / "run" / "results.json").unlink()  # as after a kill before the last file
    found = warnings_of(tmp_path, command("--resume", tmp_path / "run", "--quiet"))
    assert output("round 1: the classifier's outputs on 20 of 20 test rows are not finite", found)
    # The control: the final warnings are computed again, with a repaired network.
    assert not output("at the end the classifier's outputs", found)
    assert output("at the end the classifier's outputs", first["warnings"])


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_config_with_absurd_learning_rates_is_refused(name: str, tmp_path: Path) -> None:
    labels = {"server_sl": "labels-at-server"}.get(name, "support")
    agents = "query: 2" if name == "server_sl" else "support: 2, query: 2"
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"data: {{name: toy, labelled: 100, labels: {labels}}}\nagents: {{{agents}}}\n"
        f"algorithm: {{name: {name}}}\n"
    )
    numbers = {k: v for k, v in vars(load_config(path).algorithm).items() if isinstance(v, float)}
    bounded = [key for key in numbers if key.endswith("learning_rate")]
    assert bounded or name == "label_census"
    for key in numbers:
        with pytest.raises(
            ConfigError, match=rf"algorithm\.{key}  .*(at most|to 1|, 1\)|<|diverges)"
        ):
            load_config(path, [f"algorithm.{key}=1e38"])
    for key in bounded:
        extra = ["algorithm.l2_weight=0"] if name == "fedmatch" else []
        with pytest.raises(ConfigError, match=r"give at most 1000 \(one step would move"):
            load_config(path, [f"algorithm.{key}=1001", *extra])
        load_config(path, [f"algorithm.{key}=1000", *extra])  # the control


# Agents and networks that took no step ------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "algorithm"), [("local_steps", "fedssl"), ("local_epochs", "fedavg"), ("rounds", "uda")]
)
def test_a_config_without_training_steps_is_refused(
    key: str, algorithm: str, tmp_path: Path
) -> None:
    text = FEDAVG.replace("algorithm: {name: fedavg, rounds: 1}", "")
    text += f"algorithm: {{name: {algorithm}, {key}: 0}}\n"
    assert_refused(run(tmp_path, text), f"algorithm.{key}", "1")


def test_a_warning_names_support_agents_whose_budget_allows_no_visit(tmp_path: Path) -> None:
    """Budgets are public, so a private run may report it. The control has a budget."""
    zero = PRIVATE.replace("epsilon: 8", "epsilon: 0")
    words = "2 of 2 agents took no training step in this run (s0, s1)"
    found = warnings_of(tmp_path, run(tmp_path, FEDAVG + zero))
    assert output(words, found)
    paid = tmp_path / "paid"
    paid.mkdir()
    assert not output("took no training step", warnings_of(paid, run(paid, FEDAVG + PRIVATE)))


def test_a_warning_names_agents_that_were_never_sampled(tmp_path: Path) -> None:
    text = FEDAVG.replace("support: 2", "support: 4")
    found = warnings_of(tmp_path, run(tmp_path, text, "algorithm.agents_per_round=1"))
    assert output("3 of 4 agents took no training step in this run", found)


def test_no_warning_names_agents_that_the_algorithm_does_not_use(tmp_path: Path) -> None:
    """FedAvg learns from labelled rows only."""
    text = FEDAVG.replace("support: 2", "support: 2, query: 2")
    assert not output("took no training step", warnings_of(tmp_path, run(tmp_path, text)))


@pytest.mark.parametrize(
    ("name", "settings", "warns"),
    [
        ("pseudo", {"warm_up": 2}, True),
        ("fedssl", {"warm_up": 3}, True),
        ("pseudo", {"warm_up": 1}, False),
        ("supervise", {"warm_up": 2}, False),
        ("fedssl", {"warm_up": 2, "real_rows": False, "gate": 0.0}, False),
        ("fedavg", {}, False),
    ],
)
def test_a_warning_names_a_warm_up_on_labels_that_a_run_of_two_rounds_does_not_leave(
    name: str, settings: dict[str, Any], warns: bool
) -> None:
    algorithm = make_algorithm(ALGORITHMS[name], rounds=2, **settings)
    assert bool(warm_up_warnings(algorithm, 2)) is warns


@pytest.mark.parametrize(
    ("share", "balanced", "warns"), [(0.88, True, True), (0.7, True, False), (0.88, False, False)]
)
def test_a_warning_names_a_cluster_of_nearly_all_rows(
    share: float, balanced: bool, warns: bool
) -> None:
    algorithm = make_algorithm(ALGORITHMS["label_census"], balanced=balanced)
    found = cluster_warnings(algorithm, {"census/largest_cluster": share})
    assert bool(found) is warns
    assert not found or "has 88% of the unlabelled rows" in found[0]
    assert cluster_warnings(make_algorithm(ALGORITHMS["pseudo"]), {}) == []


def test_a_run_that_ends_within_its_warm_up_says_so_in_every_output(tmp_path: Path) -> None:
    text = FEDAVG.replace("support: 2", "support: 2, query: 2").replace("fedavg", "pseudo")
    found = warnings_of(tmp_path, run(tmp_path, text, "algorithm.local_steps=1"))
    assert output("algorithm.warm_up is 2, and the run has no later round: unlabelled rows", found)


def test_an_agent_counts_as_trained_if_it_sends_other_tensors_than_it_received() -> None:
    got, other = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])}
    assert _has_trained(TrainRequest(got), ModelUpdate(other))
    assert not _has_trained(TrainRequest(got), ModelUpdate({"w": torch.ones(2)}))
    assert not _has_trained(TrainRequest(got), BUDGET_EXHAUSTED)
    assert _has_trained(TrainRequest(got), Ack())  # it reports training
    assert _has_trained(TrainRequest(got), ModelUpdate({"w": torch.ones(2, dtype=torch.float64)}))


def test_a_warning_names_agents_that_took_no_training_step() -> None:
    roster = (AgentRef("s0", "support"), AgentRef("s1", "support"))
    [text] = idle_agent_warnings(roster, ["s1"], ["support"])
    assert text.startswith("1 of 2 agents took no training step in this run (s0)")


# Predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confusion", "expected"),
    [
        ([[5, 0, 0], [5, 0, 0]], ["predicts class a for every test row"]),
        ([[0, 0, 5], [0, 0, 5]], ["10 of 10 test rows are not finite", "accuracy 0.0000 is not"]),
        ([[6, 0, 0], [3, 0, 1]], ["1 of 10 test rows are not", "predicts class a for every"]),
        ([[3, 3, 0], [1, 3, 0]], ["accuracy 0.6000 is not above 0.6000, the share of class a"]),
        ([[4, 2, 0], [1, 3, 0]], []),  # the control: 0.7
        ([[9, 1, 0], [0, 0, 0]], []),  # accuracy cannot exceed the share of the only class
    ],
)
def test_warnings_about_predictions_follow_from_the_confusion_matrix(
    confusion: list[list[int]], expected: list[str]
) -> None:
    found = list(score_warnings(Scores(np.array(confusion), None, None), ["a", "b"]))
    assert len(found) == len(expected), found
    for words, text in zip(expected, found, strict=True):
        assert words in text


def test_a_warning_names_classes_that_are_never_predicted() -> None:
    counts = np.array([[5, 0, 0, 0], [0, 5, 0, 0], [3, 2, 0, 0]])
    [text] = score_warnings(Scores(counts, None, None), ["a", "b", "c"])
    assert text == "recall is 0 for 1 of 3 classes, which are never predicted on test rows (c)"
    counts[2] = 0  # the control: the class has no rows
    assert not list(score_warnings(Scores(counts, None, None), ["a", "b", "c"]))


# Outputs with warnings ----------------------------------------------------------------------


def test_json_output_contains_the_warnings(tmp_path: Path) -> None:
    outcome = run(tmp_path, FEDAVG + PRIVATE.replace("epsilon: 8", "epsilon: 0"), "--json")
    results = json.loads(outcome.out)
    assert output("took no training step", results["warnings"])
    for text in results["warnings"]:
        assert f"Warning: {text}\n" in outcome.err


def test_metrics_in_results_json_agree_with_the_confusion_matrix(tmp_path: Path) -> None:
    warnings_of(tmp_path, run(tmp_path, FEDAVG, "algorithm.rounds=2"))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    table = np.genfromtxt(tmp_path / "run" / "confusion.csv", delimiter=",", skip_header=1)[:, 1:]
    assert table.shape == (10, 10)
    assert np.trace(table) / table.sum() == pytest.approx(results["test_accuracy"]["final"])
    assert list(results["metrics"]["recall"]) == results["class_names"]
    recall = np.diag(table) / table.sum(axis=1)
    assert list(results["metrics"]["recall"].values()) == pytest.approx(recall)
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    last = dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))
    for name in ("loss", "macro_f1", "calibration_error"):
        assert float(last[f"test/{name}"]) == results["metrics"][name]
    assert float(last["test/recall/3"]) == results["metrics"]["recall"]["3"]
    picture = (tmp_path / "run" / "confusion.png").read_bytes()
    assert io.BytesIO(picture).read(8) == b"\x89PNG\r\n\x1a\n"
