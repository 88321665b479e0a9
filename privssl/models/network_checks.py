"""Test an own network on synthetic rows: refuse it, or warn of its predictions."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from privssl.core.rows import Shape, network_input
from privssl.errors import ConfigError, PrivacyError, first_line
from privssl.models.own_networks import TRIED
from privssl.runtime import randomness
from privssl.storage import tensor_files

RECORDED = 30  # outputs of a finished run's network
ROUNDING = 1e-3  # matrix products of other batch sizes round differently


def check_network(
    name: str, build: Callable[[], nn.Module], shape: Shape, classes: int
) -> list[str]:
    """Build a network and test it on synthetic rows; return warnings about its predictions.

    Raises:
        ConfigError: it has other inputs or outputs than the rows and classes need, differs when
            rebuilt, has weights that a state dict cannot hold or lacks, or no gradient.
    """
    rng = partial(randomness.stream, 0, 0, "world", "try the network")
    with randomness.seeded(rng()):
        network = build()
    with randomness.seeded(rng()):
        rebuilt = build()
    weights, rebuilt_weights = network.state_dict(), rebuilt.state_dict()
    try:
        tensor_files.check_types(weights)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"model.name {name}: its state dict cannot be saved: {error}") from None
    same = weights.keys() == rebuilt_weights.keys() and all(
        torch.equal(weights[n], rebuilt_weights[n]) for n in weights
    )
    if not same:
        raise ConfigError(
            f"model.name {name}: built twice, it has other layers or weights, so a run could not "
            "be repeated or resumed. Draw initial weights with torch alone, and no shapes"
        )
    if not any(p.requires_grad for p in network.parameters()):
        raise ConfigError(f"model.name {name} has no parameter that can be trained")
    x = network_input(torch.rand(TRIED, *shape, generator=rng()))
    with randomness.seeded(randomness.stream(1, 0, "world", "try the network")):
        other = build()
    for mode in (True, False):
        with torch.no_grad(), randomness.seeded(rng()):
            _check_output(name, network.train(mode), x, classes)
    if not _have_same_outputs(rebuilt, other, x):
        raise ConfigError(
            f"model.name {name}: built again with the same weights, it gives other outputs. Its "
            "state dict lacks something random: put layers of a list into a torch.nn.ModuleList, "
            "and random tensors into register_buffer"
        )
    with randomness.seeded(rng()):
        _check_gradient(name, rebuilt.train(), x)
        warnings = list(_find_doubtful_predictions(name, network.eval(), x))
    if not (warnings or _have_same_outputs(network, other, x)):
        warnings.append(
            f"{name}: in evaluation mode outputs depend on rows of training that are not in its "
            "state dict, so a run that is opened again predicts otherwise. Use register_buffer"
        )
    return warnings


@torch.no_grad()
def outputs_of(network: nn.Module, shape: Shape, device: torch.device) -> list[float]:
    """Return up to ``RECORDED`` outputs in evaluation mode on fixed synthetic rows.

    They tell networks with the same weights apart. Empty if outputs depend on chance.
    """
    rows = torch.rand(TRIED, *shape, generator=randomness.stream(0, 0, "world", "record outputs"))
    x = network_input(rows, device)
    first, second = network.eval()(x), network(x)
    return first.flatten()[:RECORDED].tolist() if torch.equal(first, second) else []


def differ(outputs: list[float], recorded: list[float]) -> bool:
    """Return whether outputs differ by more than rounding."""
    pairs = zip(outputs, recorded, strict=False)  # other shapes of weights are refused before
    return any(abs(a - b) > 0.01 * max(1.0, *map(abs, recorded)) for a, b in pairs)


def refuse_frozen(name: str, network: nn.Module) -> None:
    """Raise PrivacyError if a private step could not add noise to every parameter."""
    frozen = [n for n, parameter in network.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise PrivacyError(
            f"model.name {name}: {len(frozen)} parameters are frozen ({frozen[0]}, requires_grad "
            "is False), and a private step needs the gradient of every one. Train them too, or "
            "make the frozen part a data.encoder"
        )


def _check_output(name: str, network: nn.Module, x: Tensor, classes: int) -> None:
    rows = f"rows of shape {tuple(x.shape[1:])}"
    try:
        out = network(x)
    except Exception as error:
        raise ConfigError(
            f"model.name {name} cannot take {rows}: {type(error).__name__}: {first_line(error)}. "
            "Make its layers for shape, its first argument, and give rows of the size it needs"
        ) from error
    if not isinstance(out, Tensor) or tuple(out.shape) != (len(x), classes):
        got = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise ConfigError(
            f"model.name {name} gives {got} for {len(x)} {rows}, where one output for each of the "
            f"{classes} classes is needed: ({len(x)}, {classes})"
        )
    if out.dtype != torch.float32:
        raise ConfigError(f"model.name {name} gives {out.dtype}. Make it give float32")
    if not out.isfinite().all():
        raise ConfigError(
            f"model.name {name} gives outputs that are not finite for {rows}, in [-1, 1]. Check "
            "its initial weights, logarithms and divisions"
        )
    if (out >= 0).all() and torch.allclose(out.sum(dim=1), torch.ones(len(x)), atol=1e-4):
        raise ConfigError(
            f"model.name {name} gives probabilities: outputs of each row add up to 1. The losses "
            "take logits. Leave out the softmax at its end"
        )


def _check_gradient(name: str, network: nn.Module, x: Tensor) -> None:
    """Raise ConfigError if torch has no gradient of the outputs."""
    try:
        network(x).sum().backward()
    except Exception as error:
        raise ConfigError(
            f"model.name {name} cannot be trained: {type(error).__name__}: {first_line(error)}. "
            "Its outputs need a gradient: no detach, no_grad or numpy in forward"
        ) from error


@torch.no_grad()
def _have_same_outputs(network: nn.Module, other: nn.Module, x: Tensor) -> bool:
    """Give another network the same weights; return whether it has the same outputs."""
    other.load_state_dict(network.state_dict())
    outputs = []
    for model in (network, other):
        with randomness.seeded(randomness.stream(0, 0, "world", "try the network")):
            outputs.append(model.eval()(x))
    return torch.equal(*outputs)


@torch.no_grad()
def _find_doubtful_predictions(name: str, network: nn.Module, x: Tensor) -> Iterator[str]:
    """Yield warnings if outputs in evaluation mode depend on more than the input."""
    outputs = network(x)
    if not torch.equal(network(x), outputs):
        yield (
            f"{name}: in evaluation mode the same rows get other outputs each time, so predictions "
            "and accuracy cannot be repeated. Leave out random numbers (functional.dropout needs "
            "training=self.training), and what it keeps from one call to the next"
        )
        return
    if any(isinstance(m, _BatchNorm) and _uses_batch_statistics(m) for m in network.modules()):
        return  # intended by its author
    try:
        single = torch.cat([network(x[index : index + 1]) for index in range(len(x))])
    except Exception as error:
        yield (
            f"{name} cannot take a single row: {type(error).__name__}: {first_line(error)}. "
            "A batch may have one row: keep its dimension"
        )
        return
    if single.shape != outputs.shape or not torch.allclose(single, outputs, ROUNDING, ROUNDING):
        yield (
            f"{name}: in evaluation mode outputs of a row depend on the other rows of its batch, "
            "so predictions differ with them. Look for a softmax, mean or squeeze over dimension 0"
        )


def _uses_batch_statistics(norm: _BatchNorm) -> bool:
    return norm.running_mean is None or not int(norm.num_batches_tracked or 0)
