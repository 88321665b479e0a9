"""Write config*.md and placements.md: python docs/generate_reference.py.

The keys, types, defaults and ranges come from the dataclasses of the sections, the descriptions
from the docstring under a field or the comment beside it. Which algorithm accepts which placement
of labels comes from loading a config of each pair.
"""

import dataclasses
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter

from privssl.algorithms import ALGORITHMS
from privssl.core.rows import IMAGE, VECTOR
from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from privssl.settings.descriptions import descriptions
from privssl.settings.error_messages import describe_needed
from privssl.settings.names import PARTITIONS as NAMED_PARTITIONS
from privssl.settings.schema import (
    AgentSettings,
    DataSettings,
    ModelSettings,
    PrivacySettings,
    RunSettings,
)
from privssl.site.settings import BudgetSettings, RowsSettings, SiteSettings
from privssl.storage import atomic_files

DOCS = Path(__file__).resolve().parent
SECTIONS: dict[str, type] = {
    "run": RunSettings,
    "data": DataSettings,
    "agents": AgentSettings,
    "model": ModelSettings,
    "privacy": PrivacySettings,
}
SITE_SECTIONS: dict[str, type] = {
    "site": SiteSettings,
    "rows": RowsSettings,
    "budget": BudgetSettings,
}
#: Algorithms by page; those of one group have settings with a base class in common.
METHODS = (("fedssl",), ("fedseal",), ("semifl",), ("fedmatch",), ("fedtrinet",))
BASELINES = (
    ("label_census",),
    ("supervise", "pseudo", "mixmatch", "fedmatch_mixup"),
    ("server_sl", "fedavg", "fedprox", "fedsem"),
    ("fixmatch", "uda"),
)
COMPARATORS = (
    ("feddyn", "lg_fedavg", "heterofl"),
    ("fedrgd",),
    ("fl2",),
    ("sage",),
    ("pi_model", "mean_teacher", "remixmatch"),
)
#: The agents that a config of each placement has, and what each partition needs besides its name.
AGENTS: dict[str, dict[str, int]] = {
    "support": {"support": 2, "query": 6},
    "labels-at-server": {"query": 6},
    "labels-at-client": {"mixed": 6},
    "labels-at-both": {"support": 6},
}
PARTITIONS: dict[str, dict[str, float]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.5},
    "dirichlet_equal": {"alpha": 0.5},
    "classes_per_agent": {"k": 5},
    "shards": {"k": 5},
    "round_robin": {},
    "imbalanced": {},
}


class Key(NamedTuple):
    """One key of a section, as the page prints it."""

    name: str
    values: str
    default: str
    text: str


# config.md ----------------------------------------------------------------------------------


def show(value: Any) -> str:
    """A value as YAML writes it."""
    if value == "":
        return "empty"
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    text = yaml.safe_dump(value).removesuffix("\n").removesuffix("\n...")
    return text.strip("'")


def keys(section: type) -> list[Key]:
    """The keys of a section in their order."""
    texts, schema = descriptions(section), TypeAdapter(section).json_schema()["properties"]
    found = []
    for field in dataclasses.fields(section):
        if field.name == "name" and section not in SECTIONS.values():
            continue  # of an algorithm: the heading says it
        missing = field.default is dataclasses.MISSING
        default = "required" if missing else f"`{show(field.default)}`"
        if field.default_factory is not dataclasses.MISSING:
            default = "`empty`"
        values = describe_needed(schema[field.name], "`")
        found.append(Key(field.name, values, default, texts[field.name]))
    return found


