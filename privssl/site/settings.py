"""SITE.yaml: the settings of a site's operator.

    site:   {agent: s0, role: support, config: fedssl_dp.yaml, folder: site-s0}
    rows:   {split: split.json}            # or {arrays: rows.npz, classes: 10}, or {root: FOLDER}
    budget: {epsilon: 8.0, delta: 1.0e-5}  # or null: labelled rows are used without protection

Paths are relative to this file. ``config`` is the experiment's config, as the operator has read and
accepted it; a coordinator with another one is refused.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from accounting.account_plan import check_agent_id
from accounting.errors import PlanError
from privssl.data.downloads import default_root
from privssl.encoders import caches
from privssl.errors import ConfigError
from privssl.settings.error_messages import problem_report
from privssl.settings.schema import Positive, Problem, strict
from privssl.settings.section_builder import ConfigBuilder, unless_bad

Role = Literal["support", "query", "mixed"]


@dataclass(frozen=True, config=strict)
class SiteSettings:
    """The agent, and the operation of its site."""

    agent: str
    """Name of the agent in the experiment: s0, q3, m1."""
    role: Role
    """`support`: labelled rows; `query`: unlabelled rows; `mixed`: both."""
    config: str
    """Config of the experiment."""
    folder: str
    """Folder for the ledger, stored replies, memories and the log. It must outlive the run."""
    door: str = ""
    """Socket on which the site receives requests. Empty: FOLDER/door."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1` or `mps`. `auto`: a GPU if there is one; private steps always
    take the CPU."""
    keep_visits: Annotated[int, Field(ge=2, le=10**6)] = 64
    """Steps whose replies are stored; more than there are between two checkpoints."""
    network: str = ""
    """`model.name` of the config, if it is not of privssl: the only network that this site imports.
    """
    plugins: tuple[str, ...] = ()
    """Other plug-ins that this site may import, by their names in the config: the algorithm, the
    data set, the encoder."""
    share_notes: bool = False
    """Send training losses of rows without a budget."""
    share_ledger: bool = False
    """Send the ledger to the coordinator, which needs it for the privacy card."""

    def problems(self) -> Iterator[Problem]:
        """Yield an invalid name, or an empty path."""
        try:
            check_agent_id(self.agent)
        except PlanError as error:
            yield Problem("agent", str(error))
        for key in ("config", "folder"):
            if not getattr(self, key):
                yield Problem(key, "empty: needs a path")


@dataclass(frozen=True, config=strict)
class RowsSettings:
    """The agent's rows: ``arrays``, or ``split``, or ``root`` alone."""

    arrays: str = ""
    """NPZ file with x_labelled and y_labelled, and x_unlabelled, as the role needs."""
    classes: Positive | tuple[str, ...] | None = None
    """Number of classes of `arrays`, or their names in the coordinator's order. With `root`: all
    class names; then no test rows are read, and `train` may lack classes."""
    split: str = ""
    """split.json with this agent's rows of the config's data set."""
    root: str = ""
    """Folder of that data set. Without `split` all its training rows are this agent's; those of a
    mixed agent that have a label are its labelled ones."""

    def problems(self) -> Iterator[Problem]:
        """Yield a missing or second source of rows, or too few classes."""
        classes = self.classes
        few = classes is not None and (
            classes == 1 if isinstance(classes, int) else len(classes) < 2
        )
        if self.arrays:
            for key in ("split", "root"):
                if getattr(self, key):
                    yield Problem(key, "rows come from arrays already. Give one of them")
            if classes is None or few:
                yield Problem("classes", "missing: arrays need how many there are, or their names")
        elif not self.split and not self.root:
            yield Problem("arrays", "missing: give arrays, or split, or root")
        elif self.split and classes is not None:
            yield Problem("classes", "has no effect: the data set of the split has its own")
        elif few:
            yield Problem("classes", "too few: give all class names, at least two")


@dataclass(frozen=True, config=strict)
class BudgetSettings:
    """Privacy budget of each labelled row, over all runs together."""

    epsilon: float
    """Budget of each labelled row over all runs together, at least 0."""
    delta: float = 1e-5
    """Probability in (0, 1) that the bound fails; must be the delta of the config."""
    ledger: str = ""
    """Folder of the account. Empty: FOLDER/ledger."""

    def problems(self) -> Iterator[Problem]:
        """Yield numbers out of range."""
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            yield Problem("epsilon", f"{self.epsilon}: give a number >= 0")
        if not 0 < self.delta < 1:
            yield Problem("delta", f"{self.delta}: give a number in (0, 1), well below 1 / rows")


@dataclasses.dataclass(frozen=True)
class SiteConfig:
    """A checked SITE.yaml."""

    site: SiteSettings
    rows: RowsSettings
    budget: BudgetSettings | None
    source: Path = field(compare=False)

    def path(self, text: str) -> Path:
        """Return a path relative to the file. Raises ConfigError."""
        try:
            return self.source.resolve().parent / Path(text).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"{self.source}: {text!r}: {error}. Write the path out") from None

    @property
    def folder(self) -> Path:
        """The folder for ledger, replies, memories and log."""
        return self.path(self.site.folder)

    @property
    def secrets(self) -> tuple[Path, ...]:
        """Files and folders that only the site may read, with caches of encoded rows."""
        rows = (self.rows.arrays, self.rows.split, self.rows.root)
        paths = (self.folder, self.ledger, *(self.path(text) for text in rows if text))
        return (*paths, *caches(default_root()))

    @property
    def door(self) -> Path:
        """The socket for requests."""
        return self.path(self.site.door) if self.site.door else self.folder / "door"

    @property
    def ledger(self) -> Path:
        """The folder of the account's journal."""
        configured = "" if self.budget is None else self.budget.ledger
        return self.path(configured) if configured else self.folder / "ledger"


class _SiteConfigBuilder(ConfigBuilder):
    """Builds a SiteConfig from YAML."""

    sections: ClassVar[Mapping[str, type[Any]]] = {
        "site": SiteSettings, "rows": RowsSettings, "budget": BudgetSettings,
    }  # fmt: skip
    order: ClassVar[Sequence[str]] = ("site", "rows", "budget")
    null: ClassVar[tuple[str, str]] = (
        "budget", "Give epsilon, or write budget: null for rows without protection",
    )  # fmt: skip


def load_site_config(path: Path) -> SiteConfig:
    """Read and check a SITE.yaml. Raises ConfigError with all problems, sorted by line."""
    builder = _SiteConfigBuilder(path, {})
    builder.read_file()
    values: dict[str, Any] = {name: builder.section(name) for name in builder.order}
    bad = {name for name in builder.order if name in builder.bad}
    config = unless_bad(SiteConfig, values | {"source": path}, bad)
    builder.check("", _find_budget_problems(config, given=builder.given("budget")))
    if builder.findings:
        raise ConfigError(problem_report(path, builder.findings))
    return SiteConfig(**values, source=path)


def _find_budget_problems(config: SiteConfig, *, given: bool) -> Iterator[Problem]:
    """Yield a missing budget: a site with labels needs an explicit one, even if it is null."""
    if config.site.role == "query" and config.budget is not None:
        yield Problem("budget", "a query agent has no labelled rows. Leave it out")
    if config.site.role != "query" and not given:
        yield Problem(
            "budget",
            "missing: give epsilon, or write budget: null to use labelled rows without protection",
        )
