"""The program that an auditor runs with dp-accounting and without privssl."""

import math
import runpy
from pathlib import Path

import pytest

from accounting import verify
from accounting.errors import PlanError
from accounting.events import (
    ComposedEvent,
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    PureDpEvent,
)
from tests.support.ledger import VISIT


@pytest.fixture
def library() -> None:
    if not verify.available():
        pytest.skip("dp-accounting is not installed")


@pytest.mark.usefixtures("library")
def test_the_library_itself_would_return_infinity() -> None:
    # The control of the test above, and of the guard in accounting/verify.py.
    from dp_accounting.pld import privacy_loss_distribution

    loss = privacy_loss_distribution.from_gaussian_mechanism(4.0).self_compose(10)
    assert loss.get_epsilon_for_delta(1e-15) == math.inf
    assert math.isfinite(loss.get_epsilon_for_delta(1e-10))


def printed_by(program: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """The epsilon that an auditor's program prints."""
    path = folder / "auditor.py"
    path.write_text(program)
    capsys.readouterr()
    runpy.run_path(str(path))
    words = capsys.readouterr().out.split()
    assert words[:3] == ["epsilon", "at", "most"]
    return float(words[3])


@pytest.mark.ci
@pytest.mark.usefixtures("library")
def test_an_auditors_program_prints_the_upper_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = PoissonSampledGaussianEvent(4.0, 16 / 34, 10)
    events: list[Event] = [
        sampled,
        VISIT,
        sampled,
        ComposedEvent((PoissonSampledGaussianEvent(8.0, 1.0, 95), sampled)),
    ]

    program = verify.dp_event_source(events, 1e-5)

    assert [line for line in program.splitlines() if "import" in line] == [
        "import dp_accounting as dp  # pip install dp-accounting"
    ]
    # Equal releases are counted together.
    assert program.count("SelfComposedDpEvent") == 2
    assert f"PoissonSampledDpEvent({16 / 34!r}, dp.GaussianDpEvent(4.0)), 30)" in program
    assert "SelfComposedDpEvent(dp.GaussianDpEvent(8.0), 100)" in program
    upper = verify.pld_bracket(events, 1e-5).upper
    assert printed_by(program, tmp_path, capsys) == pytest.approx(upper, abs=1e-5)
    # The control: with one percent less noise in a third of the events, it prints another number.
    less = verify.dp_event_source(
        [PoissonSampledGaussianEvent(3.96, 16 / 34, 10), *events[1:]], 1e-5
    )
    assert printed_by(less, tmp_path, capsys) > upper + 1e-3


@pytest.mark.usefixtures("library")
def test_an_auditors_program_of_no_event_prints_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed_by(verify.dp_event_source([], 1e-5), tmp_path, capsys) == 0


@pytest.mark.ci
@pytest.mark.usefixtures("library")
def test_an_auditors_program_comments_on_pure_releases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gaussian = PoissonSampledGaussianEvent(4.0, 0.25, 20)
    events: list[Event] = [PureDpEvent(0.25, 2), gaussian, PureDpEvent(0.25, 1)]

    program = verify.dp_event_source(events, 1e-5)

    assert "# dp-accounting has no event for a release that is epsilon-DP with delta 0" in program
    # Basic composition: (e, d)-DP and (0.75, 0)-DP are (e + 0.75, d)-DP together.
    alone = verify.pld_bracket([gaussian], 1e-5).upper
    said = printed_by(program, tmp_path, capsys)
    assert said == pytest.approx(alone + 0.75, abs=1e-5)
    assert said >= verify.pld_bracket(events, 1e-5).upper


def test_events_without_a_bound_have_no_program() -> None:
    with pytest.raises(PlanError, match="unprotected"):
        verify.dp_event_source([NonPrivateEvent("F")], 1e-5)
    with pytest.raises(PlanError, match="Use the RDP value"):
        verify.dp_event_source([VISIT], 1e-15)
