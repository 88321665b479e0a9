"""Classifiers: shapes, sizes and independent rows; static batch norm; spliced networks."""

import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.testing import assert_close

from privssl.core.messages import StateDict
from privssl.core.rows import IMAGE, WITH_DROPOUT
from privssl.errors import ConfigError, DataError, PrivacyError
from privssl.models import CLASSIFIERS, build_classifier, optimize_layout
from privssl.models.splice import splice
from privssl.models.static_norm import StaticNorm, collect, statistics_of
from privssl.ops import dispatch, group_norm
from privssl.ops.dropout import Dropout
from privssl.privacy.independence import refuse_coupling_layers
from privssl.runtime.randomness import seeded, stream
from privssl.settings.names import NETWORKS
from privssl.settings.schema import ModelSettings
from privssl.training.batched.deferred import FunctionalModule
from privssl.training.local_training import weights_of

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 9, 15)]
NORMS = ["group", "batch", "static", "none"]
every_classifier = pytest.mark.parametrize("name", IMAGE.networks)


def classifier(
    name: str, shape: tuple[int, int, int] = (1, 8, 8), *, width: int = 4, norm: str = "group"
) -> nn.Module:
    settings: Any = {"name": name, "width": width, "norm": norm}
    with seeded(stream(0, 0, "world", "model")):
        return build_classifier(ModelSettings(**settings), shape, 10)


def unfilled(name: str, shape: tuple[int, int, int], norm: str) -> nn.Module:
    """At full size, with uninitialised tensors: quick to build, enough for counting."""
    settings: Any = {"name": name, "norm": norm}
    with torch.device("meta"):
        return build_classifier(ModelSettings(**settings), shape, 10)


def rows(count: int, shape: tuple[int, int, int] = (1, 8, 8)) -> Tensor:
    return 2 * torch.rand(count, *shape, generator=stream(0, 0, "world", "rows")) - 1


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def changed_row(x: Tensor, row: int) -> Tensor:
    """The batch with one row inverted and dimmed."""
    other = x.clone()
    other[row] = -0.5 * other[row].flip(-1) + 0.1
    return other


# Shapes and sizes ---------------------------------------------------------------------------


def test_a_config_can_name_every_classifier_and_norm() -> None:
    hints = get_type_hints(ModelSettings)
    assert set(NETWORKS) == set(CLASSIFIERS)
    assert set(get_args(hints["norm"])) == set(NORMS)
    assert ModelSettings() == ModelSettings("small_cnn", 16, "group")


@pytest.mark.fast_cases(44)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
@every_classifier
def test_a_classifier_gives_one_number_per_row_and_class(
    name: str, shape: tuple[int, int, int], norm: str
) -> None:
    logits = classifier(name, shape, norm=norm)(rows(3, shape))
    assert logits.shape == (3, 10)
    assert bool(logits.isfinite().all())


@every_classifier
def test_rows_too_small_for_three_poolings_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"7x8 pixels, and {name} needs at least 8x8"):
        classifier(name, (1, 7, 8))


def test_the_small_cnn_has_the_size_in_the_specification() -> None:
    # convolutions (5*5*1+1)*16, (3*3*16+1)*32, (3*3*32+1)*64; norms 2*(16+32+64); head
    # (64*3*3+1)*10: 28 pixels are halved to 14, 7, 3
    assert 26 * 16 + 145 * 32 + 289 * 64 + 224 + 577 * 10 == 29_546
    assert size(classifier("small_cnn", (1, 28, 28), width=16)) == 29_546


def test_lenet_without_a_norm_has_the_size_of_lenet_5() -> None:
    # LeCun et al. 1998 with full connections: 156 + 2,416 + 48,120 + 10,164 + 850
    assert size(classifier("lenet", (1, 28, 28), width=16, norm="none")) == 61_706
    # 32 * 76 + 64 * 801 + 512 * 4097 + 10 * 513: the 2.2 million of SemiFL's Table 3
    assert size(classifier("fedavg_cnn", (3, 32, 32), width=16, norm="none")) == 2_156_490


