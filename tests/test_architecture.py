"""The shape of the code base, checked by reading it: who imports whom, and what never appears.

Each rule is a function from a module, or a text, to the problems found in it. The rules run
over the repository, and over planted sources that break them (the negative controls) or only
look as if they did.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("privssl", "generators", "accounting")
LONGEST_MODULE = 400  # lines

# What the two stand-alone packages may import besides themselves and the standard library.
ALLOWED = {
    "generators": ("torch",),
    "accounting": ("numpy", "scipy", "opacus.accountants"),
    "accounting.verify": ("dp_accounting",),  # on top of what accounting may
}

COMMANDS = tuple(
    f"privssl.{name}"
    for name in (
        *("__main__", "train", "session", "run", "config", "prepare", "run_folder", "resuming"),
        *("site.__main__", "site.opening"),
        *("compare", "comparison", "comparison_plan", "comparison_plot"),
        *(
            "audit",
            "attack",
            "claim_check",
            "rebuilt_card",
            "run_traces",
            "mechanism_attack",
            "census_attack",
            "card",
        ),
    )
)
RECORDS = ("privssl.tracker", "privssl.checkpoint", "privssl.evaluate")
UPPER = (*COMMANDS, *RECORDS)
# Inside privssl an arrow never points back up. evaluate holds the true labels of query rows,
# so that nothing which runs on an agent may see it.
FORBIDDEN = {
    "privssl.algorithms": (*UPPER, "privssl.engines", "privssl.data"),
    "privssl.engines": (*UPPER, "privssl.data"),
    "privssl.world": (*UPPER, "privssl.data"),
    **{f"privssl.site.{name}": (*UPPER, "privssl.data") for name in ("desk", "steps", "store")},
    "privssl.site.door": (*UPPER, "privssl.engines", "privssl.algorithms", "privssl.data"),
    "privssl.data": (*UPPER, "privssl.engines", "privssl.algorithms"),
} | {
    f"privssl.{name}": (*UPPER, "privssl.engines", "privssl.algorithms", "privssl.world")
    for name in (
        *("agents", "errors", "learn", "lockstep", "losses", "messages", "mixup", "models"),
        *("census_plan", "privacy", "pseudo", "seeds", "settings", "stacked", "wire"),
    )
}
EXCEPTIONS = {"privssl.algorithms": ("privssl.data.augment", "privssl.data.views")}

# Reading a file must not run code from it, and an import must be visible to the rules above.
UNSAFE = (
    *("eval", "exec", "__import__", "importlib.import_module"),
    *("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("torch.load", "torch.serialization", "torch.save"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
)

MACHINE_PATH = re.compile(r"(?<![\w.~})*-])/(?:root|home|work|Users)/")
INDEX_HOST = re.compile(
    r"pypi[.](?:org|python)|pythonhosted[.]|download[.]pytorch[.]|anaconda[.]org"
    r"|https?://[^\s\"']+/simple\b",
    re.IGNORECASE,
)


class Module(NamedTuple):
    """One Python file of the product."""

    name: str  # dotted, as it is imported
    source: str


def repository_files() -> list[Path]:
    """Every file that is tracked, or would be after ``git add``."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git cannot list the files here: {error}")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def product_modules() -> list[Module]:
    """The modules of the three packages, read from this checkout."""
    return [
        Module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"),
            path.read_text(encoding="utf-8"),
        )
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def inside(name: str, *prefixes: str) -> bool:
    """Whether a dotted name is one of the prefixes, or lies under one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def imported(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Every import at any depth: its line, the name it gets here, and the full name it has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{origin}.{alias.name}"


def wrong_arrows(module: Module) -> Iterator[str]:
    """Imports that point the wrong way."""
    package = module.name.partition(".")[0]
    allowed, forbidden, excepted = (
        [name for key, names in table.items() if inside(module.name, key) for name in names]
        for table in (ALLOWED, FORBIDDEN, EXCEPTIONS)
    )
    for line, _, name in imported(ast.parse(module.source)):
        alone = package in ALLOWED and name.partition(".")[0] not in sys.stdlib_module_names
        if alone and not inside(name, package, *allowed):
            yield f"{module.name}:{line} imports {name}; {package} stands on {allowed} alone"
        elif inside(name, *forbidden) and not inside(name, *excepted):
            yield f"{module.name}:{line} imports {name}: an arrow that points back"


def flower_elsewhere(module: Module) -> Iterator[str]:
    """Imports of Flower, whose interfaces change, beside the one file that carries letters; and of
    that file, which is for Flower's processes alone."""
    for line, _, name in imported(ast.parse(module.source)):
        if inside(name, "flwr") and module.name != "privssl.engines.flower":
            yield f"{module.name}:{line} imports {name} beside privssl.engines.flower"
        elif inside(name, "privssl.engines.flower"):
            yield f"{module.name}:{line} imports {name}, which would import Flower"


