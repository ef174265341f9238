"""The base of optimizers that wrap another one.

RFC 293, "OptimizerWrapper" and "LossScaleOptimizer __getattribute__ and __setattr__ delegation".
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model.registration import register_serializable
from tensorflow.python.saved_model.revived_types import serialize as serialize_revived

from keras_mp import keras_api
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.support import messages
from keras_mp.support.autograph import allow_conversion, do_not_convert

_ALIASES = {"lr": "learning_rate"}

_models: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


@keras_api.register_serializable
class OptimizerWrapper(
    tf.__internal__.tracking.DelegatingTrackableMixin, *keras_api.OPTIMIZER_BASES
):
    """An optimizer that wraps another one and looks like it.

    A wrapper has the hyperparameters of the inner optimizer, which can be read and written, and its
    variables. A `tf.train.Checkpoint` of the wrapper is one of the inner optimizer.

    Hyperparameters are, for `tf.keras.optimizers.legacy` optimizers, what they registered as such
    and `clipnorm`, `clipvalue`, `global_clipnorm`; for all others the keys of their config.
    Everything else of the inner optimizer is reached through `inner_optimizer`: reading it here is
    an AttributeError that says so, and so is setting it. Methods that only an inner optimizer's
    class has are not delegated, since they would go around the wrapper.

    A subclass overrides `apply_gradients`, and also `minimize` if it computes gradients
    differently. The gradients that it gets are unscaled, however the loss was scaled, whether it is
    inside a `LossScaleOptimizer` or around one.

    Args:
        inner_optimizer: An optimizer of `tf.keras`.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer of `tf.keras`.

    Example:

    >>> class Doubled(keras_mp.OptimizerWrapper):
    ...     def apply_gradients(self, grads_and_vars, **kwargs):
    ...         doubled = [(2 * g, v) for g, v in grads_and_vars]
    ...         return super().apply_gradients(doubled, **kwargs)
    >>> optimizer = Doubled(tf.keras.optimizers.SGD(0.1))
    >>> v = tf.Variable(1.0)
    >>> _ = optimizer.apply_gradients([(tf.constant(1.0), v)])
    >>> print(f"{float(v):.1f} {float(optimizer.learning_rate):.1f}")
    0.8 0.1

    Source: RFC 293, "OptimizerWrapper".
    """

    def __init__(self, inner_optimizer: Any) -> None:
        # The constructor of Keras's base class is not called: it would make a second iteration
        # counter and learning rate, which nothing would ever use.
        adapter = adapter_of(inner_optimizer)
        if adapter is None:
            raise TypeError(
                "Expected an optimizer of `tf.keras`, which is "
                f"{keras_api.ROOT_PACKAGE} in this process{hint(inner_optimizer)}. "
                f"Received: inner_optimizer={inner_optimizer!r} (of type {type(inner_optimizer)})"
            )
        vars(self).update(
            _adapter=adapter,
            _trackable=inner_optimizer,
            _hyperparameters=adapter.hyperparameters() - _names_of_wrappers(type(self)),
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        method = vars(cls).get("apply_gradients")
        if method is None or "_takes_scaled_gradients" in vars(cls):
            return

        @functools.wraps(method)
        def apply_gradients(
            self: OptimizerWrapper, grads_and_vars: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # Also where a LossScaleOptimizer further in would be the one to unscale.
            users = allow_conversion(method)
            return users(self, self._unscaled_early(grads_and_vars), *args, **kwargs)

        cls.apply_gradients = do_not_convert(apply_gradients)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        name = _ALIASES.get(name, name)
        if name in own.get("_hyperparameters", ()):
            return getattr(own["_trackable"], name)
        try:
            return object.__getattribute__(self, name)
        except AttributeError as error:
            inner = own.get("_trackable")
            if name.startswith("_") or inner is None or not hasattr(inner, name):
                raise
            raise AttributeError(_only_inner(self, name)) from error

    def __setattr__(self, name: str, value: Any) -> None:
        name = _ALIASES.get(name, name)
        inner = vars(self).get("_trackable")
        if inner is not None and name in self._hyperparameters:
            setattr(inner, name, value)
        elif (
            inner is None
            or name in vars(self)
            or hasattr(type(self), name)
            or not hasattr(inner, name)
        ):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(_only_inner(self, name))

    def __dir__(self) -> list[str]:
        # Keras saves what it finds here, under its name: the inner optimizer is `inner_optimizer`.
        names = set(object.__dir__(self)) | self._hyperparameters | {"lr"}
        return sorted(names - {"_trackable"})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner_optimizer!r}>"

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer that is wrapped. Read-only."""
        return self._trackable

    @property
    def name(self) -> str:
        """The inner optimizer's name."""
        inner = self.inner_optimizer
        return getattr(inner, "name", None) or inner._name

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of steps."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self.inner_optimizer.iterations = value

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def built(self) -> bool:
        """Has the inner optimizer made its variables?"""
        return self.inner_optimizer.built

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables, as a list that may also be called."""
        return _CallableList(self._inner_variables())

    def _inner_variables(self) -> Sequence[Any]:
        variables = self.inner_optimizer.variables
        return variables() if callable(variables) else variables

    @property
    def weights(self) -> Any:
        """The inner optimizer's variables, under the older name."""
        return self.variables

    def build(self, var_list: Iterable[Any]) -> None:
        """Makes the inner optimizer's variables.

        Args:
            var_list: iterable of the model's trainable variables. An empty one, which Keras 3
                passes for an `.h5` file, stands for those of the model that was compiled with this
                optimizer, or for none yet.
        """
        variables = list(var_list) or list(self._variables_of_model())
        if not variables:
            return
        self._adapter.build(variables)
        weights = vars(self).pop("_weights_to_come", None)
        if weights is not None:
            with tf.init_scope():
                self.set_weights(weights)

    def compiled_for(self, model: Any) -> None:
        """Remembers the model that is trained.

        Args:
            model: A model of `tf.keras`.
        """
        for optimizer in chain(self):
            if isinstance(optimizer, OptimizerWrapper):
                _models[optimizer] = weakref.ref(model)

    def _model(self) -> Any:
        reference = _models.get(self)
        return None if reference is None else reference()

    def _variables_of_model(self) -> Sequence[Any]:
        model = self._model()
        return model.trainable_variables if model is not None and model.built else ()

    def set_weights(self, weights: Iterable[Any]) -> None:
        """Sets the values of the inner optimizer's variables.

        Args:
            weights: iterable of arrays, as `get_weights` returns them. Where Keras 3 has not built
                the optimizer yet, they are set as soon as it is.

        Raises:
            ValueError: these are weights of an optimizer of another kind or for another model.
        """
        weights = list(weights)
        if not getattr(self.inner_optimizer, "built", True):
            # Copies, since they may be in a file that will be closed by then.
            vars(self)["_weights_to_come"] = [np.array(weight) for weight in weights]
            return
        check_shapes(self.variables, weights)
        self.inner_optimizer.set_weights(weights)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal wrapper.

        A subclass with arguments of its own adds them.
        """
        return {"inner_optimizer": keras_api.serialize_optimizer(self.inner_optimizer)}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "OptimizerWrapper":
        """Makes a wrapper, and the optimizer in it.

        Args:
            config: dict that `get_config` returned.
            custom_objects: dict of names and the classes they stand for, for the inner optimizer.

        Returns:
            A wrapper.
        """
        config = dict(config)
        inner = keras_api.deserialize_optimizer(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)

    def save_own_variables(self, store: Any) -> None:
        """Saves the inner optimizer's variables, where Keras does not save them beside this.

        Args:
            store: dict-like, of names and arrays.
        """
        if not self._adapter.is_saved_by_keras:
            for i, variable in enumerate(self._inner_variables()):
                store[str(i)] = tf.convert_to_tensor(variable).numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` saved, or what an optimizer that is not wrapped did.

        Args:
            store: dict-like, of names and arrays. Where they are not as many as the inner
                optimizer's variables, these stay as they are, with a warning.

        Raises:
            ValueError: the variables are those of another optimizer.
        """
        saved = {name for name in set(store.keys()) if name.isdigit()}
        variables = self._inner_variables()
        if len(saved) == len(variables):
            weights = [store[str(i)][()] for i in range(len(variables))]
            check_shapes(variables, weights)
            for variable, weight in zip(variables, weights, strict=True):
                variable.assign(weight)
        elif saved:
            messages.warn(
                "The optimizer's variables were not loaded: build it before, with "
                "`model.optimizer.build(model.trainable_variables)`, if it is not of another kind, "
                f"or for another model. Expected {len(variables)} variables. Received: {len(saved)}"
            )

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Lets the inner optimizer set the final values, where it has any: averages, for one.

        Args:
            var_list: iterable of the model's trainable variables.
        """
        if hasattr(self.inner_optimizer, "finalize_variable_values"):
            self.inner_optimizer.finalize_variable_values(var_list)

    def get_slot_names(self) -> list[str]:
        """Names of the inner optimizer's slots; only legacy optimizers have any."""
        inner = self.inner_optimizer
        return inner.get_slot_names() if hasattr(inner, "get_slot_names") else []

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        is_of_a_model = self in _models
        if save_type == "savedmodel" and is_of_a_model and self._adapter.is_revived_without_state:
            messages.warn(
                "tf.keras loads a model from a SavedModel with a new optimizer: without iterations "
                "and slots. To train on after loading, save the model as .keras or .h5, or "
                "use a tf.train.Checkpoint. To serve it, leave the optimizer out "
                "(`model.save(path, include_optimizer=False)`, `model.export(path)`)."
            )
        return super()._trackable_children(save_type, **kwargs)

    def _serialize_to_proto(self, object_proto: Any, **kwargs: Any) -> None:
        # A SavedModel says of which family an optimizer is, and only that takes its slots when it
        # is loaded. Of a wrapper, which may be an instance of several bases, it says the inner's.
        del kwargs
        *_, innermost = chain(self)
        revived = serialize_revived(innermost)
        if revived is not None:
            object_proto.user_object.CopyFrom(revived)
        object_proto.registered_name = ""  # which would be looked up at loading, without us too

    @do_not_convert
    def minimize(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None = None,
        grad_loss: tf.Tensor | None = None,
        name: str | None = None,
    ) -> Any:
        """Computes the gradients of `loss` and applies them.

        Args:
            loss: scalar tensor, or a callable without arguments that returns one.
            var_list: list of variables, one variable, or a callable that returns either.
            tape: `tf.GradientTape` under which a tensor `loss` was computed.
            grad_loss: tensor. The gradient for `loss`; not for the new optimizers of tf_keras.
            name: str. Name of the operation.

        Returns:
            What `apply_gradients` returns.
        """
        pairs = self.compute_gradients(loss, var_list, tape, grad_loss)
        return self.apply_gradients(pairs, name=name)

    @do_not_convert
    def compute_gradients(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None = None,
        grad_loss: tf.Tensor | None = None,
    ) -> list[tuple[Any, Any]]:
        """Computes gradients: the first half of `minimize`.

        Args:
            loss: scalar tensor, or a callable without arguments that returns one.
            var_list: list of variables, one variable, or a callable that returns either.
            tape: `tf.GradientTape` under which a tensor `loss` was computed.
            grad_loss: tensor. The gradient for `loss`; not for the new optimizers of tf_keras.

        Returns:
            list of (gradient, variable) pairs.
        """
        if not (tape is None or isinstance(tape, tf.GradientTape)):
            raise TypeError(
                "`tape` must be a tf.GradientTape; pass `grad_loss` and `name` by keyword. "
                f"Received: tape={tape!r} (of type {type(tape)})"
            )
        loss = allow_conversion(loss) if callable(loss) else loss
        return self._adapter.compute_gradients(loss, var_list, tape, grad_loss)

    @do_not_convert
    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Applies gradients, in the two lists that Keras 3 has for them.

        Args:
            grads: iterable of gradients.
            trainable_variables: iterable of variables, one for each gradient. Defaults to those
                that the inner optimizer was built with.
        """
        if trainable_variables is None:
            trainable_variables = self._adapter.built_variables()
        self.apply_gradients(zip(grads, trainable_variables, strict=True))

    def _unscaled_early(self, pairs: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
        inner = self.inner_optimizer
        return inner._unscaled_early(pairs) if isinstance(inner, OptimizerWrapper) else pairs

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        *,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Lets the inner optimizer apply gradients.

        Args:
            grads_and_vars: iterable of (gradient, variable) pairs.
            name: str. Name of the operation.
            skip_gradients_aggregation: bool. True where the gradients are summed already.
            experimental_aggregate_gradients: bool. False means the same.

        Returns:
            What the inner optimizer returns.
        """
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        return self._adapter.apply(list(grads_and_vars), name, aggregate)


