"""The sections of a config file as frozen dataclasses: keys, types, defaults, ranges, conflicts.

The ``algorithm`` section is the ``Config`` of the chosen algorithm.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from privssl.settings.addresses import LOOPBACK, host_of
from privssl.settings.names import (
    PARTITIONS,
    DataSetName,
    NetworkName,
    PartitionName,
    TrackerName,
    is_outside,
    is_own_encoder,
)

# Schemas are built on first use, which saves start-up time.
strict = ConfigDict(extra="forbid", strict=True, defer_build=True)

Network = Literal["F", "G", "D"]
#: Keys of the privacy section that apply to DP-SGD alone.
DP_SGD_KEYS = (
    *("update_at_support", "protect", "noise_multiplier", "clip_norm", "sample_rate", "steps"),
    *("visits", "learning_rate", "momentum", "average_last", "augment", "views"),
    "acknowledge_unsound",
)
MAX_CLIP_NORM, MAX_LEARNING_RATE = 1e6, 1e3
MAX_NUMBER = 1e6  # largest number in the algorithm section
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _describe_limits(**limits: float) -> Any:
    """Return limits for the JSON schema alone, because ``problems`` checks them with a reason."""
    return Field(json_schema_extra=dict(limits))


class Problem(NamedTuple):
    """One problem of a config: the key within its section, and advice."""

    key: str
    text: str


@dataclass(frozen=True, config=strict)
class RunSettings:
    """Execution of a run. Results depend on ``seed`` and, by rounding, on ``precision``, device and
    ``batched_agents``."""

    name: str = ""
    """Name of the run, part of its default folder. Empty: the name of the config file."""
    seed: Count = 0
    """Seed of everything random except private noise, which is never seeded."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1` or `mps`. `auto`: a GPU if there is one; private steps always
    take the CPU."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """Number format of the multiplications in networks. `auto`: the faster one on this machine."""
    output: str = ""
    """Run folder. Empty: `runs/NAME-SEED`."""
    overwrite: bool = False
    """Replace an existing run folder. Its ledgers are moved, not deleted."""
    evaluate_every: Positive = 1
    """Rounds between evaluations on the test rows."""
    evaluate_agents: bool = False
    """Also the mean accuracy of single agents' own networks, where the server has them."""
    checkpoint_every: Positive = 10
    """Rounds between checkpoints. Ctrl-C writes one too."""
    images_every: Positive = 10
    """Rounds between pictures in TensorBoard."""
    trackers: tuple[TrackerName, ...] = ()
    """Where metrics go beside TensorBoard and metrics.csv (docs/extending.md)."""
    memories_mb: Count = 512
    """RAM in MB for agents' memories between rounds; the rest goes to a temporary file."""
    check_wire: bool = False
    """Serialise every message and read it back, as a network transport would."""
    workers: Positive | Literal["auto"] = "auto"
    """Worker processes. `auto`: one per core; 1: no extra process. Results do not depend on it."""
    batched_agents: Positive = 1
    """Agents whose training steps are batched into one. 1: no batching."""
    engine: Literal["local", "flower"] = "local"
    """`local`: all agents on this machine. `flower`: each agent is a site (docs/deploy.md)."""
    superlink: str = "127.0.0.1:8000"
    """Flower: host and port of the SuperLink."""
    certificate: str = ""
    """Flower: root certificate of the SuperLink. Required unless the host is loopback."""
    keys: str = ""
    """Flower: folder of the sites' public keys, NAME.pub. If empty, sites are not authenticated."""
    join_seconds: Rate = 120.0
    """Flower: how long to wait for sites before round 1, and for ledgers at the end."""
    visit_seconds: Rate = 600.0
    """Flower: deadline of one visit to a site."""
    absent: Literal["auto", "stop", "skip"] = "auto"
    """Flower: what to do if a site in a sequential pass is silent. `auto`: the algorithm's rule."""
    quorum: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Flower: share of the agents of a parallel step that must reply."""

    def problems(self) -> Iterator[Problem]:
        """Yield conflicts of parallel execution, and Flower without an address."""
        if self.batched_agents > 1 and self.workers not in ("auto", 1):
            yield Problem(
                "batched_agents",
                f"{self.batched_agents} agents in one stream work in one process, and workers is "
                f"{self.workers}. Leave one of the two out",
            )
        if self.engine == "flower":
            yield from self._find_site_problems()

    def _find_site_problems(self) -> Iterator[Problem]:
        """Yield missing settings of Flower: an address, and off this machine a certificate."""
        if not (host := host_of(self.superlink)):
            yield Problem("superlink", f"'{self.superlink}': give host:port, the port up to 65535")
        elif host not in LOOPBACK and not self.certificate:
            yield Problem(
                "certificate",
                f"missing: messages to {host} would cross a network in clear. Give the root "
                "certificate of its SuperLink",
            )
        for key, default in (("workers", "auto"), ("batched_agents", 1)):
            if getattr(self, key) != default:
                yield Problem(key, "has no effect: with run.engine flower agents are sites")


BUILT_IN = ("digits", "toy", "arrays")  # data sets that need no file
MAX_SIDE = 4096  # largest side of an image, in pixels; see ``data.image_folder.MAX_PIXELS``
#: Keys of the data section for one data set, with their defaults and that data set.
_OF_ONE_DATA_SET = (
    ("checksum", "", "arrays"), ("label", "label", "csv"), ("text", "", "csv"),
    ("columns", "", "csv"), ("person", "", "csv"), ("image_size", None, "image_folder"),
)  # fmt: skip


@dataclass(frozen=True, config=strict)
class DataSettings:
    """Rows and their distribution over agents; labelled and unlabelled rows have separate rules."""

    name: DataSetName = "digits"
    """Data set. `arrays`: rows from Python (docs/python.md). Others: docs/extending.md."""
    root: str = ""
    """Folder of the data; `npz`: the file. Empty: $PRIVSSL_DATA, else ~/.cache/privssl/data."""
    checksum: str = ""
    """SHA-256 of the rows of `arrays`. A run without privacy writes it; other rows are refused."""
    labels: Literal["support", "labels-at-server", "labels-at-client", "labels-at-both"] = "support"
    """The holders of labels: support agents, the server, agents that hold both kinds of rows, or
    (`labels-at-both`: FedAvg and FedProx) the server and support agents."""
    labelled: Positive = 100
    """Labelled rows of all agents with labels; persons, if rows name them (docs/persons.md)."""
    server_labelled: Positive | None = None
    """How many of them are the server's, with `labels-at-both`."""
    unlabelled: Positive | None = None
    """Unlabelled rows, over all agents. Absent: all remaining training rows."""
    stratified: bool = True
    """Sample equally many labelled rows of each class; a class with too few gives all it has."""
    validation: Count = 0
    """Labelled training rows that no agent holds, to choose settings on."""
    test: Positive | None = None
    """Test rows, sampled from all rows; the others are training rows. Absent: published ones."""
    order: Literal["stored", "by-class"] = "stored"
    """Order of an agent's rows. `by-class`: the classes are evenly spread over the order."""
    partition: PartitionName = "iid"
    """How rows are divided among agents. Others: docs/extending.md."""
    alpha: Rate | None = None
    """Concentration of `dirichlet` and `dirichlet_equal`: small values give skewed classes."""
    k: Positive | None = None
    """Classes per agent, for `classes_per_agent`; shards per agent, for `shards`."""
    labelled_partition: PartitionName | None = None
    """How labelled rows are divided. Absent: as `partition`."""
    labelled_alpha: Rate | None = None
    """`alpha` of the labelled partition."""
    labelled_k: Positive | None = None
    """`k` of the labelled partition."""
    split: str = ""
    """A split.json to replay instead of sampling a split."""
    label: str = "label"
    """`csv`: column of the classes; an empty field means no label."""
    text: str = ""
    """`csv`: column of texts, for an encoder. Empty: all other columns are a table."""
    person: str = ""
    """`csv`: column of the person whose row it is (docs/persons.md). Empty: not known."""
    columns: str = ""
    """`csv`: YAML file of a table's columns, `name: [lowest, highest]`, `[lowest, highest,
    missing]` or a list of categories. Empty: from the training rows, which private runs refuse."""
    encoder: str = ""
    """Frozen public network, applied once to every row: `efficientnet_lite0`, `minilm`,
    `minilm_words`, `minilm_mean`, `minilm_tweets`, `torchvision:NAME`, `timm:NAME`,
    `huggingface:FOLDER`, or another (docs/extending.md). Empty: none."""
    encoder_weights: str = ""
    """File of the weights of `torchvision:NAME` or `timm:NAME`. Empty: torch's cache."""
    image_size: Positive | None = None
    """Side in pixels to which `image_folder` resizes its images; at most 4096."""

    def problems(self) -> Iterator[Problem]:
        """Yield partition rules without their number, and numbers without their rule."""
        for kind, rule, alpha, k in (
            ("", self.partition, self.alpha, self.k),
            ("labelled_", self.labelled_partition, self.labelled_alpha, self.labelled_k),
        ):
            for number, names, value in (
                ("alpha", ("dirichlet", "dirichlet_equal"), alpha),
                ("k", ("classes_per_agent", "shards"), k),
            ):
                if rule in names and value is None:
                    yield Problem(f"{kind}{number}", f"missing: {kind}partition {rule} needs it")
                plugin = rule is not None and rule not in PARTITIONS  # checks its settings itself
                if not plugin and rule not in names and value is not None:
                    text = f"has no effect: it belongs to {' and '.join(names)}"
                    yield Problem(f"{kind}{number}", text)
        if self.labels != "labels-at-both" and self.server_labelled is not None:
            yield Problem("server_labelled", "has no effect: it belongs to labels-at-both")
        elif self.labels == "labels-at-both" and self.server_labelled is None:
            yield Problem("server_labelled", "missing: labels-at-both needs it")
        elif (self.server_labelled or 0) >= self.labelled:
            text = f"{self.server_labelled}: give less than data.labelled, {self.labelled}"
            yield Problem("server_labelled", text)
        for key in ("encoder", "split"):
            if self.test is not None and getattr(self, key):
                yield Problem("test", f"draws other training rows, which data.{key} cannot have")
        if self.name in ("npz", "image_folder", "csv") and not self.root:
            where = "train.csv and test.csv in it" if self.name == "csv" else "it"
            yield Problem("root", f"missing: {self.name} reads {where}")
        if self.root and self.name in BUILT_IN:
            where = "is in memory" if self.name == "arrays" else "comes with privssl"
            text = f"has no effect: {self.name} {where}. Give data.name of what lies there"
            yield Problem("root", f"{text} (npz, image_folder, ...)")
        for key, default, name in _OF_ONE_DATA_SET:
            if getattr(self, key) != default and self.name != name:
                yield Problem(key, f"has no effect: it belongs to {name}")
        yield from self._find_csv_problems()
        if self.encoder and self.name == "arrays":
            yield Problem("encoder", "has no effect on rows in memory. Encode them, or give a file")
        libraries = self.encoder.startswith(("torchvision:", "timm:"))
        if self.encoder_weights and not (libraries or is_own_encoder(self.encoder)):
            text = "has no effect: torchvision:NAME, timm:NAME and plug-ins have it"
            yield Problem("encoder_weights", text)
        if self.name == "image_folder" and (self.image_size or 0) > MAX_SIDE:
            yield Problem("image_size", f"{self.image_size}: give at most {MAX_SIDE}")

    def _find_csv_problems(self) -> Iterator[Problem]:
        """Yield columns with two meanings, and texts without an encoder."""
        if self.text and self.text == self.label:
            yield Problem("text", f"{self.text} is data.label: rows would contain their labels")
        if self.person and self.person in (self.label, self.text):
            yield Problem("person", f"{self.person} is the column of labels or texts already")
        if self.text and self.columns:
            yield Problem("columns", "has no effect on texts (data.text)")
        if (self.text or self.name == "sent140") and not self.encoder:
            yield Problem("encoder", "missing: texts need one. Set minilm, or minilm_mean")