def table(rows: list[Key]) -> str:
    """Keys as a Markdown table."""
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.name}`", row.values, row.default, row.text)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def summary(section: type) -> str:
    """The first sentence of a section's docstring."""
    return " ".join((inspect.getdoc(section) or "").split("\n\n")[0].split())


def source(*sections: type) -> str:
    """The classes of sections, and the files that define their keys."""
    kinds = [kind for each in sections for kind in each.__mro__ if dataclasses.is_dataclass(kind)]
    files = dict.fromkeys(inspect.getsourcefile(kind) or "" for kind in kinds)
    paths = ", ".join(f"`{Path(file).relative_to(DOCS.parent).as_posix()}`" for file in files)
    return f"{', '.join(f'`{each.__name__}`' for each in sections)} in {paths}"


def config_page() -> str:
    """docs/config.md."""
    parts = [CONFIG_HEAD]
    for name, section in SECTIONS.items():
        head = f"## `{name}`\n\n{SECTION_TEXTS.get(name, '')}Code: {source(section)}.\n"
        parts.append(f"{head}\n{table(keys(section))}\n")
    parts.append(SITE_HEAD)
    for name, section in SITE_SECTIONS.items():
        parts.append(f"### `{name}`\n\nCode: {source(section)}.\n\n{table(keys(section))}\n")
    return "\n".join(parts)


def algorithms_page(title: str, families: tuple[tuple[str, ...], ...]) -> str:
    """A page of algorithms. Keys that all of a family share stand once, before the others."""
    parts = [ALGORITHM_HEAD.format(title=title)]
    for names in families:
        rows = {name: keys(ALGORITHMS[name].Config) for name in names}
        shared = [row for row in rows[names[0]] if all(row in each for each in rows.values())]
        code = source(*(ALGORITHMS[name].Config for name in names))
        head = f"## {', '.join(f'`{name}`' for name in names)}\n\nCode: {code}.\n"
        parts.append(f"{head}\n{table(shared)}\n")
        for name in names:
            own = [row for row in rows[name] if row not in shared]
            if own:
                parts.append(f"`{name}` also has\n\n{table(own)}\n")
    return "\n".join(parts)


# placements.md ------------------------------------------------------------------------------


def refusal(algorithm: str, labels: str, partition: str, folder: Path, **more: Any) -> str:
    """``key: text`` of the first problem of a pair's config; empty if it is accepted."""
    data = {"name": "digits", "labelled": 300, "labels": labels, "partition": partition}
    data |= {"server_labelled": 100} if labels == "labels-at-both" else {}
    config = {
        "data": data | PARTITIONS[partition],
        "agents": AGENTS[labels],
        "algorithm": {"name": algorithm},
        **more,
    }
    path = folder / "pair.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        load_config(path)
    except ConfigError as error:
        problem = " ".join(str(error).splitlines()[1].split())
        key, _, text = re.sub(r"^(line \d+|file|argument) ", "", problem).partition(" ")
        return f"`{key}` {text}"
    return ""


def placement_rows(folder: Path) -> Iterator[tuple[str, list[str], bool, str]]:
    """For each algorithm: yes or no per placement, whether it can be private, and the reasons.

    Raises:
        ValueError: partitions of one placement differ, which the table has no room for.
    """
    for name, algorithm in ALGORITHMS.items():
        cells, reasons = [], []
        for labels in AGENTS:
            found = {refusal(name, labels, partition, folder) for partition in PARTITIONS}
            if len(found) > 1:
                raise ValueError(f"{name}, {labels}: partitions differ: {sorted(found)}")
            [text] = found
            cells.append("no" if text else "yes")
            if text and labels != "labels-at-both":  # one reason for all
                reasons.append(f"- `{name}`, `{labels}`: {text.partition(', but ')[2]}.")
        yield name, cells, algorithm.can_be_private, "\n".join(reasons)


def placements_page() -> str:
    """docs/placements.md."""
    assert set(PARTITIONS) == set(NAMED_PARTITIONS)
    rows, reasons = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, cells, private, text in placement_rows(Path(folder)):
            cells = [*cells, "yes" if private else "no"]
            rows.append(f"| `{name}` | {' | '.join(cells)} |")
            reasons += [text] if text else []
    head = ["| algorithm | " + " | ".join(f"`{labels}`" for labels in AGENTS) + " | private |"]
    head.append("|" + "---|" * (len(AGENTS) + 2))
    return PLACEMENTS_TEXT.format(
        table="\n".join(head + rows), reasons="\n".join(reasons), kinds="\n".join(kind_rows())
    )


def kind_rows() -> Iterator[str]:
    """For each algorithm: whether it takes rows that are no images, and what to set or why not."""
    for name, algorithm in ALGORITHMS.items():
        settings = algorithm.Config()
        views = [
            f"`{key}`" for key, value in vars(settings).items()
            if key != "name" and value in IMAGE.views and value not in VECTOR.views
        ]  # fmt: skip
        text = f"set {', '.join(views)}" if views else ""
        text = algorithm.needs_images or text
        yield f"| `{name}` | {'no' if algorithm.needs_images else 'yes'} | {text} |"


# The prose ----------------------------------------------------------------------------------

CONFIG_HEAD = """\
# Config reference

Look up every key of a config file here. `docs/generate_reference.py` writes this page from the
code, and a test compares both, so do not edit it by hand.

A config has the sections `run`, `data`, `agents`, `model`, `algorithm` and, for private runs,
`privacy`. The command line overrides the file: `python -m privssl.train CONFIG section.key=value`.
An unknown key, a wrong type and an impossible combination are errors that name file and line.
`python -m privssl.train CONFIG --dry-run` prints the complete config of a run.

An editor completes and checks keys after `python -m privssl.schema --output privssl.schema.json`,
with `# yaml-language-server: $schema=privssl.schema.json` as the first line of the config.

