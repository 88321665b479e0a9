"""Settings of all tests: one thread, the same random examples, no windows, no time limits.

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

# No deadline: the machine may be busy. In CI the examples are the same every time, so that a
# failure can be repeated; elsewhere they are new. `make test-all` uses the thorough profile.
same = "CI" in os.environ
settings.register_profile("privssl", deadline=None, derandomize=same, max_examples=50)
settings.register_profile("thorough", deadline=None, derandomize=same, max_examples=200)
settings.load_profile("privssl")


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugins where tests run: the controller of workers needs no torch, and the workers
    wait for it. Garbage collection is off during imports and collection.
    """
    gc.disable()
    distributes = config.getoption("dist", "no") != "no" and not config.getoption("collectonly")
    for plugin in () if distributes else PLUGINS:
        config.pluginmanager.import_plugin(plugin)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that share the longest fixture first. Idle workers take tests from the end of
    another's list: of a half-finished module, both would make the fixture.
    """
    items.sort(key=lambda item: "test_far_device.py" not in item.nodeid)


def pytest_collection_finish() -> None:
    """Collect garbage again, but skip modules and the list of tests: a million objects.

    All loggers propagate their messages. Before each test pytest visits the root logger and those
    that do not propagate, and torch has fifty of them.
    """
    gc.freeze()
    gc.enable()
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.propagate = True
