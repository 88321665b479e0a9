"""Time series of a user: rows (length, features), declared by ``kind="sequence"``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import privssl
from privssl import evaluate
from privssl.data.canonical import canonical
from privssl.data.npz import read_npz, read_rows
from privssl.data.standardisation import are_standardised
from privssl.errors import DataError, PrivacyError

LENGTH, FEATURES = 12, 2


def waves(count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Noisy waves of one or two periods with random phases: their mean is uninformative."""
    rng, y = np.random.default_rng(seed), np.arange(count) % 2
    at = np.arange(LENGTH)[:, None] / LENGTH + rng.uniform(size=(count, 1, FEATURES))
    x = np.sin(2 * np.pi * (y[:, None, None] + 1) * at) + rng.normal(0, 0.1, (count, 1, 1))
    return x.astype(np.float32), y


X, Y = waves(240, 0)
X_TEST, Y_TEST = waves(60, 1)
SHORT: dict[str, Any] = {
    "run": {"evaluate_every": 12},
    "agents": {"support": 1, "query": 1},
    "data": {"labelled": 40},
    "model": {"name": "gru", "width": 8},
    "algorithm": {"name": "pseudo", "rounds": 12, "warm_up": 6, "local_steps": 10},
}
PRIVATE: dict[str, Any] = {
    "agents": {"support": 1},
    "data": {"labelled": 40},
    "model": {"name": "linear"},
    "algorithm": {"name": "fedavg", "rounds": 1},
    "privacy": {"epsilon": 8.0, "delta": 1e-3, "sample_rate": 1.0, "steps": 1},
}


def of_arrays(x: Any = X, **more: Any) -> privssl.Dataset:
    given = {"class_names": ["one", "two"], "kind": "sequence"} | more
    return privssl.Dataset.from_arrays(x, Y, X_TEST, Y_TEST, **given)


def test_a_file_and_arrays_in_memory_give_the_same_sequences(tmp_path: Path) -> None:
    path = tmp_path / "waves.npz"
    np.savez(path, x_train=X, y_train=Y, x_test=X_TEST, y_test=Y_TEST, kind="sequence")
    assert np.array_equal(read_npz(path).x_train, X)
    data = of_arrays()
    assert data.shape == (LENGTH, FEATURES) and torch.equal(data.rows.x_train, torch.tensor(X))
    held = privssl.Dataset.federated(
        {"s0": (X[:40], Y[:40]), "s1": (X[40:], Y[40:])}, (X_TEST, Y_TEST), kind="sequence"
    )
    assert torch.equal(held.rows.x_train, data.rows.x_train)


def test_without_kind_sequence_three_axes_are_images() -> None:
    grey = (X - X.min()) / np.ptp(X)
    data = privssl.Dataset.from_arrays(grey, Y, grey[:60], Y_TEST)
    assert data.shape == (1, LENGTH, FEATURES)
    with pytest.raises(privssl.UserError, match=r'of time series .* say kind="sequence"'):
        privssl.Dataset.from_arrays(X, Y, X_TEST, Y_TEST)


@pytest.mark.parametrize(
    ("x", "kind", "said"),
    [
        (X, "series", "kind is 'series'. Give \"sequence\""),
        (X[:, :, 0], "sequence", r"sequences are \(N, length, features\)"),
        (X[:, None], "sequence", r"sequences are \(N, length, features\)"),
        (X.astype(np.uint8), "sequence", "sequences of uint8. Give finite floats"),
        (X * 1e5, "sequence", "sequences of float32, with numbers up to"),
        (np.where(X > 0.9, np.nan, X), "sequence", "rows have NaN or infinity"),
    ],
)
def test_rows_that_are_no_valid_sequences_are_refused(x: Any, kind: str, said: str) -> None:
    with pytest.raises(privssl.UserError, match=said):
        of_arrays(x, kind=kind)


def test_a_site_reads_its_own_sequences(tmp_path: Path) -> None:
    path = tmp_path / "site.npz"
    np.savez(path, x_labelled=X, y_labelled=Y, x_unlabelled=X_TEST, kind="sequence")
    found = read_rows(path, labelled=True, unlabelled=True)
    assert found.x is not None and np.array_equal(found.x, X)
    assert found.unlabelled is not None and found.unlabelled.shape == X_TEST.shape
    np.savez(path, x_labelled=X, y_labelled=Y)  # the control
    with pytest.raises(DataError, match="kind"):
        read_rows(path, labelled=True, unlabelled=False)


@pytest.mark.slow
def test_a_run_learns_what_the_mean_over_time_does_not_show(tmp_path: Path) -> None:
    run = privssl.train(SHORT, data=of_arrays(), output=tmp_path / "run")
    accuracy = run.evaluate(X_TEST, Y_TEST)["accuracy"]
    assert accuracy > 0.9 and accuracy == run.results["test_accuracy"]["final"]
    assert run.predict(X_TEST[:4]).tolist() == ["one", "two", "one", "two"]
    path = tmp_path / "new.npz"
    np.savez(path, x=X_TEST, y=Y_TEST)
    assert evaluate.main([str(run.folder), str(path)]) == 0
    with pytest.raises(privssl.UserError, match=r"sequences are \(N, length, features\)"):
        run.predict(X_TEST[:, :, 0])
    with pytest.raises(privssl.UserError, match="rows have the shape"):
        run.predict(X_TEST[:, :5])


# Privacy ------------------------------------------------------------------------------------


def test_a_series_has_one_account_content_as_sequence_and_as_vector() -> None:
    as_sequences = list(canonical(torch.tensor(X)))
    assert as_sequences == list(canonical(torch.tensor(X.reshape(len(X), -1))))
    assert len(set(as_sequences)) == len(X)  # the control: other rows differ


def scaled(x: NDArray[Any], axis: tuple[int, ...]) -> NDArray[np.float32]:
    """Rows scaled by mean and deviation over these axes of (N, length, features)."""
    return np.asarray((x - x.mean(axis, keepdims=True)) / x.std(axis, keepdims=True), np.float32)


@pytest.mark.parametrize("axis", [(0,), (0, 1)], ids=["each number", "each feature"])
def test_a_private_run_refuses_sequences_that_were_scaled_by_statistics_of_all_rows(
    axis: tuple[int, ...], tmp_path: Path
) -> None:
    rows = scaled(X, axis)
    data = of_arrays(rows)
    with pytest.raises(PrivacyError, match="scaled by their own statistics"):
        privssl.train(PRIVATE, data=data, output=tmp_path / "run")
    held = privssl.Dataset.federated(
        {"s0": (rows, Y)}, (X_TEST, Y_TEST), ["one", "two"], kind="sequence"
    )
    with pytest.raises(PrivacyError, match="scaled by their own statistics"):
        privssl.train({**PRIVATE, "data": {}}, data=held, output=tmp_path / "run")


def test_a_series_may_be_scaled_by_its_own_numbers(tmp_path: Path) -> None:
    """No other row changes it, although all rows together have mean 0 and deviation 1."""
    alone = scaled(X, (1,))
    flat = alone.reshape(-1, FEATURES)
    assert abs(flat.mean(axis=0)).max() < 1e-5 and abs(flat.std(axis=0) - 1).max() < 1e-5
    assert not are_standardised(alone) and not are_standardised(X)
    assert privssl.train(PRIVATE, data=of_arrays(alone), output=tmp_path / "run").guarantee