@pytest.mark.parametrize(("side", "parameters"), [(32, 30_840), (28, 21_840)])
def test_fedtrinets_network_has_the_sizes_in_the_paper(side: int, parameters: int) -> None:
    # 32 -> 28 -> 14 -> 10 -> 5 pixels, 20 channels: 500 features; 28 -> 24 -> 12 -> 8 -> 4: 320
    network = classifier("trinet_cnn", (1, side, side), width=16, norm="none")
    shallow, deep = (network.get_submodule(half) for half in ("shallow", "deep"))
    features = {32: 500, 28: 320}[side]
    assert size(shallow) == (25 * 1 + 1) * 10 + (25 * 10 + 1) * 20 == 5_280
    assert size(deep) == (features + 1) * 50 + 51 * 10
    assert size(network) == size(shallow) + size(deep) == parameters


@pytest.mark.parametrize(
    ("shape", "features"), [((1, 16, 16), 20), ((1, 16, 32), 20 * 5), ((1, 8, 8), 20 * 2 * 2)]
)
def test_fedtrinets_network_pads_only_if_its_convolutions_would_leave_no_pixel(
    shape: tuple[int, int, int], features: int
) -> None:
    # 16 -> 12 -> 6 -> 2 -> 1; padded 8 -> 8 -> 4 -> 4 -> 2
    network = classifier("trinet_cnn", shape, width=16, norm="none")
    assert size(network.get_submodule("deep")) == (features + 1) * 50 + 51 * 10


def test_lenet32_is_fedseals_unpadded_lenet_for_svhn() -> None:
    # 32 -> 28 -> 14 -> 10 -> 5 pixels: 400 features, as from 28 pixels padded by two
    assert 76 * 6 + 151 * 16 + 401 * 120 + 121 * 84 + 85 * 10 == 62_006
    assert size(classifier("lenet32", (3, 32, 32), width=16, norm="none")) == 62_006
    padded = size(classifier("lenet", (3, 32, 32), width=16, norm="none"))
    assert padded == 62_006 + (36 - 25) * 16 * 120  # the control: 32 -> 32 -> 16 -> 12 -> 6


@pytest.mark.parametrize("side", [28, 32])
def test_the_alexnet_variant_has_the_layers_of_fedmatch(side: int) -> None:
    # 32 -> 29 -> 14 -> 12 -> 6 -> 5 -> 2 and 28 -> 25 -> 12 -> 10 -> 5 -> 4 -> 2: 1,024 features
    convolutions = 16 * 3 * 64 + 9 * 64 * 128 + 4 * 128 * 256
    bare = convolutions + 1024 * 2048 + 2048 * 2048 + 2048 * 10
    assert bare == 6_519_808
    assert size(unfilled("alexnet", (3, side, side), "none")) == bare
    # a bias, a weight and a shift of the norm per channel; a bias per unit and class
    normed = bare + 3 * (64 + 128 + 256) + 2 * 2048 + 10
    assert size(unfilled("alexnet", (3, side, side), "group")) == normed


def test_fedtrinets_network_for_svhn_has_the_size_of_the_authors_network() -> None:
    network = unfilled("trinet_svhn", (3, 32, 32), "batch")
    shallow, deep = (size(network.get_submodule(half)) for half in ("shallow", "deep"))
    # convolution and norm, convolution: by blocks, as the specification counts them
    assert shallow == (28 * 32 + 2 * 32) + 289 * 64 == 960 + 18_496
    convolutions = 577 * 128 + 2 * 128 + 1153 * 128 + 1153 * 256 + 2 * 256 + 2305 * 256
    linear = 4097 * 1024 + 1025 * 512 + 513 * 10
    assert (convolutions, linear) == (1_107_456, 4_725_258)
    assert deep == convolutions + linear
    assert size(network) == 5_852_170


def size_of_resnet18(name: str, channels: int, width: int) -> int:
    first = 4 * width
    total, before = (49 if name == "resnet18" else 9) * channels * first + 2 * first, first
    for out in (first, 2 * first, 4 * first, 8 * first):
        total += 9 * before * out + 3 * 9 * out * out + 4 * 2 * out
        total += 0 if out == before else before * out + 2 * out  # shortcut
        before = out
    return total + (before + 1) * 10


@pytest.mark.parametrize("name", ["resnet18", "resnet18_3x3"])
def test_resnet18_has_the_sizes_of_both_stems(name: str) -> None:
    of_the_paper = {"resnet18": 11_175_370, "resnet18_3x3": 11_172_810}[name]
    assert size_of_resnet18(name, 1, 16) == of_the_paper
    assert size(classifier(name, (1, 28, 28), width=16)) == of_the_paper
    for norm in ("batch", "static"):
        bfloat16_network = classifier(name, (3, 32, 32), width=2, norm=norm)
        assert size(bfloat16_network) == size_of_resnet18(name, 3, 2)