def unsafe_names(module: Module) -> Iterator[str]:
    """Uses of what runs code from data, under whatever name it was imported."""
    tree = ast.parse(module.source)
    full = {}
    for line, here, name in imported(tree):
        full[here] = name
        if inside(name, *UNSAFE):
            yield f"{module.name}:{line} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            head, dot, rest = ast.unparse(node).partition(".")
            if inside(name := full.get(head, head) + dot + rest, *UNSAFE):
                yield f"{module.name}:{node.lineno} uses {name}"
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            yield f"{module.name}:{node.value.lineno} allows pickles"


def missing_docstrings(module: Module) -> Iterator[str]:
    """The module, its public classes and its public functions, where they say nothing."""
    tree = ast.parse(module.source)
    if not ast.get_docstring(tree):
        yield f"{module.name} has no docstring"
    named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in [node for node in tree.body if isinstance(node, named)]:
        if not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{module.name}:{node.lineno} {node.name} has no docstring"


def too_long(module: Module) -> Iterator[str]:
    """Modules that probably have more than one subject."""
    lines = len(module.source.splitlines())
    if lines > LONGEST_MODULE:
        yield f"{module.name} has {lines} lines, more than {LONGEST_MODULE}"


def without_subject(module: Module) -> Iterator[str]:
    """Modules named after being useful, at any depth."""
    if {"utils", "util", "helpers", "misc", "common"} & set(module.name.split(".")):
        yield f"{module.name} has no subject: name it after what it is about"


def outside_world(name: str, text: str) -> Iterator[str]:
    """Paths of one machine and hosts of package indexes in a file's text."""
    for line, content in enumerate(text.splitlines(), start=1):
        if MACHINE_PATH.search(content):
            yield f"{name}:{line} has an absolute path of one machine"
        if INDEX_HOST.search(content):
            yield f"{name}:{line} names a package index"


