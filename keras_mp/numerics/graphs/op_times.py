"""The seconds that TensorFlow spends on each class of operation, from its profiler."""

import contextlib
import pathlib
import re
import tempfile
from collections.abc import Iterator

import tensorflow as tf

from keras_mp.support import op_table

CLASSES = ("products", "elementwise", "reductions", "casts", "update", "loops", "compiled", "rest")
# The name scope of what belongs to the class "update".
UPDATE = "update_of_weights"
# The profiler's name for a run of code that XLA has compiled.
XLA = "ExecuteAsyncOnStream"

_KINDS = {
    "products": (
        *("matrix products", "matrix products into another dtype", "convolutions"),
        *("padded convolutions", "transposed convolutions", "gradients of kernels"),
        *("transposed convolutions to the shape of a tensor", "sparse matrix products"),
    ),
    "casts": ("casts",),
    "reductions": (
        *("sums over axes", "running sums", "sums of tensors", "gradients of biases", "norms"),
        *("products over axes", "maxima over axes", "softmax", "log softmax", "cross entropies"),
        "batch normalization",
    ),
    "loops": (
        *("loops", "lists of a loop", "entries of frames", "exits of frames", "frames"),
        "empty tensors",
    ),
    "elementwise": (
        *("additions", "multiplications", "squared differences", "squares", "powers", "divisions"),
        *("divisions without NaN", "reciprocals", "roots", "exponentials", "logarithms"),
        *("maxima of two", "selections", "signs", "roundings", "comparisons", "relu"),
        *("leaky relu", "softsign", "sigmoids", "exponential units", "softplus"),
    ),
}
_CLASS_OF = {
    op: name for name, kinds in _KINDS.items() for kind in kinds for op in op_table.BY_KIND[kind]
}


def class_of(event: str) -> str | None:
    """Returns the class of an event of the profiler, one of `CLASSES`; None if it has none.

    Args:
        event: str. TensorFlow calls that of an operation "name of the node:type of the operation".
    """
    if event.endswith(f"::{XLA}"):
        return "compiled"
    node, _, op = event.rpartition(":")
    if not node or node.endswith(":") or not re.fullmatch(r"\w+", op):
        return None
    if UPDATE in node:
        return "update"
    op = re.sub("^_(Mkl(Native)?)?", "", op)  # those of oneDNN and of grappler
    for each in (op, op.removeprefix("Fused"), re.sub("Grad(?=(V[23])?$)", "", op)):
        if each in _CLASS_OF:
            return _CLASS_OF[each]
    return "rest"


@contextlib.contextmanager
def profiled() -> Iterator[dict[str, float]]:
    """Returns a context manager that fills a dict of seconds by class of operation at its end."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace  # pyright: ignore

    seconds: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            yield seconds
        finally:
            tf.profiler.experimental.stop()
        space = XSpace()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        space.ParseFromString(file.read_bytes())
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                found = class_of(plane.event_metadata[event.metadata_id].name)
                if found is not None:
                    seconds[found] += event.duration_ps / 1e12