@pytest.mark.parametrize(("name", "side"), [("resnet18", 28 // 4), ("resnet18_3x3", 28)])
def test_the_7x7_stem_quarters_the_image_and_the_3x3_stem_keeps_its_size(
    name: str, side: int
) -> None:
    network, seen = classifier(name, (1, 28, 28), width=1), list[torch.Size]()
    for part in ("stem", "trunk"):
        hook = lambda _m, _x, y: seen.append(y.shape)  # noqa: E731
        network.get_submodule(part).register_forward_hook(hook)
    network(rows(2, (1, 28, 28)))
    last = math.ceil(side / 8)  # three blocks halve
    assert seen == [(2, 4, side, side), (2, 32, last, last)]


@pytest.mark.slow
def test_resnet18_computes_what_torchvisions_resnet18_computes() -> None:
    torchvision = pytest.importorskip("torchvision")
    x = rows(2, (3, 32, 32))
    ours = classifier("resnet18", (3, 32, 32), width=16, norm="batch").eval()
    theirs = torchvision.models.resnet18(num_classes=10).eval()
    state = list(ours.state_dict().values())
    assert [t.shape for t in theirs.state_dict().values()] == [t.shape for t in state]
    theirs.load_state_dict(dict(zip(theirs.state_dict(), state, strict=True)))
    assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)
    theirs.layer3[1].conv2.weight.data.mul_(1.01)  # the control
    assert float((ours(x) - theirs(x)).abs().max().detach()) > 1e-3


RESNET9 = ((3, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), *[(512, 512)] * 2)


def test_resnet9_without_norm_is_nine_tensors_of_fedmatchs_size() -> None:
    network = unfilled("resnet9", (3, 32, 32), "none")
    assert sum(9 * i * o for i, o in RESNET9) + 512 * 10 == 6_568_640
    assert size(network) == 6_568_640
    assert len(list(network.parameters())) == len(network.state_dict()) == 9


@pytest.mark.parametrize("norm", ["batch", "group", "static"])
def test_resnet9_with_norm_has_biases_and_the_size_of_fedseals_network(norm: str) -> None:
    # a bias, a weight and a shift of the norm per channel; a bias per class
    channels = sum(out for _, out in RESNET9)
    assert 6_568_640 + 3 * channels + 10 == 6_575_370
    assert size(unfilled("resnet9", (3, 32, 32), norm)) == 6_575_370


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64)])
def test_resnet9_has_one_head_for_all_image_sizes(shape: tuple[int, int, int]) -> None:
    network = unfilled("resnet9", shape, "none")
    assert size(network) == 6_568_640 - 9 * (3 - shape[0]) * 64


def test_at_32_pixels_resnet9_equals_the_papers_network_with_4x4_pooling() -> None:
    network, x = classifier("resnet9", (3, 32, 32), norm="none").eval(), rows(2, (3, 32, 32))
    w = list(network.parameters())

    def conv(x: Tensor, number: int) -> Tensor:
        return nn.functional.conv2d(x, w[number], padding=1).relu()

    halve: Callable[[Tensor], Tensor] = nn.MaxPool2d(2)
    h = halve(conv(conv(x, 0), 1))
    h = conv(conv(h, 2), 3) + h
    h = halve(conv(halve(conv(h, 4)), 5))
    h = conv(conv(h, 6), 7) + h
    assert_close(network(x), nn.MaxPool2d(4)(h).flatten(1) @ w[8].T)


def test_resnet9_without_norm_has_truncated_normal_weights_of_variance_one_over_fan_in() -> None:
    for weight in classifier("resnet9", (3, 32, 32), width=8, norm="none").parameters():
        fan_in = weight[0].numel()
        # the variance of N values about zero, here nearly normal, spreads by sqrt(2 / N)
        spread = 6 * math.sqrt(2 / weight.numel())
        assert float(weight.detach().var()) * fan_in == pytest.approx(1, abs=spread)
        # 0.8796 is the deviation of a standard normal truncated at two
        assert float(weight.detach().abs().max()) <= 2 / 0.8796 / math.sqrt(fan_in)


