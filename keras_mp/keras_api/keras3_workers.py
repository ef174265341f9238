"""`Model.fit`, `evaluate` and `predict` of Keras 3 on several machines.

Under `MultiWorkerMirroredStrategy` Keras 3 goes wrong in three places, for every model:

- `_maybe_symbolic_build` looks at the first batch for shapes, and takes the mean of all workers'
  batches for it. Strings and batches of different sizes have no mean.
- `reduce_per_replica` takes the mean of a step's results along their first axis. A loss has none.
  It also takes the metrics of half a batch for half of the metrics.
- Callbacks write the same files in all workers at once.

Each is replaced in the attributes of one model. The replacements call Keras's own.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from keras_mp.keras_api import keras3_names
from keras_mp.keras_api.predictions import let_gather_bfloat16
from keras_mp.step import replicas
from keras_mp.support import features
from keras_mp.support.attributes import replaced

keras = tf.keras

_Step = Callable[[Any], Any]


@functools.cache
def _reduces_an_axis() -> bool:
    """Whether Keras has this defect.

    A Keras without it would take results with an axis as such.
    """
    try:
        return 'reduce("MEAN", v, axis=0)' in inspect.getsource(keras3_names.reduce_replicas.get())
    except OSError:  # there is no source
        return True


def patch_fit(model: keras.Model) -> None:
    """Lets several workers train a compiled model with `fit`."""
    if replicas.number_of_workers(model.distribute_strategy) == 1:
        return
    let_gather_bfloat16(model.distribute_strategy)
    if not features.is_on(keras3_names.WORKERS):
        return
    vars(model)["fit"] = functools.partial(_fit, model)
    vars(model)[keras3_names.build_of_a_batch.attribute] = functools.partial(_build, model)
    if _reduces_an_axis():
        vars(model)[keras3_names.function_of_steps.attribute] = functools.partial(
            _function_of_steps, model
        )


def _build(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Builds a model of this worker's batch, instead of the mean over all workers."""
    local_results = model.distribute_strategy.experimental_local_results
    for _, _, batches in iterator or ():
        data_batch = keras.tree.map_structure(lambda each: local_results(each)[0], next(batches))
        break
    keras3_names.build_of_a_batch(model, data_batch=data_batch)


def _function_of_steps(model: Any, step_function: _Step) -> Callable[[Any], Any]:
    """Makes the function of a step of training or evaluation, for Keras to reduce."""

    @tf.autograph.experimental.do_not_convert
    def step(data: Any) -> Any:
        logs = _of_all_workers(model, step_function(data))
        # Keras takes the mean of this axis over all replicas.
        return keras.tree.map_structure(lambda value: tf.expand_dims(value, 0), logs)

    return functools.partial(_execute, model, keras3_names.function_of_steps(model, step))


def _execute(model: keras.Model, function: Callable[[Any], Any], iterator: Any) -> Any:
    """Runs `steps_per_execution` steps one by one.

    Keras's loop in a graph has no collectives.
    """
    count, outputs = model.steps_per_execution, None
    model.steps_per_execution = 1
    try:
        for _ in range(count):
            outputs = function(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        if outputs is None:
            raise
    finally:
        model.steps_per_execution = count
    return outputs


def _of_all_workers(model: keras.Model, logs: Any) -> Any:
    """Returns the metrics over the batches of all replicas.

    It does so if a step has returned metrics.
    """
    if not isinstance(logs, dict) or set(logs) != set(model.get_metrics_result()):
        return logs
    summed = [v for v in model.metrics_variables if v.aggregation == "sum"]
    # In a graph a read of a variable has no device, which TensorFlow needs.
    mine = [tf.identity(variable) for variable in summed]
    from keras_mp.step import strategies

    totals = strategies.all_reduce(mine)
    with keras.StatelessScope(state_mapping=list(zip(summed, totals, strict=True))):
        return model.get_metrics_result()


def _fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Runs `fit` with callbacks that write on the chief only."""
    fit = type(model).fit
    arguments = inspect.signature(fit).bind(model, *args, **kwargs).arguments
    with _writes_on_the_chief(arguments.get("callbacks"), model.distribute_strategy):
        return fit(model, *args, **kwargs)


@contextmanager
def _writes_on_the_chief(callbacks: Any, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Keeps callbacks of other workers from writing and removing while `fit` runs."""
    flat = tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
    writing = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
    with ExitStack() as stack:
        for callback in dict.fromkeys(flat) if not strategy.extended.should_checkpoint else ():
            if isinstance(callback, writing):
                stack.enter_context(
                    replaced(callback, keras3_names.save_model.attribute, _write_nothing)
                )
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                stack.enter_context(replaced(callback, "delete_checkpoint", False))
        yield


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
