"""Settings that every test shares: one thread, one answer, no window, no surprises in time.

The environment is set before torch and matplotlib are imported, because both read it once.
"""

import contextlib
import importlib
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import settings

#: Fixtures that several files share.
PLUGINS = (
    "tests.support.session",
    "tests.support.batched_agents",
    "tests.support.costs",
    "tests.support.privacy",
    "tests.support.private_fedssl",
    "tests.support.small_attacks",
)

# No deadline: the machine that runs the tests may be doing something else. In CI the examples
# are the same every time, so that a red run can be repeated; elsewhere they are fresh ones.
# `make test-all` asks for the thorough profile.
same = "CI" in os.environ
settings.register_profile("privssl", deadline=None, derandomize=same, max_examples=50)
settings.register_profile("thorough", deadline=None, derandomize=same, max_examples=200)
settings.load_profile("privssl")


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugins where tests are run: the controller of workers needs no torch, and they
    wait for it."""
    distributes = config.getoption("dist", "no") != "no" and not config.getoption("collectonly")
    for plugin in () if distributes else PLUGINS:
        config.pluginmanager.import_plugin(plugin)


def pytest_collection(session: pytest.Session) -> None:
    """Each worker imports another part of the test files first.

    In a new checkout pytest rewrites the assertions of every file, a third of a worker's start. It
    keeps what it made, so a worker finds the other workers' parts done.
    """
    worker, here = os.environ.get("PYTEST_XDIST_WORKER"), Path(__file__).parent
    if worker is None:
        return
    asked = [session.config.invocation_params.dir / text for text in session.config.args]
    files = sorted(p for p in here.rglob("test_*.py") if any(map(p.is_relative_to, asked)))
    modules = [".".join(p.relative_to(here.parent).with_suffix("").parts) for p in files]
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = len(modules) * int(worker.removeprefix("gw")) // count
    for module in modules[first:] + modules[:first]:
        # What fails or skips does so again when its file is collected, and is reported there.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(module)
