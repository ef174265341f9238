"""Runs all tests, once for each Keras: a process can hold only one `tf.keras`.

python -m tests [pytest arguments]
"""

import os
import pathlib
import subprocess
import sys
from concurrent import futures

_ROOT = pathlib.Path(__file__).parent.parent
_KERASES = {"Keras 3": "0", "Keras 2 (tf_keras)": "1"}


def main() -> int:
    """Runs pytest for each Keras, side by side; prints what they say, one after the other."""
    failed = []
    with futures.ThreadPoolExecutor() as pool:
        for keras, run in zip(_KERASES, pool.map(_pytest, _KERASES.values())):
            print(f"===== {keras} =====", run.stdout, sep="\n", flush=True)
            if run.returncode:
                failed.append(keras)
    print(f"Failed with: {', '.join(failed)}" if failed else "Both Kerases passed.")
    return bool(failed)


def _pytest(use_legacy_keras: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *sys.argv[1:]],
        cwd=_ROOT,
        env={**os.environ, "TF_USE_LEGACY_KERAS": use_legacy_keras, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