@pytest.mark.parametrize("norm", ["static", "batch", "group"])
def test_the_wide_resnet_has_the_size_of_wresnet_28x2(norm: str) -> None:
    total = 9 * 3 * 16  # stem
    channels = 16
    for out in (32, 64, 128):
        first = 9 * channels * out + 9 * out * out + 2 * channels + 2 * out + channels * out
        total += first + 3 * (2 * 9 * out * out + 2 * 2 * out)
        channels = out
    total += 2 * 128 + 129 * 10  # last norm, head
    assert total == 1_467_610
    assert size(classifier("wresnet28x2", (3, 32, 32), width=16, norm=norm)) == total


def test_the_wide_resnet_has_28_convolutions_and_the_initial_weights_of_semifl() -> None:
    network = classifier("wresnet28x2", (3, 32, 32), width=16)
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 1 + 24 + 3  # the stem, two in each of 12 blocks, the shortcuts
    for layer in convolutions:
        out, _, high, wide = layer.weight.shape
        variance = 2 / (out * high * wide)  # kaiming, fan-out
        spread = 6 * math.sqrt(2 / layer.weight.numel())
        assert float(layer.weight.detach().var()) / variance == pytest.approx(1, abs=spread)
    head = network.get_submodule("head")
    assert isinstance(head, nn.Linear) and not bool(head.bias.any())


def test_the_wide_resnet_quarters_the_image_and_narrows_with_its_width() -> None:
    seen: list[torch.Size] = []
    network = classifier("wresnet28x2", (3, 32, 32), width=4)
    network.get_submodule("trunk").register_forward_hook(lambda _m, _x, y: seen.append(y.shape))
    network(rows(2, (3, 32, 32)))
    assert seen == [(2, 8 * 4, 8, 8)]


# Independence of rows -----------------------------------------------------------------------


def in_training(network: nn.Module, x: Tensor) -> Tensor:
    """The logits in training mode, with the same dropout masks every time."""
    with seeded(stream(0, 0, "world", "dropout")):
        logits: Tensor = network.train()(x)
    return logits


@pytest.mark.parametrize("norm", ["group", "none"])
@every_classifier
def test_changing_a_row_does_not_change_the_logits_of_others(name: str, norm: str) -> None:
    # Wide enough that dropout keeps some of each row.
    network, x = classifier(name, width=8, norm=norm), rows(4)
    before, after = in_training(network, x), in_training(network, changed_row(x, 2))
    others = torch.tensor([0, 1, 3])
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[2], after[2])  # the control: the row itself changes


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("norm", ["batch", "static"])
@every_classifier
def test_the_check_of_logits_detects_batch_norm(name: str, norm: str) -> None:
    network, x = classifier(name, width=8, norm=norm), rows(4)
    before, after = in_training(network, x), in_training(network, changed_row(x, 2))
    assert float((before - after)[0].abs().max().detach()) > 1e-4


@every_classifier
def test_a_batch_gives_the_logits_of_its_rows_one_at_a_time(name: str) -> None:
    network, x = classifier(name).eval(), rows(4)
    batch = network(x)
    assert_close(torch.cat([network(row[None]) for row in x]), batch)
    parameters: dict[str, Tensor] = dict(network.named_parameters())
    one = vmap(lambda row: functional_call(network, parameters, (row[None],))[0])
    assert_close(one(x), batch)


def test_older_torch_versions_skip_the_vmap_layout_query_and_norms_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On them this whole file is the test: `make test-oldest`.
    seen, real = [], functional.group_norm

    def asked(x: Tensor, *others: Any) -> Tensor:
        seen.append(x.dim())
        return real(x, *others)

    monkeypatch.setattr(functional, "group_norm", asked)
    network, x = classifier("small_cnn").eval(), rows(4)
    parameters: dict[str, Tensor] = dict(network.named_parameters())
    one = vmap(lambda row: functional_call(network, parameters, (row[None],))[0])
    for older in {True, group_norm.ASKS}:
        monkeypatch.setattr(group_norm, "ASKS", older)
        seen.clear()
        with dispatch.disabled():
            assert_close(one(x), network(x))
        assert seen == ([3, 3, 3] if older else [4, 4, 4]) + [4, 4, 4]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", [name for name in IMAGE.networks if name not in WITH_DROPOUT])
