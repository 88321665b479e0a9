"""The commands of README.md run in their order, and its links exist."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import privssl.train as train
from privssl.audit import __main__ as audit
from privssl.compare import __main__ as compare
from privssl.experiment import config
from privssl.reproduce import __main__ as reproduce

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
#: Overrides that make a command of the README quick: by the start of the command.
QUICK = ["model.width=4", "algorithm.rounds=1", "algorithm.local_steps=1"]
PRIVATE = ["privacy.visits=1", "privacy.steps=2", "algorithm.warm_up=0"]
#: The command of `make train` in the Makefile.
MAKE_TRAIN = "python -m privssl.train configs/fedssl_dp.yaml run.overwrite=true"


def commands(text: str) -> list[list[str]]:
    """The ``python -m privssl...`` commands of the fenced blocks, in order, as words."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", f"{text}\n", re.DOTALL | re.MULTILINE)
    blocks = "\n".join(content for language, content in fenced if not language)
    found = []
    for line in blocks.splitlines():
        command = line.replace("make train", MAKE_TRAIN)
        if command.startswith("python -m privssl."):
            found.append(shlex.split(command, comments=True)[2:])
    return found


def obstacles(text: str) -> Iterator[str]:
    """The commands that fail after the commands before them, and why."""
    present: set[Path] = set()
    for command, *arguments in commands(text):
        files = [Path(word) for word in arguments if word.endswith(".yaml")]
        settings = [word for word in arguments if "=" in word]
        yield from (f"{file} does not exist" for file in files if not (ROOT / file).is_file())
        if command == "privssl.train" and files and (ROOT / files[0]).is_file():
            asked = config.load_config(ROOT / files[0], settings)
            if asked.folder in present and not asked.run.overwrite:
                yield f"{asked.folder} exists already: {' '.join(arguments)}"
            if "--dry-run" not in arguments:
                present.add(asked.folder)
        for word in arguments:
            if word.startswith("runs/") and Path(word) not in present:
                yield f"{word} is made by no command before: {command}"


@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md"])
def test_every_command_has_its_input_and_no_existing_output_folder(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(commands(text)) >= 8
    assert list(obstacles(text)) == []


@pytest.mark.parametrize(
    "planted",
    [
        "make train\npython -m privssl.train configs/fedssl_dp.yaml",
        "make train\npython -m privssl.train configs/fedssl_dp.yaml privacy.epsilon=4 run.seed=0",
        "make train\npython -m privssl.train --resume runs/fedssl-0",
        "python -m privssl.train configs/uda.yaml --dry-run\npython -m privssl.audit runs/uda-0",
        "python -m privssl.compare configs/fedssl.yaml configs/nothing.yaml",
    ],
)
def test_the_check_detects_commands_that_could_not_run(planted: str) -> None:
    assert len(list(obstacles(f"```\n{planted}\n```"))) == 1


def test_make_train_is_the_command_assumed_in_these_tests() -> None:
    inherited = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CONFIG", "ARGS", "VENV")  # of `make test`
    env = {key: value for key, value in os.environ.items() if key not in inherited}
    done = subprocess.run(
        ["make", "-n", "train"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f".venv/bin/{MAKE_TRAIN}"


@pytest.mark.slow
def test_the_commands_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    run = {
        "privssl.train": train.main,
        "privssl.audit": audit.main,
        "privssl.compare": compare.main,
        "privssl.reproduce": reproduce.main,
    }
    for name, *arguments in commands(TEXT):
        if any(word.endswith(".yaml") for word in arguments):
            arguments += QUICK + (PRIVATE if "fedssl_dp" in " ".join(arguments) else [])
        assert run[name]([*arguments]) == 0, (name, arguments)


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links to files or headings that do not exist, relative to a page's folder."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = folder / target
        if "://" in link:
            continue
        if not file.exists() or (target and anchor and anchor not in anchors(file)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_existing_targets(page: Path) -> None:
    assert broken_links(page.read_text(encoding="utf-8"), page.parent) == []


def test_the_check_detects_broken_links() -> None:
    text = "[a](docs/nothing.md#x) [b](docs/config.md#nothing) [c](docs/config.md#privacy)"
    assert broken_links(text, ROOT) == ["docs/nothing.md#x", "docs/config.md#nothing"]
    assert broken_links("[a](privssl/visits.py)", ROOT) == ["privssl/visits.py"]


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 130
