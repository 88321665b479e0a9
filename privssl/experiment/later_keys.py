"""Config keys that only earlier or later versions have, so that checkpoints stay valid."""

from collections.abc import Mapping
from typing import Any

from privssl.engines import batched
from privssl.settings.section_builder import ConfigBuilder

#: Keys of later versions enter a hash only if they are used, so older checkpoints stay valid.
_LATER: Mapping[str, Mapping[str, Any]] = {
    "data": {
        "checksum": "", "encoder": "", "encoder_weights": "", "label": "label", "text": "",
        "columns": "", "test": None, "order": "stored", "server_labelled": None, "person": "",
    },
    "model": {"options": {}, "weights": ""},
    "privacy": {"unit": "record", "rows_per_person": 1},
    "algorithm": {
        "updates": "joint", "reading": "bayes",
        "generator": "mixing", "weight_code": 0.0125, "generator_at": "all",
        "synthetic_share": 0.0, "synthetic_at": "query", "synthetic_labels": "teacher",
        "soft_labels": None, "mix_rows": None, "mix_drawn": None, "mix_view": None,
        "server_first": None, "schedule": ("factor", "constant"), "nesterov": False,
        "clip_gradients": None,
        "trains": "drawn", "local_player": "remembered", "labelled_by": "global",
        "decay_on": None, "inter_client_rows": None, "decomposition": True,
        "measure_labelled": False, "refresh_helpers": None, "sparse_messages": None,
        "slices_of": None, "evaluate_parts": False, "aggregation": "mean", "stream_slices": 1,
        "rotation_weight": 0.0,
    },
}  # fmt: skip
#: Keys of a label census with a generator, forgotten without one.
_OF_GENERATOR = (
    "generator_rounds", "generator_learning_rate", "generator_width", "noise_size",
    "weight_reconstruction", "weight_code",
)  # fmt: skip
#: FedMatch's settings that may be null today, and their former value. Not under the paper's
#: profile, where null has another meaning.
_NULL_WAS: Mapping[str, Any] = {
    "weight_decay": 0.0, "helpers_vote": "always", "probabilities": "clamped",
    "keep_helpers": False, "stream_slices": 1,  # the last one is newer elsewhere
}  # fmt: skip
#: Keys that some algorithms no longer have, with the only value that their runs could have.
FORMER: Mapping[str, Mapping[str, Any]] = {"algorithm": {"aggregation": "mean", "stream_slices": 1}}


def leave_out_former(builder: ConfigBuilder) -> None:
    """Drop keys from a run's config that its algorithm had in an earlier version."""
    builder.leave_out(FORMER)
    name, at_once = builder.value("algorithm.name"), builder.value("run.batched_agents")
    if isinstance(name, str) and name not in batched.ALGORITHMS and type(at_once) is int:
        builder.leave_out({"run": {"batched_agents": at_once}})  # it changes only last bits


def forget_later_keys(sections: Mapping[str, dict[str, Any] | None]) -> None:
    """Convert a config to the form of an earlier version, if it uses no newer key."""
    for name, keys in _LATER.items():
        for key, default in keys.items():
            section = sections[name] or {}
            if key in section and section[key] in (
                default if isinstance(default, tuple) else (default,)
            ):
                del section[key]
    algorithm = sections["algorithm"]
    is_census = algorithm and algorithm.get("name") == "label_census"
    if algorithm and is_census and not algorithm.get("generator_rounds"):
        for key in _OF_GENERATOR:
            algorithm.pop(key, None)
    if algorithm and algorithm.get("profile") == "fedmatch-release":
        for key, former in _NULL_WAS.items():
            algorithm[key] = former if algorithm.get(key) is None else algorithm[key]
