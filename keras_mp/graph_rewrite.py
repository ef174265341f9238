"""TensorFlow 1.15's automatic mixed precision, which rewrites graphs.

The program stays as it is.

TensorFlow 1.15, `tf.train.experimental.enable_mixed_precision_graph_rewrite`. The passes are
TensorFlow's own. This module adds loss scaling around the optimizer, errors for combinations that
cannot work, and the `report` on the operations that were rewritten.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from absl import logging

from keras_mp import hardware, keras_api
from keras_mp.compat import v1
from keras_mp.grappler import op_lists as lists
from keras_mp.grappler import optimize, passes
from keras_mp.grappler import report as reports
from keras_mp.grappler.report import RewriteReport, RewrittenOperation
from keras_mp.kernels import sums
from keras_mp.loss_scale_optimizer import LossScaleOptimizer, wrapper_of
from keras_mp.support import cpu, messages
from keras_mp.wrappers.inner_optimizers import find_loss_scale_optimizer

_Optimizer: TypeAlias = tf.keras.optimizers.Optimizer | tf.compat.v1.train.Optimizer

__all__ = ["RewriteReport", "RewrittenOperation", "change_op_lists", "op_lists", "report"]
__all__ += ["disable_mixed_precision_graph_rewrite", "enable_mixed_precision_graph_rewrite"]
__all__ += ["session_config"]


def enable_mixed_precision_graph_rewrite(
    optimizer: Any, loss_scale: Any = "dynamic", dtype: str | None = None
) -> Any:
    """Turns TensorFlow's graph rewrite on, and wraps an optimizer in loss scaling.

    From now on, where a `tf.function` or a session runs a graph, TensorFlow moves operations from
    float32 to `dtype` if they are safe in 16 bits and worth it, and puts casts around them;
    `report` shows them. The program computes with float32 tensors as before, and variables stay in
    float32. Operations whose 16-bit kernels stop short of long sums, such as the gradient of a bias
    in bfloat16 on CPUs, are left in float32, unless `enable_float32_sums(False)` was called. Eager
    code has no graph, and is not rewritten. Neither is a function that XLA compiles
    (`jit_compile=True`, which `compile` of Keras 3 chooses on GPUs).

    Compute and apply gradients with the optimizer that is returned, by `minimize`, `Model.fit`, or
    its other methods, since `tf.gradients` and `tf.GradientTape` alone do not scale the loss.

    Args:
        optimizer: An optimizer of `tf.keras` of any family, or a `tf.compat.v1.train.Optimizer`.
        loss_scale: `"dynamic"` (the default), a positive number for a fixed scale, or a
            `keras_mp.LossScale`; with an optimizer of `tf.compat.v1`, anything that
            `keras_mp.compat.v1.LossScaleOptimizer` takes. It is not used with bfloat16, which needs
            no loss scaling.
        dtype: "float16", to which TensorFlow rewrites on Nvidia GPUs of compute capability 7.0 and
            above, and on CPUs with AMX-FP16 or AVX-NE-CONVERT; "bfloat16", to which it rewrites on
            CPUs with AVX512 or AVX-NE-CONVERT; or None (the default) for the dtype that is fast on
            this machine, or "float16" if none is. Where TensorFlow leaves graphs as they are, a
            warning says so.

    Returns:
        A `keras_mp.LossScaleOptimizer` or a `keras_mp.compat.v1.LossScaleOptimizer` around
        `optimizer`; with bfloat16 `optimizer` itself.

    Raises:
        TypeError: `optimizer` is of another kind.
        ValueError: the global policy of `tf.keras` is a mixed one, the rewrite is on already, or
            the optimizer scales the loss already.

    Example:

    >>> optimizer = tf.keras.optimizers.SGD(0.1)
    >>> optimizer = keras_mp.enable_mixed_precision_graph_rewrite(optimizer, dtype="bfloat16")
    >>> step = tf.function(lambda x: tf.matmul(tf.nn.relu(tf.matmul(x, x)), x))
    >>> report = keras_mp.graph_rewrite.report(step, tf.ones([8, 8]))
    >>> report.by_dtype()["bfloat16"]
    {'MatMul': 2, 'Relu': 1}
    >>> keras_mp.disable_mixed_precision_graph_rewrite()

    Source: TensorFlow 1.15, `tf.train.experimental.enable_mixed_precision_graph_rewrite`.
    """
    _check(dtype)
    _refuse_policies()
    _refuse_second(optimizer)
    wrapper = _wrapper(optimizer)
    dtype = dtype or _fastest()
    result = wrapper(optimizer, loss_scale) if dtype == "float16" else optimizer
    _warn_if_it_is_in_vain(dtype)
    lists.keep_out(_with_wrong_sums(dtype))
    passes.turn_on(dtype)
    logging.info("Graphs are rewritten to %s, but not eager code or what XLA compiles.", dtype)
    return result


def disable_mixed_precision_graph_rewrite() -> None:
    """Turns off what `enable_mixed_precision_graph_rewrite` has turned on.

    It is off for functions at once, and for sessions that are made later. Optimizers that were
    wrapped still scale the loss, which does no harm.

    Example:

    >>> _ = keras_mp.enable_mixed_precision_graph_rewrite(
    ...     tf.keras.optimizers.SGD(), dtype="bfloat16")
    >>> keras_mp.disable_mixed_precision_graph_rewrite()

    Source: TensorFlow 1.15, `tf.train.experimental.disable_mixed_precision_graph_rewrite`.
    """
    was_on, foreign = passes.turn_off(), passes.foreign_pass()
    if foreign is not None:
        messages.warn(
            f"Graphs are rewritten by {foreign}, not by keras_mp, and still will be: turn it off "
            "where it was turned on."
        )
    elif not was_on:
        messages.warn("The graph rewrite was not on, so there is nothing to turn off.")
    lists.keep_out(())


def session_config(config: tf.compat.v1.ConfigProto | None = None) -> tf.compat.v1.ConfigProto:
    """Returns a config with which a session rewrites its graphs.

    `tf.compat.v1.Session()` follows `enable_mixed_precision_graph_rewrite` by itself. A session
    with a config follows the config, except that TensorFlow adds float16.

    Args:
        config: `tf.compat.v1.ConfigProto`, which is not changed, or None (the default).

    Returns:
        A `tf.compat.v1.ConfigProto`.

    Raises:
        RuntimeError: the graph rewrite is not on.

    Example:

    >>> _ = keras_mp.enable_mixed_precision_graph_rewrite(
    ...     tf.keras.optimizers.SGD(), dtype="bfloat16")
    >>> config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    >>> config = keras_mp.graph_rewrite.session_config(config)
    >>> config.graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16
    1
    >>> keras_mp.disable_mixed_precision_graph_rewrite()
    """
    if not (config is None or isinstance(config, tf.compat.v1.ConfigProto)):
        raise TypeError(
            "`config` must be a tf.compat.v1.ConfigProto or None. "
            f"Received: config={config!r} (of type {type(config)})"
        )
    return passes.config_for_sessions(config, _enabled("session_config"))


def report(function: Any, *args: Any, device: str | None = None, **kwargs: Any) -> RewriteReport:
    """Reports how the graph rewrite changes a function, or operations for a session.

    The function is traced as a call would trace it, but does not run. From its graph, and
    everything that the graph calls, TensorFlow's grappler then makes the graph that would run.

    With `device`, the report describes the rewrite for a GPU. No GPU is needed: grappler gets the
    description of a GPU with that compute capability, and TensorFlow's wheel knows the kernels for
    it. The rewrite need not be on either; the report is then about TensorFlow's own lists.

    Args:
        function: a `tf.function`, or a concrete function; a model of `tf.keras` that is compiled,
            for its training step; or an operation or a tensor of a `tf.Graph`, or a list of these.
        *args: the arguments of the function, tensors or `tf.TensorSpec`s. For a model, a batch of
            arrays, tensors or `tf.TensorSpec`s: `x`, `y`, and sample weights if there are any.
        device: str. A GPU and its compute capability, such as "GPU 7.0". None (the default) stands
            for this machine.
        **kwargs: keyword arguments of the function.

    Returns:
        A `RewriteReport`. Printed, it is a table.

    Raises:
        RuntimeError: the graph rewrite is not on, and `device` is None.
        ValueError: `device` is not such a description, or TensorFlow was built without CUDA; a
            model is not compiled, or operations are of several graphs.
        TypeError: `function` is something else, such as a Python function, which has no graph. Or a
            model is passed without a batch.

    Example:

    >>> _ = keras_mp.enable_mixed_precision_graph_rewrite(
    ...     tf.keras.optimizers.SGD(), dtype="bfloat16")
    >>> @tf.function
    ... def step(x):
    ...     return tf.reduce_sum(tf.exp(tf.matmul(x, x)))
    >>> report = keras_mp.graph_rewrite.report(step, tf.ones([8, 8]))
    >>> {each.op: each.why for each in report.operations}["Exp"]
    'on the deny list'
    >>> keras_mp.disable_mixed_precision_graph_rewrite()
    """
    dtype = _enabled("report") if device is None else passes.enabled_dtype() or "float16"
    if device is not None:
        optimize.compute_capability(device)
    fetches: list[Any] = list(function) if isinstance(function, (list, tuple)) else [function]
    kinds = (tf.Operation, tf.Tensor, tf.Variable)
    # An eager tensor has no graph.
    if fetches and all(isinstance(each, kinds) and hasattr(each, "graph") for each in fetches):
        if len({id(fetch.graph) for fetch in fetches}) > 1:
            raise ValueError(
                f"Expected operations and tensors of one tf.Graph. Received: function={function!r}"
            )
        return reports.report(reports.of_fetches(fetches), fetches[0].name, dtype, device=device)
    if isinstance(function, tf.keras.Model):
        function, args = _step_of_training(function, args, kwargs)
    concrete: Any = function
    if hasattr(concrete, "get_concrete_function"):
        concrete = concrete.get_concrete_function(*args, **kwargs)
    elif not isinstance(function, tf.types.experimental.ConcreteFunction):
        raise TypeError(
            "Only graphs are rewritten. Expected a tf.function, a concrete function, a model, or "
            "operations or tensors of a tf.Graph; write tf.function(f) for a Python function f. "
            f"Received: function={function!r} (of type {type(function)})"
        )
    name = getattr(function, "__name__", None) or concrete.name
    compiled = reports.is_compiled(concrete)
    return reports.report(reports.of_function(concrete), name, dtype, compiled, device)


def op_lists(dtype: str | None = None) -> dict[str, frozenset[str]]:
    """Returns the lists of operations that the graph rewrite uses.

    They are the lists that TensorFlow has at the moment.

    Args:
        dtype: "float16" or "bfloat16". Defaults to the dtype to which graphs are rewritten, or to
            "float16" while the rewrite is off. The lists for float16 are those for GPUs; the
            version of CUDA may keep a few operations off the list "allow".

    Returns:
        dict of names of operations: "allow" has operations that gain speed and are always
        rewritten; "infer" has operations that are rewritten if they stand between operations of
        "allow", and not behind one of "deny"; "deny" has operations that are dangerous in 16 bits;
        and "clear" has operations that change no number, and follow their neighbours.

    Raises:
        RuntimeError: an operation is on two lists.

    Example:

    >>> "Exp" in keras_mp.graph_rewrite.op_lists()["deny"]
    True
    """
    _check(dtype)
    return lists.read(dtype or passes.enabled_dtype() or "float16")


def change_op_lists(
    *,
    allow: Collection[str] = (),
    infer: Collection[str] = (),
    deny: Collection[str] = (),
    clear: Collection[str] = (),
    none: Collection[str] = (),
) -> None:
    """Puts operations on other lists, before the graph rewrite is turned on.

    Earlier changes are undone, so without arguments the lists are TensorFlow's again. They are
    changed by TensorFlow's environment variables, which it reads each time that it rewrites a
    graph. Functions that have run keep their graphs.

    Args:
        allow: names of operations for the list "allow". The lists are those of `op_lists`.
        infer: names of operations for "infer".
        deny: names of operations for "deny".
        clear: names of operations for "clear".
        none: names of operations for no list, which are never rewritten.

    Raises:
        RuntimeError: the graph rewrite is on.
        ValueError: TensorFlow has no such operation, or one is named twice.

    Example:

    >>> keras_mp.graph_rewrite.change_op_lists(deny=["Softmax"])
    >>> "Softmax" in keras_mp.graph_rewrite.op_lists()["deny"]
    True
    >>> keras_mp.graph_rewrite.change_op_lists()
    """
    if passes.enabled_dtype() is not None:
        raise RuntimeError(
            "The lists cannot be changed while the graph rewrite is on: functions that have run "
            "keep their graphs, and other functions would use the new lists. Change them before "
            "enable_mixed_precision_graph_rewrite(), or after "
            "disable_mixed_precision_graph_rewrite() for functions that are new."
        )
    lists.change({"allow": allow, "infer": infer, "deny": deny, "clear": clear, "none": none})


def _check(dtype: str | None) -> None:
    if dtype not in (None, *passes.PASSES):
        raise ValueError(f"Expected 'float16', 'bfloat16' or None. Received: dtype={dtype!r}")


def _enabled(what: str) -> str:
    dtype = passes.enabled_dtype()
    if dtype is None:
        raise RuntimeError(
            f"{what}() needs the graph rewrite, which is off. Call "
            "keras_mp.enable_mixed_precision_graph_rewrite() first."
        )
    return dtype


def _refuse_policies() -> None:
    policy = keras_api.get_global_policy()
    if policy.compute_dtype != policy.variable_dtype:
        raise ValueError(
            "The graph rewrite and a mixed policy of tf.keras do the same by different means: use "
            f"one of them. The global policy is {policy.name!r}. Call "
            "keras_mp.set_global_policy(None) first; or, better, do without the graph rewrite: a "
            "policy works in eager code and with XLA too."
        )


def _refuse_second(optimizer: _Optimizer) -> None:
    foreign = passes.foreign_pass()
    dtype = passes.enabled_dtype()
    if foreign is not None:
        raise ValueError(
            f"Graphs are rewritten already, by {foreign}. Turn that off: it does not scale the "
            f"loss, or scales it in another way. Received: optimizer={optimizer!r}"
        )
    if dtype is not None:
        raise ValueError(
            f"The graph rewrite is on already, for {dtype}. Use a second optimizer as it is with "
            "bfloat16, and in a keras_mp.LossScaleOptimizer or keras_mp.compat.v1."
            "LossScaleOptimizer with float16; or call "
            "keras_mp.disable_mixed_precision_graph_rewrite() first. Received: "
            f"optimizer={optimizer!r}"
        )


def _wrapper(optimizer: _Optimizer) -> type:
    """Returns the class that scales the loss for an optimizer.

    It refuses one that scales the loss itself.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        wrapper, scales = v1.LossScaleOptimizer, v1.scales_loss(optimizer)
    elif isinstance(optimizer, keras_api.OPTIMIZER_BASES):
        wrapper = LossScaleOptimizer
        scales = find_loss_scale_optimizer(optimizer) or wrapper_of(optimizer)
    else:
        raise TypeError(
            "Expected an optimizer of `tf.keras`, which is "
            f"{keras_api.ROOT_PACKAGE} in this process, or a tf.compat.v1.train.Optimizer. "
            f"Received: optimizer={optimizer!r} (of type {type(optimizer)})"
        )
    if scales:
        raise ValueError(
            "The optimizer already scales the loss: pass its inner optimizer. Received: "
            f"optimizer={optimizer!r}"
        )
    return wrapper


