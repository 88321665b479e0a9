"""More rounds for a finished run: ``--resume RUN algorithm.rounds=N`` with a larger N.

It ends with the weights of a run with N rounds from the start. So it is refused if a round depends
on the number of rounds, and in private runs, whose plan fixes the spending of all rounds.

The order of writing makes a kill harmless: results.json has "interrupted" before config.yaml has
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
    """Return whether a config has more rounds than that of a run's folder.

    Raises ConfigError if it has, and the run cannot be lengthened.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return False  # ``check_resumable`` reports it
    former = configs.load_config(path, algorithms=WITH_UNREAD)
    if former.algorithm.name != config.algorithm.name:
        return False
    rounds, former_rounds = config.algorithm.rounds, former.algorithm.rounds
    if rounds <= former_rounds:
        return False
    if reason := _explain_refusal(folder, former):
        check_resumable(folder, config, longer=True)  # reports other differences first
        raise ConfigError(
            f"algorithm.rounds is {rounds} here, but {former_rounds} there, and {folder} "
            f"cannot be lengthened: {reason}"
        )
    return True


def read_finished_outcome(folder: Path, config: Config) -> tuple[dict[str, Any], str] | None:
    """Return the outcome (``run_dir.read_outcome``) of a finished run; None if it continues.

    Raises as ``asks_for_more`` and ``check_resumable``.
    """
    longer = asks_for_more(folder, config)
    check_resumable(folder, config, longer=longer)
    outcome = run_dir.read_outcome(folder)
    finished = not longer and outcome is not None and outcome[0]["status"] != "interrupted"
    return outcome if finished else None


def _explain_refusal(folder: Path, former: Config) -> str:
    outcome = run_dir.read_outcome(folder)
    if reason := _explain_dependence(former):
        return f"{reason}. Start a new run"
    if former.run.engine != "local":
        return "its sites are gone (run.engine). Start a new run"
    if outcome is None or outcome[0]["status"] != "finished":
        return f"it has not finished. First end it: --resume {folder}"
    return ""


def _explain_dependence(config: Config) -> str:
    """Return why a round may depend on the number of rounds; empty if it does not."""
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
        names = [name for name, kind in ALGORITHMS.items() if kind.can_be_lengthened]
        return (
            f"rounds of {cfg.name} may depend on how many there are (these can be lengthened: "
            f"{', '.join(names)})"
        )
    return ""


def digest_after(config: Config, rounds: int) -> str | None:
    """Return the ``config_hash`` of the same run with this many rounds; None if it cannot be
    lengthened."""
    if _explain_dependence(config) or not 0 < rounds < config.algorithm.rounds:
        return None
    return configs.config_hash(with_rounds(config, rounds))


def with_rounds(config: Config, rounds: int) -> Config:
    """Return the config with another number of rounds."""
    return dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, rounds=rounds)
    )


def record(folder: Path, rounds: int) -> None:
    """Turn a finished run's folder into that of a longer, interrupted run."""
    outcome = run_dir.read_outcome(folder)
    assert outcome is not None  # ``asks_for_more`` has read it
    text = json.dumps({**outcome[0], "status": "interrupted"}, indent=2) + "\n"
    atomic_files.write(folder / "results.json", text)
    former = configs.load_config(folder / "config.yaml")
    atomic_files.write(folder / "config.yaml", configs.to_yaml(with_rounds(former, rounds)))