@dataclass(frozen=True, config=strict)
class AgentSettings:
    """The number of agents of each kind. labels-at-server and labels-at-both add the server."""

    support: Count = 0
    """Agents with labelled rows only."""
    query: Count = 0
    """Agents with unlabelled rows only."""
    mixed: Count = 0
    """Agents with both kinds of rows, for `labels-at-client`."""


@dataclass(frozen=True, config=strict)
class ModelSettings:
    """The classifier F. The generator and discriminator belong to the algorithm's section."""

    name: NetworkName = "small_cnn"
    """Network of the classifier. For vectors `linear` or `mlp`, for sequences also `text_cnn` and
    `gru`. Others: docs/extending.md."""
    width: Positive = 16
    """Scales the channels or units of privssl's networks; 16 is the standard size."""
    norm: Literal["group", "batch", "static", "none"] = "group"
    """Normalisation layer; own networks: in place of batch norm. Private: `group` or `none`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of an own network."""
    weights: str = ""
    """Initial weights: a safetensors file of a state dict. The last layer may have another size."""

    def problems(self) -> Iterator[Problem]:
        """Yield settings that belong to the other kind of network."""
        if is_outside(self.name) and self.width != 16:
            text = f"has no effect on {self.name}. Leave it out, or give model.options"
            yield Problem("width", text)
        if not is_outside(self.name) and self.options:
            yield Problem("options", f"has no effect on {self.name}: it belongs to other networks")