def test_a_private_run_refuses_norms_that_couple_rows_by_name(name: str, norm: str) -> None:
    network = classifier(name, norm=norm)
    if norm in ("group", "none"):
        refuse_coupling_layers({"F": network})
        assert not list(network.buffers())
        return
    layer = {"batch": "BatchNorm2d", "static": "StaticNorm"}[norm]
    with pytest.raises(PrivacyError, match=rf"F\.\S+ \({layer}\).*Set model.norm: group"):
        refuse_coupling_layers({"F": network})


# Static batch norm --------------------------------------------------------------------------


def static(weight: float = 1.0, bias: float = 0.0, channels: int = 1) -> StaticNorm:
    layer = StaticNorm(channels)
    nn.init.constant_(layer.weight, weight)
    nn.init.constant_(layer.bias, bias)
    return layer


def values(*numbers: float) -> Tensor:
    """Rows of one channel and one pixel."""
    return torch.tensor([float(number) for number in numbers]).view(-1, 1, 1, 1)


def test_in_training_static_norm_uses_batch_statistics_and_stores_nothing() -> None:
    layer, plain = static(2.0, 1.0, channels=3), nn.BatchNorm2d(3)
    nn.init.constant_(plain.weight, 2.0)
    nn.init.constant_(plain.bias, 1.0)
    x = rows(4, (3, 5, 6))
    before = weights_of(layer)
    assert_close(layer.train()(x), plain.train()(x))
    after = weights_of(layer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    trace = weights_of(plain)["running_mean"]  # the control: batch norm stores statistics
    assert not torch.equal(trace, torch.zeros(3))


def test_in_training_static_norm_uses_batch_statistics_whatever_was_collected() -> None:
    layer, x = static(channels=3), rows(4, (3, 5, 6))
    before = layer.train()(x)
    collect(layer, [3 * x + 5])
    assert torch.equal(layer.train()(x), before)
    assert not torch.allclose(layer.eval()(x), before)  # the control


def test_without_collected_statistics_evaluation_uses_batch_statistics() -> None:
    layer, x = static(channels=3), rows(4, (3, 5, 6))
    assert torch.equal(layer.train()(x), layer.eval()(x))


def test_collected_statistics_are_means_over_batches_of_mean_and_unbiased_variance() -> None:
    # batches (0, 2) and (4, 8, 12): means 1 and 8, unbiased variances 2 and 16
    layer = static(3.0, 0.5)
    collect(layer, [values(0, 2), values(4, 8, 12)])
    mean, var = 4.5, 9.0
    assert (layer.running_mean, layer.running_var) == (torch.tensor([mean]), torch.tensor([var]))
    # not those of all five rows: mean 5.2, unbiased variance 23.2
    expected = [3 * (x - mean) / math.sqrt(var + 1e-5) + 0.5 for x in (1.0, 100.0)]
    assert_close(layer.eval()(values(1.0, 100.0)).flatten(), torch.tensor(expected))


def test_statistics_of_rows_in_bfloat16_are_float32() -> None:
    layer = static(channels=1)
    collect(layer, [values(0, 2).bfloat16(), values(4, 8).bfloat16()])  # exact in bfloat16
    assert (layer.running_mean, layer.running_var) == (torch.tensor([3.5]), torch.tensor([5.0]))
    assert layer.eval()(values(3.5).bfloat16()).item() == 0.0


def test_collected_statistics_equal_torchs_cumulative_averages_layer_by_layer() -> None:
    network = classifier("wresnet28x2", norm="static")
    plain = classifier("wresnet28x2", norm="batch")
    plain.load_state_dict(weights_of(network))
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
    batches = [rows(7), rows(12)[7:], 0.3 * rows(6)]
    for batch in batches:
        plain.train()(batch)
    collect(network, batches)
    assert_close(weights_of(network), weights_of(plain))
    assert_close(network.eval()(rows(4)), plain.eval()(rows(4)))


def test_collecting_starts_anew_and_does_not_change_weights_modes_and_gradients() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.5), StaticNorm(2), nn.ReLU()).train()
    network[3].eval()
    before, modes = weights_of(network), [module.training for module in network.modules()]
    collect(network, [rows(5)])
    first = statistics_of(network)
    assert collect(network, [rows(5)]) is network
    assert all(torch.equal(value, first[key]) for key, value in statistics_of(network).items())
    after = weights_of(network)
    assert all(torch.equal(before[key], after[key]) for key in before if key not in first)
    assert [module.training for module in network.modules()] == modes
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(value.requires_grad for value in first.values())


