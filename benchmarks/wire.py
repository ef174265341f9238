"""What two workers send each other: bytes and time of a step, by the dtype of the sum.

Each worker is in a network namespace of its own, and the link between them is shaped. Needs root
and Debian's iproute2.
"""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from benchmarks import common

MEGABYTES = 100
RATES = {"unshaped": None, "1 Gbit/s": "1gbit", "200 Mbit/s": "200mbit"}
REPEATS = {"unshaped": 12, "1 Gbit/s": 12, "200 Mbit/s": 5}
# The link on which gradients take longer to send than to compute, and the rows of a batch.
SLOW, BATCH = "200 Mbit/s", 512
PORT = 12345


def worker(index: int, repeats: int, computes: bool) -> dict:
    """Is one of the two workers: makes steps of each kind, in turns."""
    addresses = [f"{_address(i)}:{PORT}" for i in range(2)]
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras_mp
    from keras_mp.step import replicas

    def sgd():
        return tf.keras.optimizers.SGD(0.0)

    with strategy.scope():
        variables = [tf.Variable(tf.eye(512)) for _ in range(MEGABYTES)]
        optimizers = {
            "Keras, float32": sgd(),
            "bfloat16": keras_mp.AllReduceOptimizer(sgd()),
            "float16": keras_mp.LossScaleOptimizer(sgd()),
        }
    rows = tf.fill([BATCH, 512], 1e-3)

    def loss():
        if not computes:
            return tf.add_n([tf.reduce_sum(v) for v in variables]) * 1e-3
        x = rows
        for v in variables:
            x = x @ v
        return tf.reduce_mean(x)

    def make_step(name):
        return tf.function(
            lambda: strategy.run(lambda: common.minimize(optimizers[name], loss, variables))
        )

    def in_packs_of(size, name):
        # Read where the step is traced.
        kept, replicas._BYTES_PER_PACK = replicas._BYTES_PER_PACK, size
        step = make_step(name)
        step()
        replicas._BYTES_PER_PACK = kept
        return step

    def compute():
        with tf.GradientTape() as tape:
            value = loss()
        return tf.add_n(tape.gradient(value, variables))

    steps = {name: make_step(name) for name in optimizers}
    if computes:
        steps = {
            "computing alone": tf.function(lambda: strategy.run(compute)),
            "one pack": in_packs_of(0, "float16"),
            "packs": steps["float16"],
        }
    sent: dict[str, list[int]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    counter = pathlib.Path(f"/sys/class/net/{_link(index)}/statistics/tx_bytes")

    def counted(name, step):
        def run():
            before, cpu_before = int(counter.read_text()), time.process_time()
            step()
            sent[name].append(int(counter.read_text()) - before)
            cpu[name].append(time.process_time() - cpu_before)

        return run

    steps = {name: counted(name, step) for name, step in steps.items()}
    seconds = common.interleaved(steps, repeats)
    assert int(optimizers["float16"].steps_skipped) == 0
    last = {"seconds": seconds, "bytes": sent, "cpu": cpu}
    return {what: {n: each[-repeats:] for n, each in of.items()} for what, of in last.items()}


def limit(index: int, repeats: int) -> dict:
    """Is one of two that send each other what a worker does in float16, over a bare connection."""
    size = MEGABYTES * 2**19
    if index == 0:
        with socket.create_server((_address(0), PORT)) as server:
            connection, _ = server.accept()
    else:
        connection = _connect()
    data, buffer, seconds = bytes(size), bytearray(2**20), []
    with connection:
        for _ in range(repeats):
            start = time.perf_counter()
            sending = threading.Thread(target=connection.sendall, args=(data,))
            sending.start()
            left = size
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            sending.join()
            seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


def _connect() -> socket.socket:
    while True:
        try:
            return socket.create_connection((_address(0), PORT))
        except OSError:
            time.sleep(0.1)


def run() -> dict | None:
    """Measures each rate, and prints tables; says so where there is no network to measure on."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("\nThe wire was not measured: it takes root, and ip and tc of iproute2.")
        return None
    results, rows = {}, []
    for name, rate in RATES.items():
        with _two_hosts(rate):
            results[name] = result = _run_workers("worker", REPEATS[name])
            bare = statistics.median(_run_workers("limit", 5)["seconds"])
        seconds = {n: statistics.median(s) for n, s in result["seconds"].items()}
        result["limit"] = bare
        for way, each in seconds.items():
            sent = statistics.median(result["bytes"][way])
            rows.append(
                [
                    name,
                    way,
                    f"{sent / 1e6:.0f} MB",
                    f"{each * 1e3:.0f} ms",
                    common.ratio(result["seconds"], "Keras, float32", way),
                    f"{bare * (2 if way == 'Keras, float32' else 1) / each:.0%}",
                    f"{statistics.median(result['cpu'][way]) * 1e3:.0f} ms",
                ]
            )
    common.print_table(
        f"Two workers, gradients of {MEGABYTES} MiB in float32: what one sends in a step, and how "
        "long it takes (medians)",
        ["link", "sum", "sent", "step", "times faster", "of the link", "CPU time of a worker"],
        rows,
    )
    with _two_hosts(RATES[SLOW]):
        results["in flight"] = result = _run_workers("computing", REPEATS[SLOW])
    common.print_table(
        f"The same in float16 on {SLOW}, with gradients that are computed one after the other",
        ["", "step"],
        [[n, f"{statistics.median(s) * 1e3:.0f} ms"] for n, s in result["seconds"].items()],
    )
    return results


def _run_workers(kind: str, repeats: int) -> dict:
    def start(index, **kwargs):
        command = ["ip", "netns", "exec", _host(index), sys.executable, "-m", "benchmarks.wire"]
        return subprocess.Popen(
            [*command, kind, str(index), str(repeats)],
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
    kind, index, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "limit":
        print(json.dumps(limit(index, repeats)))
    else:
        print(json.dumps(worker(index, repeats, computes=kind == "computing")))
