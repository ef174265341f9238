"""What two workers send each other: bytes and time of a step, in float16 and in float32.

Each worker is in a network namespace of its own, and the link between them is shaped. Needs root
and Debian's iproute2.
"""

import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import common

MEGABYTES = 50
RATES = {"unshaped": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
REPEATS = {"unshaped": 12, "1 Gbit/s": 12, "100 Mbit/s": 6}
PORT = 12345


def worker(index: int, repeats: int) -> dict:
    """Is one of the two workers: makes steps in float16 and in float32, in turns."""
    addresses = [f"{_address(i)}:{PORT}" for i in range(2)]
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras_mp

    with strategy.scope():
        variables = [tf.Variable(tf.zeros([512, 512])) for _ in range(MEGABYTES)]
        optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.0))
        optimizer.build(variables)

    def make_step(in_float16):
        def step():
            optimizer.aggregate_in_float16 = in_float16  # read where the step is traced
            strategy.run(
                lambda: optimizer.minimize(
                    lambda: tf.add_n([tf.reduce_sum(v) for v in variables]) * 1e-3, variables
                )
            )

        return tf.function(step)

    sent: dict[str, list[int]] = {"float16": [], "float32": []}
    counter = pathlib.Path(f"/sys/class/net/{_link(index)}/statistics/tx_bytes")

    def counted(name, step):
        def run():
            before = int(counter.read_text())
            step()
            sent[name].append(int(counter.read_text()) - before)

        return run

    steps = {name: counted(name, make_step(name == "float16")) for name in sent}
    seconds = common.interleaved(steps, repeats)
    assert int(optimizer.steps_skipped) == 0
    return {"seconds": seconds, "bytes": {name: each[-repeats:] for name, each in sent.items()}}


def run() -> dict | None:
    """Measures each rate, and prints a table; says so where there is no network to measure on."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("\nThe wire was not measured: it takes root, and ip and tc of iproute2.")
        return None
    results, rows = {}, []
    for name, rate in RATES.items():
        with _two_hosts(rate):
            results[name] = result = _run_workers(REPEATS[name])
        sent = {dtype: statistics.median(b) for dtype, b in result["bytes"].items()}
        seconds = {d: statistics.median(s) for d, s in result["seconds"].items()}
        rows.append(
            [
                name,
                *(f"{sent[dtype] / 1e6:.1f} MB" for dtype in ("float32", "float16")),
                f"{sent['float16'] / sent['float32']:.3f}",
                *(f"{seconds[dtype] * 1e3:.0f} ms" for dtype in ("float32", "float16")),
                common.ratio(result["seconds"], "float32", "float16"),
            ]
        )
    common.print_table(
        f"Two workers, gradients of {MEGABYTES} MiB, what one of them sends in a step (medians)",
        ["link", "float32", "float16", "bytes", "float32", "float16", "times faster"],
        rows,
    )
    return results


def _run_workers(repeats: int) -> dict:
    def start(index, **kwargs):
        command = ["ip", "netns", "exec", _host(index), sys.executable, "-m", "benchmarks.wire"]
        return subprocess.Popen(
            [*command, str(index), str(repeats)],
            cwd=common.ROOT,
            env=common.environment("Keras 3"),
            text=True,
            **kwargs,
        )

    with start(1, stdout=subprocess.DEVNULL) as other, start(0, stdout=subprocess.PIPE) as first:
        output = first.communicate()[0]
    if first.returncode or other.returncode:
        raise RuntimeError(f"A worker failed. Received: {first.returncode}, {other.returncode}")
    return json.loads(output.splitlines()[-1])


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _host(index: int) -> str:
    return f"keras_mp_{index}"


def _link(index: int) -> str:
    return f"kmp{index}"


@contextlib.contextmanager
def _two_hosts(rate: str | None) -> Iterator[None]:
    def ip(arguments):
        subprocess.run(["ip", *arguments.split()], check=True)

    with contextlib.ExitStack() as stack:
        for i in range(2):
            ip(f"netns add {_host(i)}")
            stack.callback(ip, f"netns del {_host(i)}")
        ip(f"link add {_link(0)} type veth peer name {_link(1)}")
        for i in range(2):
            ip(f"link set {_link(i)} netns {_host(i)}")
            ip(f"-n {_host(i)} addr add {_address(i)}/24 dev {_link(i)}")
            ip(f"-n {_host(i)} link set {_link(i)} up")
            ip(f"-n {_host(i)} link set lo up")
            if rate:
                shape = f"-n {_host(i)} qdisc add dev {_link(i)} root tbf rate {rate}"
                subprocess.run(
                    ["tc", *shape.split(), "burst", "256kb", "latency", "200ms"], check=True
                )
        yield


if __name__ == "__main__":
    print(json.dumps(worker(int(sys.argv[1]), int(sys.argv[2]))))
