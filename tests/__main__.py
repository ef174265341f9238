"""Runs the tests on both Kerases, one after the other: a process can hold only one `tf.keras`.

python -m tests [--quick] [--all-cases] [--keras {2,3}] [files, folders, tests]
    [pytest's options]
python -m tests --gpu [--quick] [--output FILE.json]

Without a selection all tests run, except `tests/ci`; a parametrized test has its first and its last
case then, unless `--all-cases` is given, or `--other-cases` for those that this leaves out.
pytest-xdist distributes tests over one process more than there are cores, since some wait for
processes of their own. `--gpu` checks this machine, with the current Keras (`tests/gpu`).
"""

import argparse
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parent.parent
_KERASES = {"Keras 3": "0", "Keras 2": "1"}
# What surrounds the package is tested in CI only.
_ALL = ["tests", "keras_mp", "--ignore=tests/ci"]
# The core, without the tests that train models: for a run after each change.
_QUICK = [
    "tests/step/test_gradients.py",
    "tests/step/test_loss_scale.py",
    "tests/support",
    "tests/test_policy.py",
    "tests/variables",
]


def main(arguments: list[str]) -> int:
    """Runs the tests; returns the exit status, which is 0 if they pass on both Kerases."""
    if arguments[:1] == ["--gpu"]:
        from tests.gpu.__main__ import main as check

        return check(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="unit tests of the core only")
    parser.add_argument("--all-cases", action="store_true", help="of parametrized tests")
    parser.add_argument("--keras", choices=["2", "3"], help="one of the Kerases only")
    options, arguments = parser.parse_known_args(arguments)
    default = _QUICK if options.quick else _ALL
    selected = [each for each in arguments if (_ROOT / each.split("::")[0]).exists()]
    is_one_file = len(selected) == 1 and (_ROOT / selected[0].split("::")[0]).is_file()
    processes = 0 if is_one_file else min(os.cpu_count() + 1, 8)
    # Whoever has nothing left to do takes tests from another.
    command = [sys.executable, "-m", "pytest", "-n", str(processes), "--dist", "worksteal"]
    outcomes = {}
    for keras, is_legacy in _KERASES.items():
        if options.keras not in (None, keras[-1]):
            continue
        print(f"Tests with {keras} (TF_USE_LEGACY_KERAS={is_legacy})", flush=True)
        environment = {
            **{"TF_USE_LEGACY_KERAS": is_legacy, "TF_CPP_MIN_LOG_LEVEL": "2"},
            # Each process would compile all tests, and those that tests start the package.
            "PYTHONDONTWRITEBYTECODE": "",
        }
        extra = arguments if selected else [*default, *arguments]
        if not (selected or options.all_cases or "--other-cases" in arguments):
            extra = [*extra, "--fewer-cases"]
        outcomes[keras] = subprocess.run(
            [*command, *extra], cwd=_ROOT, env=os.environ | environment
        ).returncode
    # pytest returns 5 where a selection has no tests for one Keras.
    failed = [keras for keras, status in outcomes.items() if status not in (0, 5)]
    if 0 not in outcomes.values():
        failed = failed or ["no tests at all"]
    print(f"Failed with: {', '.join(failed)}" if failed else f"{' and '.join(outcomes)} passed.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
