"""Runs the tests, once for each Keras: a process can hold only one `tf.keras`.

python -m tests [--quick] [--jobs N] [files, folders or tests] [options of pytest]

Processes take test files from a queue for each Keras, the longest first, and help the other Keras
out when theirs is empty. There is one more of them than there are cores, since some tests wait.
What lies in `tests/ci` runs if it is named.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing import connection

_ROOT = pathlib.Path(__file__).parent.parent
_KERASES = {"Keras 3": "0", "tf_keras": "1"}
# What surrounds the package is for CI to look at.
_ALL = ["tests", "keras_mp", "--ignore=tests/ci"]
# What a developer wants to know after each change: the core, less what trains models.
_QUICK = [
    "tests/step/test_gradients.py",
    "tests/step/test_loss_scale.py",
    "tests/support",
    "tests/test_policy.py",
    "tests/variables",
]

# Roughly how long each file takes, in seconds of a core: for the order and the time that is left.
_SECONDS = _ROOT / "tests" / "seconds.json"
# The same of one test in a file that is not among them, by its room.
_OF_A_TEST = {"programs": 15, "replicas": 2, "saving": 1.5, "step": 0.8}
# TensorFlow keeps what it compiled. A process that has grown by that much is replaced.
_GIGABYTES = 3.0
# Seconds of work below which another process is not worth its start.
_START = 20


class Queue:
    """The files that are left for one Keras, and what its tests have said so far."""

    def __init__(self, keras: str, seconds: dict[str, float]):
        self.keras = keras
        self.files: list[str] = []  # the next one last
        self.counts: dict[str, int] = {}
        self.outcomes = collections.Counter()
        self.finished = 0
        self.failures: list[str] = []
        self.skipped = collections.Counter()
        self.slowest: list[tuple[float, str]] = []
        self.took: dict[str, tuple[float, float]] = {}  # seconds, and seconds of a core
        self._seconds = seconds

    def add(self, tests: Iterable[str]) -> None:
        """Takes the names of all tests."""
        self.counts = dict(collections.Counter(test.split("::")[0] for test in tests))
        self.files = sorted(self.counts, key=self.expected)

    def expected(self, file: str) -> float:
        """Seconds that a file may take."""
        room = file.split("/")[1]
        return self._seconds.get(
            f"{self.keras} {file}", _OF_A_TEST.get(room, 0.4) * self.counts[file]
        )

    def record(self) -> dict[str, float]:
        """Seconds that the files took."""
        everything = sum(seconds for seconds, _ in self.took.values())
        share = sum(of_core for _, of_core in self.took.values()) / max(everything, 1)
        # What waits takes longer than a core is busy with it.
        return {
            f"{self.keras} {file}": round(max(of_core, share * seconds), 1)
            for file, (seconds, of_core) in self.took.items()
        }

    def waiting(self) -> float:
        """Seconds that the files in it may take."""
        return sum(map(self.expected, self.files))

    def seconds_left(self, running: Iterable["Worker"]) -> float:
        """Seconds of one core, if this machine goes on as it did so far."""
        took = sum(seconds for seconds, _ in self.took.values())
        pace = (took + 30) / (sum(map(self.expected, self.took)) + 30)
        left = self.waiting()
        for worker in running:
            of_file = self.expected(worker.file) * pace
            share = max(1 - worker.finished / self.counts[worker.file], 0)
            left += max(of_file - worker.seconds, share * of_file) / pace
        return left * pace


@dataclasses.dataclass
class Worker:
    """A process that runs tests of one Keras."""

    queue: Queue
    process: subprocess.Popen
    connection: connection.Connection
    log: pathlib.Path
    file: str = ""
    test: str = ""
    started: float = 0.0
    finished: int = 0

    @property
    def seconds(self) -> float:
        """Since it got its file."""
        return time.monotonic() - self.started

    def give(self, selection: list[str], file: str = "", collect_only: bool = False) -> None:
        """Sends it a file, or what is to be collected."""
        self.file, self.test, self.finished, self.started = file, "", 0, time.monotonic()
        self.connection.send((selection, collect_only))

    def stop(self) -> None:
        """Lets it go, or kills it where it is at work."""
        self.connection.close()
        if self.file:
            self.process.kill()
        self.process.wait()


class Run:
    """All of it."""

    def __init__(self, selection: list[str], options: list[str], jobs: int, folder: pathlib.Path):
        seconds = json.loads(_SECONDS.read_text()) if _SECONDS.exists() else {}
        self.queues = [Queue(keras, seconds) for keras in _KERASES]
        self._selection = selection
        self._options = options
        self._jobs = jobs
        self._folder = folder
        self._waiting = list(self.queues)  # for the names of their tests
        self._workers: list[Worker] = []
        self._screen = Screen()
        self._start = time.monotonic()

    def run(self) -> bool:
        """Runs everything; returns whether all is well."""
        try:
            while self._start_some():
                ready = connection.wait([w.connection for w in self._workers], timeout=1)
                for worker in [w for w in self._workers if w.connection in ready]:
                    self._listen(worker)
                self._screen.show(self._lines())
        except KeyboardInterrupt:
            self._screen.print("Interrupted.")
            for queue in self.queues:
                queue.failures.append("interrupted")
        finally:
            for worker in self._workers:
                worker.stop()
        return self._summary()

    def _start_some(self) -> bool:
        """Starts as many processes as there is work for; returns whether there are any."""
        while len(self._workers) < self._jobs:
            if self._waiting:
                worker = self._begin(self._waiting.pop(0))
                worker.give(self._selection, file="collecting", collect_only=True)
                continue
            queue = max(self.queues, key=Queue.waiting)
            is_at_work = any(worker.queue is queue for worker in self._workers)
            if queue.waiting() < (_START if is_at_work else 0) or not queue.files:
                break
            self._next(self._begin(queue))
        return bool(self._workers)

    def _begin(self, queue: Queue) -> Worker:
        ours, theirs = connection.Pipe()
        log = self._folder / f"{len(os.listdir(self._folder))}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker", str(theirs.fileno()), *self._options],
                cwd=_ROOT,
                env={
                    **os.environ,
                    "TF_USE_LEGACY_KERAS": _KERASES[queue.keras],
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        worker = Worker(queue, process, ours, log)
        self._workers.append(worker)
        return worker

    def _next(self, worker: Worker) -> bool:
        """Gives a process its next file, if there is one."""
        if not worker.queue.files:
            return False
        file = worker.queue.files.pop()
        chosen = [each for each in self._selection if each.split("::")[0] == file]
        worker.give(chosen or [file], file)
        return True

    def _listen(self, worker: Worker) -> None:
        """Hears one message, and lets a process go that has died, has grown or has no work."""
        queue = worker.queue
        try:
            what, *about = worker.connection.recv()
        except (EOFError, ConnectionError):
            test = worker.test or worker.file
            worker.file = ""  # It ends by itself, and may still be writing why.
            self._dismiss(worker)
            log = worker.log.read_text(errors="replace").strip()
            *_, last = log.split("\n")
            status = worker.process.returncode
            self._fail(queue, test, f"The process died with status {status}: {last}\n{log[-5000:]}")
            return
        if what == "collected":
            queue.add(*about)
        elif what == "started":
            [worker.test] = about
        elif what == "finished":
            test, seconds = about
            worker.finished += 1
            queue.finished += 1
            queue.slowest = sorted([*queue.slowest, (seconds, test)])[-5:]
        elif what == "outcome":
            test, outcome, text = about
            queue.outcomes[outcome] += 1
            if outcome in ("failed", "xpassed"):
                self._fail(queue, test, text)
            elif outcome == "skipped":
                queue.skipped[text] += 1
        elif what == "done":
            status, of_core, gigabytes = about
            if worker.file in queue.counts:
                queue.took[worker.file] = worker.seconds, of_core
            # 1 is said by the failures, 2 is an interruption or an error of collection, 5 no tests.
            if status not in (0, 1, 5) and not queue.failures:
                log = worker.log.read_text(errors="replace")[-5000:]
                self._fail(queue, worker.file, f"pytest ended with status {status}.\n{log}")
            worker.file = ""
            if gigabytes > _GIGABYTES or not self._next(worker):
                self._dismiss(worker)

    def _dismiss(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.stop()

    def _fail(self, queue: Queue, test: str, text: str) -> None:
        queue.failures.append(test)
        self._screen.print(f"FAILED with {queue.keras}: {test}\n{text}\n")

    def _lines(self) -> Iterator[str]:
        everything = 0.0
        running = {q.keras: [w for w in self._workers if w.queue is q] for q in self.queues}
        left = {}
        for queue in self.queues:
            at_work = [w for w in running[queue.keras] if w.file in queue.counts]
            left[queue.keras] = queue.seconds_left(at_work)
            everything += left[queue.keras]
        for queue in self.queues:
            total = sum(queue.counts.values())
            if not queue.counts:
                yield f"{queue.keras:8}  collecting tests"
                continue
            # Who is done helps the other Keras out, so both end when everything does.
            seconds = everything / self._jobs if left[queue.keras] else 0
            where = " ".join(w.file for w in running[queue.keras])
            yield (
                f"{queue.keras:8}  {queue.finished} of {total} tests, "
                f"{len(queue.failures)} failed, {_minutes(seconds)} left  {where}"
            )

    def _summary(self) -> bool:
        self._screen.show([])
        for queue in self.queues:
            counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(queue.outcomes.items()))
            print(f"===== {queue.keras}: {counts or 'no tests'} =====")
            for reason, count in sorted(queue.skipped.items()):
                print(f"skipped {count}: {reason}")
            for seconds, test in reversed(queue.slowest):
                print(f"{seconds:5.1f} s  {test}")
            variable = f"TF_USE_LEGACY_KERAS={_KERASES[queue.keras]}"
            for test in queue.failures:
                print(f"FAILED  {variable} python -m pytest '{test}'")
        failed = [q.keras for q in self.queues if q.failures]
        if not failed and not any(q.outcomes for q in self.queues):
            failed = ["no tests at all"]
        print(f"Failed with: {', '.join(failed)}" if failed else "Both Kerases passed.", end=" ")
        print(f"({_minutes(time.monotonic() - self._start)})")
        return not failed


class Screen:
    """Lines that move on a terminal; elsewhere, what they say every half minute."""

    def __init__(self):
        self._moves = sys.stdout.isatty()
        self._shown = 0
        self._last = 0.0

    def show(self, lines: Iterable[str]) -> None:
        """Replaces the lines shown last."""
        pause = 0.2 if self._moves else 30
        lines = list(lines)
        if lines and time.monotonic() - self._last < pause:
            return
        self._last = time.monotonic()
        if not self._moves:
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
            return
        self._erase()
        width = os.get_terminal_size().columns - 1
        print(*(line[:width] for line in lines), sep="\n", end="\n" if lines else "", flush=True)
        self._shown = len(lines)

    def print(self, text: str) -> None:
        """Prints something that stays."""
        self._erase()
        self._last = 0.0
        print(text, flush=True)

    def _erase(self) -> None:
        if self._shown:
            print(f"\x1b[{self._shown}A\x1b[J", end="")
        self._shown = 0


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def main() -> int:
    """Runs what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only unit tests of the core")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() + 1, 8), help="processes")
    parser.add_argument("--record", action="store_true", help=f"write {_SECONDS.name} anew")
    arguments, others = parser.parse_known_args()
    selection = [each for each in others if (_ROOT / each.split("::")[0]).exists()]
    options = [each for each in others if each not in selection]
    selection = selection or (_QUICK if arguments.quick else _ALL)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(selection, options, arguments.jobs, pathlib.Path(folder))
        is_well = run.run()
    if arguments.record:
        took = json.loads(_SECONDS.read_text()) if _SECONDS.exists() else {}
        for queue in run.queues:
            took |= queue.record()
        took = {key: took[key] for key in sorted(took) if (_ROOT / key.split()[-1]).exists()}
        _SECONDS.write_text(json.dumps(took, indent=1) + "\n")
    return not is_well


if __name__ == "__main__":
    sys.exit(main())
