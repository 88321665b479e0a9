"""Own networks: a class or function of the user, of torchvision or of timm.

    network(shape, classes, **options)   a class or function; or a module, which is copied
    torchvision:NAME, timm:NAME          imported when used; head and first layer adapted

A network is adapted when it is built, deterministically, so that a resumed run has the same one:

* batch norm becomes the layer that ``model.norm`` names, with its scale and shift;
* activations with ``inplace=True`` work on copies, because per-example gradients need their inputs;
* rows are contiguous, as in other projects, so that ``x.view(len(x), -1)`` works.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from privssl.core.rows import Shape
from privssl.errors import ConfigError, first_line
from privssl.models.convnets import norm_layer
from privssl.models.static_norm import StaticNorm
from privssl.ops.group_norm import GroupNorm
from privssl.runtime import plugins
from privssl.settings.error_messages import unknown
from privssl.settings.names import is_outside
from privssl.settings.schema import ModelSettings

#: A class or function of (shape, classes, **options), or a module whose last layer is replaced.
NetworkSource: TypeAlias = Callable[..., nn.Module] | nn.Module
LIBRARIES = ("torchvision", "timm")

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm
#: Exact classes: subclasses may do more than batch norm.
PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: Options of timm and torchvision that read files or download.
_READING = re.compile(
    "weights|pretrain|checkpoint|cache|features_only|scriptable|exportable|.*(cfg|_file|_dir|_url|hub)"
)
TRIED = 3  # batch size of the tests of a network
TRAINED_IN = "privssl_trained_in"  # attribute of a run's classifier: the folder of its run


def is_imported(name: str) -> bool:
    """Return whether ``model.name`` is a plug-in: code of neither privssl nor a known library."""
    return is_outside(name) and name.partition(":")[0] not in LIBRARIES


def reference_of(source: NetworkSource) -> str:
    """Return the ``model.name`` of a network given from Python. Raises ConfigError."""
    if not callable(source):
        raise ConfigError(
            f"model is {source!r}. Give a torch.nn.Module class, a function of (shape, classes) "
            "that returns one, or its name (package.module:Name)"
        )
    if not hasattr(source, "__qualname__"):  # a module, or another callable object
        return f"__main__:<{type(source).__name__}>"
    return f"{source.__module__}:{source.__qualname__}"


def runs_behind(network: nn.Module) -> tuple[Path, ...]:
    """Return the folders of the runs whose classifiers, or copies of them, are in a network."""
    folders = (vars(layer).get(TRAINED_IN) for layer in network.modules())
    return tuple(dict.fromkeys(Path(folder) for folder in folders if folder is not None))


def build_network(
    settings: ModelSettings, shape: Shape, classes: int, source: NetworkSource | None = None
) -> nn.Module:
    """Build an untrained own network, adapted as above: ``source``, or else the import of
    ``model.name``.

    Raises ConfigError if it does not exist, or cannot be built for these rows.
    """
    if source is None and is_imported(settings.name):
        source = import_network(settings.name)  # a module is adapted differently from a class
    network = _make_network(settings, shape, classes, source)
    if any(is_lazy(p) for p in network.parameters()):
        with torch.no_grad():
            network(torch.zeros(TRIED, *shape))
    if settings.weights:
        load_initial_weights(network, settings.weights)
    if source is None or isinstance(source, nn.Module):  # others are built for shape and classes
        _fit_ends(network, shape[0], classes)
    _replace_norms(network, settings)
    for layer in network.modules():
        if getattr(layer, "inplace", False) is True:
            layer.inplace = False  # type: ignore[assignment]
    network.register_forward_pre_hook(_contiguous)
    return network


def _make_network(
    settings: ModelSettings, shape: Shape, classes: int, source: NetworkSource | None
) -> nn.Module:
    if source is None and not is_imported(settings.name):
        return _build_library_network(settings, shape[0], classes)
    source = import_network(settings.name) if source is None else source
    if isinstance(source, nn.Module):
        return copy.deepcopy(source)
    build: Callable[..., Any] = source
    return _call_builder(settings.name, partial(build, shape, classes), settings.options)


def _refuse_files(settings: ModelSettings) -> None:
    """Refuse options for which libraries download, or read pickles: a config must not cause it."""
    for key, value in settings.options.items():
        if _READING.match(key) or isinstance(value, Mapping):
            raise ConfigError(
                f"model.options.{key} of {settings.name}: give numbers and plain text that choose "
                "the layers. No option may read or download a file; initial weights are a "
                "safetensors file (model.weights)"
            )


def import_network(name: str) -> NetworkSource:
    """Import the network of a name, calling nothing else."""
    return check_source(f"model.name {name}", plugins.load("models", "model.name", name))


def check_source(prefix: str, found: Any) -> NetworkSource:
    """Return an imported object as a network. Raises ConfigError, which begins with ``said``."""
    is_class = inspect.isclass(found) and issubclass(found, nn.Module)
    if not (is_class or inspect.isfunction(found) or isinstance(found, nn.Module)):
        raise ConfigError(
            f"{prefix} is {str(found)[:60]}, which is no network. Name a torch.nn.Module class, a "
            "function of (shape, classes), or a module"
        )
    source: NetworkSource = found
    return source


def _call_builder(name: str, build: Callable[..., Any], options: Any) -> nn.Module:
    try:
        network = build(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model.name {name} cannot be built: {type(error).__name__}: {first_line(error)}. A "
            "network is made as Network(shape, classes, **model.options); shape: that of a row"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model.name {name} gives a {type(network).__name__}, no nn.Module")
    return network


# Libraries ----------------------------------------------------------------------------------


def _build_library_network(settings: ModelSettings, channels: int, classes: int) -> nn.Module:
    _refuse_files(settings)
    factory = library_maker("model.name", settings.name)
    timm_options = {"pretrained": False, "in_chans": channels}
    options = timm_options if settings.name.startswith("timm:") else {"weights": None}
    return _call_builder(
        settings.name, factory, {**options, "num_classes": classes, **settings.options}
    )


def library_maker(key: str, name: str) -> Callable[..., Any]:
    """Return the constructor of the network ``torchvision:NAME`` or ``timm:NAME``; download
    nothing.

    Raises ConfigError if the library is not installed, or has no such network. ``key``: of the
    config, for errors.
    """
    library, _, network = name.partition(":")
    if library == "torchvision":
        from torchvision import models as zoo

        names = zoo.list_models(module=zoo)
        exists, factory = network.lower() in names, zoo.get_model
    else:
        try:
            import timm
        except ImportError:
            raise ConfigError(
                f"{key} is {name}, and timm is not installed: pip install timm"
            ) from None
        names, factory = timm.list_models(), timm.create_model
        exists = timm.is_model(network)  # other names read folders, or a hub
    if not exists:
        raise ConfigError(f"{key} {name}: {unknown('network', network, names)[:300]}")
    return partial(factory, network)


def _fit_ends(network: nn.Module, channels: int, classes: int) -> None:
    """Replace the first convolution and the last layer if they do not fit.

    The new first layer sums, or repeats, the old one's channels; the new last layer is initialised
    randomly.
    """
    if isinstance(network, nn.Linear | nn.Conv2d):
        raise ConfigError(
            f"model is a single {type(network).__name__}. Put it into a torch.nn.Sequential, with "
            "torch.nn.Flatten() before it where rows are images"
        )
    layers = list(network.named_modules())
    convolutions = [(n, layer) for n, layer in layers if isinstance(layer, nn.Conv2d)]
    if convolutions and convolutions[0][1].in_channels != channels:
        name, old = convolutions[0]
        first = _make_convolution_like(old, channels, old.out_channels)
        with torch.no_grad():
            first.weight.copy_(
                old.weight.sum(dim=1, keepdim=True).expand_as(first.weight) / channels
            )
            if first.bias is not None and old.bias is not None:
                first.bias.copy_(old.bias)
        network.set_submodule(name, first)
    heads = [(n, layer) for n, layer in layers if isinstance(layer, nn.Linear | nn.Conv2d)]
    if not heads:
        return
    name, last = heads[-1]
    if isinstance(last, nn.Linear) and last.out_features != classes:
        head: nn.Module = nn.Linear(last.in_features, classes, bias=last.bias is not None)
        network.set_submodule(name, head)
    elif isinstance(last, nn.Conv2d) and last.out_channels != classes:
        network.set_submodule(name, _make_convolution_like(last, last.in_channels, classes))


def _make_convolution_like(old: nn.Conv2d, channels: int, out: int) -> nn.Conv2d:
    padding: Any = old.padding
    return nn.Conv2d(
        channels, out, old.kernel_size, old.stride, padding,  # type: ignore[arg-type]
        dilation=old.dilation, bias=old.bias is not None,  # type: ignore[arg-type]
    )  # fmt: skip


# Fitting ------------------------------------------------------------------------------------


class FittedGroupNorm(GroupNorm):
    """Group norm whose output may be changed in place (``out += x``). Per-example gradients use a
    copy, because they need the recorded output."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.clone() if torch._C._are_functorch_transforms_active() else out


