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

#: Tests with the marker ``ci``: documentation, tables of results, tools, and parts that other files
#: test in small.
CI_ONLY = (
    "tests/api/test_generate.py", "tests/audit/test_histogram_attack.py", "tests/benchmarks/",
    "tests/cli/test_export.py", "tests/cli/test_start_up.py", "tests/compare/test_compare.py",
    "tests/compare/test_vary.py", "tests/data/test_rand_augment.py", "tests/docs/",
    "tests/engines/test_scale.py", "tests/examples/", "tests/generation/", "tests/reporting/",
    "tests/reproduce/", "tests/rows/test_encoders.py", "tests/runs/test_forecast.py",
    "tests/runs/test_lengthening.py", "tests/site/test_run_over_sites.py",
    "tests/site/test_sandbox.py", "tests/site/test_site_keys.py", "tests/site/test_site_tools.py",
    "tests/test_planted_faults.py", "tests/testing/", "tests/training/test_batched_agents.py",
)  # fmt: skip
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
settings.register_profile("privssl", deadline=None, derandomize=same, max_examples=25)
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


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test with ``fast_cases(N)``, N cases evenly spread, or with ``fast_cases(*ids)``, the
    named ones run in `make test`; the others are marked ``slow``.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(CI_ONLY):
            item.add_marker(pytest.mark.ci)
        if item.get_closest_marker("fast_cases"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, of_test in cases.items():
        [asked] = [mark.args for mark in of_test[0].iter_markers("fast_cases")]
        ids = [item.nodeid.partition("[")[2][:-1] for item in of_test]
        if isinstance(asked[0], int):
            count = min(asked[0], len(ids))
            asked = tuple(ids[len(ids) * n // count] for n in range(count))
        elif len(ids) > len(asked) and (unknown := set(asked) - set(ids)):
            raise pytest.UsageError(f"{test} has no cases {unknown}: correct its fast_cases.")
        for item, case in zip(of_test, ids, strict=True):
            if case not in asked:
                item.add_marker(pytest.mark.slow)


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
