"""Before a private step, a self-test checks that our kernels clip, draw noise and add it."""

import runpy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privssl.errors import PrivacyError
from privssl.ops import clipping, dispatch, gaussian_noise, self_test
from privssl.privacy.dp_sgd import PrivateTraining, make_dp_sgd_plan
from privssl.settings.schema import PrivacySettings
from tests.support.kernel_generations import HERE
from tests.support.privacy import plan

if not HERE:
    pytest.skip("no kernels were compiled", allow_module_level=True)


@pytest.fixture(autouse=True)
def clear_self_test() -> Iterator[None]:
    self_test._find_wrong_kernel.cache_clear()
    yield
    self_test._find_wrong_kernel.cache_clear()


def begin() -> None:
    PrivateTraining(plan(), {"F": nn.Linear(2, 2)})


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_kernels_of_each_instruction_set_pass_the_self_test(kind: torch.dtype, name: str) -> None:
    torch.set_default_dtype(kind)
    try:
        with patch.object(dispatch, "_find_latest", lambda: name):
            begin()
    finally:
        torch.set_default_dtype(torch.float32)
    assert self_test._find_wrong_kernel.cache_info().misses == 1


FACTORS, TOTALS, NORMAL, ADD = (
    clipping.factors,
    clipping.totals,
    gaussian_noise.normal,
    gaussian_noise.add,
)


def shifted(sums: Any, noise: Any, deviation: float, step: float, noisy: list[Tensor]) -> None:
    """Correct except for one number between two points of the grid."""
    ADD(sums, noise, deviation, step, noisy)
    noisy[-1][-1] += 0.4 * step


@pytest.mark.parametrize(
    ("module", "name", "wrong", "said"),
    [
        (clipping, "factors", lambda *a: torch.ones_like(FACTORS(*a)), "clips rows"),
        # Short rows are lengthened; norms of other parameters are ignored.
        (clipping, "factors", lambda *a: FACTORS(*a) * (1 + torch.eye(7)[0]), "clips rows"),
        (clipping, "factors", lambda g, told, *a: FACTORS(g, None, *a), "clips rows"),
        # One row a ten-thousandth too long; a row that was not drawn; a non-finite row.
        (clipping, "factors", lambda *a: FACTORS(*a) * (1 + 1e-4 * torch.eye(7)[4]), "clips rows"),
        (clipping, "factors", lambda *a: FACTORS(*a) + 0.1 * torch.eye(7)[1], "clips rows"),
        (clipping, "factors", lambda *a: FACTORS(*a) + 1e-3 * torch.eye(7)[5], "clips rows"),
        (clipping, "factors", lambda *a: FACTORS(*a) * torch.nan, "clips rows"),
        (clipping, "totals", lambda g, f: TOTALS(g, f + f * torch.eye(7)[3]), "clips rows"),
        (clipping, "totals", lambda g, f: TOTALS(g, f).roll(1), "clips rows"),
        (gaussian_noise, "normal", lambda *a: 0.999 * NORMAL(*a), "draws noise"),
        (gaussian_noise, "normal", lambda *a: np.roll(NORMAL(*a), 1), "draws noise"),
        (gaussian_noise, "add", lambda s, n, d, *a: ADD(s, n, 0.999 * d, *a), "adds noise to sums"),
        (
            gaussian_noise,
            "add",
            lambda s, n, d, step, *a: ADD(s, n, d, 0.0, *a),
            "adds noise to sums",
        ),
        (gaussian_noise, "add", lambda s, n, *a: ADD(s, n[::-1], *a), "adds noise to sums"),
        (gaussian_noise, "add", shifted, "adds noise to sums"),
    ],
)
def test_a_faulty_kernel_is_refused_with_advice(
    module: Any, name: str, wrong: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(PrivacyError, match=f"kernel that {said} .* PRIVSSL_KERNELS=torch"):
        begin()
    settings = PrivacySettings(epsilon=8.0, noise_multiplier=1.0, delta=1e-5, sample_rate=0.5)
    with pytest.raises(PrivacyError):  # before a visit is charged
        make_dp_sgd_plan(settings, rounds=1, rows_per_agent=10)
    with dispatch.disabled():  # like PRIVSSL_KERNELS=torch
        begin()
        make_dp_sgd_plan(settings, rounds=1, rows_per_agent=10)


@pytest.mark.parametrize(("asked", "said"), [("tourch", "'tourch'"), ("torch", ""), ("", "")])
def test_an_unknown_value_of_privssl_kernels_causes_a_warning(
    asked: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PRIVSSL_KERNELS", asked)
    runpy.run_path(dispatch.__file__)  # as a new process reads it
    assert (f"PRIVSSL_KERNELS is {said} in the environment" in caplog.text) == bool(said)
