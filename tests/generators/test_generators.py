"""G and D: shapes, sizes, relevant inputs, independent rows, and the losses of Eq. 6 and 7."""

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, vmap
from torch.nn.functional import one_hot
from torch.testing import assert_close

from generators import (
    ImageDiscriminator,
    ImageGenerator,
    discriminator_loss,
    g,
    networks_for,
    realistic_loss,
    reconstruction_loss,
)
from generators.sampling import draw_samples
from generators.spectral import spectral_norm
from generators.variational import LABEL_GAIN, VariationalFeatureGenerator, VariationalGenerator

VECTOR = (7,)
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
B, C = 3, 5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def make(build: Callable[[], nn.Module]) -> nn.Module:
    """A network with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def generator(shape: tuple[int, int, int] = (1, 8, 8)) -> nn.Module:
    return make(lambda: ImageGenerator(shape, C, width=4, code_size=8, noise_size=6))


def discriminator(shape: tuple[int, int, int] = (1, 8, 8), spectral: bool = True) -> nn.Module:
    return make(
        lambda: ImageDiscriminator(shape, C, width=4, feature_size=8, spectral=spectral)
    ).eval()  # fmt: skip


def inputs(shape: tuple[int, ...] = (1, 8, 8), seed: int = 0) -> dict[str, Tensor]:
    """The inputs of G: rows, labels, targets, noise and two blending factors per row."""
    return {
        "x": 2 * drawn(B, *shape, seed=seed) - 1,
        "p": drawn(B, C, seed=seed + 1).softmax(dim=1),
        "p_target": one_hot(torch.arange(B), C).float(),
        "z": drawn(B, 6, seed=seed + 2),
        "lam": drawn(B, 2, seed=seed + 3),
    }


# Shapes and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_generator_gives_several_mixes_of_each_row_in_range(shape: tuple[int, int, int]) -> None:
    mixes = generator(shape)(**inputs(shape))
    assert mixes.shape == (B, 2, *shape)
    assert bool((mixes.abs() <= 1).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_discriminator_gives_one_number_per_row(shape: tuple[int, int, int]) -> None:
    given_ = inputs(shape)
    assert discriminator(shape)(given_["x"], given_["p"]).shape == (B,)


def test_the_networks_have_the_sizes_in_the_specification() -> None:
    G, D = ImageGenerator((1, 28, 28), 10, width=16), ImageDiscriminator((1, 28, 28), 10, width=16)
    sizes = [sum(p.numel() for p in network.parameters()) for network in (G, D)]
    # G: encoder 4*4*16+16, 4*4*16*32+32, 1568*64+64; prior 42*128+128, 128*64+64;
    # decoder 75*1568+1568, 4*4*32*16+16, 4*4*16+1
    assert 272 + 8224 + 100_416 + 5504 + 8256 + 119_168 + 8208 + 257 == 250_305
    # D: trunk as the encoder of G; realism 64+1; projection 10*64
    assert 272 + 8224 + 100_416 + 65 + 640 == 109_617
    assert sizes == [250_305, 109_617]


@pytest.mark.parametrize("network", [ImageGenerator, ImageDiscriminator])
def test_sides_that_cannot_be_halved_twice_are_refused(network: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match="30x28; both sides must be multiples of 4"):
        network((1, 30, 28), C)


# Inputs of G that matter --------------------------------------------------------------------


def changes(network: nn.Module, lam: float, which: str, shape: tuple[int, ...] = (1, 8, 8)) -> bool:
    """Whether G's mixes at a blending factor change with one input."""
    before = inputs(shape) | {"lam": torch.full((B, 1), lam)}
    after = before | {which: inputs(shape, seed=50)[which]}
    if which == "p_target":
        after[which] = before[which].roll(1, dims=1)
    return not torch.equal(network(**before), network(**after))


def test_at_lambda_0_a_mix_depends_on_noise_and_class_and_not_on_the_row() -> None:
    G = generator()
    seen = {which: changes(G, 0.0, which) for which in ("x", "p", "p_target", "z")}
    assert seen == {"x": False, "p": False, "p_target": True, "z": True}


def test_at_lambda_1_a_mix_depends_on_the_row_and_not_on_noise_and_class() -> None:
    G = generator()
    seen = {which: changes(G, 1.0, which) for which in ("x", "p", "p_target", "z")}
    assert seen == {"x": True, "p": True, "p_target": False, "z": False}


def test_between_them_a_mix_depends_on_all_inputs_and_on_lambda() -> None:
    G = generator()
    assert all(changes(G, 0.5, which) for which in ("x", "p", "p_target", "z"))
    given_ = inputs() | {"lam": torch.tensor([[0.4, 0.6]]).expand(B, 2)}
    mixes = G(**given_)
    assert not torch.equal(mixes[:, 0], mixes[:, 1])


