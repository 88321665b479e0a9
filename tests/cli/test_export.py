"""``privssl export``: the exported file has the classifier's outputs, or is not written."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import privssl
from privssl import export, models
from privssl.api.experiment import train
from privssl.errors import ConfigError, UserError
from privssl.models import exported
from privssl.models.static_norm import collect
from privssl.settings.schema import ModelSettings
from tests.api.digits import config, dataset

SHAPES: dict[str, tuple[int, ...]] = {
    "small_cnn": (1, 8, 8), "lenet": (1, 8, 8), "lenet32": (3, 8, 8), "alexnet": (3, 8, 8),
    "fedavg_cnn": (1, 8, 8), "trinet_cnn": (1, 8, 8), "trinet_svhn": (3, 8, 8),
    "resnet9": (3, 8, 8), "resnet18": (1, 8, 8), "resnet18_3x3": (3, 8, 8),
    "wresnet28x2": (3, 8, 8), "linear": (5,), "mlp": (5,), "text_cnn": (6, 5), "gru": (2, 5),
}  # fmt: skip
#: Networks whose layers occur in other networks too; exporting one takes seconds.
SLOW = (
    "lenet32", "alexnet", "trinet_svhn", "resnet18", "resnet18_3x3", "fedavg_cnn", "trinet_cnn",
    "resnet9", "wresnet28x2", "lenet", "linear",
)  # fmt: skip
FORMS = {"onnx": exported.as_onnx, "torch-export": exported.as_torch_export}
METADATA = {"class_names": "a\nb"}


def classifier(name: str, norm: str = "group") -> nn.Module:
    """A network whose weights and norm statistics all differ from their initial values."""
    torch.manual_seed(0)
    settings = ModelSettings(name=name, width=4, norm=norm)  # type: ignore[arg-type]
    network = models.build_classifier(settings, SHAPES[name], 3)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        rows = torch.randn(16, *SHAPES[name])
        network(rows)  # statistics of batch norm
        collect(network, [rows])  # and of static norm
    return network.eval()


def test_the_export_tests_cover_every_network() -> None:
    assert set(SHAPES) == set(models.CLASSIFIERS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in SHAPES]
)
def test_a_torch_export_computes_the_networks_outputs(name: str) -> None:
    network = classifier(name)
    written, apart = exported.checked(exported.as_torch_export, network, SHAPES[name], METADATA)
    assert len(written) > 1000 and apart <= 1e-4


def test_static_norms_are_exported_with_their_collected_statistics() -> None:
    _, apart = exported.checked(
        exported.as_torch_export, classifier("small_cnn", "static"), SHAPES["small_cnn"], METADATA
    )
    assert apart <= 1e-4
    bare = models.build_classifier(ModelSettings("small_cnn", 4, "static"), SHAPES["small_cnn"], 3)
    with pytest.raises(UserError, match="no statistics"):
        exported.checked(exported.as_torch_export, bare.eval(), SHAPES["small_cnn"], METADATA)


def test_an_exported_file_contains_no_path_and_no_source_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, here = classifier("mlp"), str(Path(models.__file__).parents[1]).encode()

    def traces() -> list[int]:
        written, _ = exported.checked(exported.as_torch_export, network, SHAPES["mlp"], METADATA)
        return [written.count(text) for text in (here, b".py", b"self.")]

    assert traces() == [0, 0, 0]
    rows = ({0: torch.export.Dim("rows")},)
    plain = torch.export.export(network, (torch.zeros(3, 5),), dynamic_shapes=rows)
    monkeypatch.setattr(exported, "_trace_network", lambda *_: plain)
    assert min(traces()) > 0  # the control: torch's own export


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "batch", "static", "none"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SHAPES)
def test_each_network_with_each_norm_can_be_exported_in_each_format(
    name: str, form: str, norm: str
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    if norm == "static" and len(SHAPES[name]) < 3:
        return  # only for images
    exported.checked(FORMS[form], classifier(name, norm), SHAPES[name], METADATA)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> privssl.Run:
    folder = tmp_path_factory.mktemp("export")
    return train(config(folder), data=dataset(), output=folder / "run")


def run_main(*arguments: object) -> int:
    return export.main([str(argument) for argument in arguments])


def test_the_export_command_writes_a_self_contained_file(
    run: privssl.Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "net.pt2"
    assert run_main(run.folder, "--torch-export", path) == 0
    assert "(B, 1, 8, 8), [-1, 1], to logits (B, 3)" in " ".join(capfd.readouterr().out.split())
    texts = dict.fromkeys(("class_names", "shape", "scaling"), "")
    network = torch.export.load(path, extra_files=texts).module()
    assert texts == {"class_names": "0\n1\n2", "shape": "1x8x8", "scaling": "[-1, 1]"}
    for rows in (1, 7):
        x = torch.randn(rows, 1, 8, 8)
        assert torch.allclose(network(x), run.classifier()(x), atol=1e-4)
    before = path.read_bytes()
    assert run_main(run.folder, "--torch-export", path) == 2
    assert "exists. Choose another file" in capfd.readouterr().err
    assert path.read_bytes() == before


def test_an_onnx_file_names_its_classes_and_accepts_any_number_of_rows(
    run: privssl.Run, tmp_path: Path
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "net.onnx"
    assert run_main(run.folder, "--onnx", path) == 0
    assert b".py" not in path.read_bytes()  # no path of this machine
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.get_modelmeta().custom_metadata_map
    assert found["class_names"].split("\n") == run.class_names
    for rows in (1, 7):
        x = torch.randn(rows, 1, 8, 8)
        [logits] = session.run(["logits"], {"x": x.numpy()})
        assert torch.allclose(torch.from_numpy(logits), run.classifier()(x), atol=1e-4)


# Refused exports ----------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        return logits


class Branching(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class RandomOutput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


class ThreeOutputs(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (2 if len(x) == 3 else 1))


@pytest.mark.parametrize(
    ("network", "error_text"),
    [
        (Branching(), "no branch on their values"),
        (RandomOutput(), "so it was not written"),
        (ThreeOutputs(), "cannot be exported"),
    ],
)
def test_a_network_that_cannot_be_exported_exactly_is_refused(
    network: nn.Module, error_text: str
) -> None:
    exported.checked(exported.as_torch_export, Plain().eval(), (4,), METADATA)  # the control
    with pytest.raises(UserError, match=error_text):
        exported.checked(exported.as_torch_export, network.eval(), (4,), METADATA)


@pytest.mark.parametrize("wrong", [2e-4, float("nan"), None])
def test_an_export_with_different_outputs_is_not_written(wrong: float | None) -> None:
    network = Plain().eval()

    def faulty(network: nn.Module, *_: Any) -> Any:
        return b"", lambda x: network(x)[:, :2] if wrong is None else network(x) + wrong

    with pytest.raises(UserError, match="so it was not written"):
        exported.checked(faulty, network, (4,), METADATA)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_the_error_names_a_missing_package_once(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None if name == package else object())
    with pytest.raises(ConfigError, match=f"needs {package}: pip install onnx onnxscript"):
        exported.as_onnx(Plain(), (4,), METADATA)


def test_a_folder_that_is_no_run_and_an_unknown_format_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_main(tmp_path, "--onnx", tmp_path / "x.onnx") == 2
    assert "has no results.json" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run_main(tmp_path)
    assert list(tmp_path.iterdir()) == []
