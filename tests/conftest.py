"""Settings that every test shares: one thread, one answer, no window, no surprises in time.

The environment is set before torch and matplotlib are imported, because both read it once.
"""

import gc
import logging
import os

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
    wait for it. Nothing that imports or collection make is garbage."""
    gc.disable()
    distributes = config.getoption("dist", "no") != "no" and not config.getoption("collectonly")
    for plugin in () if distributes else PLUGINS:
        config.pluginmanager.import_plugin(plugin)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that share the longest fixture. Workers that run out of tests take some
    from another's end: of a module that is half done, both would make its fixture."""
    items.sort(key=lambda item: "test_far_device.py" not in item.nodeid)


def pytest_collection_finish() -> None:
    """Collect garbage again, but never look at modules and the list of tests: a million objects.

    All loggers pass their messages on. Before each test pytest goes to the root and to those that
    do not, and torch has fifty."""
    gc.freeze()
    gc.enable()
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.propagate = True
