"""Rolls back what a forward pass assigned to weights, after a skip or an error.

Batch normalization moves its statistics while the loss is computed, before anybody knows that the
step will be skipped. In a graph, each weight is read where the step begins. When gradients are
applied, the graph shows which weights were written since then, and the reads of all others are
pruned. In eager this is unknown, so all values are kept until the verdict.

This module needs TensorFlow only; it asks a model for its `weights`.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.step import kept_values, replicas
from keras_mp.step.scaled_losses import thread
from keras_mp.step.skip_report import name_of
from keras_mp.support import attributes, function_graphs, host, messages, variable_ops
from keras_mp.support.autograph import do_not_convert
from keras_mp.variables import scope


class Weight(NamedTuple):
    """A variable in this replica.

    Attributes:
        variable: the variable.
        handle: its handle.
        dtype: DType of the stored value.
        is_trained: bool. Whether an optimizer changes it.
    """

    variable: Any
    handle: tf.Tensor
    dtype: tf.DType
    is_trained: bool


@do_not_convert
@contextlib.contextmanager
def training_step(*models: Any) -> Iterator[None]:
    """Makes a skipped step leave no trace in a model, in a training loop of your own.

    A layer such as `BatchNormalization` assigns to its weights in the forward pass. If the step is
    then skipped, because the gradients are not finite, each weight gets back the value that it had
    where the context began, or where the last step was made in it. `Model.fit` and `train_on_batch`
    enter this context for each batch.

    It goes around the forward pass *and* `apply_gradients` or `minimize`. Where these are in a
    `tf.function`, it goes into that function, and under a `tf.distribute.Strategy` into the
    function that `strategy.run` calls. All optimizers that make a step inside share it. Weights
    that a good step has changed keep the change. Random generators and metrics are left alone. With
    a `GradScaler`, a step ends with `update`: what was assigned since the last one is put back if
    any optimizer is skipped.

    An exception in eager code puts the same values back, unless functions have made steps since, or
    an optimizer that raised it has changed weights.

    In the graph mode of TensorFlow 1 it does nothing. A model that is built by its first batch has
    no weights before that, so nothing is known that could be put back after that batch.

    Args:
        *models: models, layers, `tf.Module`s, variables, or lists of them.

    Raises:
        TypeError: one of the arguments is something else.
        ValueError: the context is entered in a cross-replica context.

    Example:

    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([2]), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
    ... )
    >>> optimizer = keras_mp.LossScaleOptimizer("sgd")
    >>> @tf.function
    ... def train_step(x):
    ...     with keras_mp.training_step(model):
    ...         with tf.GradientTape() as tape:
    ...             scaled_loss = optimizer.get_scaled_loss(tf.reduce_mean(model(x, training=True)))
    ...         gradients = tape.gradient(scaled_loss, model.trainable_variables)
    ...         gradients = optimizer.get_unscaled_gradients(gradients)
    ...         optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    >>> train_step(tf.fill([4, 2], float("nan")))
    >>> bool(optimizer.last_step_skipped), model.layers[0].moving_mean.numpy().tolist()
    (True, [0.0, 0.0])
    """
    if host.in_v1_graph():
        yield
        return
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Enter keras_mp.training_step in a replica context: inside the function that is "
            f"passed to `strategy.run`. Received: models={models!r}"
        )
    outer, variables = thread.under_way, _variables(models)
    if outer is not None and outer.graph is host.current_graph():
        outer.add(variables)
        yield
        return
    step = StepUnderWay(variables)
    with attributes.replaced(thread, "under_way", step):
        try:
            yield
        except BaseException:
            step.put_back()
            raise


class StepUnderWay:
    """A step that is under way: its weights, and their values when it began.

    Attributes:
        graph: the graph in which it began; None in eager.
        weights: the remembered weights, by the id of the handle.

    Args:
        variables: iterable of variables, and whether each is trained.
    """

    def __init__(self, variables: Iterable[tuple[Any, bool]]) -> None:
        self.graph = host.current_graph()
        self.weights = _weights_of(variables)
        self._examples: tf.Tensor | None = None
        # The values that were read in eager, by the ids of the handles.
        self._values: dict[int, tf.Tensor] = {}
        # The number of operations that each graph had when the step began there.
        self._starts: dict[Any, int] = {}
        self.begin()

    def begin(self) -> None:
        """Remembers the values where a step begins: also after one was made or skipped."""
        graph = host.current_graph()
        if graph is not None:
            self._starts[graph] = len(graph.get_operations())
        self._read(self.weights)

    def add(self, variables: Iterable[tuple[Any, bool]]) -> None:
        """Remembers the values of more variables."""
        new = {k: w for k, w in _weights_of(variables).items() if k not in self.weights}
        self.weights = {**self.weights, **new}
        self._read(new)

    def _read(self, weights: dict[int, Weight]) -> None:
        values = {key: kept_values.read(each.handle, each.dtype) for key, each in weights.items()}
        if tf.executing_eagerly():
            self._values.update(values)

    def watch(self, batch: Any) -> None:
        """Notes the batch that the model is given, a structure of tensors."""
        tensors = (each for each in tf.nest.flatten(batch) if isinstance(each, tf.Tensor))
        self._examples = next((each for each in tensors if each.shape.rank), None)

    def keep(
        self, trained: Sequence[Any], optimizer: Any, may_skip: bool
    ) -> tuple[kept_values.Kept, tf.Tensor | None]:
        """Returns what to restore if the step is skipped, and whether there are examples.

        The latter is None if that is certain, or not known.

        Called in a replica context, before anything is applied.

        Args:
            trained: the variables that the step trains. For other trainable weights it is unknown
                whether the forward pass or another step has written to them.
            optimizer: what trains them.
            may_skip: bool. Whether the step may be skipped.
        """
        own = _weights_of((variable, True) for variable in trained)
        if hasattr(optimizer, "iterations"):
            _trained_by.setdefault(optimizer, set()).update(own)
        weights = self.weights.items() if may_skip else ()
        weights = {k: w for k, w in weights if k in own or not w.is_trained}
        if not tf.executing_eagerly():
            return self._written(weights), self._has_examples()
        values = self._values
        # An update copies values that are held. The other values are for the steps of other
        # optimizers.
        self._values = {key: value for key, value in values.items() if key not in own}
        kept = [(w.handle, values[key]) for key, w in weights.items() if key in values]
        return kept, self._has_examples()

    def _has_examples(self) -> tf.Tensor | None:
        if self._examples is None or self.graph is not host.current_graph():
            return None
        # In eager, each replica knows the size of its own part only.
        is_shared = not (tf.executing_eagerly() and replicas.are_several())
        is_certain = bool(self._examples.shape[0]) and is_shared
        return None if is_certain else tf.shape(self._examples)[0] > 0

    def put_back(self) -> None:
        """Restores in eager what was written since the step began.

        If a step was made inside, only later writes are undone. If functions have made some, which
        has changed weights that are trained, nothing is known of these writes.
        """
        if not tf.executing_eagerly():
            return
        old = {key: (self.weights[key].handle, value) for key, value in self._values.items()}
        trained = {key for key, weight in self.weights.items() if weight.is_trained}
        trained = trained.union(*_trained_by.values())
        if not kept_values.may_have_changed([old[key] for key in old if key in trained]):
            kept_values.put_back(list(old.values()))

    def _written(self, weights: dict[int, Weight]) -> kept_values.Kept:
        """Returns the old values of variables that the step may have written in a graph."""
        first, written = dict[int, tf.Tensor](), set[int]()
        for graph in function_graphs.graphs_of_branches(host.current_graph()):
            since = graph.get_operations()[self._starts.get(graph, 0) :]
            places = {op.name: place for place, op in enumerate(since)}
            captured = [each for each in graph.captures if id(each[0]) in weights]
            uses = [(op, *each) for each in captured for op in each[1].consumers()]
            uses = [use for use in uses if use[0].name in places]
            for op, outside, handle in sorted(uses, key=lambda use: places[use[0].name]):
                if not variable_ops.only_reads(op, handle):
                    written.add(id(outside))
                elif op.type == "ReadVariableOp" and id(outside) not in written:
                    first.setdefault(id(outside), op.outputs[0])
        old = [(weights[key].handle, first[key]) for key in first if key in written]
        unknown = [name_of(weights[key].variable) for key in weights if key in written - {*first}]
        if unknown:
            messages.warn(
                "If this step is skipped, these weights keep what the forward pass assigns to "
                f"them: {', '.join(map(repr, unknown))}. They are assigned in a tf.function that "
                "has not read them before. Enter keras_mp.training_step(model) in the function "
                "that applies the gradients."
            )
        return old


# What optimizers have trained: the ids of the handles.
_trained_by: "weakref.WeakKeyDictionary[Any, set[int]]" = weakref.WeakKeyDictionary()


def _weights_of(variables: Iterable[tuple[Any, bool]]) -> dict[int, Weight]:
    """Returns weights by the ids of their handles, in a replica context.

    Args:
        variables: iterable of variables, and whether each is trained.
    """
    weights = {}
    with scope.shared.enter(None):  # Here variables show the dtype of their values.
        for variable, is_trained in variables:
            handle = getattr(variable, "handle", None)
            if handle is not None:  # A variable of Keras 3 that is not built yet has none.
                dtype = tf.as_dtype(variable.dtype)
                weights[id(handle)] = Weight(variable, handle, dtype, is_trained)
    return weights


def _variables(models: Any) -> list[tuple[Any, bool]]:
    """Returns the variables of models, layers and modules.

    Each variable comes with a bool: whether it is trained. The variables of metrics are left out. A
    variable that is given by itself counts as not trained.
    """
    if hasattr(type(models), "weights"):
        try:
            weights = models.weights
        except ValueError:  # Models of Keras 2 that are not built yet have none.
            return []
        of_metrics = {id(v) for m in getattr(models, "metrics", ()) for v in m.variables}
        # In Keras 2, the vocabulary of a lookup is among the weights, but is not a variable.
        return [(v, getattr(v, "trainable", False)) for v in weights if id(v) not in of_metrics]
    if isinstance(models, tf.Module):
        return [(v, v.trainable) for v in models.variables]
    if hasattr(models, "handle"):
        return [(models, False)]
    if isinstance(models, (str, dict)) or tf.is_tensor(models) or not isinstance(models, Iterable):
        raise TypeError(
            "Expected models, layers, tf.Modules, variables, or lists of them. "
            f"Received: {models!r} (of type {type(models)})"
        )
    return [variable for model in models for variable in _variables(model)]
