"""Read and check a config: ``load_config``.

The command line overrides the file, and the file the defaults. All problems are reported at once in
one ``ConfigError``, each with its line and advice. Types and ranges are in ``settings/schema.py``
and in the ``Config`` of each algorithm; the checks between sections are here. A check that needs an
invalid value is skipped. Delta's limits: docs/privacy.md.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, Context
from pathlib import Path
from typing import Any, Literal

import yaml

from accounting.account_plan import DEVICE_NAMES
from privssl import encoders
from privssl.algorithms import ALGORITHMS
from privssl.core.rows import WITH_DROPOUT
from privssl.data.split import role_problems
from privssl.engines import batched
from privssl.errors import ConfigError
from privssl.experiment.later_keys import forget_later_keys, leave_out_former
from privssl.experiment.number_checks import count_labelled_rows, number_problems
from privssl.experiment.own_method_checks import not_private, problems_of
from privssl.experiment.row_checks import IMAGE_SETS, kind_in, row_problems
from privssl.ops.precision import Precision, fastest_precision, is_emulated
from privssl.settings import names
from privssl.settings.error_messages import either, problem_report, show
from privssl.settings.names import DATA_SETS, IMAGE_ENCODERS, LABELS_AT_BOTH, is_outside
from privssl.settings.schema import (
    DP_SGD_KEYS,
    AgentSettings,
    DataSettings,
    ModelSettings,
    PrivacySettings,
    Problem,
    RunSettings,
)
from privssl.settings.section_builder import ORDER, ConfigBuilder, unless_bad
from privssl.settings.yaml_reader import as_yaml_number

LONGEST_NAME = 200
_PATHS = {
    "data": ("root", "split", "encoder_weights", "columns"),
    "model": ("weights",),
    "run": ("certificate", "keys"),
    "privacy": ("ledger",),
}


@dataclass(frozen=True)
class Config:
    """One experiment. ``algorithm`` is the ``Config`` of the chosen algorithm.

    ``warnings`` are about values that are valid but probably unintended.
    """

    run: RunSettings
    data: DataSettings
    agents: AgentSettings
    model: ModelSettings
    algorithm: Any
    privacy: PrivacySettings | None
    source: Path = field(compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def hides_counts(self) -> bool:
        """Whether the number of an agent's labelled rows is protected too."""
        return self.privacy is not None and self.privacy.record_counts == "private"

    @property
    def folder(self) -> Path:
        """The run folder: ``run.output``, or runs/NAME-SEED."""
        text = self.run.output or f"runs/{self.run.name}-{self.run.seed}"
        try:
            return Path(text).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"run.output is {text!r}: {error}. Write the path out") from None


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    algorithms: Mapping[str, type[Any]] = ALGORITHMS,
    text: str | None = None,
) -> Config:
    """Read and check a config file of at most 1 MiB.

    Args:
        overrides: ``section.key=value``, the value as YAML; ``privacy=null`` removes that section.
        algorithms: name -> class with a ``Config`` dataclass and ``problems(config)``.
        text: the content to read instead of the file, whose path is then only a name.

    Raises:
        ConfigError: with every problem of the file and the arguments, sorted by line.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:  # the run's log and config.yaml could not contain it
        raise ConfigError(f"{show(str(path))}: its name is not UTF-8. Rename the file") from None
    builder = ConfigBuilder(path, algorithms)
    builder.read_file(text)
    from_run = path.name == "config.yaml" and (path.parent / "split.json").exists()
    if from_run:
        leave_out_former(builder)
    for override in overrides:
        builder.override(override)
    values: dict[str, Any] = {name: builder.section(name) for name in ORDER}
    values |= {"source": path, "warnings": ()}
    config = unless_bad(Config, values, {name for name in ORDER if name in builder.bad})
    builder.check("run.", _find_name_problems(config))
    builder.check("", _find_privacy_problems(config, algorithms))
    builder.check("", _find_method_problems(config, algorithms))
    builder.check("", _find_row_problems(config, algorithms))
    builder.check("run.", _find_quorum_problems(config, algorithms))
    builder.check("run.", _find_batching_problems(config))
    builder.check("", number_problems(config, builder.bad))
    if not builder.findings:  # unless the algorithm has reported it
        builder.check("agents.", role_problems(config.data.labels, config.agents))
    if builder.findings:
        raise ConfigError(problem_report(path, builder.findings))
    run = dataclasses.replace(
        config.run, name=_name_of_run(config), precision=_resolve_precision(config, algorithms),
        absent=_resolve_absent(config, algorithms),
    )  # fmt: skip
    config = dataclasses.replace(config, run=run, warnings=tuple(_collect_warnings(config)))
    # In a run folder paths are absolute; other paths in older runs are part of their checksum.
    return config if from_run else _make_paths_absolute(config)


def _make_paths_absolute(config: Config) -> Config:
    sections = {}
    for name, keys in _PATHS.items():
        section = getattr(config, name)
        paths = {key: getattr(section, key) for key in keys if getattr(section, key, "")}
        absolute = {key: os.path.abspath(text) for key, text in paths.items() if text[0] != "~"}
        sections[name] = dataclasses.replace(section, **absolute) if absolute else section
    return dataclasses.replace(config, **sections)


def _name_of_run(config: Config) -> str:
    return config.run.name or config.source.stem


def _resolve_precision(config: Config, algorithms: Mapping[str, type[Any]]) -> Precision:
    """Resolve ``auto`` for this machine, so that the run's config repeats the run elsewhere."""
    if config.run.precision != "auto":
        return config.run.precision
    private = config.privacy is not None and not _is_census(config, algorithms)
    if private or config.run.batched_agents > 1:  # these need float32
        return "float32"
    return fastest_precision(config.model.name, config.run.device)


