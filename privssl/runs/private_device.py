"""The device of the private steps that a run took with an earlier version, which let a GPU take
them: rounding there may depend on other rows, so clipping bounds nothing."""

import re
from pathlib import Path

from privssl.algorithms import WITH_UNREAD
from privssl.experiment.config import Config

#: The line of train.log with the device of a session, where that is not the CPU.
_OTHER = re.compile(r"^[\d-]+ [\d:,]+ INFO Device (?!cpu\b)(\S+), torch ", re.MULTILINE)


def other_device(folder: Path, config: Config) -> str:
    """A sentence where the folder says that private steps took another device; empty: it does not.

    Args:
        config: that of the run's config.yaml.
    """
    census = getattr(WITH_UNREAD[config.algorithm.name], "mechanism", "dp-sgd") == "census"
    privacy = config.privacy
    if privacy is None or privacy.scope != "sound" or census or config.run.engine != "local":
        return ""
    place, device = "config.yaml", config.run.device
    if device in ("auto", "cpu"):
        place, found = "train.log", _OTHER.search(_read(folder / "train.log"))
        device = "" if found is None else found[1]
    if not device:
        return ""
    return (
        f"{place} says that private steps took {device}, where rounding may let a row change the "
        "gradients of others, so no guarantee holds (docs/performance.md, A GPU)"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
