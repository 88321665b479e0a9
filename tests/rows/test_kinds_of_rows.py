"""Vectors, sequences and texts: their scaling, the networks and views for them, and refused configs
(privssl/core/rows.py).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.testing import assert_close

from privssl.algorithms import ALGORITHMS
from privssl.audit.__main__ import main as audit
from privssl.core import rows
from privssl.core.rows import KINDS, SEQUENCE, VECTOR
from privssl.data.augmentations import View
from privssl.data.canonical import canonical
from privssl.data.datasets import load_dataset
from privssl.errors import DataError, PrivacyError, UserError
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.models import CLASSIFIERS, build_classifier
from privssl.models.feature_nets import GRU
from privssl.settings.schema import DataSettings, ModelSettings
from privssl.train import main as train
from tests.support.toy_worlds import TOY

SHAPES: dict[str, tuple[int, ...]] = {"vector": (30,), "sequence": (6, 8)}
FLAT = TOY.x_train.flatten(1).numpy()

CONFIG: dict[str, dict[str, Any]] = {
    "run": {"images_every": 1, "checkpoint_every": 2, "workers": 1, "device": "cpu"},
    "data": {"name": "npz", "labelled": 40, "unlabelled": 60},
    "agents": {"support": 2, "query": 2},
    "model": {"name": "mlp", "width": 2},
    "algorithm": {
        "name": "fedssl", "rounds": 2, "local_steps": 2, "batch_size": 8, "generator_width": 2,
    },
}  # fmt: skip
PRIVATE = {
    "epsilon": 50.0, "noise_multiplier": 4.0, "steps": 2, "sample_rate": 1.0,
    "update_at_support": ["F", "D", "G"], "protect": ["F", "D", "G"],
}  # fmt: skip


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(kind: str, count: int = 5) -> Tensor:
    return torch.randn(count, *SHAPES[kind], generator=rng(1))


def save(path: Path, **changes: Any) -> Path:
    """An NPZ file of vectors with 64 features, made from toy rows."""
    y = TOY.y_train.numpy()
    arrays = {"x_train": FLAT[:400], "y_train": y[:400], "x_test": FLAT[400:500],
              "y_test": y[400:500]}  # fmt: skip
    np.savez(path, **(arrays | changes))
    return path


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write the config of a run on vectors, with other sections."""

    def write(**sections: Any) -> Path:
        root = str(save(tmp_path / "rows.npz"))
        data = {"data": CONFIG["data"] | {"root": root}, "run": CONFIG["run"] | {
            "output": str(tmp_path / "run")}}  # fmt: skip
        path = tmp_path / "vectors.yaml"
        path.write_text(yaml.safe_dump(CONFIG | data | sections))
        return path

    return write


# Scaling and content -------------------------------------------------------------------------


def test_vectors_of_bytes_are_scaled_like_pixels_and_other_numbers_are_unchanged() -> None:
    x = torch.tensor([[0, 255], [51, 204]], dtype=torch.uint8)
    assert_close(rows.network_input(x), torch.tensor([[-1.0, 1.0], [-0.6, 0.6]]))
    y = torch.tensor([[-3.0, 1e3]], dtype=torch.float16)
    assert_close(rows.network_input(y), torch.tensor([[-3.0, 1000.0]]))


def test_the_row_kinds_list_every_network_and_no_other() -> None:
    assert {name for kind in KINDS.values() for name in kind.networks} == set(CLASSIFIERS)


def test_the_mean_of_a_sequence_is_over_its_filled_positions() -> None:
    x = torch.tensor([[[1.0, 3.0], [0.0, 0.0], [3.0, 0.0]], [[0.0, 0.0]] * 3])
    assert_close(rows.pooled(x), torch.tensor([[2.0, 1.5], [0.0, 0.0]]))


def test_a_vector_is_one_record_for_every_stored_number_type() -> None:
    x = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    as_floats = rows.network_input(x)
    assert list(canonical(x)) == list(canonical(as_floats))
    assert list(canonical(torch.tensor([[0.0]]))) == list(canonical(torch.tensor([[-0.0]])))
    # The control: another number is another record.
    assert list(canonical(x)) != list(canonical(as_floats + 2**-20))


