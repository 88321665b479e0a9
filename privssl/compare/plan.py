"""The ordered runs of a comparison, checked before the first: configs, folders, splits."""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accounting.errors import AccountingError
from privssl.compare.vary import Variant, grid
from privssl.data import split_manifest
from privssl.errors import ConfigError, RunFolderError, UserError
from privssl.experiment import config as configs
from privssl.experiment.config import LONGEST_NAME, Config
from privssl.experiment.prepare import prepare
from privssl.runs import resume, run_dir
from privssl.runs.round_plan import rounds_of

LONGEST_FOLDER = 100  # characters of the default folder's list of names
# Keys that the command sets for every run, and their alternatives.
DECIDED = {
    "run.seed": "use --seeds",
    "run.output": "use --output",
    "run.overwrite": "a comparison never replaces a run; remove its folder, or use --output",
}

RunState = Literal["new", "stale", "begun", "finished"]  # stale: ended without a checkpoint


@dataclass(frozen=True)
class Planned:
    """One run of the comparison, checked."""

    config: Config  # with its seed and folder
    state: RunState
    rounds: int
    split: str  # the hash of its split.json
    rows: str  # the checksum of its data set

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def title(self) -> str:
        return f"{self.name} seed {self.config.run.seed}"


def load_configs(arguments: Sequence[str], vary: Sequence[str] = ()) -> list[Config]:
    """Load the configs, each with all overrides, and each in all variants (``section.key=a,b,c``).

    ``arguments``: paths of YAML files and ``section.key=value``, in any order.

    Raises:
        ConfigError: with the problems of all of them; or two have one name.
    """
    # A file whose name contains an equals sign needs a folder: ./a=1.yaml.
    overrides = [t for t in arguments if "=" in t and "/" not in t.partition("=")[0]]
    paths = [Path(text) for text in arguments if text not in overrides]
    for key, advice in DECIDED.items():
        if any(text.startswith(f"{key}=") for text in (*overrides, *vary)):
            raise ConfigError(f"{key} cannot be an argument here: {advice}")
    if any(text.startswith("run.name=") for text in vary):
        raise ConfigError("--vary run.name would repeat the same runs. Vary another key")
    if not paths:
        raise ConfigError("No config was given: name one YAML file or more")
    loaded, problems = list[Config](), list[str]()
    for path, variant in itertools.product(paths, grid(vary)):
        try:
            loaded.append(_load_variant(path, overrides, variant))
        except ConfigError as problem:
            problems.append(str(problem))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    by_casefold: dict[str, Config] = {}
    for config in loaded:
        # Some file systems ignore case.
        other = by_casefold.setdefault(config.run.name.casefold(), config)
        if other is not config:
            raise ConfigError(
                f"{other.source} and {config.source} both have the name {config.run.name}, which "
                "names the folders of their runs. Give one another run.name in its file"
            )
    unnamed = [dataclasses.replace(c, run=dataclasses.replace(c.run, name="")) for c in loaded]
    for (config, unnamed_config), (other, unnamed_other) in itertools.combinations(
        zip(loaded, unnamed, strict=True), 2
    ):
        if unnamed_config == unnamed_other and config.source == other.source:
            names = f"{config.run.name} and {other.run.name}"
            raise ConfigError(f"--vary: {names} are the same runs. Give each value once")
    return loaded


def _load_variant(path: Path, overrides: Sequence[str], variant: Variant) -> Config:
    config = configs.load_config(path, [*overrides, *variant.overrides])
    if not variant.name:
        return config
    run = dataclasses.replace(config.run, name=config.run.name + variant.name)
    return dataclasses.replace(config, run=run)


