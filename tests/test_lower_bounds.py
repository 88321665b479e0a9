"""The lower bounds in setup.cfg are the versions that `make test-oldest` installs."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lower_bounds(config: str) -> dict[str, str]:
    """All packages that a user installs: package -> oldest version."""
    setup = configparser.ConfigParser()
    setup.read_string(config)
    lines = setup["options"]["install_requires"] + setup["options.extras_require"]["verify"]
    return dict(re.findall(r"^([\w-]+)>=([\d.]+)", lines, flags=re.MULTILINE))


def unlike(config: str, constraints: str) -> set[str]:
    """The packages whose lower bound differs from the installed version."""
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", constraints, flags=re.MULTILINE))
    return {
        name
        for name, oldest in lower_bounds(config).items()
        if not f"{pinned.get(name)}.".startswith(f"{oldest}.")
    }


def test_the_oldest_tested_packages_are_the_lower_bounds() -> None:
    config = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    constraints = (ROOT / "tests" / "oldest.txt").read_text(encoding="utf-8")
    assert {"torch", "scipy", "pydantic", "dp-accounting"} <= lower_bounds(config).keys()
    assert not unlike(config, constraints)
    # The negative controls: a lowered bound, and an untested one.
    assert unlike(config.replace("scipy>=1.13", "scipy>=1.1"), constraints) == {"scipy"}
    assert unlike(config, constraints.replace("rich==", "poor==")) == {"rich"}