def _replace_norms(network: nn.Module, settings: ModelSettings) -> None:
    """Replace every batch norm by the layer of ``model.norm``."""
    if settings.norm == "batch":
        return
    for name, old in list(batch_norms(network)):
        channels = old.num_features
        if settings.norm == "static" and not isinstance(old, nn.BatchNorm2d):
            raise ConfigError(
                f"model.norm is static, but {settings.name} has a {type(old).__name__} at {name}. "
                "Set model.norm: group"
            )
        new = norm_layer(settings.norm, channels)
        if isinstance(new, GroupNorm):
            new = FittedGroupNorm(new.num_groups, channels)
        if isinstance(new, FittedGroupNorm | StaticNorm) and old.affine:
            with torch.no_grad():
                new.weight.copy_(old.weight)
                assert new.bias is not None
                new.bias.copy_(old.bias)
        if type(old) not in PLAIN_NORMS:  # timm's BatchNormAct2d: norm, dropout, activation
            drop, act = getattr(old, "drop", None), getattr(old, "act", None)
            if not (isinstance(drop, nn.Module) and isinstance(act, nn.Module)):
                raise ConfigError(
                    f"{settings.name} has a {type(old).__name__} at {name}, which may do more than "
                    "batch norm and cannot be replaced. Use another network, or without privacy "
                    "model.norm: batch"
                )
            new = nn.Sequential(new, drop, act)
        network.set_submodule(name, new)