def test_several_mixes_of_a_row_equal_those_made_one_at_a_time() -> None:
    G, given_ = generator(), inputs()
    together = G(**given_)
    for number in range(2):
        alone = G(**(given_ | {"lam": given_["lam"][:, number : number + 1]}))
        assert_close(alone[:, 0], together[:, number])


# The variational generator ------------------------------------------------------------------


def variational(shape: tuple[int, ...] = (1, 8, 8)) -> VariationalGenerator:
    kind, _ = networks_for(shape, "variational")
    G = make(lambda: kind(shape, C, width=4, noise_size=6))
    assert isinstance(G, VariationalGenerator)
    return G


def vectors() -> VariationalFeatureGenerator:
    G = variational(VECTOR)
    assert isinstance(G, VariationalFeatureGenerator)
    return G


@pytest.mark.parametrize("shape", SHAPES)
def test_a_variational_generator_gives_mixes_in_range(shape: tuple[int, int, int]) -> None:
    mixes = variational(shape)(**inputs(shape))
    assert mixes.shape == (B, 2, *shape) and bool((mixes.abs() <= 1).all())


@pytest.mark.parametrize("shape", [(1, 8, 8), VECTOR])
def test_a_variational_generator_depends_on_the_row_or_on_the_target(
    shape: tuple[int, ...],
) -> None:
    G, which = variational(shape), ("x", "p", "p_target", "z")
    assert [changes(G, 0.0, w, shape) for w in which] == [False, False, True, True]
    # At lambda 1 the noise is that of the row's code.
    assert [changes(G, 1.0, w, shape) for w in which] == [True, True, False, True]
    assert all(changes(G, 0.5, w, shape) for w in which)


def test_the_code_loss_is_the_divergence_from_the_standard_normal_distribution() -> None:
    G, given_ = variational(), inputs()
    rows, cost = G(**given_, with_cost=True)
    assert_close(rows, G(**given_))
    moments = G.posterior(torch.cat([G.encoder(given_["x"]), LABEL_GAIN * given_["p"]], dim=1))
    mean, raw = moments.chunk(2, dim=1)
    spread = (4 * torch.tanh(raw / 4) / 2).exp()
    own, standard = Normal(mean, spread), Normal(0.0, 1.0)
    assert_close(cost, kl_divergence(own, standard).sum(dim=1))


def test_of_vectors_the_cost_is_the_negative_evidence_lower_bound() -> None:
    G, given_ = vectors(), inputs(VECTOR) | {"lam": torch.tensor([[0.3, 1.0]]).expand(B, 2)}
    with torch.no_grad():
        G.log_deviation.copy_(torch.linspace(-2, 0.5, 7))  # the first is below the least
    rows, cost = G(**given_, with_cost=True)
    moments = G.posterior(torch.cat([G.encoder(given_["x"]), LABEL_GAIN * given_["p"]], dim=1))
    mean, raw = moments.chunk(2, dim=1)
    code = kl_divergence(Normal(mean, (2 * torch.tanh(raw / 4)).exp()), Normal(0.0, 1.0))
    deviation = (5 * G.log_deviation.detach()).clamp(min=-4).exp()
    errors = (given_["x"] - rows[:, 1]) / deviation  # minus log density, less log(2 pi) / 2
    given_code = errors.square() / 2 + deviation.log()
    assert_close(cost, (code.sum(dim=1) + given_code.sum(dim=1)))


def test_numbers_of_a_vector_vary_around_the_decoder_by_a_learned_deviation() -> None:
    G = vectors()
    assert G.noise_size == 6 + 7
    with torch.no_grad():
        G.log_deviation.copy_(torch.linspace(-0.5, 0.0, 7))
    p = one_hot(torch.zeros(4000, dtype=torch.long), C).float()
    z, x = drawn(4000, 13), torch.zeros(4000, 7)
    z[:, :6] = 0.3  # one code
    rows = G(x, p, p, z, torch.zeros(4000, 1))[:, 0]
    means = G(x, p, p, z[:, :6], torch.zeros(4000, 1))[:, 0]
    assert bool((means == means[0]).all())
    assert_close(rows.mean(dim=0), means[0], atol=0.06, rtol=0)
    assert_close(rows.std(dim=0), (5 * G.log_deviation).exp().detach(), atol=0, rtol=0.05)


