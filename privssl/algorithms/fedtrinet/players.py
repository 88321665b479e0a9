"""Which layers of W the spliced network has, and how an agent keeps its own network."""

from torch import Tensor, nn

from privssl.algorithms.fedtrinet.voting import FedTriNetConfig
from privssl.core.agents import Memory
from privssl.core.messages import StateDict
from privssl.models.splice import splice


def select_shallow_modules(network: nn.Module, cfg: FedTriNetConfig) -> tuple[str, ...]:
    """Names of the modules that c takes from W.

    Raises:
        ConfigError: ``shallow`` names one that is not there.
    """
    weights = network.state_dict()
    if cfg.shallow:
        splice(weights, weights, cfg.shallow)
        return cfg.shallow
    names = dict.fromkeys(key.rpartition(".")[0] for key in weights)  # in the order they run
    layers = {name: network.get_submodule(name) for name in names}
    if cfg.shallow_convolutions is None:
        return tuple(layers)
    convolutions, shallow = 0, []
    for name, module in layers.items():
        convolutions += isinstance(module, nn.Conv2d)
        if convolutions > cfg.shallow_convolutions or isinstance(module, nn.Linear):
            break
        shallow.append(name)
    return tuple(shallow)


def pack_local_weights(weights: StateDict) -> dict[str, Tensor]:
    """l under its names in an agent's memory."""
    return {f"local/{name}": tensor for name, tensor in weights.items()}


def unpack_local_weights(memory: Memory) -> dict[str, Tensor]:
    """l; empty where an agent never trained."""
    local = {n: tensor for n, tensor in memory.items() if n.startswith("local/")}
    return {name.removeprefix("local/"): tensor for name, tensor in local.items()}
