"""A mistake in a user's algorithm ends the run with one error: what, where, and what to do.

What cannot be repeated or resumed is refused or gives a warning."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import privssl
from privssl.algorithms.local_ssl import ModelState
from privssl.core.plugin_errors import PluginError, plugin_errors
from privssl.core.task import Context
from privssl.errors import ConfigError
from privssl.runtime import plugins
from privssl.testing import BrokenPromise, check_algorithm
from tests.support.command_line import command
from tests.testing import own_method, own_mistakes

WHERE = "tests.testing.own_mistakes:{}"
FILE = r"\(tests/testing/own_mistakes\.py, line \d+\)"


def config(name: str, **more: Any) -> dict[str, Any]:
    return {
        "run": {"workers": 1},
        "data": {"name": "toy", "labelled": 40, "unlabelled": 60},
        "agents": {"support": 2, "query": 2},
        "model": {"name": "small_cnn", "width": 4},
        "algorithm": {"name": name if ":" in name else WHERE.format(name), "rounds": 2},
        **more,
    }


IN_STEPS = {
    "Raises": rf"fails in first {FILE}, guess of q0 in round 1: ValueError: shapes do not match",
    "LabelsOfUnlabelled": rf"fails in first {FILE}, guess of q0 .* no attribute 'y'",
    "NoMessage": r"guess of q0 returned dict. Return a Message, or Declined",
    "OtherMessage": r"guess returns Sent or Declined by its annotations, and here a Undeclared",
    "ArraySent": r"guess of q0: Sent.F is a ndarray, which no message carries. Give a tensor",
    "NumbersInStateDict": r"guess of q0: Sent.more is a dict, which no message carries",
    "NotFinite": r"guess of q0: Sent.F has numbers that are not finite",
    "RowsChanged": r"guess of q0 wrote into its rows \(unlabelled.x\).* Work on a copy: x.clone",
    "SetOnAgent": r"guess of q0 set agent.teacher, which its next visit does not have",
    "MemoryIsAList": r"guess of q0: agent.memory is a list. Assign a mapping of tensors",
    "TextLogged": rf"fails in first {FILE}.* log_metric got a str for train/loss. Give a number",
    "AccuracyLogged": r"a step logs test/accuracy, which the run measures. Name it train/WORD",
}
ON_THE_SERVER = {
    "NoState": r"round returns a NoneType, and StateType is ModelState.* Return a ModelState",
    "OtherState": r"round returns a Wide, and StateType is ModelState",
    "ListInState": r"start returns Wide.more as a list, which no checkpoint holds. Give tensors",
    "ArrayInState": r"start returns Wide.more\['p'\] as a ndarray, which no checkpoint holds",
    "NumberAsKey": r"start returns Wide.more with the key 0. Give text",
    "GradientInState": r"start returns Wide.more with a gradient. Give Wide.more.detach\(\)",
    "RoundRaises": rf"fails in round {FILE}: AttributeError: 'ModelState' object has no attribute",
    "ReadsAggregated": r"this reply has no more: .* an aggregator took .* Call without aggregator",
    "PartOfClassifier": r"classifier lacks trunk.0.bias, and the network of model.name has it as",
    "NetworkAsClassifier": r"classifier returns a torch module. Return F's state dict",
    "TextMetric": r"metrics gives train/teacher as a str. Give a number",
    "OwnAccuracy": r"metrics logs test/accuracy, which the run measures. Name it train/WORD",
}
BEFORE_THE_RUN = {
    "OtherInit": r"__init__ cannot be called \(too many.* Write __init__\(self, config, task, plan",
    "InitRaises": rf"fails in __init__ {FILE}: AttributeError: 'Task' object has no attribute 'gen",
    "NoProblems": r"problems gives 'None'. Yield Problem\(",
    "ProblemsRaise": rf"fails in problems {FILE}: AttributeError",
    "TextAsProblem": r"problems gives 'too many rounds'. Yield Problem\(",
    "AnyTypes": r"has a Config that takes values of any type. Write @pydantic.dataclasses",
    "Changeable": r"has a Config that can be changed during a run. Write @pydantic.dataclasses",
    "NoYaml": r"has a Config with a key that YAML cannot give \(.*torch.device.*\). Use numbers",
    "StateChangeable": r"has a StateType, StateType, that can be changed.* Write @dataclass\(froz",
    "MessageOfDict": r"DictOfTensors declares F as dict\[str, torch.Tensor\].* Declare StateDict",
    "MessageWithoutFields": r"PlainMessage is no dataclass of its own. Write @dataclass\(frozen",
}


@pytest.mark.parametrize("name", [*IN_STEPS, *ON_THE_SERVER])
def test_a_mistake_in_a_round_is_reported_with_its_file_and_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(privssl.UserError, match=(IN_STEPS | ON_THE_SERVER)[name]):
        privssl.train(config(name), output=tmp_path / "run")


@pytest.mark.parametrize("name", BEFORE_THE_RUN)
def test_a_mistake_found_before_the_run_creates_no_run_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(privssl.UserError, match=BEFORE_THE_RUN[name]):
        privssl.train(config(name), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["Raises", "SetOnAgent", "NotFinite"])
def test_a_mistake_in_a_worker_process_is_reported_as_in_one_process(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(privssl.UserError, match=IN_STEPS[name]):
        privssl.train(config(name), {"run.workers": 2}, output=tmp_path / "run")


def test_the_command_prints_the_error_and_logs_the_traceback(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "{run: {workers: 1}, data: {name: toy, labelled: 40, unlabelled: 60}, "
        "agents: {support: 2, query: 2}, model: {name: small_cnn, width: 4}, "
        f"algorithm: {{name: '{WHERE.format('Raises')}', rounds: 2}}}}"
    )
    outcome = command(file, f"run.output={tmp_path / 'run'}")
    assert outcome.status == 2 and "Traceback" not in outcome.err
    log = tmp_path / "run" / "train.log"
    assert f"The traceback is in {log}" in " ".join(outcome.err.split())
    assert 'raise ValueError("shapes do not match")' in log.read_text()


def test_the_error_names_a_users_network_that_fails_in_a_round(tmp_path: Path) -> None:
    one = config("fedavg:", model={"name": "tests.api.test_own_method_mistakes:Brittle"})
    one["algorithm"]["name"] = "fedavg"
    with pytest.raises(PluginError, match=r"model.name .*Brittle fails in forward .*: too many"):
        privssl.train(one, output=tmp_path / "run")


class Brittle(torch.nn.Module):
    """Fails for more rows than privssl's own check uses."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 3:
            raise ValueError("too many rows")
        logits: torch.Tensor = self.layer(x.flatten(1))
        return logits


