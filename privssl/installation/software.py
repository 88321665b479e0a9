"""Checks of installed packages and their versions, without importing them."""

import platform
import sys
from collections.abc import Container, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from privssl import __version__
from privssl.installation.finding import Finding, judge

#: Packages with their own line of the report.
MAIN = ("torch", "torchvision", "opacus", "numpy")
#: Optional packages (extras of setup.cfg), and their purpose.
OPTIONAL = {
    "flwr": ("flower", "sites (run.engine: flower)"),
    "dp-accounting": ("verify", "a second computation of epsilon"),
}
ROOT = Path(__file__).parents[2]


def check_python() -> Iterator[Finding]:
    """Check Python and privssl itself."""
    version = platform.python_version()
    supported, text = sys.version_info >= (3, 10), f"{version}, {sys.executable}"
    yield judge("Python", supported, text, "Use 3.10 or later.", otherwise="problem")
    try:
        installed = metadata.version("privssl")
    except metadata.PackageNotFoundError:
        yield Finding(
            "privssl", "problem", f"{__version__} in {ROOT}, which is not installed",
            "Run pip install -e . there.",
        )  # fmt: skip
        return
    matches = installed == __version__
    text = f"{__version__} in {ROOT}" + f", but {installed} is installed" * (not matches)
    advice = "Run pip install -e . in the folder that you use."
    yield judge("privssl", matches, text, advice, otherwise="problem")


def check_packages() -> Iterator[Finding]:
    """Check versions of required packages, against privssl's requirements and each other's."""
    requirements = map(Requirement, metadata.requires("privssl") or ())
    # without extras
    ranges = {
        requirement.name: requirement for requirement in requirements if requirement.marker is None
    }
    others = []
    for name, requirement in ranges.items():
        installed = _installed_version(name)
        if installed is None:
            yield Finding(name, "problem", f"absent; needed: {requirement}", "Run pip install -e .")
        elif not requirement.specifier.contains(installed, prereleases=True):
            advice = f'Run pip install "{requirement}".'
            yield Finding(name, "problem", f"{installed}; needed: {requirement}", advice)
        elif conflict := next(_find_clashes(name, ranges), None):
            advice = f'Run pip install "{conflict}", or install {name} again.'
            reason = (
                f"it is made for {conflict}, and {_installed_version(conflict.name)} is installed"
            )
            yield Finding(name, "problem", f"{installed}; {reason}", advice)
        elif name in MAIN:
            yield Finding(name, "ok", installed)
        else:
            others.append(f"{name} {installed}")
    if others:
        yield Finding("other packages", "ok", ", ".join(others))


def _find_clashes(name: str, names: Container[str]) -> Iterator[Requirement]:
    """Yield requirements of a package that installed versions do not meet."""
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        installed = _installed_version(requirement.name)
        if (
            installed is not None
            and requirement.name in names
            and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
            and not requirement.specifier.contains(installed.partition("+")[0], prereleases=True)
        ):
            yield requirement


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_optional_packages() -> Iterator[Finding]:
    """Report optional packages."""
    requirements = {
        requirement.name: requirement
        for requirement in map(Requirement, metadata.requires("privssl") or ())
    }
    for name, (extra, purpose) in OPTIONAL.items():
        installed, advice = _installed_version(name), f'pip install -e ".[{extra}]".'
        if installed is None:
            yield Finding(name, "note", f"absent: {purpose}", f"If you need it: {advice}")
        elif name in requirements and not requirements[name].specifier.contains(
            installed, prereleases=True
        ):
            text = f"{installed}; {purpose} need {requirements[name].specifier}"
            yield Finding(name, "problem", text, f"Run {advice}")
        else:
            yield Finding(name, "ok", f"{installed}: {purpose}")
