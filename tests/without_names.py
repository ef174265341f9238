"""Runs the core of keras_mp without a private name, in forks of a process without keras_mp.

It reads names from its input, and writes a line for each. Importing TensorFlow takes longest.
"""

import json
import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from benchmarks.acceptance import core_program

MARK = "without: "


def main() -> None:
    """Forks a process for each line."""
    for line in sys.stdin:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os.environ["KERAS_MP_WITHOUT"] = line.strip()
            print(f"{MARK}{json.dumps(core_program.results())}", flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(f"{MARK}{json.dumps([{'import': f'status {status}'}, []])}", flush=True)


if __name__ == "__main__":
    main()
