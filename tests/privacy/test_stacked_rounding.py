"""Agents' gradients are stacked only if a row has the same bits beside any other rows: clipping
bounds the effect of a row only if all other gradients keep their bits (docs/dp_sgd.md).
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privssl.privacy import batched_dp_sgd, row_bits
from privssl.privacy.clipping import DenseGradients
from privssl.privacy.dp_sgd import ClippedSum
from privssl.privacy.per_example_gradients import factored_gradients
from privssl.training.batched.deferred import ExampleLoss
from privssl.training.losses import hard_label_loss

AGENTS, ROWS, CLASSES = 3, 8, 5


@pytest.fixture(autouse=True)
def clear_checked_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_dp_sgd, "_TRIED", {})


def requests() -> list[ClippedSum]:
    """Gradient requests of three agents with their own weights and rows."""
    torch.manual_seed(0)
    made = list[ClippedSum]()
    for _ in range(AGENTS):
        F = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        fields = {"x": torch.rand(ROWS, 1, 12) * 2 - 1, "y": torch.arange(ROWS)[:, None] % CLASSES}
        loss = ExampleLoss(hard_label_loss, (), {"F": F})
        drawn = torch.rand(ROWS) < 0.5
        made.append(ClippedSum(loss, {"F": dict(F.named_parameters())}, fields, drawn, 1.0))
    return made


def by_place(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).expand(x.shape[:2]).float()


def by_the_rows_beside_it(x: Tensor) -> Tensor:
    return x.flatten(2).mean(dim=(1, 2))[:, None].expand(x.shape[:2])


def by_the_rows_of_another_agent(x: Tensor) -> Tensor:
    return by_the_rows_beside_it(x.roll(1, 0))


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Add a rounding error to the gradients of stacked agents."""
    real = factored_gradients

    def round_them(error: Callable[[Tensor], Tensor]) -> None:
        def wrong(loss: Any, own: Any, fields: Mapping[str, Tensor], *, agents: bool) -> Any:
            found = real(loss, own, fields, agents=agents)
            factor = (1 + 1e-6 * error(fields["x"])).reshape(-1, 1)
            for one in found.values():
                if isinstance(one, DenseGradients):
                    one.each.flatten(1).mul_(factor)
                    break
            return found

        monkeypatch.setattr(row_bits, "factored_gradients", wrong)

    return round_them


def stacked(monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[Any]]:
    """Whether three agents were summed together, and their sums."""
    alone, real = list[ClippedSum](), ClippedSum.run_single

    def run_single(one: ClippedSum) -> Any:
        alone.append(one)
        return real(one)

    with monkeypatch.context() as patch:
        patch.setattr(ClippedSum, "run_single", run_single)
        found = list(batched_dp_sgd._sum_batched(wanted := requests()))
    assert len(alone) in (0, len(wanted))
    return not alone, found


@pytest.mark.parametrize("error", [by_place, by_the_rows_beside_it, by_the_rows_of_another_agent])
@pytest.mark.usefixtures("copies")
def test_agents_are_computed_alone_where_a_stack_would_round_rows_by_other_rows(
    error: Callable[[Tensor], Tensor], rounding: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    together, expected = stacked(monkeypatch)
    assert together  # the control: no row is rounded by another
    batched_dp_sgd._TRIED.clear()
    rounding(error)
    together, found = stacked(monkeypatch)
    assert not together
    for ours, theirs in zip(found, expected, strict=True):
        for key, total in ours.items():
            torch.testing.assert_close(total, theirs[key], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("copies")
def test_each_stack_size_is_checked_once_and_without_rows_of_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Mapping[str, Tensor]] = []

    def tried(_: Any, __: Any, fields: Mapping[str, Tensor]) -> bool:
        seen.append(fields)
        return True

    monkeypatch.setattr(row_bits, "stack_keeps_bits", tried)
    for _ in range(2):
        batched_dp_sgd._sum_batched(requests())
    batched_dp_sgd._sum_batched(requests()[:2])  # another size
    assert [len(fields["x"]) for fields in seen] == [3, 2]
    rows = torch.cat([one.fields["x"].flatten(1) for one in requests()])
    assert torch.cdist(seen[0]["x"].flatten(0, 2).flatten(1), rows).min() > 0.1


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of these tests are no copies of a run's networks, and have no modes."""
    monkeypatch.setattr(
        batched_dp_sgd, "_batch_key_of", lambda one: (len(one.drawn), one.clip_norm)
    )
