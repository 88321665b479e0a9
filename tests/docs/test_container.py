"""The container file of a site follows good practice, and starts a site.

No test builds it: that needs a container engine and a package index.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from privssl.site import __main__ as site

ROOT = Path(__file__).parents[2]
FILE = (ROOT / "containers" / "Containerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "container.md").read_text(encoding="utf-8")


def instructions(text: str) -> list[tuple[str, str]]:
    """Instruction and argument of each line, continued lines joined."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    split = (line.split(None, 1) for line in lines if line.strip() and line[0] != "#")
    return [(name, " ".join(argument.split())) for name, argument in split]


def problems(text: str) -> Iterator[str]:
    """What a linter of container files, or a careful operator, would refuse."""
    found = instructions(text)
    bases = [argument for name, argument in found if name == "FROM"]
    last = [name for name, _ in found][::-1].index("FROM")
    final = found[-last:]
    yield from (f"{base}: no fixed tag" for base in bases if not re.match(r"[\w./-]+:\d", base))
    users = [argument for name, argument in final if name == "USER"]
    if not users or users[-1].partition(":")[0] in ("root", "0"):
        yield "runs as root"
    for name, argument in found:
        if name == "ADD" or "sudo" in argument.split():
            yield f"{name} {argument}"
        if name in ("ENTRYPOINT", "CMD") and not argument.startswith("["):
            yield f"{name} in a shell, which signals do not pass"
        if "apt-get install" in argument and "rm -rf /var/lib/apt/lists/*" not in argument:
            yield "keeps the lists of packages"
        if "pip install" in argument and "--no-cache-dir" not in argument:
            yield "keeps pip's cache"
        if re.search(r"(?i)(password|token|secret|\.key\b|SITE\.yaml|rows\.npz)", argument) and (
            name in ("COPY", "ENV", "ARG")
        ):
            yield f"{name} puts what is the operator's into the image"
        if name == "COPY" and not argument.startswith("--from"):
            sources = argument.split()[:-1]
            yield from (f"no {source}" for source in sources if not (ROOT / source).exists())


def test_the_file_has_no_problem() -> None:
    assert list(problems(FILE)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("python:3.12-slim\nCOPY", "python\nCOPY", "no fixed tag"),
        ("USER 10001:10001", "USER root", "runs as root"),
        ("USER 10001:10001\n", "", "runs as root"),
        (" && rm -rf /var/lib/apt/lists/*", "", "keeps the lists"),
        (" --no-cache-dir", "", "keeps pip's cache"),
        ('CMD ["SITE.yaml", "--serve"]', "CMD SITE.yaml --serve", "in a shell"),
        ("COPY privssl ./privssl", "COPY privsl ./privssl", "no privsl"),
        ("WORKDIR /site", "COPY s0/SITE.yaml /site/", "the operator's"),
    ],
)
def test_the_check_detects_planted_problems(old: str, new: str, said: str) -> None:
    assert old in FILE
    assert any(said in text for text in problems(FILE.replace(old, new)))


def test_the_copied_files_are_those_that_an_installation_needs() -> None:
    copied = " ".join(argument for name, argument in instructions(FILE) if name == "COPY")
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    packages = re.findall(r"^    (\w+)\*$", setup, re.MULTILINE)
    assert packages == ["privssl", "generators", "accounting"]
    for name in (*packages, "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        assert name in copied.split()


def test_the_container_starts_a_site_like_the_commands_on_the_page(tmp_path: Path) -> None:
    found = dict(instructions(FILE))
    assert json.loads(found["ENTRYPOINT"])[1:] == ["-m", "privssl.site"]
    parse = site._build_parser().parse_args
    assert parse(json.loads(found["CMD"])).serve
    commands = re.findall(r"^ +podman (run|build) (.*)$", PAGE, re.MULTILINE)
    assert [name for name, _ in commands] == ["build", "run", "run"]
    assert commands[0][1].endswith("--file containers/Containerfile .")
    check, start = (parse(text.partition("privssl-site ")[2].split()) for _, text in commands[1:])
    assert not check.serve and check.superlink is None
    assert (start.superlink, start.key) == ("link.example.org:8000", "s0")
    user = found["USER"].partition(":")[0]
    for _, text in commands[1:]:
        assert f"--userns keep-id:uid={user}" in text and "--volume ./s0:/site:Z" in text


def test_the_container_disables_the_telemetry_of_flower_like_the_launchers() -> None:
    from privssl.remote.flower_transport import OFFLINE

    assert all(f"{name}={value}" in FILE for name, value in OFFLINE.items())
