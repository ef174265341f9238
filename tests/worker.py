"""A process that runs test files, one after the other, and tells `tests.__main__` of each test.

python -m tests.worker FILE_DESCRIPTOR [pytest arguments]
"""

import gc
import os
import resource
import sys
import traceback
from multiprocessing import connection

import pytest


def main() -> int:
    """Runs what the other end of the connection asks for, until it hangs up."""
    descriptor, *arguments = sys.argv[1:]
    # Several processes would write the same cache.
    arguments = ["-p", "no:cacheprovider", *arguments]
    boss = connection.Connection(int(descriptor))
    while True:
        try:
            selection, collect_only = boss.recv()
        except EOFError:
            return 0
        options = ["--collect-only"] if collect_only else []
        # pytest collects garbage twice after each file. Looking through what was there before,
        # TensorFlow above all, took a sixth of all the time.
        gc.freeze()
        before = sum(os.times()[:4])
        reporter = _Reporter(boss, collect_only)
        try:
            status = pytest.main([*options, *selection, *arguments], [reporter])
        except Exception as error:
            # What the last garbage collection found after the last test.
            reporter.tell(selection[0], "failed", _text(error))
            status = pytest.ExitCode.TESTS_FAILED
        # Of all cores, with child processes: what does not depend on who else is at work.
        seconds = sum(os.times()[:4]) - before
        boss.send(("done", int(status), seconds, _peak_gigabytes()))


class _Reporter:
    """A plugin of pytest."""

    def __init__(self, boss: connection.Connection, collect_only: bool):
        self._boss = boss
        self._collect_only = collect_only

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._collect_only:
            self._boss.send(("collected", [item.nodeid for item in session.items]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell_of("failed", report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds = 0.0
        self._boss.send(("started", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        # A test has three reports. It is told of once, unless it fails in two of them.
        if report.when == "call" or outcome != "passed":
            self._tell_of(outcome, report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._boss.send(("finished", nodeid, self._seconds))

    def tell(self, test: str, outcome: str, text: str = "") -> None:
        self._boss.send(("outcome", test, outcome, text))

    def _tell_of(self, outcome: str, report: pytest.CollectReport | pytest.TestReport) -> None:
        text = ""
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        elif outcome == "failed":
            captured = [f"----- {title} -----\n{content}" for title, content in report.sections]
            text = "\n".join([report.longreprtext, *captured])
        self.tell(report.nodeid, outcome, text)


def _text(error: Exception) -> str:
    """What went wrong first: a reader may see no more than the beginning."""
    error = error.with_traceback(None)  # pytest's own lines
    return "".join([f"{error!r}\n\n", *traceback.format_exception(error)])


def _peak_gigabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


if __name__ == "__main__":
    sys.exit(main())