def test_trained_on_a_table_it_keeps_spread_correlation_and_shares_of_each_class() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(2, (2000,), generator=rng)
    first = 0.3 * torch.randn(2000, generator=rng) + 0.4 * y - 0.2
    second = first + 0.1 * torch.randn(2000, generator=rng)
    binary = 2.0 * (torch.rand(2000, generator=rng) < 0.2 + 0.6 * y) - 1
    x, p = torch.stack([first, second, binary], dim=1), one_hot(y, 2).float()
    G = make(lambda: VariationalFeatureGenerator((3,), 2, width=8, noise_size=4))
    optimiser = torch.optim.Adam(G.parameters(), 2e-3, (0.5, 0.99))
    for _ in range(600):
        some = torch.randint(2000, (64,), generator=rng)
        z = torch.rand(64, 4, generator=rng)
        _, cost = G(x[some], p[some], p[some], z, torch.ones(64, 1), with_cost=True)
        optimiser.zero_grad()
        cost.mean().backward()
        optimiser.step()
    for c in range(2):
        made = draw_samples(G, torch.full((2000,), c), 2, (3,), rng)  # type: ignore[arg-type]
        real = x[y == c]
        assert_close(made[:, :2].mean(dim=0), real[:, :2].mean(dim=0), atol=0.08, rtol=0)
        assert_close(made[:, :2].std(dim=0), real[:, :2].std(dim=0), atol=0, rtol=0.2)
        assert torch.corrcoef(made[:, :2].T)[0, 1] > 0.75  # 0.95 in the rows
        share = float((made[:, 2] > 0).float().mean())
        assert share == pytest.approx(0.2 + 0.6 * c, abs=0.1)


def test_there_is_no_variational_generator_of_sequences() -> None:
    assert networks_for((5, 4), "variational") == networks_for((5, 4))


def test_codes_at_lambda_0_are_standard_normal_and_finite_at_the_ends() -> None:
    heard: list[Tensor] = []
    G = variational()
    assert isinstance(G.first, nn.Module)
    G.first.register_forward_pre_hook(lambda _, given_: heard.append(given_[0]))
    z = drawn(4000, 6)
    z[0], z[1] = 0.0, 1 - 2**-24  # the ends of [0, 1)
    p = one_hot(torch.zeros(4000, dtype=torch.long), C).float()
    G(torch.zeros(4000, 1, 8, 8), p, p, z, torch.zeros(4000, 1))
    code = heard[0][2:, :6]
    assert bool(heard[0].isfinite().all())
    assert_close(code.mean(dim=0), torch.zeros(6), atol=0.07, rtol=0)
    assert_close(code.std(dim=0), torch.ones(6), atol=0.05, rtol=0)


@pytest.mark.parametrize("shape", [(1, 8, 8), VECTOR])
def test_rows_of_a_variational_generator_are_independent(shape: tuple[int, ...]) -> None:
    G, given_ = variational(shape), inputs(shape)
    rows, cost = G(**given_, with_cost=True)
    for number in range(B):
        alone = {name: value[number : number + 1] for name, value in given_.items()}
        row, its_cost = G(**alone, with_cost=True)
        assert_close(row[0], rows[number])
        assert_close(its_cost[0], cost[number])


# Inputs of D that matter --------------------------------------------------------------------


def test_a_discriminator_depends_on_the_row_and_on_its_label() -> None:
    D, given_ = discriminator(), inputs()
    before = D(given_["x"], given_["p"])
    assert not torch.equal(before, D(-given_["x"], given_["p"]))
    assert not torch.equal(before, D(given_["x"], given_["p"].roll(1, dims=1)))


def test_the_logit_of_a_mixed_label_is_the_mix_of_the_logits() -> None:
    # The logit is affine in the label, and labels sum to 1: D(x, a p + b q) = a D(p) + b D(q).
    D, x = discriminator(), inputs()["x"]
    p, q = torch.eye(C)[:B], torch.eye(C)[1 : B + 1]
    assert_close(D(x, 0.3 * p + 0.7 * q), 0.3 * D(x, p) + 0.7 * D(x, q))