def _fastest() -> str:
    """Returns the dtype to which a rewrite pays off on this machine.

    It is "float16" if neither does.
    """
    if tf.config.get_visible_devices("GPU"):
        return "float16"  # The pass for bfloat16 is for CPUs.
    return "bfloat16" if hardware.best_policy() == "mixed_bfloat16" else "float16"


def _warn_if_it_is_in_vain(dtype: str) -> None:
    has_gpu = bool(tf.config.get_visible_devices("GPU"))
    if dtype == "bfloat16" and has_gpu:
        messages.warn(
            "TensorFlow rewrites graphs to bfloat16 on CPUs only, and this program sees a GPU: "
            "what runs there stays in float32. Use dtype='float16', or the policy "
            "'mixed_bfloat16' in place of the graph rewrite."
        )
    elif not has_gpu and cpu.takes_rewrite(dtype):
        hardware.warn_if_slow(dtype)
    elif not (has_gpu and hardware.why_slow(dtype) is None):
        messages.warn(
            "TensorFlow will leave graphs in float32. It rewrites to float16 on Nvidia GPUs of "
            "compute capability 7.0 or above, and on CPUs with AMX-FP16 or AVX-NE-CONVERT; to "
            "bfloat16 on CPUs with AVX512 or AVX-NE-CONVERT, fast or not, and only with oneDNN, "
            "which TensorFlow uses on CPUs with AVX512-VNNI or newer, or where the environment "
            f"has TF_ENABLE_ONEDNN_OPTS=1. Received: dtype={dtype!r}"
        )


