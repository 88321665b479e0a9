"""The installed command finds its commands, and answers a mistake in words."""

import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from privssl.__main__ import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_gets_its_arguments_and_its_status_is_returned(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sequence[str]] = []

    def stand_in(arguments: Sequence[str]) -> int:
        seen.append(list(arguments))
        return 3

    packages = ("compare", "reproduce", "audit", "site")
    module = f"privssl.{command}.__main__" if command in packages else f"privssl.{command}"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(main=stand_in))
    assert main([command, "x.yaml", "--flag"]) == 3
    assert seen == [["x.yaml", "--flag"]]


def test_an_unknown_command_is_a_mistake_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "x.yaml"]) == 2  # codespell:ignore
    out, err = capsys.readouterr()
    assert out == ""
    assert "no command 'trian'. Did you mean train?" in err  # codespell:ignore


def test_no_command_is_a_mistake_and_help_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert out == err  # the same usage, on the stream where it belongs
    assert all(f"  {name}  " in out for name in COMMANDS)


def test_an_unknown_flag_gets_the_form_of_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "compare"):
        with pytest.raises(SystemExit):
            main([command, "x.yaml", "--rounds", "5"])
        assert "section.key=value, such as algorithm.rounds=5" in capsys.readouterr().err


def test_a_flag_with_a_typo_gets_the_flag_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command, typo, meant in (
        ("train", "--dryrun", "--dry-run"),
        ("compare", "--quite", "--quiet"),
    ):
        with pytest.raises(SystemExit):
            main([command, "x.yaml", typo])
        assert capsys.readouterr().err.endswith(f"{typo}. Did you mean {meant}?\n")