Check = Callable[[Module], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    wrong_arrows,
    flower_elsewhere,
    unsafe_names,
    missing_docstrings,
    too_long,
    without_subject,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_module_of_the_product_keeps_the_rule(check: Check) -> None:
    problems = [problem for module in product_modules() for problem in check(module)]
    assert not problems, "\n".join(problems)


def test_no_file_names_a_machine_or_a_package_index() -> None:
    problems: list[str] = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        problems += outside_world(str(path.relative_to(ROOT)), text)
    assert not problems, "\n".join(problems)


def test_the_rules_see_all_three_packages_and_every_rule_names_a_module_that_exists() -> None:
    # A rule about a module that was renamed would pass for ever.
    names = [module.name for module in product_modules()]
    assert set(PACKAGES) == {name.partition(".")[0] for name in names}
    ruled = {*ALLOWED, *FORBIDDEN, *(name for arrow in FORBIDDEN.values() for name in arrow)}
    assert sorted(ruled - set(names)) == []


@pytest.mark.parametrize(
    ("check", "name", "source"),
    [
        (wrong_arrows, "generators.image", "import numpy"),
        (wrong_arrows, "generators.image", "from privssl.losses import soft_cross_entropy"),
        (wrong_arrows, "generators.image", "def f():\n    import accounting.events"),
        (wrong_arrows, "generators.image", "from .. import privssl"),
        (wrong_arrows, "accounting.ledger", "import privssl"),
        (wrong_arrows, "accounting.accountants", "from opacus import PrivacyEngine"),
        (wrong_arrows, "accounting.accountants", "from dp_accounting import pld"),
        (
            wrong_arrows,
            "privssl.algorithms.fedssl",
            "from privssl.engines.local import LocalEngine",
        ),
        (wrong_arrows, "privssl.algorithms.fedssl", "from privssl import tracker"),
        (wrong_arrows, "privssl.algorithms.fedssl", "from privssl.data import datasets"),
        (wrong_arrows, "privssl.algorithms.fedssl", "import privssl.checkpoint as c"),
        (wrong_arrows, "privssl.algorithms.fedssl", "from privssl.evaluate import Oracle"),
        (wrong_arrows, "privssl.engines.local", "import privssl.data.datasets"),
        (wrong_arrows, "privssl.models.convnets", "from privssl.algorithms import base"),
        (flower_elsewhere, "privssl.run", "from flwr.app import Message"),
        (flower_elsewhere, "privssl.run", "from privssl.engines import flower"),
        (unsafe_names, "privssl.checkpoint", "import pickle"),
        (unsafe_names, "privssl.checkpoint", "from cloudpickle import loads"),
        (unsafe_names, "privssl.checkpoint", "import torch as t\nt.load('x')"),
        (unsafe_names, "privssl.checkpoint", "from torch import load as read"),
        (unsafe_names, "privssl.config", "import yaml\nread = yaml.load"),
        (unsafe_names, "privssl.config", "eval('1')"),
        (unsafe_names, "privssl.config", "exec('x = 1')"),
        (
            unsafe_names,
            "privssl.config",
            "import importlib\nimportlib.import_module('privssl.run')",
        ),
        (unsafe_names, "privssl.data.datasets", "import numpy\nnumpy.load('x', allow_pickle=True)"),
        (missing_docstrings, "privssl.learn", "x = 1"),
        (missing_docstrings, "privssl.learn", "'''Story.'''\ndef learn(): ..."),
        (missing_docstrings, "privssl.learn", "'''Story.'''\nclass Learner: ..."),
        (too_long, "privssl.learn", "x = 1\n" * (LONGEST_MODULE + 1)),
        (without_subject, "privssl.utils", ""),
        (without_subject, "privssl.data.utils.images", ""),
    ],
)
def test_a_planted_breach_is_found(check: Check, name: str, source: str) -> None:
    assert len(list(check(Module(name, source)))) >= 1


@pytest.mark.parametrize(
    ("check", "name", "source"),
    [
        (
            wrong_arrows,
            "generators.image",
            "import math\nfrom torch import nn\nimport generators.base",
        ),
        (wrong_arrows, "accounting.accountants", "import numpy as np\nimport opacus.accountants"),
        (wrong_arrows, "accounting.verify", "import dp_accounting, scipy.stats"),
        (wrong_arrows, "privssl.algorithms.semifl", "from privssl.data.augment import weak"),
        (
            wrong_arrows,
            "privssl.algorithms.semifl",
            "from privssl.runs import a\nimport privssl.data2",
        ),
        (flower_elsewhere, "privssl.engines.flower", "from flwr.app import Message"),
        (flower_elsewhere, "privssl.run", "from privssl.engines.flower_post import FlowerPost"),
        (unsafe_names, "privssl.learn", "model.eval()\nself.load()"),
        (unsafe_names, "privssl.checkpoint", "from safetensors.torch import load\nload(b'')"),
        (unsafe_names, "privssl.checkpoint", "from safetensors import torch\ntorch.load(b'')"),
        (
            unsafe_names,
            "privssl.data.datasets",
            "import numpy\nnumpy.load('x', allow_pickle=False)",
        ),
        (missing_docstrings, "privssl.learn", "'''Story.'''\ndef _inner(): ..."),
        (too_long, "privssl.learn", "x = 1\n" * LONGEST_MODULE),
        (without_subject, "privssl.data.datasets", ""),
    ],
)
def test_what_only_looks_like_a_breach_passes(check: Check, name: str, source: str) -> None:
    assert list(check(Module(name, source))) == []


# Put together here, so that this file does not hold what it forbids.
@pytest.mark.parametrize(
    "text",
    [
        "data = '/" + "root/data'",
        "see /" + "home/me/notes.txt",
        "file:///" + "work/x",
        "pip install -i https://pypi" + ".org/simple torch",
        "files.pythonhosted" + ".org",
        "--index-url https://download.pytorch" + ".org/whl/cpu",
        "https://mirror.example/artifacts/" + "simple",
    ],
)
def test_a_planted_path_or_index_is_found(text: str) -> None:
    assert len(list(outside_world("README.md", f"first line\n{text}\n"))) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "~/.cache/privssl/data",
        "../shared/work/x and a/home/b",
        "https://www.example.org/home/index.html",
        "a simple/plain rule",
    ],
)
def test_relative_paths_and_other_hosts_pass(text: str) -> None:
    assert list(outside_world("README.md", text)) == []
