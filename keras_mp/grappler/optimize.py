"""Grappler for this machine, or for a GPU that is not in it.

Grappler asks a cluster of devices for the compute capability of a GPU and for its versions of CUDA
and cuDNN, and TensorFlow's registry for kernels. The registry of a wheel that was built for CUDA
has those of GPUs on every machine. So what TensorFlow would make of a graph on a GPU is known
without one. This module needs TensorFlow only.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_mp.support import registered_kernels
from keras_mp.tensorflow_api import grappler

MetaGraph: TypeAlias = tf.compat.v1.MetaGraphDef

_NAME = "/job:localhost/replica:0/task:0/device:{}:0"
# By library, the name of its version, and what each part counts in CUDA_VERSION, CUDNN_VERSION.
_VERSIONS = {"cuda": ("cuda_version", (1000, 10)), "cudnn": ("cudnn_version", (10000, 100, 1))}


def compute_capability(device: str) -> str:
    """Returns the compute capability in the description of a GPU.

    Args:
        device: str, such as "GPU 7.0".

    Returns:
        The compute capability, "7.0".

    Raises:
        ValueError: `device` is no such description, or this TensorFlow was built without CUDA.
    """
    found = re.fullmatch(r"GPU ([0-9]+\.[0-9]+)", device) if isinstance(device, str) else None
    if found is None:
        raise ValueError(
            "Expected a GPU and its compute capability, such as 'GPU 7.0'. "
            f"Received: device={device!r}"
        )
    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        raise ValueError(
            "This TensorFlow was built without CUDA and has no kernels for GPUs. "
            f"Received: device={device!r}"
        )
    return found[1]


def graph(
    config: tf.compat.v1.ConfigProto, meta_graph: MetaGraph, device: str | None = None
) -> tf.compat.v1.GraphDef:
    """Returns a graph as grappler leaves it, before it runs.

    Args:
        config: `ConfigProto`. Which passes are on.
        meta_graph: `MetaGraphDef`, as `with_fetches` makes it.
        device: str. The GPU on which it would run, such as "GPU 7.0". Defaults to this machine.
    """
    if device is None:
        return grappler.optimize(config, meta_graph, verbose=False)
    environment = {"architecture": compute_capability(device)}
    for library, (key, sizes) in _VERSIONS.items():
        parts = tf.sysconfig.get_build_info()[key].split(".")
        environment[library] = str(sum(int(part) * size for part, size in zip(parts, sizes)))
    cluster = grappler.Cluster(devices=[_device("CPU"), _device("GPU", environment=environment)])
    try:
        return grappler.optimize(config, _placed(meta_graph), verbose=False, cluster=cluster)
    finally:
        cluster.Shutdown()


def with_fetches(definition: tf.compat.v1.GraphDef, fetches: Sequence[str]) -> MetaGraph:
    """Returns a graph as grappler takes it, with names of the nodes that are fetched."""
    result = MetaGraph(graph_def=definition)
    result.collection_def["train_op"].node_list.value.extend(fetches)
    return result


def _device(kind: str, **properties: Any) -> Any:
    of_kind: Any = {"type": kind, **properties}
    return grappler.Device(name=_NAME.format(kind), properties=of_kind)


def _placed(graph: MetaGraph) -> MetaGraph:
    """Returns a graph with its operations on the GPU, where there are kernels for it.

    TensorFlow places operations before grappler runs. Those that the program has placed stay.
    """
    result = MetaGraph()
    result.CopyFrom(graph)
    functions = result.graph_def.library.function
    for nodes in (result.graph_def.node, *(function.node_def for function in functions)):
        for node in nodes:
            types = {name: value.type for name, value in node.attr.items() if value.type}
            on_gpu = registered_kernels.has_kernel(node.op, types, "GPU")
            node.device = node.device or _NAME.format("GPU" if on_gpu else "CPU")
    return result