register_serializable("keras_mp", predicate=lambda value: isinstance(value, OptimizerWrapper))(
    OptimizerWrapper
)


def chain(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and, as long as it is one that wraps another, the inner ones.

    Args:
        optimizer: An optimizer of `tf.keras`, or None, which yields nothing.
    """
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def adapter_of(optimizer: Any) -> OptimizerAdapter | None:
    """Tells how an optimizer of `tf.keras`, or a wrapper of one, is driven.

    Args:
        optimizer: Any.

    Returns:
        An `OptimizerAdapter`, or None where it is neither.
    """
    if isinstance(optimizer, OptimizerWrapper):
        return _WrapperAdapter(optimizer)
    return keras_api.optimizer_adapter(optimizer)


class _WrapperAdapter(OptimizerAdapter):
    """A wrapper that is wrapped itself."""

    @property
    def is_revived_without_state(self) -> bool:
        return self.optimizer._adapter.is_revived_without_state

    @property
    def takes_float32_gradients(self) -> bool:
        return self.optimizer._adapter.takes_float32_gradients

    def hyperparameters(self) -> frozenset[str]:
        return self.optimizer._hyperparameters

    def build(self, variables: Sequence[Any]) -> None:
        self.optimizer.build(variables)

    def built_variables(self) -> Sequence[Any]:
        return self.optimizer._adapter.built_variables()

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any,
        tape: tf.GradientTape | None,
        grad_loss: tf.Tensor | None,
    ) -> list[tuple[Any, Any]]:
        return self.optimizer.compute_gradients(loss, var_list, tape, grad_loss)

    def custom_aggregation(self) -> Callable[[list[tuple[Any, Any]]], list[tuple[Any, Any]]] | None:
        return self.optimizer._adapter.custom_aggregation()

    def apply(
        self, grads_and_vars: Sequence[tuple[Any, Any]], name: str | None, aggregate: bool
    ) -> Any:
        return self.optimizer.apply_gradients(
            grads_and_vars, name=name, skip_gradients_aggregation=not aggregate
        )

    def accumulates(self) -> bool:
        return self.optimizer._adapter.accumulates()

    def completes_step(self) -> tf.Tensor:
        return self.optimizer._adapter.completes_step()

    def totals(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> Sequence[tuple[Any, Any]]:
        return self.optimizer._adapter.totals(grads_and_vars)

    def drop_accumulated(self) -> None:
        self.optimizer._adapter.drop_accumulated()

    def is_overwritten(self, variable: Any) -> bool:
        return self.optimizer._adapter.is_overwritten(variable)


def check_shapes(variables: Iterable[Any], weights: Sequence[Any]) -> None:
    """Checks that weights fit into an optimizer's variables.

    Args:
        variables: iterable of variables.
        weights: sequence of arrays.

    Raises:
        ValueError: their shapes differ.
    """
    expected = [tuple(variable.shape) for variable in variables]
    received = [tuple(np.shape(weight)) for weight in weights]
    if expected != received:
        raise ValueError(
            "The weights are those of an optimizer of another kind, or for another model. "
            f"Nothing was set. Expected the shapes {expected}. Received: {received}"
        )


def _names_of_wrappers(cls: type) -> set[str]:
    """What wrapper classes define themselves, which a hyperparameter of that name cannot hide."""
    classes = cls.__mro__[: cls.__mro__.index(OptimizerWrapper) + 1]
    return {name for wrapper in classes for name in vars(wrapper)}


class _CallableList(list):
    """`optimizer.variables` and `optimizer.variables()`: the families spell it differently."""

    def __call__(self) -> "_CallableList":
        return self


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: OptimizerWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner_optimizer, name)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"OptimizerWrapper.{name}"
    method.__doc__ = f"Calls `{name}` of the inner optimizer."
    return method


def _delegate_rest() -> None:
    """Delegates every public method that Keras's base classes have and the wrapper does not.

    What a newer Keras adds there is so delegated as well.
    """
    for base in keras_api.OPTIMIZER_BASES:
        for name in dir(base):
            is_method = callable(getattr(base, name))
            is_ours = name in vars(OptimizerWrapper)
            if is_method and not is_ours and (not name.startswith("_") or name in _CHECKPOINTS):
                setattr(OptimizerWrapper, name, _delegate(name))


# What tf.train.Checkpoint calls on an optimizer that has slots.
_CHECKPOINTS = ("_create_or_restore_slot_variable", "_restore_slot_variable")

_delegate_rest()


def _only_inner(wrapper: OptimizerWrapper, name: str) -> str:
    return (
        f"{type(wrapper).__name__} has no attribute {name!r}, only its inner optimizer has: use "
        f"`optimizer.inner_optimizer.{name}`. What the wrapper passes on are hyperparameters, here "
        f"{sorted(wrapper._hyperparameters | {'learning_rate'})}."
    )


def hint(optimizer: Any) -> str:
    """What to say of an optimizer that is one of the other Keras; nothing of any other."""
    if type(optimizer).__module__.partition(".")[0] == keras_api.OTHER_PACKAGE:
        return f". To use one of {keras_api.OTHER_PACKAGE}, {keras_api.switch_hint()}"
    return ""
