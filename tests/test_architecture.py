"""The architecture of the code base: allowed imports, and forbidden content.

Each rule is a function from a module, or a text, to its violations. The rules run over the
repository, and over planted sources that break them (the negative controls) or only look like it.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.product import (
    PACKAGES,
    ROOT,
    Module,
    dotted,
    imports,
    inside,
    nodes,
    parsed,
    product_modules,
    repository_files,
)

#: Lowest first: a package of ``privssl`` imports itself and packages listed before it, at any depth
#: of the code. ``__init__`` may be imported everywhere, for its version.
ORDER = (
    *("errors", "storage", "runtime", "settings", "ops", "core", "models", "training"),
    *("encoders", "data", "reporting", "privacy", "algorithms", "remote", "engines"),
    *("experiment", "runs", "audit", "generation", "compare", "reproduce", "site"),
    *("installation", "api", "testing", "predict", "evaluate", "generate", "export", "schema"),
    *("train", "doctor"),
    *("__main__", "__init__"),
)
#: Files that lie in privssl/ itself.
FLAT = (
    *("__init__", "__main__", "doctor", "errors", "evaluate", "export", "generate", "predict"),
    *("schema", "train"),
)
#: Additional rules. ``evaluation`` holds the true labels of query rows, which no code on an agent
#: may see; nor may that code read data sets or write results.
APART = {
    "privssl.training.evaluation": ("algorithms", "engines", "core", "site"),
    "privssl.reporting.trackers": ("algorithms", "engines"),
    "privssl.reporting.outside_trackers": ("algorithms", "engines", "remote", "site"),
    **dict.fromkeys(
        (
            *("privssl.data.datasets", "privssl.data.downloads", "privssl.data.image_folder"),
            *(
                "privssl.data.csv_rows",
                "privssl.data.npz",
                "privssl.data.split",
                "privssl.data.split_manifest",
            ),
        ),
        ("algorithms", "engines", "remote"),
    ),
}
LONGEST_MODULE = 420  # lines

# What the two stand-alone packages may import besides themselves and the standard library.
ALLOWED = {
    "generators": ("torch",),
    "accounting": ("numpy", "scipy", "opacus.accountants"),
    "accounting.verify": ("dp_accounting",),  # in addition to those of accounting
}

# Reading a file must not run code from it, and all imports must be visible to the rules above.
UNSAFE = (
    *("eval", "exec", "__import__", "importlib.import_module"),
    *("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("torch.load", "torch.serialization", "torch.save"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
)
#: The one module that imports a module named in a text: a user's network, from her own config.
IMPORTS_BY_NAME = "privssl.runtime.plugins"

MACHINE_PATH = re.compile(r"(?<![\w.~})*-])/(?:root|home|work|Users)/")
INDEX_HOST = re.compile(
    r"pypi[.](?:org|python)|pythonhosted[.]|download[.]pytorch[.]|anaconda[.]org"
    r"|https?://[^\s\"']+/simple\b",
    re.IGNORECASE,
)


def package_of(name: str) -> str:
    """The place in ``ORDER`` of a dotted name inside privssl."""
    second = name.split(".")[1:2]
    return second[0] if second and second[0] != "__version__" else "__init__"


def wrong_arrows(module: Module) -> Iterator[str]:
    """Imports against the order of packages."""
    package = module.name.partition(".")[0]
    allowed = [name for key, names in ALLOWED.items() if inside(module.name, key) for name in names]
    here = package_of(module.name)
    if package == "privssl" and here not in ORDER:
        yield f"{module.name}: {here} has no place in ORDER"
        return
    for line, _, name in imports(module.source):
        alone = package in ALLOWED and name.partition(".")[0] not in sys.stdlib_module_names
        if alone and not inside(name, package, *allowed):
            yield f"{module.name}:{line} imports {name}; {package} stands on {allowed} alone"
        elif package == "privssl" and inside(name, "privssl") and name != "privssl.__version__":
            there = package_of(name)
            if there not in ORDER:
                yield f"{module.name}:{line} imports {name}: {there} has no place in ORDER"
            elif ORDER.index(there) > ORDER.index(here):
                yield f"{module.name}:{line} imports {name}: {here} stands below {there}"
            for what, never in APART.items():
                if inside(name, what) and here in never:
                    yield f"{module.name}:{line} imports {name}, which {here} may not see"


def import_cycles(modules: Sequence[Module]) -> Iterator[str]:
    """Modules that import each other, directly or indirectly, at any depth of the code."""
    names = {module.name for module in modules}
    graph = {
        module.name: {
            found
            for _, _, name in imports(module.source)
            for found in (name, name.rpartition(".")[0])
            if found in names - {module.name, module.name.partition(".")[0]}
        }
        for module in modules
    }
    for start in sorted(graph):
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += graph[name]
        if start in seen:
            yield f"{start} imports itself by way of {sorted(n for n in seen if n in graph[start])}"


def flower_elsewhere(module: Module) -> Iterator[str]:
    """Imports of Flower, whose interfaces change, outside the one module that delivers requests;
    and imports of that module, which only Flower's processes use.
    """
    for line, _, name in imports(module.source):
        if inside(name, "flwr") and module.name != "privssl.remote.flower_app":
            yield f"{module.name}:{line} imports {name} beside privssl.remote.flower_app"
        elif inside(name, "privssl.remote.flower_app"):
            yield f"{module.name}:{line} imports {name}, which would import Flower"


def unsafe_names(module: Module) -> Iterator[str]:
    """Uses of functions that run code from data, under any imported name."""
    full = {}
    may_import = ("importlib.import_module",) if module.name == IMPORTS_BY_NAME else ()
    unsafe = tuple(name for name in UNSAFE if name not in may_import)
    for line, here, name in imports(module.source):
        full[here] = name
        if inside(name, *unsafe):
            yield f"{module.name}:{line} imports {name}"
    # Only tensors: nothing in the file runs.
    plain = {
        id(call.func) for call in nodes(module.source)
        if isinstance(call, ast.Call)
        and any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)
    }  # fmt: skip
    for node in nodes(module.source):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in plain:
            head, dot, rest = dotted(node).partition(".")
            if inside(name := full.get(head, head) + dot + rest, *unsafe):
                yield f"{module.name}:{node.lineno} uses {name}"
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            yield f"{module.name}:{node.value.lineno} allows pickles"


def missing_docstrings(module: Module) -> Iterator[str]:
    """The module, its public classes and its public functions without a docstring."""
    tree = parsed(module.source)
    if not ast.get_docstring(tree):
        yield f"{module.name} has no docstring"
    named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in [node for node in tree.body if isinstance(node, named)]:
        if not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{module.name}:{node.lineno} {node.name} has no docstring"


def too_long(module: Module) -> Iterator[str]:
    """Modules that are probably too long for one subject."""
    lines = len(module.source.splitlines())
    if lines > LONGEST_MODULE:
        yield f"{module.name} has {lines} lines, more than {LONGEST_MODULE}"


def without_subject(module: Module) -> Iterator[str]:
    """Modules with names such as utils, at any depth."""
    if {"utils", "util", "helpers", "misc", "common"} & set(module.name.split(".")):
        yield f"{module.name} has no subject: name it after what it is about"


def outside_world(name: str, text: str) -> Iterator[str]:
    """Local paths and hosts of package indexes in a text."""
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


def test_no_file_contains_a_local_path_or_a_package_index() -> None:
    problems: list[str] = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        problems += outside_world(str(path.relative_to(ROOT)), text)
    assert not problems, "\n".join(problems)


def test_no_modules_import_each_other() -> None:
    problems = list(import_cycles(product_modules()))
    assert not problems, "\n".join(problems)
    # The negative controls: through a third module, and inside a function; and what is no cycle.
    planted = [
        Module("privssl.core.a", "from privssl.core.b import x"),
        Module("privssl.core.b", "def f():\n    from privssl.core import c"),
        Module("privssl.core.c", "import privssl.core.a"),
    ]
    assert len(list(import_cycles(planted))) == 3
    assert list(import_cycles(planted[:2])) == []


def test_only_the_public_modules_lie_directly_in_privssl() -> None:
    flat = sorted(path.stem for path in (ROOT / "privssl").glob("*.py"))
    assert flat == sorted(FLAT)


def test_the_rules_cover_all_three_packages_and_name_modules_that_exist() -> None:
    # A rule about a renamed module would always pass.
    names = [module.name for module in product_modules()]
    assert set(PACKAGES) == {name.partition(".")[0] for name in names}
    assert sorted({*ALLOWED, *APART} - set(names)) == []
    assert sorted({package_of(name) for name in names if inside(name, "privssl")}) == sorted(ORDER)
    assert {place for places in APART.values() for place in places} <= set(ORDER)


@pytest.mark.parametrize(
    ("check", "name", "source"),
    [
        (wrong_arrows, "generators.image", "import numpy"),
        (wrong_arrows, "generators.image", "from privssl.training.losses import hard_label_loss"),
        (wrong_arrows, "generators.image", "def f():\n    import accounting.events"),
        (wrong_arrows, "generators.image", "from .. import privssl"),
        (wrong_arrows, "accounting.ledger", "import privssl"),
        (wrong_arrows, "accounting.accountants", "from opacus import PrivacyEngine"),
        (wrong_arrows, "accounting.accountants", "from dp_accounting import pld"),
        (
            wrong_arrows,
            "privssl.algorithms.semifl",
            "from privssl.engines.local import LocalEngine",
        ),
        (wrong_arrows, "privssl.algorithms.semifl", "from privssl.reporting import trackers"),
        (wrong_arrows, "privssl.algorithms.semifl", "from privssl.data import datasets"),
        (wrong_arrows, "privssl.algorithms.semifl", "import privssl.runs.checkpoint as c"),
        (
            wrong_arrows,
            "privssl.algorithms.semifl",
            "from privssl.training.evaluation import Oracle",
        ),
        (wrong_arrows, "privssl.engines.local", "import privssl.data.datasets"),
        (
            wrong_arrows,
            "privssl.models.convnets",
            "def f():\n    from privssl.algorithms import base",
        ),
        (wrong_arrows, "privssl.ops.dropout", "from privssl.no_such_package import x"),
        (wrong_arrows, "privssl.no_such_package.x", ""),
        (flower_elsewhere, "privssl.runs.round_loop", "from flwr.app import Message"),
        (flower_elsewhere, "privssl.runs.round_loop", "from privssl.remote import flower_app"),
        (unsafe_names, "privssl.runs.checkpoint", "import pickle"),
        (unsafe_names, "privssl.runs.checkpoint", "from cloudpickle import loads"),
        (unsafe_names, "privssl.runs.checkpoint", "import torch as t\nt.load('x')"),
        (unsafe_names, "privssl.runs.checkpoint", "from torch import load as read"),
        (
            unsafe_names,
            "privssl.encoders.frozen",
            "import torch\ntorch.load(f, weights_only=False)",
        ),
        (unsafe_names, "privssl.encoders.frozen", "import torch\nf(torch.load, weights_only=True)"),
        (unsafe_names, "privssl.experiment.config", "import yaml\nread = yaml.load"),
        (unsafe_names, "privssl.experiment.config", "eval('1')"),
        (unsafe_names, "privssl.experiment.config", "exec('x = 1')"),
        (
            unsafe_names,
            "privssl.experiment.config",
            "import importlib\nimportlib.import_module('privssl.runs')",
        ),
        (unsafe_names, IMPORTS_BY_NAME, "import importlib, pickle"),
        (unsafe_names, "privssl.data.datasets", "import numpy\nnumpy.load('x', allow_pickle=True)"),
        (missing_docstrings, "privssl.training.local_training", "x = 1"),
        (missing_docstrings, "privssl.training.local_training", "'''Story.'''\ndef learn(): ..."),
        (missing_docstrings, "privssl.training.local_training", "'''Story.'''\nclass Learner: ..."),
        (too_long, "privssl.training.local_training", "x = 1\n" * (LONGEST_MODULE + 1)),
        (without_subject, "privssl.utils", ""),
        (without_subject, "privssl.data.utils.images", ""),
    ],
)
def test_planted_violations_are_found(check: Check, name: str, source: str) -> None:
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
        (wrong_arrows, "privssl.algorithms.semifl", "from privssl.data.augmentations import weak"),
        (wrong_arrows, "privssl.core.messages", "from privssl import __version__"),
        (wrong_arrows, "privssl.core.messages", "import privssl2.runs"),
        (flower_elsewhere, "privssl.remote.flower_app", "from flwr.app import Message"),
        (
            flower_elsewhere,
            "privssl.runs.round_loop",
            "from privssl.remote.flower_transport import Transport",
        ),
        (unsafe_names, "privssl.training.local_training", "model.eval()\nself.load()"),
        (unsafe_names, "privssl.runs.checkpoint", "from safetensors.torch import load\nload(b'')"),
        (unsafe_names, "privssl.runs.checkpoint", "from safetensors import torch\ntorch.load(b'')"),
        (
            unsafe_names,
            "privssl.data.datasets",
            "import numpy\nnumpy.load('x', allow_pickle=False)",
        ),
        (unsafe_names, "privssl.encoders.frozen", "import torch\ntorch.load(f, weights_only=True)"),
        (missing_docstrings, "privssl.training.local_training", "'''Story.'''\ndef _inner(): ..."),
        (too_long, "privssl.training.local_training", "x = 1\n" * LONGEST_MODULE),
        (without_subject, "privssl.data.datasets", ""),
    ],
)
def test_sources_that_only_look_like_violations_pass(check: Check, name: str, source: str) -> None:
    assert list(check(Module(name, source))) == []


# Assembled here, so that this file does not contain what it forbids.
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