def test_dropout_is_off_while_statistics_are_collected() -> None:
    network = nn.Sequential(nn.Dropout(0.5), static()).train()
    collect(network, [values(2, 4)])
    assert statistics_of(network)["1.running_mean"].item() == 3.0


def test_modes_are_restored_when_a_batch_fails() -> None:
    network = nn.Sequential(StaticNorm(2)).train()
    with pytest.raises(RuntimeError):
        collect(network, [rows(3)])  # one channel instead of two
    assert all(module.training for module in network.modules())
    assert not network[0].collecting


def test_statistics_of_several_agents_equal_one_collection_over_all_of_them() -> None:
    # The pooling of B5 in the specification, computed where the rows are.
    network = classifier("small_cnn", norm="static")
    one, other = [rows(9)[:4]], [rows(9)[4:7], 0.5 * rows(9)[7:]]
    pooled = statistics_of(collect(network, [*one, *other]))
    parts = [statistics_of(collect(network, part)) for part in (one, other)]
    for key, value in pooled.items():
        if key.endswith("num_batches_tracked"):
            assert [int(part[key]) for part in parts] == [1, 2] and int(value) == 3
        else:
            assert_close((parts[0][key] + 2 * parts[1][key]) / 3, value)


def test_without_batches_or_static_norms_nothing_is_collected() -> None:
    network = classifier("small_cnn", norm="static")
    collect(network, [rows(4)])
    collect(network, [])
    assert torch.equal(network.eval()(rows(4)), network.train()(rows(4)))
    bare = classifier("small_cnn", norm="group")
    never = iter([rows(4)])
    assert statistics_of(collect(bare, never)) == {}
    assert len(list(never)) == 1


def test_a_single_value_has_no_variance_and_becomes_the_bias() -> None:
    layer = static(3.0, 0.5)
    # 7 - 7, times 3 / sqrt(1e-5) = 949, plus 0.5; rounding of 7 * 949 may leave 1e-3
    assert layer.train()(values(7.0)).item() == pytest.approx(0.5, abs=1e-3)
    collect(layer, [values(7.0), values(1.0, 5.0)])
    # variances 0 and 8
    assert (layer.running_mean, layer.running_var) == (torch.tensor([5.0]), torch.tensor([4.0]))
    x = values(7.0).requires_grad_()
    layer.train()(x).sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_statistics_are_sent_in_the_state_dict_and_separately() -> None:
    network, other = classifier("resnet9", norm="static"), classifier("resnet9", norm="static")
    collect(network, [rows(6)])
    kept = statistics_of(network)
    assert len(kept) == 3 * 8
    assert kept.keys() == {key for key, _ in network.named_buffers()}
    other.load_state_dict({**weights_of(other), **kept})
    assert torch.equal(network.eval()(rows(3)), other.eval()(rows(3)))
    kept["conv1.1.running_mean"].zero_()  # a copy: the network does not change
    assert torch.equal(network(rows(3)), other(rows(3)))


# Spliced networks ---------------------------------------------------------------------------


def two(name: str, norm: str = "batch") -> tuple[StateDict, StateDict]:
    first = weights_of(classifier(name, norm=norm))
    return first, {key: value + 1 for key, value in first.items()}


@pytest.mark.parametrize("norm", NORMS)
def test_a_splice_has_the_shallow_half_of_one_network_and_the_deep_half_of_another(
    norm: str,
) -> None:
    one, other = two("trinet_cnn", norm)
    mixed = splice(one, other, ["shallow"])
    assert list(mixed) == list(other)
    for key, value in mixed.items():
        assert torch.equal(value, (one if key.startswith("shallow.") else other)[key])
    classifier("trinet_cnn", norm=norm).load_state_dict(dict(mixed))
    assert any("running_mean" in key for key in mixed) == (norm in ("batch", "static"))


@every_classifier
def test_a_splice_with_itself_is_unchanged_and_all_or_no_layers_give_one_of_the_two(
    name: str,
) -> None:
    one, other = two(name)
    whole = sorted({key.partition(".")[0] for key in one})
    for found, expected in (
        (splice(one, one, whole[:1]), one),
        (splice(one, other, whole), one),
        (splice(one, other, []), other),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


def test_a_name_selects_its_module_and_no_module_with_the_same_prefix() -> None:
    one = {f"trunk.{n}.weight": torch.tensor(1.0) for n in (1, 10, 11)}
    other = {key: torch.tensor(2.0) for key in one}
    mixed = splice(one, other, ["trunk.1"])
    assert [float(value) for value in mixed.values()] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["conv1", "shallow.99", "shallow.0.weight", "", "shall"])
