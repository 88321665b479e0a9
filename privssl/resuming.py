"""Whether a run may go on in its folder: the same config, and the same rows at the same agents.

A claim says what was released about the rows of each account. If other rows lay under it after an
interruption than before, visits to a row would be spread over accounts, and no account would have
all of them; so a run whose data was changed in between does not go on.
"""

import logging
from pathlib import Path
from typing import Any

from privssl import config as configs
from privssl.checkpoint import Snapshot
from privssl.config import Config
from privssl.data import manifest
from privssl.errors import DataError, RunFolderError
from privssl.prepare import Prepared

log = logging.getLogger("privssl")

#: The key under which a checkpoint remembers the hash of the run's split.
SPLIT = "split"


def check_resumable(folder: Path, config: Config) -> None:
    """Whether this is the folder of a run of this config.

    Raises:
        RunFolderError: it is no run, or a setting that decides over results is another one.
        ConfigError: its config.yaml is damaged.
    """
    recorded = folder / "config.yaml"
    if not recorded.is_file():
        raise RunFolderError(
            f"{folder} is not the folder of a run: it has no config.yaml. Give --resume the "
            "folder that an earlier run named in its last lines"
        )
    now, then = _deciding(config), _deciding(configs.load(recorded))
    differing = [
        f"{key} is {now.get(key, 'absent')} here, but {then.get(key, 'absent')} there"
        for key in sorted(now.keys() | then.keys())
        if now.get(key, "absent") != then.get(key, "absent")
    ]
    if differing:
        moved = any(text.startswith(("data.root", "data.split")) for text in differing)
        advice = " Data that was moved must be put back, or linked to." if moved else ""
        raise RunFolderError(
            f"{folder} belongs to another config: {'; '.join(differing)}. Go on with "
            f"{recorded}, or start a new run with another run.output.{advice}"
        )


def _deciding(config: Config) -> dict[str, Any]:
    """What decides over the results of a run, by dotted key: what ``config.digest`` is made of."""
    return {
        f"{name}.{key}": value
        for name, section in configs.deciding(config).items()
        for key, value in (section or {}).items()
    }


def check_same_split(folder: Path, prepared: Prepared, snapshot: Snapshot) -> None:
    """Whether every agent has the rows that it had; a split.json that is damaged is written anew.

    Raises:
        RunFolderError: the data is not what it was.
    """
    now, path = prepared.federation.manifest, folder / "split.json"
    try:
        written = manifest.read(path).hash
    except DataError as error:
        written = ""
        log.warning("%s. It is written anew", error)
    then = snapshot.extra.get(SPLIT, written)  # earlier checkpoints do not remember it
    if then not in (now.hash, ""):
        raise RunFolderError(
            f"{folder} began with other data: the split of its rows has the hash {str(then)[:12]}, "
            f"that of the data as it is now {now.hash[:12]}. Put the former data back, or start a "
            "new run with another run.output"
        )
    if written != now.hash:
        now.write(path)
