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
    here = platform.python_version()
    new, text = sys.version_info >= (3, 10), f"{here}, {sys.executable}"
    yield judge("Python", new, text, "Use 3.10 or later.", otherwise="problem")
    try:
        installed = metadata.version("privssl")
    except metadata.PackageNotFoundError:
        yield Finding(
            "privssl", "problem", f"{__version__} in {ROOT}, which is not installed",
            "Run pip install -e . there.",
        )  # fmt: skip
        return
    same = installed == __version__
    text = f"{__version__} in {ROOT}" + f", but {installed} is installed" * (not same)
    advice = "Run pip install -e . in the folder that you use."
    yield judge("privssl", same, text, advice, otherwise="problem")


def check_packages() -> Iterator[Finding]:
    """Check versions of required packages, against privssl's requirements and each other's."""
    asked = map(Requirement, metadata.requires("privssl") or ())
    ranges = {needed.name: needed for needed in asked if needed.marker is None}  # without extras
    fine = []
    for name, needed in ranges.items():
        found = _version(name)
        if found is None:
            yield Finding(name, "problem", f"absent; needed: {needed}", "Run pip install -e .")
        elif not needed.specifier.contains(found, prereleases=True):
            advice = f'Run pip install "{needed}".'
            yield Finding(name, "problem", f"{found}; needed: {needed}", advice)
        elif clash := next(_clashes(name, ranges), None):
            advice = f'Run pip install "{clash}", or install {name} again.'
            wanted = f"it is made for {clash}, and {_version(clash.name)} is installed"
            yield Finding(name, "problem", f"{found}; {wanted}", advice)
        elif name in MAIN:
            yield Finding(name, "ok", found)
        else:
            fine.append(f"{name} {found}")
    if fine:
        yield Finding("other packages", "ok", ", ".join(fine))


def _clashes(name: str, ours: Container[str]) -> Iterator[Requirement]:
    """Yield requirements of a package that installed versions do not meet."""
    for text in metadata.requires(name) or ():
        needed = Requirement(text)
        found = _version(needed.name)
        if (
            found is not None
            and needed.name in ours
            and (needed.marker is None or needed.marker.evaluate({"extra": ""}))
            and not needed.specifier.contains(found.partition("+")[0], prereleases=True)
        ):
            yield needed


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_optional_packages() -> Iterator[Finding]:
    """Report optional packages."""
    needed = {
        needed.name: needed for needed in map(Requirement, metadata.requires("privssl") or ())
    }
    for name, (extra, purpose) in OPTIONAL.items():
        found, advice = _version(name), f'pip install -e ".[{extra}]".'
        if found is None:
            yield Finding(name, "note", f"absent: {purpose}", f"If you need it: {advice}")
        elif name in needed and not needed[name].specifier.contains(found, prereleases=True):
            text = f"{found}; {purpose} need {needed[name].specifier}"
            yield Finding(name, "problem", text, f"Run {advice}")
        else:
            yield Finding(name, "ok", f"{found}: {purpose}")