def test_an_error_in_privssl_itself_is_not_attributed_to_the_plug_in() -> None:
    # The control: its traceback has no line of the plug-in.
    own: plugins.Kind = "algorithms"
    with pytest.raises(ZeroDivisionError), plugin_errors([(own, "algorithm.name", "json:loads")]):
        dataclasses.replace(ModelState({}), F={"w": torch.ones(1 // 0)})


def test_control_a_correct_algorithm_runs(tmp_path: Path) -> None:
    # The control of all mistakes.
    run = privssl.train(config("tests.testing.own_method:Own"), output=tmp_path / "run")
    assert not [text for text in run.results["warnings"] if "Own" in text]


# Reproducibility ----------------------------------------------------------------------------------


def test_state_on_the_algorithm_object_gives_a_warning(tmp_path: Path) -> None:
    run = privssl.train(config("KeptOnItself"), output=tmp_path / "run")
    error_text = "keeps rounds on the algorithm object, which no checkpoint has"
    assert sum(error_text in text for text in run.results["warnings"]) == 1


def test_global_random_generators_are_seeded_for_a_users_algorithm(tmp_path: Path) -> None:
    def weights(name: str, seed: int, workers: int) -> bytes:
        given = {"run.seed": seed, "run.workers": workers}
        run = privssl.train(config("Drawing"), given, output=tmp_path / name)
        return (run.folder / "classifier.safetensors").read_bytes()

    first = weights("first", 0, 1)
    assert weights("again", 0, 1) == first == weights("workers", 0, 2)
    assert weights("other", 1, 1) != first  # the control


def test_a_logged_metric_may_be_a_tensor() -> None:
    given: dict[str, Any] = {"visit_key": "", "session_id": "", "device": torch.device("cpu")}
    ctx = Context(seed=0, round=1, agent="q0", **given)
    ctx.log_metric("train/loss", torch.tensor(0.5, requires_grad=True))  # type: ignore[arg-type]
    ctx.log_metric("train/steps", 3)
    assert ctx.metrics == {"train/loss": 0.5, "train/steps": 3}
    with pytest.raises(TypeError, match="got a Tensor for train/loss"):
        ctx.log_metric("train/loss", torch.ones(2))  # type: ignore[arg-type]


def test_check_algorithm_finds_a_config_that_takes_any_type() -> None:
    with pytest.raises(ConfigError, match=BEFORE_THE_RUN["AnyTypes"]):
        check_algorithm(own_mistakes.AnyTypes)


def test_check_algorithm_finds_rows_that_a_step_writes_into() -> None:
    with pytest.raises(BrokenPromise, match="guess of q0 wrote into its rows"):
        check_algorithm(own_mistakes.RowsChanged, promises=["learns"])


# Privacy ------------------------------------------------------------------------------------------

PRIVACY = {"epsilon": 8.0, "delta": 1e-3, "sample_rate": 0.5, "steps": 1}


@pytest.mark.parametrize(("name", "error_text"), [
    ("NeverPrivate", r"or fedavg, write its private form \(can_be_private, docs/extending.md\)"),
    ("Unchecked", r"has can_be_private = True and no check_private.* Write it"),
])  # fmt: skip
def test_a_private_run_of_an_algorithm_without_check_private_is_refused(
    name: str, error_text: str, tmp_path: Path
) -> None:
    with pytest.raises(privssl.UserError, match=error_text.replace("or fedavg", "fedavg")):
        privssl.train(config(name, privacy=PRIVACY), output=tmp_path / "run")


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "error_text"), [
    ("tests.testing.own_method.Own", "Did you mean tests.testing.own_method:Own?"),
    ("Own", "Your own is package.module:Name"),
])  # fmt: skip
def test_the_error_about_a_name_without_colon_shows_the_right_form(
    name: str, error_text: str
) -> None:
    one = config("Own")
    one["algorithm"]["name"] = name
    with pytest.raises(privssl.UserError) as told:
        privssl.load(one)
    assert error_text in str(told.value)


def test_the_error_about_a_class_in_place_of_its_name_shows_the_name() -> None:
    one = config("Own")
    one["algorithm"]["name"] = own_method.Own
    error_text = 'algorithm.name is <class .*>. Give its name: "tests.testing.own_method:Own"'
    with pytest.raises(privssl.UserError, match=error_text):
        privssl.load(one)


def test_a_module_that_exits_when_imported_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_the_process.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    error_text = r"importing ends_the_process failed: SystemExit: 0 \(ends_the_process.py, line 3\)"
    with pytest.raises(privssl.UserError, match=error_text):
        privssl.load(config("ends_the_process:Own"))