# Views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", ["weak", "mid", "strong"])
def test_a_view_depends_on_its_own_row_and_random_numbers_only(kind: str, name: str) -> None:
    x = some(kind)
    seen = View(name)(x, rng())
    assert seen.shape == x.shape
    assert not torch.equal(seen, x)
    other = x.clone()
    other[0] = other[3]
    again = View(name)(other, rng())
    assert torch.equal(seen[1:], again[1:])
    assert torch.equal(View(name)(x[:2], rng()), seen[:2])  # for any batch


def test_without_augmentation_views_equal_the_rows() -> None:
    x = some("vector")
    assert View("none")(x, rng()) is x


def test_a_strong_view_masks_its_share_of_features_and_adds_noise_to_the_rest() -> None:
    x = torch.ones(200, 500)
    seen = View("strong")(x, rng())
    assert float((seen == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(seen[seen != 0].std()) == pytest.approx(0.2, abs=0.01)


def test_empty_positions_of_a_sequence_stay_empty_and_whole_positions_are_masked() -> None:
    x = torch.ones(300, 6, 8)
    x[:, 4:] = 0
    seen = View("strong")(x, rng())
    assert not seen[:, 4:].any()
    masked = (seen[:, :4] == 0).all(dim=2)
    assert float(masked.float().mean()) == pytest.approx(0.2, abs=0.03)
    assert (seen[:, :4][~masked] != 0).all()


# Networks ------------------------------------------------------------------------------------


def cases(norm: tuple[str, ...]) -> list[tuple[str, str, str]]:
    kinds = {"vector": VECTOR, "sequence": SEQUENCE}
    return [(k, n, m) for k, kind in kinds.items() for n in kind.networks for m in norm]


@pytest.mark.parametrize(("kind", "name", "norm"), cases(("group", "none")))
def test_a_row_does_not_change_the_logits_of_other_rows(kind: str, name: str, norm: str) -> None:
    settings: Any = {"name": name, "width": 2, "norm": norm}
    F = build_classifier(ModelSettings(**settings), SHAPES[kind], 3)
    for p in F.parameters():  # a linear layer starts at 0
        torch.nn.init.normal_(p, generator=rng())
    x = some(kind)
    logits = F(x)
    assert logits.shape == (5, 3)
    other = x.clone()
    other[0] += 1
    assert torch.equal(F(other)[1:], logits[1:])
    assert not torch.equal(F(other)[0], logits[0])


def test_the_check_of_logits_detects_batch_norm() -> None:
    settings: Any = {"name": "mlp", "width": 2, "norm": "batch"}
    F = build_classifier(ModelSettings(**settings), (30,), 3)
    x = some("vector")
    other = x.clone()
    other[0] += 1
    assert not torch.equal(F(other)[1:], F(x)[1:])


@pytest.mark.parametrize("name", ["text_cnn", "gru"])
def test_padding_after_a_text_changes_nothing(name: Literal["text_cnn", "gru"]) -> None:
    F = build_classifier(ModelSettings(name=name, width=2), (6, 8), 3)
    x = some("sequence")
    x[:, 3:] = 0
    longer = torch.cat([x, torch.zeros(5, 4, 8)], dim=1)
    assert_close(F(longer), F(x))


def test_the_gru_computes_what_torchs_gru_computes() -> None:
    F = GRU((6, 8), 3, width=2, norm="none")
    twin = nn.GRU(8, 8, batch_first=True)
    for name, layer in (("ih", F.read), ("hh", F.keep)):
        getattr(twin, f"weight_{name}_l0").data = layer.weight.data
        getattr(twin, f"bias_{name}_l0").data = layer.bias.data
    x = some("sequence")
    assert_close(F(x), F.head(twin(x)[0].mean(dim=1)))
    # the control: the gates in another order
    twin.weight_ih_l0.data = twin.weight_ih_l0.data.roll(8, 0)  # type: ignore[operator]
    assert not torch.allclose(F(x), F.head(twin(x)[0].mean(dim=1)), atol=1e-3)


def test_an_empty_position_within_a_text_does_not_change_the_state_of_the_gru() -> None:
    F = build_classifier(ModelSettings(name="gru", width=2), (6, 8), 3)
    x = some("sequence")[:, :4]
    gap = torch.cat([x[:, :2], torch.zeros(5, 1, 8), x[:, 2:]], dim=1)
    assert_close(F(gap), F(x))


# Files and configs ---------------------------------------------------------------------------


def test_an_npz_file_may_contain_vectors(tmp_path: Path) -> None:
    dataset = load_dataset(DataSettings(name="npz", root=str(save(tmp_path / "a.npz"))))
    assert dataset.shape == (64,)
    assert torch.equal(dataset.x_train, torch.from_numpy(FLAT[:400]))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e5])