`null` in the column "values" means that the key may be left out. The `algorithm` section:
[FedSSL, FedSEAL, SemiFL, FedMatch, FedTriNet](config_algorithms.md);
[label census and baselines](config_baselines.md); [FedDyn, LG-FedAvg, HeteroFL,
FedRGD, (FL)^2, SAGE, Pi-Model, Mean Teacher, ReMixMatch](config_comparators.md).
`empty` as a default stands for an empty text, list or mapping.
"""
SECTION_TEXTS = {
    "run": "How a run is carried out. Only `seed`, `precision`, `device` and `batched_agents` "
    "affect results, the last three only by rounding.\n\n",
    "data": "Which rows there are and who holds them.\n\n",
    "agents": "How many agents of each kind. `labels-at-server` and `labels-at-both` add the "
    "server.\n\n",
    "model": "The classifier F. Generator and discriminator belong to the algorithm.\n\n",
    "privacy": "The privacy guarantee of each labelled row of a support agent, or of each person. "
    "With `unit: person` what these keys say of a row is true of a person. Without this "
    "section a run is not private. If `noise_multiplier` is absent, it is calibrated so that all "
    "visits fit the budget; if it is given, agents are visited until the budget is spent. "
    "See [privacy.md](privacy.md).\n\n",
}
ALGORITHM_HEAD = """\
# Config reference: {title}

Look up the keys of the `algorithm` section here. `docs/generate_reference.py` writes this page
from the code, and a test compares both, so do not edit it by hand.

`algorithm.name` selects the algorithm. Symbols are those of its paper; "paper", "code" (of its
authors) and "ours" name the source of a default. The page of each method explains its keys.
A learning rate is at most 1000, any other number that is no integer at most 1000000.
"""
SITE_HEAD = """\
## `SITE.yaml`

The file of a site's operator, for `python -m privssl.site SITE.yaml`. Paths are relative to the
file. `budget: null` means that labelled rows are used without protection.
See [deploy.md](deploy.md).
"""
PLACEMENTS_TEXT = """\
# Who holds labels, and which algorithm can use them

Check here whether an algorithm accepts your setting. `docs/generate_reference.py` writes this
page from the code, and a test compares both, so do not edit it by hand.

