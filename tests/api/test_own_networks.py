"""Users' networks: adapted when built, refused with an error if they cannot be trained, and never
imported because a message or a run folder names them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import privssl
from privssl import models
from privssl.models import own_networks
from privssl.models.own_networks import FittedGroupNorm
from privssl.privacy.card_text import network_sentence
from privssl.runtime import plugins
from privssl.settings.schema import ModelSettings
from tests.api import own_module
from tests.api.digits import PLAIN, PRIVATE, Net, arrays, config, dataset, plain
from tests.support.command_line import command

NAMED = "tests.api.own_module:{}"
COLOUR = (3, 32, 32)


def build(
    name: str, shape: tuple[int, int, int] = COLOUR, classes: int = 4, **more: Any
) -> nn.Module:
    with plugins.imports_allowed():
        return models.build_classifier(ModelSettings(name=name, **more), shape, classes)


# Accepted networks --------------------------------------------------------------------------------


def test_a_config_names_a_network_and_its_options(tmp_path: Path) -> None:
    text = PLAIN + "model: {name: 'tests.api.own_module:Net', options: {hidden: 6}}\n"
    assert command(config(tmp_path, text), f"run.output={tmp_path / 'run'}").status == 0
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert "name: tests.api.own_module:Net" in written
    assert "hidden: 6" in written
    weights = safetensors.torch.load_file(tmp_path / "run" / "classifier.safetensors")
    assert weights["conv.weight"].shape == (6, 1, 3, 3)
    assert not [name for name in weights if "running" in name]
    assert (
        command("--resume", tmp_path / "run").status == 0
    )  # the run is finished, so only its config is read


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("model", [Net, plain, own_module.Lazy, NAMED.format("Net"), nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))],
    ids=["class", "function", "lazy layers", "name", "module"])  # fmt: skip
def test_a_network_may_be_given_as_class_function_name_or_module(
    model: Any, tmp_path: Path
) -> None:
    given = {"algorithm.rounds": 1}
    run = privssl.train(config(tmp_path), given, dataset(), model, tmp_path / "run")
    x, y = arrays()[2:]
    again = privssl.open_run(run.folder, model)
    assert again.evaluate(x, y)["accuracy"] == run.results["test_accuracy"]["final"]
    assert again.predict(x, probabilities=True).shape == (30, 3)


def test_a_network_from_python_gets_the_options_of_the_config(tmp_path: Path) -> None:
    given = {"algorithm.rounds": 1, "model.options": {"hidden": 6}}
    run = privssl.train(config(tmp_path), given, dataset(), own_module.Net, tmp_path / "run")
    weights = safetensors.torch.load_file(run.folder / "classifier.safetensors")
    assert weights["conv.weight"].shape == (6, 1, 3, 3)


@pytest.mark.slow
def test_rows_of_a_table_accept_users_networks(tmp_path: Path) -> None:
    data, given = dataset(shape=(12,)), {"privacy.steps": 1}
    run = privssl.train(config(tmp_path, PRIVATE), given, data, plain, tmp_path / "run")
    x, y = arrays(shape=(12,))[2:]
    again = privssl.open_run(run.folder, plain)
    assert again.shape == (12,)
    assert again.evaluate(x, y)["accuracy"] == run.results["test_accuracy"]["final"]


def test_torchvision_networks_are_adapted_to_rows_and_classes() -> None:
    network = build("torchvision:resnet18", (1, 32, 32))
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 4)
    norms = [layer for layer in network.modules() if isinstance(layer, FittedGroupNorm)]
    assert len(norms) == 20
    assert not list(own_networks.batch_norms(network))
    kept = build("torchvision:resnet18", norm="batch")
    assert len(list(own_networks.batch_norms(kept))) == 20
    assert not any(getattr(layer, "inplace", False) for layer in network.modules())


@pytest.mark.slow
@pytest.mark.parametrize("text", [PRIVATE, PRIVATE.replace("privacy:", "# privacy:")],
                         ids=["with privacy", "without"])  # fmt: skip
def test_resnet18_trains_on_colour_images_with_and_without_privacy(
    text: str, tmp_path: Path
) -> None:
    data = dataset(rows=40, shape=(16, 16, 3))
    given = {"algorithm.local_epochs": 1} if "# " in text else {"privacy.steps": 1}
    given |= {"algorithm.rounds": 1, "data.labelled": 16}
    run = privssl.train(
        config(tmp_path, text), given, data, "torchvision:resnet18", tmp_path / "run"
    )
    assert run.results["rounds"] == 1
    assert (run.guarantee is None) == ("# " in text)
    [sentence] = [w for w in run.results["warnings"] if "batch norms" in w]
    assert "20 batch norms were replaced by group norm" in sentence
    # The folder is enough, without a user's code.
    assert privssl.open_run(run.folder).evaluate(*arrays(rows=40, shape=(16, 16, 3))[2:])


def test_a_replaced_norm_keeps_its_activation_and_unknown_norms_are_refused() -> None:
    network = build(NAMED.format("with_norm_act"))
    first = network.get_submodule("0")
    out = first(torch.randn(2, *COLOUR)).detach()
    assert isinstance(first.get_submodule("0"), FittedGroupNorm)
    assert (out.min(), out.max()) == (0.0, pytest.approx(0.1))
    with pytest.raises(privssl.UserError, match="a Doubling at 0, which may do more"):
        build(NAMED.format("with_doubling"))
    assert build(NAMED.format("with_doubling"), norm="batch")


def test_timm_networks_train_or_the_error_says_how_to_install_timm(tmp_path: Path) -> None:
    try:
        import timm  # noqa: F401
    except ImportError:
        with pytest.raises(privssl.UserError, match="pip install timm"):
            privssl.train(config(tmp_path), None, dataset(), "timm:resnet18", tmp_path / "run")
        return
    network = build("timm:resnet18", (1, 32, 32))
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 4)
    assert not list(own_networks.batch_norms(network))


def test_initial_weights_come_from_a_file_except_the_head_for_other_classes(
    tmp_path: Path,
) -> None:
    trained, path = (
        build("torchvision:resnet18", classes=7, norm="batch"),
        tmp_path / "w.safetensors",
    )
    safetensors.torch.save_file(trained.state_dict(), path)
    network = build("torchvision:resnet18", weights=str(path))
    assert torch.equal(network.state_dict()["conv1.weight"], trained.state_dict()["conv1.weight"])
    assert network.state_dict()["fc.weight"].shape == (4, 512)
    grey = build("torchvision:resnet18", (1, 32, 32), weights=str(path))
    x = torch.rand(2, 1, 32, 32)
    first, old = grey.get_submodule("conv1"), trained.get_submodule("conv1")
    assert torch.allclose(first(x), old(x.expand(2, 3, 32, 32)), atol=1e-5)
    with pytest.raises(privssl.UserError, match="is of another network"):
        build("torchvision:resnet34", weights=str(path))
    path.write_bytes(b"no weights")
    with pytest.raises(privssl.UserError, match="cannot be read as a safetensors file"):
        build("torchvision:resnet18", weights=str(path))


# Refused networks ---------------------------------------------------------------------------------

WRONG = {
    "Wide": r"gives \(3, 4\) for 3 rows of shape \(1, 8, 8\).*: \(3, 3\)",
    "Coloured": r"cannot take rows of shape \(1, 8, 8\).*RuntimeError",
    "Uneven": "built twice, it has other layers or weights",
    "Listed": "built again with the same weights, it gives other outputs.*ModuleList",
    "Projecting": "built again with the same weights, it gives other outputs.*register_buffer",
    "Detached": "cannot be trained: RuntimeError.*no detach",
    "Broken": "cannot be built: ValueError: I need a GPU",
    "NO_NETWORK": "is 3, which is no network",
    "Abroad": r"has no Abroad\. Did you mean Broken|has no Abroad\. Write package",
}


@pytest.mark.parametrize(("name", "message"), WRONG.items(), ids=WRONG)
def test_an_unsuitable_network_raises_one_clear_error(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(privssl.UserError, match=message):
        privssl.train(config(tmp_path), None, dataset(), NAMED.format(name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


DOUBTFUL = {
    "DroppingAlways": "in evaluation mode the same rows get other outputs each time",
    "Counting": "",
    "Mixing": "outputs of a row depend on the other rows of its batch",
    "Squeezing": "outputs of a row depend on the other rows of its batch",
    "Centring": "depend on rows of training that are not in its state dict",
    "Dropping": "",
    "Frozen": "",
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("name", "words"), DOUBTFUL.items(), ids=DOUBTFUL)
def test_predictions_that_depend_on_chance_or_on_other_rows_give_a_warning(
    name: str, words: str, tmp_path: Path
) -> None:
    """The controls: a dropout layer is off in evaluation, a counter changes no output, and frozen
    weights may be trained without privacy."""
    given = {"algorithm.rounds": 1}
    run = privssl.train(config(tmp_path), given, dataset(), NAMED.format(name), tmp_path / "run")
    found = [text for text in run.results["warnings"] if "in evaluation mode" in text]
    assert len(found) == bool(words)
    assert all(words in text for text in found)


def test_a_run_is_not_opened_with_another_network_that_its_weights_fit(tmp_path: Path) -> None:
    """As after a change in a notebook. The controls: the network itself, and runs of former
    versions, which recorded no outputs."""

    class Negated(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    given, x = {"algorithm.rounds": 1}, arrays()[2]
    run = privssl.train(config(tmp_path), given, dataset(), Net, tmp_path / "run")
    with pytest.raises(privssl.UserError, match="gives other outputs than the run's network"):
        privssl.open_run(run.folder, Negated).predict(x)
    assert (privssl.open_run(run.folder, Net).predict(x) == run.predict(x)).all()
    results = {name: value for name, value in run.results.items() if name != "outputs"}
    (run.folder / "results.json").write_text(json.dumps(results))
    assert len(privssl.open_run(run.folder, Negated).predict(x)) == 30


def test_a_random_tensor_in_a_buffer_is_there_when_a_run_is_opened_again(tmp_path: Path) -> None:
    model, (x, y) = own_module.ProjectingByBuffer, arrays()[2:]
    run = privssl.train(config(tmp_path), None, dataset(), model, tmp_path / "run")
    again = privssl.open_run(run.folder, model)
    assert again.evaluate(x, y)["accuracy"] == run.results["test_accuracy"]["final"]


def test_a_network_instance_named_by_a_config_predicts_after_training(tmp_path: Path) -> None:
    name = NAMED.format("MODULE")
    run = privssl.train(config(tmp_path), {"algorithm.rounds": 1}, dataset(), name, tmp_path / "o")
    x, y = arrays()[2:]
    assert run.predict(x, probabilities=True).shape == (30, 3)
    again = privssl.open_run(run.folder, name)
    assert again.evaluate(x, y)["accuracy"] == run.results["test_accuracy"]["final"]


REFUSED = {
    "Dropping": r"F\.drop \(Dropout\)",
    "Noisy": "random numbers",
    "Centred": "changed the loss of other rows",
    "Remembering": "keeps something from one call|random numbers|loss of other rows",
    "Tallying": r"keeps something from one call to the next \(sums",
    "Training": r"keeps something from one call to the next \(last",
    "Queueing": r"keeps something from one call to the next \(\.?queue",
    "Counting": r"keeps something from one call to the next \(calls\)",
    "Centring": "keeps something of the rows that it is trained on, and uses it in evaluation",
    "Halving": r"parameters\(\) and named_parameters\(\) of F differ",
    "Branching": "gradient of a single row cannot be computed",
    "Buffered": "its buffers would be sent without noise",
    "InPlace": "is changed in place",
    "Frozen": r"1 parameters are frozen \(head\.weight",
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=REFUSED)
def test_a_private_run_refuses_layers_that_clipping_does_not_bound(
    name: str, message: str, tmp_path: Path
) -> None:
    model = getattr(own_module, name)
    with pytest.raises(privssl.UserError, match=message):
        privssl.train(config(tmp_path, PRIVATE), None, dataset(), model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_network_of_one_layer_and_outputs_that_are_no_logits_are_refused(tmp_path: Path) -> None:
    class Infinite(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 0

    class Probabilities(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).softmax(dim=1)

    class LogProbabilities(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).log_softmax(dim=1)

    for model, message in (
        (nn.Linear(64, 10), r"a single Linear. Put it into a torch\.nn\.Sequential"),
        (Infinite, "outputs that are not finite"),
        (Probabilities, "gives probabilities.*Leave out the softmax"),
        (lambda shape, classes: plain(shape, classes).double(), "Float and Double"),
    ):
        with pytest.raises(privssl.UserError, match=message):
            privssl.train(config(tmp_path), None, dataset(), model, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # The control: the softmax of log-probabilities returns the probabilities.
    privssl.train(config(tmp_path), None, dataset(), LogProbabilities, tmp_path / "run")


def test_model_settings_without_effect_are_refused(tmp_path: Path) -> None:
    text = PLAIN + "model: {name: 'a.b:C', width: 8}\n"
    for more, message in (
        ([], "model.width"),
        (
            ["model.width=16", "run.precision=bfloat16"],
            "bfloat16 belongs to the networks of privssl",
        ),
        (["model={}"], "section"),
        (["model.name=small_cnn", "model.options={a: 1}"], "model.options"),
        (
            ["model.name=grop"],
            "needs small_cnn, lenet, ",
        ),
    ):
        outcome = command(config(tmp_path, text), *more)
        assert outcome.status == 2
        assert message in outcome.err


def test_a_missing_failing_or_notebook_module_raises_one_clear_error(
    tmp_path: Path,
) -> None:
    for name, message in (
        ("no_such_module:Net", "no module no_such_module here"),
        ("tests.api.absent:Net", r"no module tests\.api\.absent here"),
        ("tests.api.failing_module:Net", "OSError: the driver is not there"),
        ("__main__:Net", "cannot be imported. Give a network from Python"),
        ("torchvision:resnet", "unknown network. Did you mean resnet50"),
        ("os:getcwd", "<built-in function getcwd>, which is no network"),
    ):
        with pytest.raises(privssl.UserError, match=message):
            privssl.train(config(tmp_path), {"model.name": name}, output=tmp_path / "run")
    with pytest.raises(privssl.UserError, match=r"Give a torch\.nn\.Module class"):
        privssl.train(config(tmp_path), model=3)  # type: ignore[arg-type]


# Imports of code ----------------------------------------------------------------------------------

HARM = """\
import os
os.mkdir(os.environ["MARK"])
def Net(shape, classes):
    import torch
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
"""


@pytest.fixture
def harmful_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private run whose folder names a harmful module that can be imported."""
    run = privssl.train(config(tmp_path, PRIVATE), None, dataset(), plain, tmp_path / "run")
    for name in ("config.yaml", "privacy.json", "privacy.md"):
        path = run.folder / name
        path.write_text(path.read_text().replace("tests.api.digits:plain", "harmful_network:Net"))
    (tmp_path / "harmful_network.py").write_text(HARM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return run.folder


@pytest.mark.usefixtures("small_attacks")
def test_reading_a_run_folder_imports_no_code(harmful_run: Path) -> None:
    from privssl.audit.__main__ import audit
    from privssl.evaluate import main as evaluate
    from privssl.predict import main as predict

    mark, x = Path(os.environ["MARK"]), arrays()[2]
    rows = harmful_run.parent / "x.npz"
    import numpy as np

    np.savez(rows, x=x, y=arrays()[3])
    with pytest.raises(privssl.UserError, match="no run folder may choose what code is imported"):
        privssl.open_run(harmful_run).predict(x)
    assert predict([str(harmful_run), str(rows)]) == evaluate([str(harmful_run), str(rows)]) == 2
    report = audit(harmful_run, empirical=True)
    assert report.attack is not None
    assert any("an audit runs no code" in note for note in report.attack.notes)
    assert not mark.exists()
    # The control: a network named by the caller is imported.
    assert predict([str(harmful_run), str(rows), "--model", "harmful_network:Net"]) == 0
    assert mark.exists()


def test_generating_rows_imports_no_network_that_the_run_folder_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from privssl.generate import main as generate

    named = NAMED.format("Net")
    run = privssl.train(config(tmp_path), None, dataset(), named, tmp_path / "run")

    def imported(said: str, reference: str) -> Any:
        raise AssertionError(f"{reference} was imported")

    monkeypatch.setattr(plugins, "import_object", imported)
    with pytest.raises(AssertionError, match="was imported"):  # the control
        build(named)
    out = tmp_path / "made.npz"
    assert generate([str(run.folder), "--count", "3", "--output", str(out)]) == 0
    assert out.exists()
    # Only the classifier needs it; a network named by the caller is imported.
    sure = [str(run.folder), "--count", "3", "--output", str(tmp_path / "b.npz")]
    sure += ["--confidence", "0.001"]
    assert generate(sure) == 2
    with pytest.raises(AssertionError, match="was imported"):
        generate([*sure, "--model", named])


@pytest.mark.parametrize("library", ["torchvision", "timm"])
@pytest.mark.parametrize("options", [
    {"weights": "DEFAULT"}, {"pretrained": True}, {"checkpoint_path": "evil.pth"},
    {"pretrained_cfg": "x"}, {"pretrained_cfg_overlay": {"file": "evil.pth"}}, {"cache_dir": "x"},
    {"any_other": {"file": "evil.pth"}},
])  # fmt: skip
def test_library_options_that_read_or_download_files_are_refused(
    options: dict[str, Any], library: str
) -> None:
    with pytest.raises(privssl.UserError, match="No option may read or download a file"):
        build(f"{library}:resnet18", options=options)


def test_library_options_may_select_layers() -> None:
    network = build("torchvision:resnet18", options={"zero_init_residual": True})
    assert not network.get_parameter("layer1.0.bn2.weight").any()


# The privacy card ---------------------------------------------------------------------------------


def test_the_card_states_that_network_and_initial_weights_are_assumed_public(
    tmp_path: Path,
) -> None:
    from privssl.audit.__main__ import Verdict, audit
    from privssl.privacy.card_text import render_markdown

    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(plain((1, 8, 8), 3).state_dict(), path)
    given = {"model.weights": str(path), "algorithm.rounds": 1}
    run = privssl.train(config(tmp_path, PRIVATE), given, dataset(), plain, tmp_path / "run")
    card = json.loads((run.folder / "privacy.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert card["network"] == {"name": "tests.api.digits:plain", "weights": digest}
    assert any(digest in text and "taken as public" in text for text in card["not_protected"])
    assert audit(run.folder).verdict is Verdict.CONSISTENT

    hidden: list[Any] = [None, {"name": card["network"]["name"], "weights": ""}]  # who hides it
    for network in hidden:
        quiet = {**card, "network": network}
        quiet["not_protected"] = [t for t in card["not_protected"] if digest not in t]
        if network:
            quiet["not_protected"].insert(
                -1, network_sentence({"name": network["name"], "weights": ""})
            )
        (run.folder / "privacy.json").write_text(json.dumps(quiet, indent=2) + "\n")
        (run.folder / "privacy.md").write_text(render_markdown(quiet))
        report = audit(run.folder)
        assert report.verdict is Verdict.VIOLATED
        assert [p for p in report.problems if "network" in p] == report.problems, report.problems