def test_vectors_with_non_finite_or_huge_numbers_are_refused(wrong: float, tmp_path: Path) -> None:
    x = FLAT[:400].astype(np.float32) / 255
    parts = {"x_train": x, "x_test": x[:100].copy()}
    load_dataset(DataSettings(name="npz", root=str(save(tmp_path / "ok.npz", **parts))))
    parts["x_test"][7, 3] = wrong
    with pytest.raises(DataError, match="x_test has vectors of float32"):
        load_dataset(DataSettings(name="npz", root=str(save(tmp_path / "a.npz", **parts))))


@pytest.mark.parametrize(
    ("section", "changed", "said"),
    [
        (
            "model",
            {"name": "small_cnn"},
            "model.name: small_cnn takes images, and rows are vectors",
        ),
        ("model", {"name": "text_cnn"}, "model.name: text_cnn takes sequences, and rows are vec"),
        ("algorithm", {"name": "fedtrinet"}, "fedtrinet needs images: it splices networks"),
        ("algorithm", {"name": "fixmatch"}, "algorithm.strong: fedmatch is a view of images"),
        ("algorithm", {"name": "semifl"}, "algorithm.weak: crop is a view of images"),
        (
            "algorithm",
            {"name": "fedseal", "validation_rows": 2},
            "positive_view: fedseal is a view",
        ),
        ("algorithm", {"name": "pseudo", "flip": True}, "algorithm.flip: true mirrors images"),
    ],
)
def test_settings_that_vectors_do_not_support_are_refused_with_the_reason(
    section: str, changed: dict[str, Any], said: str, written: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match="vectors of 64 numbers") as error:
        prepare(config.load_config(written(**{section: changed})))
    assert said in str(error.value)


def test_static_norm_is_refused_for_vectors(written: Callable[..., Path]) -> None:
    views = {"name": "semifl", "weak": "weak", "strong": "strong"}
    path = written(model={"name": "mlp", "norm": "static"}, algorithm=views)
    with pytest.raises(UserError, match="norm: static is for images"):
        prepare(config.load_config(path))


def test_networks_for_vectors_are_refused_for_images_when_the_config_is_read(
    written: Callable[..., Path],
) -> None:
    path = written(data={"name": "digits"})
    with pytest.raises(UserError, match="mlp takes sequences or vectors"):
        config.load_config(path)


def test_only_fedtrinet_requires_images() -> None:
    assert {name for name, kind in ALGORITHMS.items() if kind.needs_images} == {"fedtrinet"}


# A run ---------------------------------------------------------------------------------------


def test_a_run_on_vectors_records_the_kind_of_its_rows_and_draws_no_picture(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    assert train([str(written()), "--quiet"]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["rows"]["kind"] == "vector"
    assert results["rows"]["shape"] == [64]
    assert "no pictures" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("by", ["training rows", "rows with a label", "all rows", "others"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_private_run_refuses_vectors_that_were_scaled_by_their_own_statistics(
    by: str, ddof: int, written: Callable[..., Path], tmp_path: Path
) -> None:
    rows = {"training rows": FLAT[:400], "rows with a label": FLAT[:300], "all rows": FLAT[:500],
            "others": FLAT[500:900]}[by]  # fmt: skip
    y = TOY.y_train.numpy().copy()
    y[300:400] = -1
    path = written(privacy=PRIVATE)
    scaled = ((FLAT - rows.mean(axis=0)) / rows.std(axis=0, ddof=ddof)).astype(np.float32)
    save(tmp_path / "rows.npz", x_train=scaled[:400], y_train=y[:400], x_test=scaled[400:500])
    read = config.load_config(path)
    if by == "others":  # the control: these scaling constants may be public
        assert prepare(read).plan
        return
    with pytest.raises(PrivacyError, match="mean 0 and deviation 1, so the rows were scaled by"):
        prepare(read)
    prepare(config.load_config(path, ["privacy=null"]))  # no claim


def test_a_private_run_on_vectors_is_consistent_with_its_ledger(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    assert train([str(written(privacy=PRIVATE)), "--quiet"]) == 0
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["task"] == {"classes": 10, "shape": [64]}
    assert audit([str(tmp_path / "run")]) == 0
