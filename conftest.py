"""Options of the tests. What needs TensorFlow is in `tests/plugin.py`.

The process that distributes the tests loads this file, too. It runs none of them, so it does not
wait for TensorFlow.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Takes which cases of the tests are to run."""
    parser.addoption(
        "--fewer-cases", action="store_true", help="of each test the first and the last case only"
    )
    parser.addoption(
        "--other-cases", action="store_true", help="the cases that --fewer-cases leaves out"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Loads what tests start from, in processes that run them."""
    distributes = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not distributes:
        config.pluginmanager.import_plugin("tests.plugin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves cases out: every behaviour is looked at, but not with every combination."""
    is_other = config.getoption("--other-cases")
    if not (is_other or config.getoption("--fewer-cases")):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    ends = {id(item) for each in cases.values() for item in (each[0], each[-1])}
    left_out = [item for item in items if (id(item) in ends) == is_other]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if (id(item) in ends) != is_other]
