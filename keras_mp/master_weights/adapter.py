"""Drives an optimizer with float32 views of weights that are in 16 bits."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.master_weights import methods
from keras_mp.master_weights.float32_view import Float32View, Updates
from keras_mp.step import gradients, replicas
from keras_mp.step.optimizer_adapter import DelegatingAdapter, OptimizerAdapter, Pairs
from keras_mp.support import attributes, host
from keras_mp.support.dtypes import LOW_PRECISION
from keras_mp.support.native_variables import native_variable as native

# The methods with which optimizers make slots. The first argument is the variable that a slot is
# for.
_SLOT_MAKERS = ("add_variable_from_reference", "add_slot")


class Float32Adapter(DelegatingAdapter):
    """Drives an optimizer that sees each weight in 16 bits as a float32 variable.

    Weights in other dtypes it sees as they are.

    Attributes:
        beside: the variables that are kept beside weights, by name, in the order of the weights.
        updates: the state that the views share.

    Args:
        inner: drives the optimizer.
        method: one of `methods.NAMES`.
        slot_dtype: DType of the slots of weights in 16 bits.
        seed: int. The seed of stochastic rounding.
        track: the method `_track_trackable` of what has the variables in checkpoints.
    """

    takes_float32_gradients = True

    def __init__(
        self,
        inner: OptimizerAdapter,
        method: str,
        slot_dtype: tf.DType,
        seed: int,
        track: Callable[..., Any],
    ) -> None:
        super().__init__(inner.optimizer, inner)
        self._track = track
        self.beside: dict[str, tf.Variable] = {}
        self._method, self._slot_dtype, self._seed = method, slot_dtype, seed
        self.updates = Updates(inner.steps_made)
        # All weights that the optimizer was built with, and the views of those in 16 bits, by the
        # id of the `tf.Variable`.
        self._weights: dict[int, Any] = {}
        self._views: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    @property
    def is_built(self) -> bool:
        """Whether it has been built with any variables."""
        return bool(self._weights)

    def build(self, variables: Sequence[Any]) -> None:
        if host.in_v1_graph():
            raise RuntimeError(
                "A MasterWeightOptimizer works in eager and in tf.function, not in a graph of "
                "TensorFlow 1. Use float32 variables there."
            )
        by_id = {id(native(variable)): variable for variable in variables}
        self._weights.update(by_id)
        new = [
            variable
            for key, variable in by_id.items()
            if key not in self._views and tf.as_dtype(native(variable).dtype) in LOW_PRECISION
        ]
        rounds = self._method == "stochastic_rounding" or self._slot_dtype != tf.float32
        needs_seed = rounds and self.updates.seed is None

        def build() -> None:
            with tf.init_scope():
                for variable in new:
                    self._add_view(variable)
                if needs_seed:
                    self.updates.seed = self._make(
                        "rounding_seed", tf.constant(self._seed, tf.int64)
                    )
            with self._slots_in_16_bits():
                self._inner.build(self.views(by_id.values()))

        if new or needs_seed:
            # The first step of a `fit` of Keras 2 calls this on each replica.
            replicas.once_for_all_replicas(build)
        else:
            build()

    def _make(self, name: str, initial: tf.Tensor) -> tf.Variable:
        slot: Any = tf.Variable(
            initial,
            trainable=False,
            name=name,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        slot.path = name  # by which Keras 3 knows variables
        self.beside[name] = slot
        self._track(slot, name, overwrite=True)
        return slot

    def _add_view(self, variable: Any) -> None:
        stored = native(variable)
        method = methods.method(self._method, stored.dtype)
        with _made_like(stored):
            beside = [
                self._make(f"{name}_{len(self._views)}", initial)
                for name, initial in method.beside(stored).items()
            ]
        self._views[id(stored)] = self._view(stored, beside, method, described=variable)

    def _view(
        self, stored: Any, beside: Sequence[Any], method: methods.Method, **kwargs: Any
    ) -> Any:
        """Returns a view of a variable, which is distributed if the variable is."""
        number = next(self._numbers)
        if not isinstance(stored, tf.distribute.DistributedValues):
            return Float32View(stored, beside, method, self.updates, number, **kwargs)
        of_replicas = zip(*(_on_replicas(each) for each in (stored, *beside)), strict=True)
        views = [
            Float32View(first, rest, method, self.updates, number, **kwargs)
            for first, *rest in of_replicas
        ]
        return type(stored)(
            stored.distribute_strategy, views, stored.aggregation, var_policy=stored._policy
        )

    @contextlib.contextmanager
    def _slots_in_16_bits(self) -> Iterator[None]:
        """Keeps the slots of weights in 16 bits that are made inside in the slots' dtype."""
        if self._slot_dtype == tf.float32:
            yield
            return
        views = {id(view) for view in self._views.values()}

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            initial: Any = kwargs.get("initial_value")
            initial = initial() if callable(initial) else initial
            initial = tf.convert_to_tensor(initial, kwargs.get("dtype"))
            if initial.dtype != tf.float32:
                return next_creator(**kwargs)
            low_precision = tf.cast(initial, self._slot_dtype)
            kwargs.update(initial_value=low_precision, dtype=self._slot_dtype)
            slot = next_creator(**kwargs)
            method = methods.method("stochastic_rounding", self._slot_dtype)
            return self._view(slot, [], method, is_weight=False)

        def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            weight, *_ = inspect.signature(original).bind(*args, **kwargs).arguments.values()
            is_view = id(native(weight)) in views
            with tf.variable_creator_scope(create) if is_view else contextlib.nullcontext():
                return original(*args, **kwargs)

        optimizer = self.optimizer
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        with contextlib.ExitStack() as stack:
            for name in _SLOT_MAKERS:
                if hasattr(optimizer, name):
                    method = functools.partial(make, getattr(optimizer, name))
                    stack.enter_context(attributes.replaced(optimizer, name, method))
            yield

    def views(self, variables: Iterable[Any]) -> list[Any]:
        """Returns variables as the optimizer sees them."""
        return [self._views.get(id(native(variable)), variable) for variable in variables]

    def built_variables(self) -> Sequence[Any]:
        return list(self._weights.values()) or self._inner.built_variables()

    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], list[tuple[Any, Any]]] | None:
        aggregate = self._inner.custom_aggregation()
        if aggregate is None:
            return None
        return lambda pairs: self._with_weights(aggregate(self._with_views(pairs)))

    def apply(self, grads_and_vars: Pairs, name: str | None, aggregate: bool) -> Any:
        self.build([variable for _, variable in grads_and_vars])
        with self.updates.step():
            return self._inner.apply(self._with_views(grads_and_vars), name, aggregate)

    def _with_views(self, pairs: Pairs) -> list[tuple[Any, Any]]:
        views = self.views(variable for _, variable in pairs)
        in_float32 = gradients.convert((g for g, _ in pairs), widens=True)
        return [
            (gradient if view is variable else cast, view)
            for (gradient, variable), cast, view in zip(pairs, in_float32, views, strict=True)
        ]

    def _with_weights(self, pairs: Pairs) -> list[tuple[Any, Any]]:
        weights = {id(view): self._weights[key] for key, view in self._views.items()}
        return [(gradient, weights.get(id(view), view)) for gradient, view in pairs]

    def totals(self, grads_and_vars: Pairs) -> Pairs:
        return self._with_weights(self._inner.totals(self._with_views(grads_and_vars)))


def size_in_bytes(variable: Any) -> int:
    """Returns how many bytes a variable takes.

    A view takes the bytes of the variable in 16 bits.
    """
    variable = native(variable)
    if isinstance(variable, tf.distribute.DistributedValues):
        variable, *_ = _on_replicas(variable)
    return variable.shape.num_elements() * getattr(variable, "stored", variable).dtype.size


def _on_replicas(variable: Any) -> Sequence[tf.Variable]:
    return variable.distribute_strategy.experimental_local_results(variable)


@contextlib.contextmanager
def _made_like(variable: Any) -> Iterator[None]:
    """Makes variables on the devices and replicas of another one, inside of the block."""
    if not tf.distribute.in_cross_replica_context() and tf.distribute.has_strategy():
        # All replicas make it together.
        yield
    elif isinstance(variable, tf.distribute.DistributedValues):
        strategy = variable.distribute_strategy
        with strategy.scope(), strategy.extended.colocate_vars_with(variable):
            yield
    else:
        with tf.device(variable.device):
            yield