def _with_wrong_sums(dtype: str) -> set[str]:
    """Returns operations that the pass would move to kernels with wrong long sums."""
    if not (sums.are_enabled() and lists.can_be_read(dtype)):
        return set()
    found = lists.read(dtype)
    rewritten = found["allow"] | found["infer"] | found["clear"]
    # Most kernels are wrong in sums of rows, and in biases of both formats.
    patterns = {"BiasAddGrad": ("NHWC", "NCHW"), "Sum": ((True, False),), "Mean": ((True, False),)}
    return {
        op
        for op in rewritten & sums.KERNELS.keys()
        if any(sums.TABLE.is_wrong(op, dtype, pattern) for pattern in patterns.get(op, (None,)))
    }


def _step_of_training(
    model: tf.keras.Model, batch: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """Returns the step of `fit`, and its batch.

    The iterator that Keras puts around the step is left out.
    """
    if getattr(model, "optimizer", None) is None:
        raise ValueError(f"Expected a model that is compiled. Received: function={model!r}")
    if not batch or kwargs or any(isinstance(each, tf.data.Dataset) for each in batch):
        raise TypeError(
            "Expected one batch after the model, by position: x, y, and sample weights if there "
            f"are any. Received: args={batch!r}, {kwargs}"
        )

    def train_step(data: tuple[Any, ...]) -> object:
        return model.distribute_strategy.run(model.train_step, args=(data,))

    # The attribute is None by default in models of Keras 2.
    function = tf.function(train_step, autograph=False, jit_compile=model.jit_compile or None)

    def tensor(value: Any) -> Any:
        if value is None or isinstance(value, tf.TensorSpec):
            return value
        return tf.convert_to_tensor(value)

    return function, (tf.nest.map_structure(tensor, tuple(batch)),)
