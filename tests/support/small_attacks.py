"""Attacks of ``audit --empirical`` on fewer canaries and trials than a user's."""

import pytest

from privssl.audit import canary_attack, mechanism_attack

CANARIES, GUESSES = 120, 60


@pytest.fixture
def small_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer canaries than the command uses, so that an attack takes well under a second."""
    monkeypatch.setattr(mechanism_attack, "MEMBERS", 300)
    monkeypatch.setattr(mechanism_attack, "OTHERS", 2000)
    monkeypatch.setattr(mechanism_attack, "WITH_MEMBERS", (24, 1 / 2))
    monkeypatch.setattr(mechanism_attack, "WITH_OTHERS", (48, 1 / 48))
    monkeypatch.setattr(mechanism_attack, "_STEPS_WITHOUT_NOISE", 60)
    monkeypatch.setattr(mechanism_attack, "_VISITS", 6)
    monkeypatch.setattr(canary_attack, "CANARIES", CANARIES)
    monkeypatch.setattr(canary_attack, "GUESSES", GUESSES)
    monkeypatch.setattr(canary_attack, "FEWEST", CANARIES)