def test_an_unknown_layer_name_is_refused_with_the_known_ones(name: str) -> None:
    one, other = two("trinet_cnn")
    with pytest.raises(ConfigError) as refusal:
        splice(one, other, ["shallow", name])
    assert f"no layers under {name!r}" in str(refusal.value)
    assert "it has deep, shallow" in str(refusal.value)


def test_networks_of_two_architectures_cannot_be_spliced() -> None:
    one, other = two("trinet_cnn", "batch")[0], two("trinet_cnn", "none")[0]
    with pytest.raises(ValueError, match="one architecture"):
        splice(one, other, ["shallow"])


# Networks as functions ----------------------------------------------------------------------


def test_a_network_can_be_called_with_other_parameters() -> None:
    network = nn.Linear(2, 1)
    other = {"weight": torch.tensor([[2.0, 3.0]]), "bias": torch.tensor([1.0])}
    assert FunctionalModule(network, other)(torch.tensor([[1.0, 1.0]])).item() == 6.0  # 2 + 3 + 1


def test_gradients_flow_through_a_frozen_network_but_not_into_it() -> None:
    network, x = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
    FunctionalModule(network).frozen()(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, network.weight.detach())
    weight: Tensor = network.weight
    assert weight.grad is None
    network(x).sum().backward()  # the control: the network itself gets a gradient
    assert weight.grad is not None


# Precision ----------------------------------------------------------------------------------


def gradient_of(network: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def bfloat16_network(name: str, norm: str) -> nn.Module:
    settings: Any = {"name": name, "width": 4, "norm": norm}
    with seeded(stream(0, 0, "world", "model")):
        return build_classifier(ModelSettings(**settings), (1, 8, 8), 10, "bfloat16")


@pytest.mark.fast_cases(11)
@pytest.mark.parametrize("norm", NORMS)
@every_classifier
def test_a_bfloat16_network_has_the_weights_of_a_float32_one_and_similar_gradients(
    name: str, norm: str
) -> None:
    wide, thin = classifier(name, norm=norm), bfloat16_network(name, norm)
    found = {}
    for network in (wide, thin):
        with seeded(stream(0, 0, "world", "dropout")):
            logits = network(rows(32))
        logits.logsumexp(dim=1).sum().backward()
        found[network] = logits, gradient_of(network)
    assert list(thin.state_dict()) == list(wide.state_dict())
    for key, value in thin.named_parameters():
        assert value.dtype == torch.float32, key
        assert torch.equal(value, wide.get_parameter(key)), key
    (logits, gradient), (rounded, coarse) = found[wide], found[thin]
    assert rounded.dtype == coarse.dtype == torch.float32
    # 8 bits of fraction: 0.4% in a product, some percent after eight layers and a ReLU's kinks,
    # more after 18 whose batch norms are of 32 numbers
    deep = name.startswith("resnet18") and norm in ("batch", "static")
    assert (rounded - logits).norm() < (0.1 if deep else 0.05) * logits.norm()
    assert torch.cosine_similarity(gradient, coarse, dim=0) > (0.85 if deep else 0.98)
    assert not torch.equal(rounded, logits)  # autocast is enabled


# Dropout ------------------------------------------------------------------------------------


def dropped(p: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """400,000 ones, channels last, after dropout in training mode."""
    ones = torch.ones(50, 40, 20, 10, dtype=dtype).contiguous(memory_format=torch.channels_last)
    with seeded(stream(seed, 1, "q0", "dropout")):
        after: Tensor = Dropout(p)(ones)
        return after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.25, 0.3, 0.5, 0.9])
def test_dropout_keeps_the_configured_share_and_scales_like_torch(
    p: float, dtype: torch.dtype
) -> None:
    after = dropped(p, dtype)
    [large] = set(after[after != 0].tolist())
    torchs = torch.nn.functional.dropout(torch.ones(1000, dtype=dtype), p)
    assert {large} == set(torchs[torchs != 0].tolist())
    assert abs(float((after == 0).float().mean()) - p) < 5 * (p * (1 - p) / 400_000) ** 0.5


