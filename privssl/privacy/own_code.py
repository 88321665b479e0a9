"""Tell privssl's code from code of others, which gets further checks in private steps."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

_KNOWN = ("privssl.", "generators.", "torch.nn.")  # prefixes of modules with our layers and losses
_PLAIN = (Tensor, bool, int, float, str, bytes, torch.device, torch.dtype, type(None))


def has_known_layers(network: nn.Module) -> bool:
    """Return whether all layers are privssl's or torch's."""
    return all(type(layer).__module__.startswith(_KNOWN) for layer in network.modules())


def is_ours(code: object) -> bool:
    """Return whether a function, network or object is privssl's or plain, with all that it holds.

    A function holds its object, its closure and the arguments of a partial. Networks have known
    layers and no hooks. Fields of privssl's own objects are not looked at.
    """
    if isinstance(code, _PLAIN):
        return True
    if isinstance(code, nn.Module):
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in code.modules())
        return has_known_layers(code) and not hooked
    if isinstance(code, Mapping):
        return all(map(is_ours, code.values()))
    if isinstance(code, list | tuple):
        return all(map(is_ours, code))
    if isinstance(code, partial):
        return is_ours((code.func, *code.args, *code.keywords.values()))
    if not str(getattr(code, "__module__", "")).startswith(_KNOWN):
        return False
    try:
        variables = [cell.cell_contents for cell in getattr(code, "__closure__", None) or ()]
    except ValueError:  # a variable that is not assigned yet
        return False
    return is_ours([getattr(code, "__self__", None), *variables])
