"""Spectral norms by a kernel of ours: torch's, but for rounding."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.nn.utils import parametrizations

import generators.spectral
from generators import ImageDiscriminator
from privssl.models import optimize_layout
from privssl.ops import dispatch
from privssl.ops import spectral_norm_binding as kernel
from privssl.ops.spectral_norm import SpectralNorm
from tests.support.kernel_generations import HERE

if not HERE:
    pytest.skip("no kernels were compiled", allow_module_level=True)

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": partial(nn.Linear, 37, 5),
    "one row": partial(nn.Linear, 9, 1),
    "large linear": partial(nn.Linear, 1568, 64),
    "grey": partial(nn.Conv2d, 1, 16, 4),
    "convolution": partial(nn.Conv2d, 3, 7, (2, 3)),
    "wide convolution": partial(nn.Conv2d, 16, 32, 4),
    "places": partial(nn.Conv2d, 5, 6, 1),
}


def normalised(layer: nn.Module, iterations: int = 1) -> nn.Module:
    """By torch, in float64, from vectors that have far to go."""
    network = parametrizations.spectral_norm(layer.double(), n_power_iterations=iterations)
    for vector in network.buffers():
        vector.copy_(functional.normalize(torch.randn_like(vector), dim=0))
    return network


def ours(network: nn.Module) -> nn.Module:
    """The same in float32, by the kernel."""
    mine = copy.deepcopy(network).float()
    for module in mine.modules():
        if isinstance(module, parametrizations._SpectralNorm):
            module.__class__ = SpectralNorm
    return mine.to(memory_format=torch.channels_last)


def weight_of(layer: nn.Module) -> Tensor:
    """What it multiplies with; each look at it moves the vectors in training."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


@pytest.mark.usefixtures("each_generation")
@pytest.mark.parametrize("which", LAYERS)
@pytest.mark.parametrize("iterations", [1, 3])
def test_weights_vectors_and_gradients_are_torchs(which: str, iterations: int) -> None:
    torch.manual_seed(0)
    torchs = normalised(LAYERS[which](), iterations)
    mine = ours(torchs)
    down = torch.randn_like(torchs.get_parameter("parametrizations.weight.original")).detach()
    for network in (torchs, mine):
        before = [vector.clone() for vector in network.buffers()]
        first, second = weight_of(network), weight_of(network)  # of other vectors, mostly
        torch.autograd.backward(((first + 2 * second) * down.to(first.dtype)).sum())
        assert not all(map(torch.equal, network.buffers(), before))
        network.eval()
        assert torch.equal(weight_of(network), weight_of(network))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_dtype=False)
    close(weight_of(mine), weight_of(torchs))
    assert list(mine.state_dict()) == list(torchs.state_dict())
    for one, other in zip(mine.state_dict().values(), torchs.state_dict().values(), strict=True):
        close(one, other)
    own, others = mine.get_parameter, torchs.get_parameter
    name = "parametrizations.weight.original"
    close(own(name).grad, others(name).grad)
    assert float(others(name).grad.abs().max()) > 1e-2  # type: ignore[union-attr]


@pytest.mark.usefixtures("each_generation")
def test_a_weight_without_length_is_no_number_as_torchs() -> None:
    weight = torch.zeros(3, 4)
    vectors = torch.ones(3) / 3**0.5, torch.ones(4) / 2
    scaled, *_ = kernel.scale(weight, *vectors, 1, 1e-12)
    assert scaled.isnan().all()
    assert not vectors[0].any()
    assert not vectors[1].any()


@pytest.mark.usefixtures("each_generation")
def test_weights_may_lie_anyhow_in_memory_and_vectors_may_not() -> None:
    torch.manual_seed(0)
    weight, u, v = torch.randn(6, 5, 3, 2), torch.randn(6), torch.randn(30)
    expected = kernel.scale(weight, u.clone(), v.clone(), 2, 1e-12)[0]
    for form in (
        weight.contiguous(memory_format=torch.channels_last),
        weight.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert torch.equal(kernel.scale(form, u.clone(), v.clone(), 2, 1e-12)[0], expected)
    for other in (torch.stack([v, v], 1)[:, 0], v[:29], v.double()):
        with pytest.raises(ValueError, match="vector of 30 numbers is not that long, not float32"):
            kernel.scale(weight, u, other, 1, 1e-12)


def test_derivatives_of_derivatives_are_torchs() -> None:
    torch.manual_seed(0)
    torchs = normalised(nn.Conv2d(2, 3, 2)).eval()
    found = []
    for network in (torchs, ours(torchs)):
        [own] = [p for n, p in network.named_parameters() if n.endswith("original")]
        loss = weight_of(network).pow(3).sum()
        [first] = torch.autograd.grad(loss, own, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), own)[0].float())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_discriminators_as_runs_have_them_have_it() -> None:
    torch.manual_seed(0)
    plain = ImageDiscriminator((1, 8, 8), 3)
    network = optimize_layout(copy.deepcopy(plain))
    kinds = [type(module) for module in network.modules() if hasattr(module, "_u")]
    assert kinds == [SpectralNorm] * 3
    assert list(network.state_dict()) == list(plain.state_dict())
    x, p = torch.randn(4, 1, 8, 8), torch.rand(4, 3)
    torch.testing.assert_close(network(x, p), plain(x, p))
    assert issubclass(
        SpectralNorm, generators.spectral.SpectralNorm
    )  # what training/batched/stacking.py knows


def test_torch_does_it_where_the_kernel_cannot() -> None:
    torch.manual_seed(0)
    torchs = parametrizations.spectral_norm(nn.Linear(4, 3))
    mine = ours(torchs).eval()
    torchs.eval()
    expected = weight_of(torchs)
    with dispatch.disabled():
        assert torch.equal(weight_of(mine), expected)  # to the bit
    assert torch.equal(weight_of(mine.double()), weight_of(torchs.double()))
    norm, weights = mine.float().get_submodule("parametrizations.weight.0"), torch.randn(2, 3, 4)
    each = torch.stack([norm(weight) for weight in weights])
    torch.testing.assert_close(vmap(norm)(weights), each)


def test_what_it_made_is_gone_with_its_last_name() -> None:
    weight = weight_of(ours(normalised(nn.Linear(4, 3))))
    assert weight.grad_fn is not None
    gone = weakref.ref(weight)
    gc.disable()
    try:
        del weight
        assert gone() is None
    finally:
        gc.enable()