@dataclass(frozen=True, config=strict)
class PrivacySettings:
    """The guarantee for each record or person of a support agent, and the mechanism.

    Without ``noise_multiplier`` the noise is calibrated so that all visits fit the budget; with
    it, support agents are visited until the budget is spent.
    """

    epsilon: Annotated[float, _describe_limits(minimum=0)]
    """Privacy budget of each support agent, at least 0. 0: no labelled row is ever read."""
    delta: Annotated[float, _describe_limits(exclusiveMinimum=0, exclusiveMaximum=1)] = 1e-5
    """Probability in (0, 1) that the bound fails, for each row; choose it well below 1 / rows."""
    update_at_support: tuple[Network, ...] = ("F",)
    """Networks that a support agent trains."""
    protect: tuple[Network, ...] = ("F",)
    """Networks that it trains with private noise. Must be all of them, or the published [G]."""
    noise_multiplier: Annotated[float | None, _describe_limits(minimum=0.2, maximum=1e4)] = None
    """Noise standard deviation / clip norm, 0.2 to 10000. Absent: calibrated from epsilon."""
    clip_norm: Annotated[float, _describe_limits(minimum=1e-3, maximum=MAX_CLIP_NORM)] = 1.0
    """Largest l2 norm of one row's gradient over all protected networks, 0.001 to 1000000."""
    sample_rate: Annotated[float, _describe_limits(exclusiveMinimum=0, maximum=1)] = 0.1
    """Probability in (0, 1] that a row is in a batch. 1: every row in every step."""
    steps: Positive = 10
    """Private steps of one visit."""
    visits: Positive | None = None
    """Planned visits of each support agent. Absent: one in every round."""
    learning_rate: Annotated[Rate, _describe_limits(maximum=MAX_LEARNING_RATE)] = 1.0
    """Learning rate of SGD on the noisy mean gradient, at most 1000."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of SGD on the noisy mean gradient."""
    average_last: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a visit's last iterates whose mean is sent. Averaging costs no privacy."""
    augment: Literal["none", "weak", "mid", "strong"] = "none"
    """Strength of the augmentation of rows in private steps."""
    views: Positive = 1
    """Augmented views of a row, averaged within the row before clipping."""
    acknowledge_unsound: bool = False
    """Must be true to run the published scheme, which guarantees nothing."""
    unit: Literal["record", "person"] = "record"
    """Whom the guarantee is for: a labelled row, or a person with several (docs/persons.md)."""
    rows_per_person: Positive = 1
    """Census with the unit person: rows of a person that count, at most. Noise grows with it."""
    record_counts: Literal["public", "private"] = "public"
    """Whether the number of labelled rows of an agent is public or protected too."""
    ledger: str = ""
    """Folder of accounts that outlive the run. Empty: RUN/ledger, for this run alone."""
    ledger_epsilon: float | None = None
    """Budget of each account in `ledger` over all runs together, at least `epsilon`."""

    @property
    def scope(self) -> Literal["sound", "as_published"]:
        """Computed, never set. Sound: all networks that a support agent trains are protected."""
        return "sound" if set(self.update_at_support) <= set(self.protect) else "as_published"

    def problems(self) -> Iterator[Problem]:
        """Yield reasons why these numbers permit no guarantee. docs/privacy.md."""
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            yield Problem(
                "epsilon",
                f"{self.epsilon}: give a number >= 0 (0: no labelled row is ever read), or leave "
                "the privacy section out for a run without privacy",
            )
        if not 0 < self.delta < 1:
            yield Problem("delta", f"{self.delta}: give a number in (0, 1), well below 1 / rows")
        if self.noise_multiplier is not None and not 0.2 <= self.noise_multiplier <= 1e4:
            yield Problem(
                "noise_multiplier",
                f"{self.noise_multiplier}: give 0.2 to 10000, or leave it out and it is "
                "calibrated from epsilon (below 0.2 no useful bound exists, above 10000 nothing is "
                "learned)",
            )
        if not 0 < self.sample_rate <= 1:
            yield Problem("sample_rate", f"{self.sample_rate}: it is a probability in (0, 1]")
        if not 1e-3 <= self.clip_norm <= MAX_CLIP_NORM:
            yield Problem(
                "clip_norm",
                f"{self.clip_norm}: give 0.001 to {MAX_CLIP_NORM:.0f} (gradients and noise are "
                "float32: below, a row's gradient underflows; above, nothing is clipped and all "
                "is noise)",
            )
        if self.learning_rate > MAX_LEARNING_RATE:
            yield Problem(
                "learning_rate",
                f"{self.learning_rate:g}: give at most {MAX_LEARNING_RATE:.0f} (one step would "
                "move the weights so far that the outputs are not finite, and the budget is spent)",
            )
        yield from self._find_ledger_problems()
        yield from self._find_scope_problems()

    def _find_ledger_problems(self) -> Iterator[Problem]:
        total = self.ledger_epsilon
        if bool(self.ledger) != (total is not None):
            yield Problem(
                "ledger_epsilon" if self.ledger else "ledger",
                "missing: ledger names the folder of accounts that outlive the run, "
                "ledger_epsilon their budget over all runs; give both or neither",
            )
        elif total is not None and not (math.isfinite(total) and total >= self.epsilon):
            yield Problem(
                "ledger_epsilon",
                f"{total}: it is the budget of all runs together, so at least epsilon "
                f"({self.epsilon:g}), what this run may spend of it",
            )

    def _find_scope_problems(self) -> Iterator[Problem]:
        for key in ("update_at_support", "protect"):
            networks = getattr(self, key)
            if not networks or len(set(networks)) != len(networks):
                yield Problem(key, f"{list(networks)}: name each network once, at least one")
        update, protect = set(self.update_at_support), set(self.protect)
        if protect - update:
            yield Problem("protect", f"{sorted(protect - update)} is not in update_at_support")
        elif update - protect and (update, protect) != ({"F", "D", "G"}, {"G"}):
            yield Problem(
                "protect",
                f"{sorted(update - protect)} would be trained at support agents without "
                "protection. Add to protect, or remove from update_at_support",
            )
        elif update - protect and not self.acknowledge_unsound:
            yield Problem(
                "protect",
                "[G] alone, with F and D trained unprotected, is the published scheme and "
                "guarantees nothing for any row. Set acknowledge_unsound: true to reproduce it, "
                "or protect: [F, D, G]",
            )