| `data.labels` | who holds labels | who holds unlabelled rows | agents |
|---|---|---|---|
| `support` | support agents | query agents | `agents.support`, `agents.query` |
| `labels-at-server` | the server | query agents | `agents.query` |
| `labels-at-client` | mixed agents | mixed and query agents | `agents.mixed`, `agents.query` |
| `labels-at-both` | the server and support agents | nobody | `agents.support` |

## The table

`yes`: runs with every partition. `no`: refused when the config is read. The last column says
whether the algorithm accepts a `privacy` section.

{table}

`labels-at-both` is FedMatch's upper bound with labels at the server: it has `data.server_labelled`
of the rows, trains first in every round, and agents start from its weights. Other methods have no
such round, and it is refused over sites. With privacy both it and `labels-at-server` are refused: a
claim is against whoever controls the server, which would hold labelled rows.

Reasons of other refusals, and what to set instead:

{reasons}

## Which kinds of rows

Every algorithm takes images. Vectors take `model.name` `linear` or `mlp`, sequences also
`text_cnn` and `gru`; views of them are `none`, `weak`, `mid` and `strong`. RandAugment, `crop`,
`shift` and `flip` are refused there, and so is `model.norm: static`. The label census learns an
encoder of images; the features of vectors and the means of sequences are clustered as they are.

| algorithm | vectors and sequences | what to set, or the reason |
|---|---|---|
{kinds}

## What a placement means for a method

| algorithm | labels at the server | labels at clients | support agents |
|---|---|---|---|
| `fedssl`, `pseudo`, `mixmatch` | the server acts as a support agent | two steps a round | paper |
| `fedmatch_mixup` | as `fedssl` | as `fedssl` | paper |
| `supervise` | the server alone | labelled rows of mixed agents | support agents alone |
| `fedseal` | paper | each mixed agent does the server's steps too | same, at support agents |
| `fedtrinet` | the server trains on its labels every round | paper | as at the server |
| `fedmatch` | paper, Algorithm 2 | paper, Algorithm 1 | Algorithm 2, mean of all sigma |
| `semifl`, `fl2` | paper | all fine-tune the average in parallel | same |
| `label_census` | the server answers the census | mixed agents answer and train | standard |
| `server_sl` | the server alone | refused | refused |
| `fedavg`, `fedprox` | refused | labelled rows of mixed agents | support agents alone |
| `feddyn`, `lg_fedavg`, `heterofl` | refused | as `fedavg` | as `fedavg` |
| `fedrgd` | paper: both at the same time | a step on each kind of rows | their mean is the server |
| `fixmatch`, `uda` | server first, then agents | one step on both losses | as at the server |
| `sage` | server first, then agents | paper: one step on both losses | as at the server |
| `pi_model`, `mean_teacher`, `remixmatch` | all at once | paper: one agent | as at the server |
| `fedsem` | server first, then agents | both kinds of labels in one batch | as at the server |

## Refusals that depend on numbers

These come when the config is read, or when the split is drawn, always before round 1.

| setting | reason |
|---|---|
| no query and no mixed agents, for a method that needs unlabelled rows | nobody holds any |
| `agents.query` above 0 with `fedmatch` and `labels-at-client` | its agents hold both kinds |
| `model.norm: static` where the method collects no statistics | no values for evaluation |
| `fedseal`: `validation_rows` too large for `data.labelled` | more than a holder has |
| `model.norm: batch` with batches of one row | batch norm needs two rows |
| fewer rows than agents, or a class that no agent would own | an agent would have no rows |
| `imbalanced` with more than ten classes | the rule is defined for ten |
"""


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "config_algorithms.md": lambda: algorithms_page("methods of papers", METHODS),
    "config_baselines.md": lambda: algorithms_page("label census and baselines", BASELINES),
    "config_comparators.md": lambda: algorithms_page("other methods", COMPARATORS),
    "placements.md": placements_page,
}


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        atomic_files.write(DOCS / name, page().encode())


if __name__ == "__main__":
    main()
