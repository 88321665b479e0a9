"""The ``privssl`` command: its subcommands and its error messages."""

import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from privssl.__main__ import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_the_main_command_passes_arguments_on_and_returns_the_status(
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


def test_an_unknown_command_is_refused_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "x.yaml"]) == 2  # codespell:ignore
    out, err = capsys.readouterr()
    assert out == ""
    assert "no command 'trian'. Did you mean train?" in err  # codespell:ignore


def test_a_missing_command_is_an_error_and_help_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert out == err  # the same usage, on the stream where it belongs
    assert all(f"  {name}  " in out for name in COMMANDS)


def test_the_error_about_an_unknown_flag_shows_the_syntax_of_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("train", "compare"):
        with pytest.raises(SystemExit):
            main([command, "x.yaml", "--rounds", "5"])
        assert "section.key=value, such as algorithm.rounds=5" in capsys.readouterr().err


def test_the_error_about_a_mistyped_flag_suggests_the_right_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command, typo, meant in (
        ("train", "--dryrun", "--dry-run"),
        ("compare", "--quite", "--quiet"),
    ):
        with pytest.raises(SystemExit):
            main([command, "x.yaml", typo])
        assert capsys.readouterr().err.endswith(f"{typo}. Did you mean {meant}?\n")