def _find_name_problems(config: Config) -> Iterator[Problem]:
    """Check a run's name, which becomes a folder on every system."""
    name = _name_of_run(config)
    valid = name not in (".", "..") and not set(name) & set('/\\:*?"<>|')
    if not valid or DEVICE_NAMES.fullmatch(name) or name != name.strip(" ") or name.endswith("."):
        yield Problem(
            "name",
            f"{show(name)} cannot be the name of a folder on every system. "
            "Use letters, digits, - and _",
        )
    for key, text in (("name", name), ("output", config.run.output)):
        if len(text) > LONGEST_NAME:
            yield Problem(key, f"has {len(text)} characters: give at most {LONGEST_NAME}")


def _find_privacy_problems(
    config: Config, algorithms: Mapping[str, type[Any]]
) -> Iterator[Problem]:
    """Yield settings of other sections that violate the guarantee. docs/privacy.md."""
    if config.privacy is None:
        return
    if _is_census(config, algorithms):
        yield from _find_census_problems(config)
    else:
        yield from _find_dp_sgd_problems(config)
    if config.data.order != "stored":
        yield Problem(
            "data.order",
            f"{config.data.order} puts an agent's rows in an order that follows from the labels of "
            "all, so one label would move the random draws of other rows. Leave it out",
        )
    rows = count_labelled_rows(config)
    if rows and 1 / rows <= config.privacy.delta < 1:
        yield Problem(
            "privacy.delta",
            f"{config.privacy.delta} allows a whole row to be published: an agent holds about "
            f"{rows:.0f} labelled rows. Give less than 1 / {rows:.0f}, better {_usual_delta(rows)}",
        )


def _is_census(config: Config, algorithms: Mapping[str, type[Any]]) -> bool:
    """Whether labels are released as noisy counts instead of noisy gradients."""
    return getattr(algorithms[config.algorithm.name], "mechanism", "dp-sgd") == "census"


def _find_census_problems(config: Config) -> Iterator[Problem]:
    """Yield settings that do not fit a census: noisy gradients, and norms that mix rows."""
    name = config.algorithm.name
    defaults = {spec.name: spec.default for spec in dataclasses.fields(PrivacySettings)}
    for key in DP_SGD_KEYS:
        value = getattr(config.privacy, key)
        if value != defaults[key]:
            yield Problem(
                f"privacy.{key}",
                f"{show(value)} has no meaning for {name}, which trains no network on labelled "
                "rows. Leave it out",
            )
    if getattr(config.privacy, "record_counts", "") == "private":
        yield Problem(
            "privacy.record_counts",
            "private, but how many labelled rows there are is public in a census (data.labelled): "
            "set public",
        )
    if config.model.norm == "batch":
        yield Problem(
            "model.norm",
            "batch norm mixes the rows of a batch, so one row more could move others to another "
            "cluster. Set model.norm: group",
        )


