"""Runs all tests, once for each Keras: a process can hold only one `tf.keras`.

python -m tests [pytest arguments]
"""

import os
import pathlib
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).parent.parent
_KERASES = {"Keras 3": "0", "Keras 2 (tf_keras)": "1"}


def main() -> int:
    """Starts one pytest for each Keras, side by side; prints what they say, one after the other."""
    runs = []
    for keras, legacy in _KERASES.items():
        output = tempfile.TemporaryFile("w+")
        environment = {
            **os.environ,
            "TF_USE_LEGACY_KERAS": legacy,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONPATH": str(_ROOT),
        }
        command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        runs.append((keras, process, output))
    for keras, process, output in runs:
        process.wait()
        output.seek(0)
        print(f"===== {keras} =====", output.read(), sep="\n", flush=True)
    failed = [keras for keras, process, _ in runs if process.returncode]
    print(f"Failed with: {', '.join(failed)}" if failed else "Both Kerases passed.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