@pytest.mark.parametrize("p", [0.25, 0.3])
def test_dropout_is_equally_likely_at_every_position_and_independent_between_positions(
    p: float,
) -> None:
    in_memory = dropped(p).permute(0, 2, 3, 1).reshape(-1, 8) == 0  # a word has eight bytes
    rates = in_memory.float().mean(dim=0)
    assert float((rates - p).abs().max()) < 5 * (p * (1 - p) / 50_000) ** 0.5
    together = in_memory.float().T.cov() / (p * (1 - p))
    assert float((together - torch.eye(8)).abs().max()) < 5 / 50_000**0.5


def test_gradients_flow_through_kept_values() -> None:
    x = torch.ones(1000, requires_grad=True)
    after = Dropout(0.5)(x)
    after.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, after.detach())


def test_dropout_depends_on_the_seed() -> None:
    assert torch.equal(dropped(0.5, seed=1), dropped(0.5, seed=1))
    assert not torch.equal(dropped(0.5, seed=1), dropped(0.5, seed=2))


def test_dropout_changes_nothing_in_evaluation_and_works_for_rates_0_and_1() -> None:
    x = torch.linspace(-1, 1, 100)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not Dropout(1.0)(x).any()
    almost = Dropout(1 - 2.0**-40)(x)
    assert almost.isfinite().all()


def test_networks_are_built_with_our_dropout() -> None:
    network = build_classifier(ModelSettings("trinet_cnn"), (1, 28, 28), 10)
    kinds = [type(layer) for layer in network.modules()]
    assert Dropout in kinds
    assert torch.nn.Dropout not in kinds


# Layers after pooling ----------------------------------------------------------------------


@pytest.mark.parametrize("first", [(nn.ReLU(),), (nn.Dropout2d(0.3),), (nn.ReLU(), nn.Dropout2d())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_moved_behind_pooling_give_the_same_bits_and_gradients(
    first: tuple[nn.Module, ...], dtype: torch.dtype
) -> None:
    # Whole numbers from -2 to 2: ties, zeros, and windows in which nothing is above zero.
    x = torch.randint(-2, 3, (6, 4, 8, 8), generator=stream(0, 0, "world", "ties")).to(dtype)
    windows = x.unfold(2, 2, 2).unfold(3, 2, 2).amax(dim=(-1, -2))
    assert all(bool((windows == level).any()) for level in (-1, 0, 2))
    g = torch.rand(6, 4, 4, 4, generator=stream(0, 0, "world", "slope")).to(dtype)
    plain, late = (nn.Sequential(*first, nn.MaxPool2d(2), nn.ReLU()) for _ in range(2))
    assert isinstance(optimize_layout(late)[0], nn.MaxPool2d)
    found: list[tuple[Tensor, Any]] = []
    for network in (plain, late):
        rows = x.clone().requires_grad_()
        with seeded(stream(0, 0, "world", "dropout")):
            out = network(rows)
        out.backward(g)
        found.append((out.detach(), rows.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_only_adjacent_layers_that_commute_are_exchanged() -> None:
    network = optimize_layout(
        nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.LeakyReLU(),
            nn.MaxPool2d(2), nn.ReLU(), nn.AvgPool2d(2), nn.Sequential(nn.ReLU()), nn.MaxPool2d(1),
            nn.ReLU(), nn.MaxPool2d(1, return_indices=True),
        )
    )  # fmt: skip
    assert [type(layer).__name__ for layer in network] == [
        "Conv2d", "MaxPool2d", "ReLU", "LeakyReLU", "MaxPool2d", "ReLU", "AvgPool2d", "Sequential",
        "MaxPool2d", "ReLU", "MaxPool2d",
    ]  # fmt: skip
    assert set(network.state_dict()) == {"0.weight", "0.bias"}


def test_resnet9_pools_after_its_second_third_and_fourth_convolution() -> None:
    F: Any = classifier("resnet9", (3, 32, 32), norm="none")
    seen: list[tuple[str, int]] = []
    for name, layer in F.named_modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _, __, y, name=name: seen.append((name, y.shape[2])))
    F(rows(1, (3, 32, 32)))
    assert seen == [
        ("conv1.0", 32), ("conv2.0", 32), ("residual1.0.0", 16), ("residual1.1.0", 16),
        ("conv3.0", 16), ("conv4.0", 8), ("residual2.0.0", 4), ("residual2.1.0", 4),
    ]  # fmt: skip