def varied_values(loaded: Sequence[Config], vary: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Map each config to the keys of ``--vary`` with its values."""
    keys = [text.partition("=")[0] for text in vary]
    return {config.run.name: {key: _read_key(config, key) for key in keys} for config in loaded}


def _read_key(config: Config, key: str) -> Any:
    section, *names = key.split(".")
    value = getattr(config, section)
    for name in names:
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def title_of(config: Config) -> str:
    """Return the file of a config, with its name if different (as for variants)."""
    is_default = config.run.name == config.source.stem
    return str(config.source) if is_default else f"{config.source} ({config.run.name})"


def default_output(loaded: Sequence[Config]) -> Path:
    """Return runs/compare-NAMES."""
    names = "-".join(config.run.name for config in loaded)
    if len(names) > LONGEST_FOLDER:
        names = f"{names[:LONGEST_FOLDER]}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    return Path("runs") / f"compare-{names}"


def all_runs(loaded: Sequence[Config], seeds: Sequence[int], output: Path) -> list[Planned]:
    """Return all runs in their order: all configs on one seed, then on the next.

    Raises UserError or AccountingError for the first problem, with its run.
    """
    planned = []
    for seed in seeds:
        for config in loaded:
            folder = output / f"{config.run.name}-{seed}"
            _check_folder_name(folder)
            run = dataclasses.replace(config.run, seed=seed, output=str(folder), overwrite=False)
            run_config = dataclasses.replace(config, run=run)
            try:
                planned.append(_plan_run(run_config))
            except (UserError, AccountingError) as problem:
                raise ConfigError(f"{title_of(config)}, seed {seed}: {problem}") from problem
    for runs in by_name(planned).values():
        _check_one_data_set(runs)
    return planned


def _check_one_data_set(runs: Sequence[Planned]) -> None:
    """Refuse seeds of one config with different rows: their files changed after a run finished."""
    first = runs[0]
    seeds = [str(run.config.run.seed) for run in runs if run.rows != first.rows]
    if seeds and first.config.data.test is None:  # which samples test rows by the seed
        raise ConfigError(
            f"{title_of(first.config)}: seed {', '.join(seeds)} has other rows than seed "
            f"{first.config.run.seed}: {first.config.data.name} was changed between runs. Put the "
            "former data back, or give another --output"
        )


def _check_folder_name(folder: Path) -> None:
    """Refuse a name that a run's config.yaml could not contain."""
    if len(str(folder)) > LONGEST_NAME or not str(folder).isprintable():
        raise ConfigError(
            f"{str(folder)!r} cannot be the folder of a run: give --output a name that can be "
            f"printed, and at most {LONGEST_NAME} characters in all"
        )


def _plan_run(config: Config) -> Planned:
    state = _read_run_state(config)
    if state == "finished":
        outcome = run_dir.read_outcome(config.folder)
        assert outcome is not None  # or it would not be finished
        # Not from results.json: private runs withhold it there.
        split = split_manifest.read_manifest(config.folder / "split.json")
        return Planned(config, state, outcome[0]["rounds"], split.hash, split.checksum)
    prepared = prepare(config)
    split = prepared.federated_data.manifest
    return Planned(config, state, rounds_of(prepared.algorithm), split.hash, split.checksum)


def _read_run_state(config: Config) -> RunState:
    """Return the state of a run's folder. Raises RunFolderError if it is no run, or another one."""
    folder = config.folder
    try:
        names = run_dir.list_entries(folder)
        state: RunState = "stale"
        if (folder / "config.yaml").is_file():
            state = resume.run_state(folder, config)
    except RunFolderError as problem:
        raise RunFolderError(f"{problem} (for a comparison: another --output)") from None
    if not names:
        return "new"
    if state != "stale":
        return state
    if "split.json" not in names:
        raise RunFolderError(
            f"{folder} exists and is not a run of privssl: nothing was changed. Give another "
            "--output"
        )
    return "stale"


def by_name(planned: Sequence[Planned]) -> dict[str, list[Planned]]:
    """Map configs to runs; configs in the order of the command line, runs by seed."""
    runs: dict[str, list[Planned]] = {}
    for run in planned:
        runs.setdefault(run.name, []).append(run)
    return runs


def different_splits(planned: Sequence[Planned]) -> dict[str, list[str]]:
    """Map configs to the keys for which their splits differ from those of the first config."""
    first, *others = by_name(planned).values()
    differs: dict[str, list[str]] = {first[0].name: []}
    for runs in others:
        equal = [run.split for run in runs] == [run.split for run in first]
        keys = [] if equal else list(_find_differing_keys(runs[0].config, first[0].config))
        differs[runs[0].name] = keys if equal or keys else ["the rows of the data set"]
    return differs


def _find_differing_keys(config: Config, first: Config) -> Mapping[str, tuple[Any, Any]]:
    """Map the keys of data and agents that differ to both values: this one, and the first's."""
    return {
        f"{section}.{key}": (value, vars(getattr(first, section))[key])
        for section in ("data", "agents")
        for key, value in vars(getattr(config, section)).items()
        if value != vars(getattr(first, section))[key]
    }


def cannot_share(planned: Sequence[Planned], differs: Mapping[str, Sequence[str]]) -> str:
    """Return the error message for configs without a shared split, with every key that differs."""
    runs = by_name(planned)
    first = planned[0].config
    lines = []
    for name in (name for name, keys in differs.items() if keys):
        values = _find_differing_keys(runs[name][0].config, first)
        details = [f"{key} is {value}, not {other}" for key, (value, other) in values.items()]
        details = details or ["the rows of its data set are others: it was changed between runs"]
        lines.append(f"  {title_of(runs[name][0].config)}: {'; '.join(details)}")
    return "\n".join(
        [
            f"These configs cannot have the split of {title_of(first)}, so that their accuracies "
            "could not be compared:",
            *lines,
            "Give all the same values (an argument section.key=value counts for all), or "
            "--allow-different-splits, and the table says so",
        ]
    )
