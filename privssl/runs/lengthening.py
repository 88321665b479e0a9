"""More rounds for a finished run: ``--resume RUN algorithm.rounds=N`` with a larger N.

It ends with the weights of a run that had been asked for N rounds at once. So it is refused where a
round depends on how many there are, and in private runs, whose plan says what all rounds spend.

The order of writing makes a kill harmless: results.json says "interrupted" before config.yaml has
the new number, and the checkpoint of the former last round counts as one of the longer run.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from privssl.algorithms import ALGORITHMS, WITH_UNREAD
from privssl.errors import ConfigError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.runs import run_dir
from privssl.runs.resume import check_resumable
from privssl.storage import atomic_files


def asks_for_more(folder: Path, config: Config) -> bool:
    """Whether a config has more rounds than that of a run's folder. Raises ConfigError: it has, and
    the run cannot be lengthened."""
    path = folder / "config.yaml"
    if not path.is_file():
        return False  # ``check_resumable`` says what is missing
    former = configs.load_config(path, algorithms=WITH_UNREAD)
    if former.algorithm.name != config.algorithm.name:
        return False
    now, then = config.algorithm.rounds, former.algorithm.rounds
    if now <= then:
        return False
    if reason := _refusal(folder, former):
        check_resumable(folder, config, longer=True)  # another difference is said first
        raise ConfigError(
            f"algorithm.rounds is {now} here, but {then} there, and {folder} cannot be lengthened: "
            f"{reason}"
        )
    return True


def read_finished_outcome(folder: Path, config: Config) -> tuple[dict[str, Any], str] | None:
    """The outcome (``run_dir.read_outcome``) of a run that is over; None: it goes on. Raises as
    ``asks_for_more`` and ``check_resumable``."""
    longer = asks_for_more(folder, config)
    check_resumable(folder, config, longer=longer)
    known = run_dir.read_outcome(folder)
    over = not longer and known is not None and known[0]["status"] != "interrupted"
    return known if over else None


def _refusal(folder: Path, former: Config) -> str:
    known = run_dir.read_outcome(folder)
    if reason := _dependence(former):
        return f"{reason}. Start a new run"
    if former.run.engine != "local":
        return "its sites are gone (run.engine). Start a new run"
    if known is None or known[0]["status"] != "finished":
        return f"it has not finished. First end it: --resume {folder}"
    return ""


def _dependence(config: Config) -> str:
    """Why a round may depend on how many there are; empty: it is the same."""
    kind, cfg = ALGORITHMS[config.algorithm.name], config.algorithm
    if config.privacy is not None:
        return (
            "its privacy plan fixes how often rows are used in all rounds together, and the noise "
            "for that"
        )
    if getattr(cfg, "schedule", "") == "cosine":
        return "its learning rate falls over all its rounds (algorithm.schedule)"
    # A stream is divided among the rounds.
    if not kind.can_be_lengthened or getattr(cfg, "stream_slices", 1) > 1:
        able = [name for name, kind in ALGORITHMS.items() if kind.can_be_lengthened]
        return (
            f"rounds of {cfg.name} may depend on how many there are (these can be lengthened: "
            f"{', '.join(able)})"
        )
    return ""


def digest_after(config: Config, rounds: int) -> str | None:
    """The ``config_hash`` of the same run with as few rounds; None where a run cannot go on."""
    if _dependence(config) or not 0 < rounds < config.algorithm.rounds:
        return None
    return configs.config_hash(with_rounds(config, rounds))


def with_rounds(config: Config, rounds: int) -> Config:
    """The config with another number of rounds."""
    return dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, rounds=rounds)
    )


def record(folder: Path, rounds: int) -> None:
    """Make a finished run's folder that of a longer one, which was interrupted."""
    known = run_dir.read_outcome(folder)
    assert known is not None  # ``asks_for_more`` has read it
    text = json.dumps({**known[0], "status": "interrupted"}, indent=2) + "\n"
    atomic_files.write(folder / "results.json", text)
    former = configs.load_config(folder / "config.yaml")
    atomic_files.write(folder / "config.yaml", configs.to_yaml(with_rounds(former, rounds)))