def _find_dp_sgd_problems(config: Config) -> Iterator[Problem]:
    """Yield settings that break per-example clipping."""
    if config.model.norm in ("batch", "static"):
        yield Problem(
            "model.norm",
            f"{config.model.norm} norm couples the rows of a batch, so no single row can be "
            "clipped. Set model.norm: group",
        )
    if config.run.precision == "bfloat16":
        yield Problem(
            "run.precision",
            "private gradients are clipped and noised in float32. Set run.precision: float32",
        )
    if config.model.name in WITH_DROPOUT:
        yield Problem(
            "model.name",
            f"{config.model.name} has dropout, whose draws go by a row's place in the batch, so "
            "one row more would change what others contribute. Set model.name: small_cnn",
        )


def _usual_delta(rows: float) -> str:
    """Return the usual largest delta, rows^-1.1, rounded down, as a YAML number."""
    two_digits = Context(prec=2, rounding=ROUND_DOWN)
    return as_yaml_number(f"{two_digits.create_decimal_from_float(rows**-1.1):.1e}") or "0.5"


def _find_method_problems(config: Config, algorithms: Mapping[str, type[Any]]) -> Iterator[Problem]:
    name = config.algorithm.name
    yield from problems_of(algorithms[name], config)
    if config.data.labels == "labels-at-both" and name not in LABELS_AT_BOTH:
        text = f"labels-at-both, but {name} has no round in which a server and agents learn "
        advice = f"from labels. Set algorithm.name: {either(LABELS_AT_BOTH)}, or data.labels"
        yield Problem("data.labels", text + advice)
    if config.privacy is not None and config.data.labels in ("labels-at-server", "labels-at-both"):
        text = f"{config.data.labels}, but a claim is against whoever controls the server, and the "
        yield Problem("data.labels", f"{text}server would hold labelled rows. Set support")
    if config.privacy is not None and not algorithms[name].can_be_private:
        private = [key for key, algorithm in algorithms.items() if algorithm.can_be_private]
        yield Problem("algorithm.name", not_private(name, private))


def _find_row_problems(config: Config, algorithms: Mapping[str, type[Any]]) -> Iterator[Problem]:
    encoder = config.data.encoder
    if encoder and not encoders.is_known(encoder):
        yield Problem("data.encoder", f"{show(encoder)} is unknown. Give {either(encoders.NAMES)}")
        return
    data, texts = config.data, config.data.name == "sent140" or bool(config.data.text)
    takes_texts = encoders.reads_texts(encoder) if encoder else None
    if takes_texts not in (None, texts) and data.name in DATA_SETS and data.name != "npz":
        takes, other = ("texts", IMAGE_ENCODERS[0]) if not texts else ("images", "minilm")
        has = "texts" if texts else "images" if data.name in IMAGE_SETS else "a table"
        advice = "Leave it out" if has == "a table" else f"Set {other}"
        yield Problem(
            "data.encoder", f"{encoder} takes {takes}, and {data.name} has {has}. {advice}"
        )
        return
    if config.privacy is not None and data.name == "csv" and not (data.text or data.columns):
        yield Problem(
            "data.columns",
            "missing: bounds and categories taken from private rows would be one more release. "
            "Declare them in a file, from public knowledge",
        )
    kind = kind_in(config)
    if kind is not None:
        yield from row_problems(config, kind, algorithms)


def _reply_policy_of(config: Config, algorithms: Mapping[str, type[Any]]) -> Any:
    """Return which replies the algorithm can miss: ``algorithms.base.MissingReplyPolicy``."""
    kind = algorithms[config.algorithm.name]
    return kind.missing_reply_policy_for(config.algorithm, private=config.privacy is not None)


def _resolve_absent(config: Config, algorithms: Mapping[str, type[Any]]) -> Literal["stop", "skip"]:
    """Resolve ``auto`` for this algorithm, so that the run's config records it."""
    if config.run.absent != "auto":
        return config.run.absent
    default: Literal["stop", "skip"] = _reply_policy_of(config, algorithms).absent
    return default