@pytest.mark.parametrize("layer", [nn.Linear(7, 5), nn.Conv2d(3, 4, 4)])
def test_spectral_normalisation_equals_that_of_torch_to_the_bit(layer: nn.Module) -> None:
    x = drawn(2, 7) if isinstance(layer, nn.Linear) else drawn(2, 3, 6, 6)
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch's": torch.nn.utils.parametrizations.spectral_norm,
        "ours": spectral_norm,
    }
    seen = {}
    for name, normalised in ways.items():
        network = make(partial(normalised, copy.deepcopy(layer)))
        twice = network(x) + network(x)  # each call updates the vectors
        twice.square().sum().backward()
        gradients = [p.grad for p in network.parameters()]
        seen[name] = [twice, *network.eval()(x), *network.state_dict().values(), *gradients]
        assert list(network.state_dict()) == [
            "bias", "parametrizations.weight.original",
            "parametrizations.weight.0._u", "parametrizations.weight.0._v",
        ]  # fmt: skip
    for one, other in zip(*seen.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spectral", [True, False])
def test_spectral_normalisation_bounds_the_trunk_of_d(spectral: bool) -> None:
    D = discriminator(spectral=spectral)
    with torch.no_grad():
        for parameter in D.parameters():
            parameter.mul_(50)
    weight = D.trunk[5].weight  # type: ignore[index, union-attr]
    norm = float(torch.linalg.matrix_norm(weight.detach(), 2))
    assert (norm < 2) == spectral  # one, up to the error of power iteration; without it far above
    buffers = [name for name, _ in D.named_buffers()]
    assert bool(buffers) == spectral  # a private D must have no buffers


# Independence of rows -----------------------------------------------------------------------


def in_turn(network: nn.Module, given_: dict[str, Tensor]) -> Tensor:
    """One row at a time, by vmap over a functional call, like the private step."""
    parameters: dict[str, Tensor] = dict(network.named_parameters())

    def one(row: dict[str, Tensor]) -> Tensor:
        batch = {name: value[None] for name, value in row.items()}
        answer: Tensor = functional_call(network, parameters, kwargs=batch, args=())
        return answer[0]

    answers: Tensor = vmap(one)(given_)
    return answers


@pytest.mark.parametrize("name", ["G", "D", "D without spectral norm"])
def test_rows_are_independent(name: str) -> None:
    given_ = inputs()
    network = generator() if name == "G" else discriminator(spectral=name == "D")
    if name != "G":
        given_ = {"x": given_["x"], "p": given_["p"]}
    before = network(**given_)
    assert_close(in_turn(network, given_), before)
    for field in given_:
        moved = {key: value.clone() for key, value in given_.items()}
        moved[field][1] = moved[field][1].flip(-1) * 0.5
        after = network(**moved)
        assert torch.equal(after[[0, 2]], before[[0, 2]])
        assert not torch.equal(after[1], before[1])  # the control: the row itself matters


# Eq. 6 and 7 --------------------------------------------------------------------------------


def test_g_is_one_at_the_ends_and_smallest_in_the_middle() -> None:
    lam = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    quarter = math.exp(-0.25)  # max(0.25, 0.75) - 1
    assert_close(g(lam), torch.tensor([1.0, quarter, math.exp(-0.5), quarter, 1.0]))


@given(st.floats(0, 1))
def test_g_is_even_about_one_half_and_within_its_range(lam: float) -> None:
    value = float(g(torch.tensor(lam, dtype=torch.float64)))
    assert value == pytest.approx(float(g(torch.tensor(1 - lam, dtype=torch.float64))))
    assert math.exp(-0.5) <= value <= 1


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def test_the_loss_of_d_by_hand() -> None:
    real, fake, lam = (0.4, -2.0), (-0.3, 1.5), (0.5, 1.0)
    expected = [
        -math.log(sigmoid(r)) - math.exp(max(v, 1 - v) - 1) * math.log(1 - sigmoid(f))
        for r, f, v in zip(real, fake, lam, strict=True)
    ]
    losses = discriminator_loss(torch.tensor(real), torch.tensor(fake), torch.tensor(lam))
    assert_close(losses, torch.tensor(expected))


def test_the_realistic_loss_of_g_by_hand() -> None:
    fake, lam = (-0.3, 1.5), (0.5, 0.1)
    expected = [
        -math.exp(max(v, 1 - v) - 1) * math.log(sigmoid(f)) for f, v in zip(fake, lam, strict=True)
    ]
    assert_close(realistic_loss(torch.tensor(fake), torch.tensor(lam)), torch.tensor(expected))


def test_g_learns_even_if_d_is_certain() -> None:
    fake = torch.tensor([-30.0], requires_grad=True)  # D is certain that the row is not real
    realistic_loss(fake, torch.tensor([1.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert float(fake.grad) == pytest.approx(-1.0)  # type: ignore[arg-type]
    # the control: Eq. 6 as printed, log(1 - D), has no gradient there
    printed = torch.tensor([-30.0], requires_grad=True)
    (-nn.functional.softplus(printed)).sum().backward()  # type: ignore[no-untyped-call]
    assert abs(float(printed.grad)) < 1e-12  # type: ignore[arg-type]


def test_the_reconstruction_loss_sums_squares_over_each_row() -> None:
    x = torch.zeros(2, 1, 2, 2)
    rebuilt = x.clone()
    rebuilt[1] = torch.tensor([[0.5, 1.0], [0.0, -1.0]])  # 0.25 + 1 + 0 + 1
    assert_close(reconstruction_loss(rebuilt, x), torch.tensor([0.0, 2.25]))
