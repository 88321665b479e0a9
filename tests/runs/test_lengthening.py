"""``--resume RUN algorithm.rounds=N``: the bits of a run of N rounds, or an error."""

import json
import re
from pathlib import Path

import pytest
import yaml

from privssl.algorithms import ALGORITHMS
from privssl.experiment import config as configs
from privssl.runs import round_loop
from tests.support.command_line import PLAIN, assert_refused, command, tree
from tests.support.product import ROOT

FEDAVG = """\
data: {name: toy, labelled: 40}
agents: {support: 2}
model: {name: small_cnn, width: 4}
algorithm: {name: fedavg, rounds: 3, learning_rate_decay: 0.9, momentum: 0.9}
"""
PRIVATE = FEDAVG.replace(", learning_rate_decay: 0.9, momentum: 0.9", "") + (
    "privacy: {epsilon: 8.0, sample_rate: 0.2, steps: 2}\n"
)
TEXTS = {"fedssl": PLAIN, "pseudo": PLAIN.replace("fedssl", "pseudo").replace(
    "  generator_width: 4\n", ""), "fedavg": FEDAVG}  # fmt: skip
ARGUMENTS = ("--quiet", "run.workers=1", "run.images_every=2")  # the last round logs images


def train_run(folder: Path, text: str, rounds: int) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(text)
    output = folder / f"run-{rounds}"
    outcome = command(path, f"algorithm.rounds={rounds}", f"run.output={output}", *ARGUMENTS)
    assert outcome.status == 0, outcome
    return output


def lengthen(folder: Path, rounds: int) -> None:
    outcome = command("--resume", folder, f"algorithm.rounds={rounds}", "--quiet")
    assert outcome.status == 0, outcome


def assert_same_run(one: Path, other: Path) -> None:
    for name in ("classifier.safetensors", "metrics.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    found = [json.loads((folder / "results.json").read_text()) for folder in (one, other)]
    for key in ("status", "rounds", "test_accuracy", "bytes", "metrics"):
        assert found[0][key] == found[1][key], key
    settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (one, other)]
    assert settings[0]["algorithm"] == settings[1]["algorithm"]


@pytest.mark.fast_cases("fedavg")
@pytest.mark.parametrize("name", TEXTS)
def test_a_lengthened_run_has_the_bits_of_a_run_of_that_length(name: str, tmp_path: Path) -> None:
    at_once, run = train_run(tmp_path, TEXTS[name], 4), train_run(tmp_path, TEXTS[name], 2)
    before = (run / "classifier.safetensors").read_bytes()
    lengthen(run, 4)
    assert_same_run(run, at_once)
    assert (run / "classifier.safetensors").read_bytes() != before  # training continued
    again = tree(run)
    assert command("--resume", run).status == 0  # finished: nothing changes
    assert {k: v for k, v in tree(run).items() if k != "train.log"} == {
        k: v for k, v in again.items() if k != "train.log"
    }


@pytest.mark.slow
def test_a_run_killed_while_it_is_lengthened_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, run = train_run(tmp_path, FEDAVG, 4), train_run(tmp_path, FEDAVG, 2)
    for module, name in ((configs, "to_yaml"), (round_loop, "train")):
        with monkeypatch.context() as patch:

            def killed(*_: object) -> None:
                raise SystemExit(9)

            patch.setattr(module, name, killed)
            with pytest.raises(SystemExit):
                lengthen(run, 4)
        assert json.loads((run / "results.json").read_text())["status"] == "interrupted"
        # After the first kill the config has two rounds, after the second one four.
        assert command("--resume", run, "--quiet").status == 0
    assert_same_run(run, at_once)


def test_private_runs_and_scheduled_algorithms_cannot_be_lengthened(tmp_path: Path) -> None:
    private = train_run(tmp_path / "private", PRIVATE, 2)
    semifl = "algorithm: {name: semifl, rounds: 2, epochs: 1}\n"
    scheduled = train_run(
        tmp_path / "semifl", PLAIN.partition("algorithm")[0].replace(
            "support: 2, ", "").replace("40,", "40, labels: labels-at-server,") + semifl, 2,
    )  # fmt: skip
    for folder, error_text in (
        (private, "its privacy plan fixes"),
        (scheduled, "rounds of semifl may depend on how many there are"),
    ):
        before = tree(folder)
        refused = command("--resume", folder, "algorithm.rounds=3", "--quiet")
        assert_refused(refused, "algorithm.rounds is 3 here, but 2 there", error_text)
        assert tree(folder) == before
    other = command("--resume", private, "algorithm.rounds=3", "run.seed=9", "--quiet")
    assert_refused(other, "belongs to another config: run.seed is 9 here")


def test_fewer_rounds_or_other_changed_settings_are_refused(tmp_path: Path) -> None:
    run = train_run(tmp_path, FEDAVG, 2)
    before = tree(run)
    for values, error_text in (
        (["algorithm.rounds=1"], "algorithm.rounds is 1 here, but 2 there"),
        (["algorithm.rounds=3", "algorithm.momentum=0.5"], "algorithm.momentum is 0.5 here"),
    ):
        assert_refused(command("--resume", run, *values, "--quiet"), error_text)
    assert command("--resume", run, "algorithm.rounds=3", "--dry-run").status == 0
    results = json.loads((run / "results.json").read_text())
    assert tree(run) == before
    (run / "results.json").write_text(json.dumps(results | {"status": "interrupted"}))
    refused = command("--resume", run, "algorithm.rounds=3", "--quiet")
    assert_refused(refused, "it has not finished. First end it")


def test_the_list_of_algorithms_that_can_be_lengthened_is_as_expected() -> None:
    names = {name for name, kind in ALGORITHMS.items() if kind.can_be_lengthened}
    assert names == {
        *("fedssl", "supervise", "pseudo", "mixmatch", "fedmatch_mixup", "server_sl", "fedavg"),
        *("fedprox", "feddyn", "lg_fedavg", "heterofl"),
    }


def test_the_docs_name_the_algorithms_that_can_be_lengthened() -> None:
    page = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    [sentence] = re.findall(r"^- Runs of (.*?) can be lengthened", page, re.MULTILINE | re.DOTALL)
    names = {name for name, kind in ALGORITHMS.items() if kind.can_be_lengthened}
    assert set(re.findall(r"`(\w+)`", sentence)) == names
