"""What a training step would do on a GPU: kernels, copies and waits, read from the graph.

TensorFlow's Linux package registers its GPU kernels on every machine. This module traces a step
and places each operation as TensorFlow would on a machine with one GPU: on the GPU if a kernel is
registered for its dtypes, else on the CPU. Then it counts the tensors that have to move. No GPU is
needed, and nothing is run.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import tensorflow as tf
from tensorflow.python.framework import kernels as _kernels
from tensorflow.python.framework import op_def_registry as _op_defs

# They move no data: handles of variables live on the host, and TensorFlow makes a constant where
# it is used.
_HANDLE = tf.resource.as_datatype_enum
_NO_DATA = frozenset((_HANDLE, tf.variant.as_datatype_enum))
_EVERYWHERE = frozenset(("Const", "NoOp"))
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
_CASES = frozenset(("Case", "StatelessCase"))
_CONDITIONS = _CASES | {"If", "StatelessIf"}
_LOOPS = frozenset(("While", "StatelessWhile"))
HOST = "host"


class Tensor(NamedTuple):
    """A tensor of a step.

    Attributes:
        name: str. The path of the operation that makes it, and its number there.
        device: str. Whose memory it is in: that of a GPU, such as "GPU:0", or `HOST`.
        is_constant: bool. Whether its value is known before the step.
    """

    name: str
    device: str
    is_constant: bool = False


class Step(NamedTuple):
    """What one step would do on a machine with a GPU, or one for each replica.

    Attributes:
        without_gpu_kernel: Counter of the types of operations, with their dtypes, that have to run
            on the CPU; in what XLA compiles, of those that it cannot compile.
        to_host: set of str. The tensors that are copied to the host, which waits for them.
        to_gpu: set of str. The tensors that are copied from it to a GPU.
    """

    without_gpu_kernel: collections.Counter[str]
    to_host: set[str]
    to_gpu: set[str]


def step(function: Any, *arguments: Any, skipped: bool = False, replicas: int = 1) -> Step:
    """Places the operations of one step.

    Args:
        function: `tf.function` that makes a step. In each `tf.cond` on a verdict, the first branch
            is what a good step does; a branch that calls Python is taken to be rare. In each
            `tf.switch_case`, the first branch is that of a good step and the last one that of a
            skipped one.
        *arguments: arguments or `tf.TensorSpec`s of the function.
        skipped: bool. Looks at a step that is skipped. Defaults to False.
        replicas: int. With several, the CPU devices of the function from number 1 on stand for
            GPUs. Defaults to 1.

    Returns:
        A `Step`.
    """
    with _traced_beside_a_gpu():
        concrete = function.get_concrete_function(*arguments)
    graph = concrete.graph.as_graph_def()
    library = {each.signature.name: each for each in graph.library.function}
    found = Step(collections.Counter(), set(), set())
    walk = _Walk(library, skipped, replicas, found)
    captured = {
        inside.op.name: Tensor(inside.op.name, _gpu_of(outside))
        for outside, inside in concrete.graph.captures
    }
    is_compiled = concrete.function_def.attr["_XlaMustCompile"].b
    walk.body(graph.node, captured, "", "GPU:0", is_compiled)
    return walk.found


def _traced_beside_a_gpu() -> Any:
    """Context manager in which TensorFlow lists a GPU, beside which few conditions are made."""
    listed = tf.config.list_logical_devices
    devices = [*listed(), tf.config.LogicalDevice("GPU:0", "GPU")]
    # What asks for GPUs alone would run on them.
    return mock.patch.object(
        tf.config, "list_logical_devices", lambda kind=None: listed(kind) if kind else devices
    )


def _gpu_of(captured: tf.Tensor) -> str:
    """The GPU in whose memory a variable would be."""
    return f"GPU:{max(0, (tf.DeviceSpec.from_string(captured.device).device_index or 0) - 1)}"


class _Walk:
    """Goes through a graph and the functions that it calls."""

    def __init__(
        self, library: Mapping[str, Any], skipped: bool, replicas: int, found: Step
    ) -> None:
        self._library, self._skipped, self._replicas = library, skipped, replicas
        self.found = found
        self._conditions = 0  # that surround the operation

    def device_of(self, name: str, default: str = "GPU:0") -> str:
        """The device that one of this machine stands for.

        Args:
            name: str. The name of a device, which may be empty.
            default: str. What runs if it names none.
        """
        spec = tf.DeviceSpec.from_string(name)
        if spec.device_type is None:
            return default
        index = spec.device_index or 0
        return f"GPU:{index - 1}" if self._replicas > 1 and index else HOST

    def body(
        self, nodes: Any, arguments: Mapping[str, Tensor], path: str, device: str, is_compiled: bool
    ) -> Callable[[str], Tensor]:
        """Counts the operations of a graph or function; returns what looks a tensor up."""
        by_name = {node.name: node for node in nodes}
        outputs: dict[str, list[Tensor]] = {}

        def run(name: str) -> list[Tensor]:
            if name not in outputs:
                node = by_name[name]
                outputs[name] = self._run(node, tensor, f"{path}{name}", device, is_compiled)
            return outputs[name]

        def tensor(source: str) -> Tensor:
            name, *rest = source.split(":")
            if name in arguments:
                return arguments[name]
            index = int(rest[-1]) if rest else 0
            if len(rest) == 2:
                index += _first_of(by_name[name], rest[0])
            return run(name)[index]

        for name in by_name:
            if name not in arguments:
                run(name)
        return tensor

    def _run(
        self, node: Any, tensor: Callable[[str], Tensor], path: str, device: str, is_compiled: bool
    ) -> list[Tensor]:
        inputs = [tensor(source) for source in node.input if not source.startswith("^")]
        # Without a device of its own, an operation follows the variable that it is about.
        handles = [
            each.device for each, dtype in zip(inputs, _input_dtypes(node)) if dtype == _HANDLE
        ]
        device = self.device_of(node.device, (handles or [device])[0])
        if node.op in _CALLS:
            return self._call(node.attr["f"].func.name, inputs, path, device, is_compiled)
        if node.op in _CONDITIONS:
            self._move(inputs[:1], [HOST])
            taken = self._taken(node)
            self._conditions += 1
            results = self._call(taken, inputs[1:], path, device, is_compiled)
            self._conditions -= 1
            return results
        if node.op in _LOOPS:
            [verdict] = self._call(
                node.attr["cond"].func.name, inputs, f"{path}/cond", device, is_compiled
            )
            self._move([verdict], [HOST])
            return self._call(node.attr["body"].func.name, inputs, path, device, is_compiled)
        if node.op == "Placeholder":
            return [Tensor(path, _memory_of_argument(node.attr["dtype"].type, device))]
        ins, outs = _memory(node, device, is_compiled)
        if node.op not in _EVERYWHERE and _gpu_kernel(node, is_compiled) is None:
            self.found.without_gpu_kernel[_with_dtypes(node)] += 1
        self._move(inputs, ins)
        is_constant = node.op == "Const" or self._is_folded(node, inputs)
        return [Tensor(f"{path}:{i}", where, is_constant) for i, where in enumerate(outs)]

    def _is_folded(self, node: Any, inputs: list[Tensor]) -> bool:
        """Whether TensorFlow computes it before the first step."""
        is_known = all(each.is_constant for each in inputs)
        return bool(inputs) and is_known and not _op_defs.get(node.op).is_stateful

    def _call(
        self, name: str, inputs: list[Tensor], path: str, device: str, is_compiled: bool
    ) -> list[Tensor]:
        function = self._library[name]
        names = [arg.name for arg in function.signature.input_arg]
        is_compiled |= function.attr["_XlaMustCompile"].b
        arguments = dict(zip(names, inputs, strict=True))
        tensor = self.body(function.node_def, arguments, f"{path}/", device, is_compiled)
        return [tensor(function.ret[arg.name]) for arg in function.signature.output_arg]

    def _move(self, inputs: list[Tensor], wanted: Sequence[str | None]) -> None:
        for each, device in zip(inputs, wanted, strict=True):
            if device is None or each.device == device or each.is_constant:
                continue
            if device == HOST:
                self.found.to_host.add(each.name)
            elif each.device == HOST:
                self.found.to_gpu.add(each.name)

    def _taken(self, node: Any) -> str:
        if node.op in _CASES:
            branches = [each.name for each in node.attr["branches"].list.func]
            return branches[-1 if self._skipped else 0]
        branches = [node.attr[each].func.name for each in ("then_branch", "else_branch")]
        calm = [each for each in branches if not self._calls_python(each)]
        if len(calm) == 1:
            return calm[0]
        # What a skipped step decides further in is whether it may be made at all.
        return branches[self._skipped and not self._conditions]

    def _calls_python(self, name: str) -> bool:
        """Whether a function calls Python each time that it runs."""
        return any(
            node.op == "EagerPyFunc"
            or (node.op in _CALLS and self._calls_python(node.attr["f"].func.name))
            for node in self._library[name].node_def
        )


def _first_of(node: Any, output: str) -> int:
    """The number of the first tensor of an output, which may be a list."""
    position = 0
    for arg in _op_defs.get(node.op).output_arg:
        if arg.name == output:
            return position
        position += len(_dtypes(node, arg))
    raise KeyError(output)


def _dtypes(node: Any, arg: Any) -> list[int]:
    if arg.type_list_attr:
        return list(node.attr[arg.type_list_attr].list.type)
    dtype = arg.type or node.attr[arg.type_attr].type
    return [dtype] * (node.attr[arg.number_attr].i if arg.number_attr else 1)


def _input_dtypes(node: Any) -> list[int]:
    return [dtype for arg in _op_defs.get(node.op).input_arg for dtype in _dtypes(node, arg)]


@functools.cache
def _gpu_kernels(op: str, is_compiled: bool) -> tuple[Any, ...]:
    kernels = _kernels.get_registered_kernels_for_op(op).kernel
    kinds = ("XLA_GPU_JIT",) if is_compiled else ("GPU", "DEFAULT")
    return tuple(each for each in kernels if each.device_type in kinds)


def _gpu_kernel(node: Any, is_compiled: bool) -> Any:
    """The kernel that a GPU would run, or None."""
    matching = [
        kernel
        for kernel in _gpu_kernels(node.op, is_compiled)
        if all(_allows(each, node.attr[each.name]) for each in kernel.constraint)
    ]
    # One for GPUs comes before one for any device.
    return min(matching, key=lambda each: (-each.priority, each.device_type != "GPU"), default=None)


def _allows(constraint: Any, attribute: Any) -> bool:
    allowed = set(constraint.allowed_values.list.type)
    return {attribute.type, *attribute.list.type} - {0} <= allowed


def _memory(node: Any, device: str, is_compiled: bool) -> tuple[list[str | None], list[str]]:
    """Where inputs have to be, None where it does not matter, and where outputs are."""
    definition, kernel = _op_defs.get(node.op), _gpu_kernel(node, is_compiled)
    on_host = {arg.name for arg in (*definition.input_arg, *definition.output_arg)}
    if is_compiled:
        on_host = set()  # What XLA has to know, it knows when it compiles.
    elif kernel is not None:
        on_host &= set(kernel.host_memory_arg)
    ins, outs = (
        [
            None if dtype in _NO_DATA else HOST if arg.name in on_host else device
            for arg in args
            for dtype in _dtypes(node, arg)
        ]
        for args in (definition.input_arg, definition.output_arg)
    )
    return ins, [each or device for each in outs]


def _memory_of_argument(dtype: int, device: str) -> str:
    """Where an argument of a function is: numbers in int32 are passed in the host's memory."""
    node = tf.compat.v1.NodeDef(op="_Arg")
    node.attr["T"].type = dtype
    kernel = _gpu_kernel(node, is_compiled=False)
    return HOST if kernel is not None and kernel.host_memory_arg else device


def _with_dtypes(node: Any) -> str:
    dtypes = {tf.as_dtype(value.type).name for value in node.attr.values() if value.type}
    return f"{node.op}({', '.join(sorted(dtypes))})"
