"""Code of privssl is told from code of others with all that it holds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from privssl.privacy.own_code import is_ours


def holding(content: Any, *, assigned: bool = True) -> Callable[..., Any]:
    """Return a function, as if privssl's, whose closure holds something."""

    def function() -> Any:
        return variable

    if assigned:
        variable = content
    function.__module__ = "privssl.privacy.own_code"
    return function


@pytest.mark.parametrize("code", [nn.Linear(2, 2), holding(1.0), partial(holding(nn.ReLU()), [3])])
def test_code_of_privssl_and_torch_is_ours(code: object) -> None:
    assert is_ours(code)


class Network(nn.Linear):
    """A network from outside."""


@pytest.mark.parametrize("code", [
    Network(2, 2), holding(Network(2, 2)), partial(holding(1.0), [Network(2, 2)]),
    {"F": nn.Sequential(Network(2, 2))}, holding(1.0, assigned=False),
], ids=["network", "closure", "partial", "mapping", "not assigned"])  # fmt: skip
def test_code_that_holds_something_from_outside_is_not_ours(code: object) -> None:
    assert not is_ours(code)
