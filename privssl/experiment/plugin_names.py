"""Plug-ins named by a config, and their record in a run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from privssl.runtime import plugins
from privssl.settings import names


class PluginName(NamedTuple):
    """The name of a plug-in, and its config key."""

    kind: plugins.Kind
    key: str
    name: str


BUILT_IN: dict[plugins.Kind, tuple[str, ...]] = {
    "algorithms": names.ALGORITHMS,
    "models": names.NETWORKS,
    "datasets": names.DATA_SETS,
    "encoders": (*names.IMAGE_ENCODERS, *names.TEXT_ENCODERS),
    "partitions": names.PARTITIONS,
    "trackers": names.TRACKERS,
}
_PREFIXES: dict[plugins.Kind, tuple[str, ...]] = {
    "models": ("torchvision", "timm"), "encoders": names.ENCODER_PREFIXES,
}  # fmt: skip


def plugins_of(config: Any) -> Iterator[PluginName]:
    """Yield the plug-ins of a config. ``config``: a ``privssl.experiment.config.Config``."""
    data = config.data
    candidates: list[tuple[plugins.Kind, str, str | None]] = [
        ("algorithms", "algorithm.name", config.algorithm.name),
        ("models", "model.name", config.model.name),
        ("datasets", "data.name", data.name),
        ("encoders", "data.encoder", data.encoder),
        ("partitions", "data.partition", data.partition),
        ("partitions", "data.labelled_partition", data.labelled_partition),
        *(("trackers", "run.trackers", name) for name in config.run.trackers),
    ]
    for kind, key, name in candidates:
        library = name and name.partition(":")[0] in _PREFIXES.get(kind, ())
        if name and name not in BUILT_IN[kind] and not library:
            yield PluginName(kind, key, name)


def names_in(config: Any) -> frozenset[str]:
    """Return the names of a config's plug-ins."""
    return frozenset(name for _, _, name in plugins_of(config))


def imports_of(*configs: Any) -> AbstractContextManager[None]:
    """Permit imports of the plug-ins of the user's configs, and of no others.

    Run folders that are read meanwhile cannot choose code.
    """
    allowed = frozenset().union(*map(names_in, configs))
    return plugins.imports_allowed(allowed, "name it in the config that you train on")


def refuse_taken_names() -> None:
    """Raise ConfigError if an installed plug-in has the name of another, or of privssl."""
    for kind, built_in in BUILT_IN.items():
        plugins.check_names(kind, built_in)


def describe_plugins(config: Any) -> dict[str, dict[str, str | None]]:
    """Return a run's record of each plug-in, by key (``plugins.describe``)."""
    records: dict[str, dict[str, str | None]] = {}
    for kind, key, name in plugins_of(config):
        records[f"{key}: {name}" if key in records else key] = plugins.describe(kind, name)
    return records


def describe_here(config: Any) -> dict[str, dict[str, str | None]]:
    """Return the same for the plug-ins installed here, which are imported.

    Raises ConfigError if one cannot be imported.
    """
    for kind, key, name in plugins_of(config):
        plugins.load(kind, key, name)
    return describe_plugins(config)