def _find_quorum_problems(config: Config, algorithms: Mapping[str, type[Any]]) -> Iterator[Problem]:
    """Refuse runs over sites that would continue without replies that their algorithm needs."""
    name, policy = config.algorithm.name, _reply_policy_of(config, algorithms)
    if config.run.absent == "skip" and not policy.skip:
        yield Problem(
            "absent",
            f"skip, but with these settings {name} visits no agents one after the other, and a "
            "missing reply changes the aggregate. Leave it out, and give run.quorum, the share of "
            "agents that must reply",
        )
    if config.run.quorum < 1 and not policy.quorum:
        yield Problem("quorum", f"{name} needs the reply of every agent. Leave it out")


def _find_batching_problems(config: Config) -> Iterator[Problem]:
    """Yield settings that exclude batched agents or own networks; ``prepare`` checks the device."""
    if config.run.precision == "bfloat16" and is_outside(config.model.name):
        yield Problem(
            "precision",
            f"bfloat16 belongs to the networks of privssl, and model.name is {config.model.name}. "
            "Set run.precision: float32",
        )
    at_once = config.run.batched_agents
    reason = batched.unsupported_settings_reason(config.algorithm.name, config.run.precision)
    if at_once > 1 and reason is not None:
        yield Problem("batched_agents", f"is {at_once}, but {reason}")


def _collect_warnings(config: Config) -> Iterator[str]:
    if is_emulated(config.run.precision, config.run.device):
        yield (
            "run.precision is bfloat16, for which this processor has no instructions: steps can "
            "take several times as long as in float32. Set it to auto"
        )
    if config.run.engine == "flower" and config.run.certificate and not config.run.keys:
        yield (
            "run.keys is empty, so names are pinned to no keys: one site could use the name of "
            "another that is offline. Give the folder of the sites' public keys"
        )
    rows = count_labelled_rows(config)
    if config.privacy and rows and config.privacy.delta > rows**-1.1:
        yield (
            f"privacy.delta is {config.privacy.delta}, large for about {rows:.0f} labelled rows "
            f"of an agent. Customary is at most {_usual_delta(rows)}"
        )


def to_yaml(config: Config) -> str:
    """Return the config as YAML with every key; ``load_config`` reads it back as equal."""
    return yaml.safe_dump(_as_sections(config), sort_keys=False, allow_unicode=True, width=1000)


def without_paths(config: Config) -> dict[str, Any]:
    """Return all keys by section, without paths of this machine."""
    sections = _as_sections(config)
    _drop(sections, _PATHS | {"run": (*_PATHS["run"], "output")})
    sections["data"]["encoder"] = names.encoder_without_path(config.data.encoder)
    return sections


def result_relevant(config: Config) -> dict[str, dict[str, Any] | None]:
    """Return settings that may change a trained bit, by section; of ``run``: seed and precision."""
    sections = _as_sections(config)
    forget_later_keys(sections)
    return {**sections, "run": {key: sections["run"][key] for key in ("seed", "precision")}}


def config_hash(config: Config) -> str:
    """Hash :func:`result_relevant` by SHA-256. Configs with equal hashes can share checkpoints."""
    return hash_values(result_relevant(config))


def compatibility_hash(
    config: Config, classes: Sequence[str], shape: Sequence[int], scaling: str,
    encoder: str | None = None, columns: Mapping[str, Sequence[Any]] | None = None,
) -> str:  # fmt: skip
    """Return the SHA-256 of all that the parties of a run must share.

    Like ``config_hash``, without paths and budgets of one machine, and with the task: class names
    in the order of the outputs, the shape of a row and its scaling (``rows.scaling_of``), the
    checksum of the encoder's weights, and the columns of a table with their bounds or categories.
    With others a site would train on other features.
    """
    parts = result_relevant(config)
    _drop(parts, _PATHS | {"privacy": ("ledger", "ledger_epsilon")})
    task: dict[str, Any] = {"classes": list(classes), "shape": list(shape), "scaling": scaling}
    task |= {"encoder": encoder} if encoder else {}
    task |= {"columns": [[name, *scale] for name, scale in columns.items()]} if columns else {}
    return hash_values({**parts, "task": task})


def _drop(sections: Mapping[str, dict[str, Any] | None], keys: Mapping[str, Sequence[str]]) -> None:
    for section, dropped in keys.items():
        for key in dropped:
            (sections[section] or {}).pop(key, None)


def hash_values(parts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, in hex."""
    text = json.dumps(parts, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_sections(config: Config) -> dict[str, Any]:
    """Return all keys by section; None for a missing section."""
    return {name: (part := getattr(config, name)) and dataclasses.asdict(part) for name in ORDER}