def batch_norms(network: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield the batch norms of a network by name, without static norms."""
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, StaticNorm):
            yield name, layer


def _contiguous(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Copy rows with contiguous strides: a grey image counts as contiguous in either layout."""
    return (inputs[0].clone(memory_format=torch.contiguous_format),)


def load_initial_weights(network: nn.Module, path: str) -> None:
    """Copy the state dict of a safetensors file into a network.

    The last layer, and a first layer for other channels, keep their own weights if they differ in
    size; statistics of batch norm may be absent.

    Raises:
        ConfigError: no such file, not a state dict in safetensors form, or another network's.
    """
    file = Path(path).expanduser()
    try:
        loaded = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.weights: {file} cannot be read as a safetensors file ({first_line(error)}). "
            "Save a state dict with safetensors.torch.save_file(network.state_dict(), PATH)"
        ) from None
    expected = network.state_dict()
    weights = [name.rpartition(".")[0] for name, tensor in expected.items() if tensor.dim() > 1]
    ends = {weights[0], weights[-1]} if weights else set()
    fitting = {n: t for n, t in loaded.items() if n in expected and expected[n].shape == t.shape}
    mismatched = [n for n in loaded if n not in fitting and n.rpartition(".")[0] not in ends]
    mismatched += [
        n for n in expected.keys() - loaded.keys()
        if n.rpartition(".")[0] not in ends and n.rpartition(".")[2] not in STATISTICS
    ]  # fmt: skip
    if mismatched or not fitting:
        raise ConfigError(
            f"model.weights: {file} is of another network: {', '.join(sorted(mismatched)[:3])} "
            "differ in name or size. Give the weights of model.name"
        )
    network.load_state_dict({**expected, **fitting})


def describe_exchange(
    settings: ModelSettings, shape: Shape, classes: int, source: NetworkSource | None
) -> str | None:
    """Describe the batch norms that ``model.norm`` replaces; None if there are none."""
    if settings.norm == "batch":
        return None
    network = _make_network(settings, shape, classes, source)
    if not (count := len(list(batch_norms(network)))):
        return None
    new = {"group": "group norm", "static": "static batch norm", "none": "no norm"}[settings.norm]
    advice = "Set model.norm: batch to keep them in a run without privacy"
    return f"{settings.name}: {count} batch norms were replaced by {new} (model.norm). {advice}"
