"""The base class of optimizers that wrap another one.

RFC 293, "OptimizerWrapper" and "LossScaleOptimizer __getattribute__ and __setattr__ delegation".
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.step import gradients, replicas
from keras_mp.step.optimizer_adapter import Loss, Pairs, Tape, VarList
from keras_mp.step.scaled_step import make_step
from keras_mp.support import trackables
from keras_mp.support.autograph import allow_conversion, do_not_convert
from keras_mp.wrappers import inner_optimizers

# What a wrapper takes from the inner optimizer besides the hyperparameters.
_OF_INNER = frozenset({"built", "iterations", "learning_rate", "optimizers"})


@keras_api.register_serializable
class OptimizerWrapper(trackables.DelegatingTrackable, *keras_api.OPTIMIZER_BASES):
    """An optimizer that wraps another one and looks like it.

    A wrapper has the variables of the inner optimizer, its `iterations`, its `learning_rate` and
    its other hyperparameters, which can be read and written. A `tf.train.Checkpoint` of the wrapper
    is one of the inner optimizer.

    The hyperparameters of `tf.keras.optimizers.legacy` optimizers are those that they registered,
    and `clipnorm`, `clipvalue`, `global_clipnorm`; the hyperparameters of all others are the keys
    of the config. Everything else of the inner optimizer is reached through `inner_optimizer`. To
    read or set it on the wrapper is an AttributeError that says so. Methods that only the class of
    an inner optimizer has are not delegated, since they would bypass the wrapper.

    A subclass overrides `apply_gradients`, and also `minimize` if it computes gradients
    differently. The gradients that it gets are unscaled, however the loss was scaled, whether the
    wrapper is inside a `LossScaleOptimizer` or around one.

    Args:
        inner_optimizer: The optimizer to wrap: an instance, a name such as `"adam"`, or a config.
        reduce_dtype: `"bfloat16"` or `"float32"`, or such a DType. The dtype in which float32
            gradients are summed over replicas, before the inner optimizer sees them. Defaults to
            None, which leaves the sum to the inner optimizer.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer of `tf.keras`, or sums gradients itself
            although `reduce_dtype` is given.
        ValueError: `reduce_dtype` is another dtype, such as float16, which needs loss scaling.

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

    _reduce_dtype: tf.DType | None = None
    _name: str | None = None
    # Those that are to be set as soon as the optimizer is built.
    _weights_to_come: list[Any] | None = None
    # The model that is trained, if it is known.
    _model: Callable[[], tf.keras.Model | None] = staticmethod(lambda: None)

    def __init__(self, inner_optimizer: Any, reduce_dtype: str | tf.DType | None = None) -> None:
        # The constructor of Keras's base class is not called: it would make a second iteration
        # counter and a second learning rate, which nothing would ever use.
        if isinstance(inner_optimizer, (str, dict)):
            inner_optimizer = keras_api.get_optimizer(inner_optimizer)
        self._refuse(inner_optimizer)
        adapter = inner_optimizers.adapter_of(inner_optimizer)
        if adapter.overrides_minimize:
            raise TypeError(
                "The optimizer overrides `minimize`, but a wrapper calls `compute_gradients` and "
                "`apply_gradients` instead, so the override would have no effect. Override one of "
                "these, or train without a wrapper: in mixed_bfloat16, which needs no loss scale. "
                f"Received: inner_optimizer={inner_optimizer!r} (of type {type(inner_optimizer)})"
            )
        self._adapter, self._delegated = adapter, adapter.hyperparameters() | _OF_INNER
        self._trackable = inner_optimizer  # the last: it is asked for what follows
        if reduce_dtype is not None:
            self.reduce_dtype = reduce_dtype

    def _refuse(self, optimizer: Any) -> None:
        """Raises a TypeError if the wrapper does not go around an optimizer."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if "apply_gradients" in vars(base))
        if owner is not cls and issubclass(owner, OptimizerWrapper):
            return
        method = vars(owner)["apply_gradients"]

        @functools.wraps(method)
        def apply_gradients(
            self: Any, grads_and_vars: Any, *args: Any, scaled: bool = False, **kwargs: Any
        ) -> Any:
            # They are unscaled even if a LossScaleOptimizer further inside would unscale them
            # later.
            with self._unscaled(grads_and_vars, scaled) as pairs:
                return allow_conversion(method)(self, pairs, *args, **kwargs)

        cls.apply_gradients = do_not_convert(apply_gradients)

    def __repr__(self) -> str:
        # Gradients that are scaled are summed in float16, unless it is said.
        is_usual = self.reduce_dtype in (None, "float16")
        how = "" if is_usual else f", reduce_dtype={self.reduce_dtype!r}"
        return f"<{type(self).__name__} of {self.inner_optimizer!r}{how}>"

    # Not that of legacy optimizers: it is Python, so each attribute would take ten times as long.
    __getattribute__ = object.__getattribute__

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        inner = own.get("_trackable")
        if inner is not None and (name in own["_delegated"] or name in keras_api.READ_BY_CALLBACKS):
            return getattr(inner, name)
        if name.startswith("_") or not hasattr(inner, name):
            return object.__getattribute__(self, name)  # It raises the usual error.
        raise _only_inner(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("_trackable")
        is_own = name in vars(self) or hasattr(type(self), name)
        if inner is not None and not is_own and name in self._delegated:
            # A legacy optimizer that is asked for it makes a variable, which takes no function.
            setattr(inner, name, value)
        elif inner is None or is_own or not hasattr(inner, name):
            # Neither Keras nor checkpoints track it.
            object.__setattr__(self, name, value)
        else:
            raise _only_inner(self, name)

    def __dir__(self) -> list[str]:
        # Keras saves all of these by name. The inner optimizer is saved only once, as
        # `inner_optimizer`.
        names = set(object.__dir__(self)) | self._delegated | {"lr"}
        return sorted(names - {"_trackable"})

    inner_optimizer = property(lambda self: self._trackable, doc="The optimizer that is wrapped.")

    @property
    def name(self) -> str:
        """The name given to the constructor, or the inner optimizer's."""
        of_inner = getattr(self.inner_optimizer, "name", None)
        return self._name or of_inner or self.inner_optimizer.get_config()["name"]

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's variables, as a list that may also be called."""
        return _CallableList(self._inner_variables())

    def _inner_variables(self) -> Any:
        variables = self.inner_optimizer.variables
        return variables() if callable(variables) else variables

    lr = trackables.delegated("learning_rate")
    weights = property(lambda self: self.variables, doc="`variables` under the older name.")

    @property
    def reduce_dtype(self) -> str | None:
        """The dtype in which this wrapper sums float32 gradients over replicas.

        It is None if the inner optimizer sums them. Another dtype may be set at any time. A
        `tf.function` keeps the dtype that was set when it was traced.
        """
        return None if self._reduce_dtype is None else self._reduce_dtype.name

    @reduce_dtype.setter
    def reduce_dtype(self, value: str | tf.DType) -> None:
        inner_optimizers.refuse_second(self.inner_optimizer, type(self).__name__)
        dtype = replicas.to_reduce_dtype(value)
        if dtype == tf.float16:
            raise ValueError(
                "Gradients in float16 have to be scaled: use LossScaleOptimizer(optimizer, "
                f"reduce_dtype='float16'). Received: reduce_dtype={value!r}"
            )
        self._reduce_dtype = dtype

    def build(self, var_list: Iterable[Any] = (), *, variables: Iterable[Any] = ()) -> None:
        """Makes the inner optimizer's variables.

        Args:
            var_list: iterable of the model's trainable variables. Keras 3 passes an empty one for
                an `.h5` file. It stands for the variables of the model that was compiled with this
                optimizer, or for none yet.
            variables: iterable. The name of `var_list` in Keras 3.
        """
        given = [*var_list, *variables] or list(self._variables_of_model())
        if not given:
            return
        self._adapter.build(given)
        weights, self._weights_to_come = self._weights_to_come, None
        if weights is not None:
            with tf.init_scope():
                self.set_weights(weights)

    def compiled_for(self, model: tf.keras.Model) -> None:
        """Remembers the model that is trained.

        Args:
            model: A model of `tf.keras`.
        """
        for optimizer in inner_optimizers.chain(self):
            if isinstance(optimizer, OptimizerWrapper):
                optimizer.__dict__["_model"] = weakref.ref(model)

    def _variables_of_model(self) -> Sequence[Any]:
        model = self._model()
        return model.trainable_variables if model is not None and model.built else ()

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Lets the inner optimizer set final values, such as averages, if it has any.

        Args:
            var_list: iterable of the model's trainable variables.
        """
        getattr(self.inner_optimizer, "finalize_variable_values", lambda _: None)(var_list)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the inner optimizer's slots.

        Only legacy optimizers have any.
        """
        return getattr(self.inner_optimizer, "get_slot_names", list)()

    @do_not_convert
    def minimize(
        self,
        loss: Loss,
        var_list: VarList,
        tape: Tape = None,
        grad_loss: tf.Tensor | None = None,
        name: str | None = None,
    ) -> Any:
        """Makes a whole step: computes the gradients of a loss and applies them.

        A `LossScaleOptimizer` scales the loss, and unscales the gradients.

        Args:
            loss: float tensor, or a callable without arguments that returns one. Not scaled.
            var_list: list of variables, one variable, or a callable that returns either.
            tape: `tf.GradientTape` under which a tensor `loss` was computed.
            grad_loss: tensor. The gradient for `loss`; not for the new optimizers of tf_keras.
            name: str. Name of the operation.

        Returns:
            The result of `apply_gradients`.
        """
        return self._whole_step(name, loss, var_list, _checked(tape), grad_loss)

    def _whole_step(self, name: str | None, *of_loss: Any) -> Any:
        return self.apply_gradients(self.compute_gradients(*of_loss), name=name)

    @do_not_convert
    def compute_gradients(
        self, loss: Loss, var_list: VarList, tape: Tape = None, grad_loss: tf.Tensor | None = None
    ) -> list[tuple[Any, Any]]:
        """Computes gradients: the first half of `minimize`, with the same arguments.

        Returns:
            list of (gradient, variable) pairs. The gradients are not scaled.
        """
        return self._gradients_of(loss, var_list, _checked(tape), grad_loss)

    def _gradients_of(self, loss: Any, *how: Any) -> list[tuple[Any, Any]]:
        loss = allow_conversion(loss) if callable(loss) else loss
        return self._adapter.compute_gradients(loss, *how)

    @do_not_convert
    def apply(
        self, grads: Iterable[Any], trainable_variables: Any = None, *, scaled: bool = False
    ) -> None:
        """Applies gradients, given in two lists as in Keras 3.

        Args:
            grads: iterable of gradients.
            trainable_variables: iterable of variables, one for each gradient. Defaults to the
                variables that the inner optimizer was built with.
            scaled: bool, as in `apply_gradients`. Defaults to False.
        """
        if trainable_variables is None:
            trainable_variables = self._adapter.built_variables()
        self.apply_gradients(zip(grads, trainable_variables, strict=True), scaled=scaled)

    @contextlib.contextmanager
    def _unscaled(self, pairs: Iterable[Any], scaled: bool) -> Iterator[Iterable[Any]]:
        """Context manager that unscales gradients early.

        It unscales them as a LossScaleOptimizer further inside would. If an exception leaves it,
        the record of that optimizer's calls is as it was before.

        Args:
            pairs: iterable of (gradient, variable) pairs.
            scaled: bool, as in `apply_gradients`.

        Yields:
            The pairs of unscaled gradients.
        """
        scaling = inner_optimizers.find_loss_scale_optimizer(self)
        if not isinstance(scaling, OptimizerWrapper):
            if scaled:
                raise ValueError(
                    "The gradients cannot be scaled: no LossScaleOptimizer is among the "
                    f"optimizers. Received: scaled={scaled!r} for {self!r}"
                )
            yield pairs
            return
        calls, pairs = scaling._step_calls, list(pairs)
        grads = gradients.convert((g for g, _ in pairs), scaling._adapter.takes_float32_gradients)
        undoing = calls.as_before_an_exception(grads if scaled else None)
        with undoing, calls.unscaled_early(pairs, grads) as unscaled:
            yield unscaled

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        *,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
        scaled: bool = False,
    ) -> Any:
        """Lets the inner optimizer apply gradients.

        A `LossScaleOptimizer` sums them over replicas, and applies them or skips the step. It
        unscales them here if the loss was scaled with `scale_loss`, and takes them as they are if
        `get_scaled_loss` and `get_unscaled_gradients` were called. A call that is missing is
        reported with a `MixedPrecisionWarning`.

        Args:
            grads_and_vars: iterable of (gradient, variable) pairs. A gradient may be None.
            name: str. Name of the operation.
            skip_gradients_aggregation: bool. True where the gradients are summed already.
            experimental_aggregate_gradients: bool. False is the older spelling of
                `skip_gradients_aggregation=True`.
            scaled: bool. True if you have multiplied the loss by the loss scale yourself (that of
                the `LossScaleOptimizer`, if it is inside), and the scale has not changed since.
                Defaults to False, which leaves it to the calls that were made.

        Returns:
            The result of the inner optimizer. A `LossScaleOptimizer` returns `iterations`, or in a
            TensorFlow 1 graph the operation that makes the step.

        Raises:
            ValueError: no variable has a gradient, the gradients are said to be scaled and no
                optimizer scales any, or they come from `get_unscaled_gradients`, or a
                `LossScaleOptimizer` is called in a cross-replica context.
        """
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        return self._applied(grads_and_vars, scaled, aggregate, name)

    def _applied(self, pairs: Any, scaled: bool, aggregate: bool, name: str | None) -> Any:
        with self._unscaled(pairs, scaled) if scaled else contextlib.nullcontext(pairs) as pairs:
            if self._reduce_dtype is None:
                return self._adapter.apply(list(pairs), name, aggregate)
            how = {"reduce_dtype": self._reduce_dtype, "aggregate": aggregate, "name": name}
            return self._make_step(gradients.checked_pairs(pairs), **how)

    def _make_step(self, pairs: Pairs, *args: Any, **how: Any) -> Any:
        """Builds the inner optimizer, and makes a step, as `apply_gradients` returns it."""
        if not pairs:
            return self.iterations
        self.build([variable for _, variable in pairs])
        operation, _ = make_step(self._adapter, pairs, *args, **how)
        return self.iterations if operation is None else operation

    def set_weights(self, weights: Iterable[Any]) -> None:
        """Sets the values of the inner optimizer's variables.

        Args:
            weights: iterable of arrays, as `get_weights` returns them. Where Keras 3 has not built
                the optimizer yet, they are set as soon as it is.

        Raises:
            ValueError: the weights are those of an optimizer of another kind or for another model.
        """
        weights = list(weights)
        if not getattr(self.inner_optimizer, "built", True):
            # Copies, since the arrays may be in a file that will be closed by then.
            self._weights_to_come = [np.array(weight) for weight in weights]
            return
        from keras_mp.wrappers import saved_variables

        variables, count = self.variables, len(self._inner_variables())
        are_inner = len(weights) == count
        saved_variables.check_shapes(variables[:count] if are_inner else variables, weights)
        self.inner_optimizer.set_weights(weights[:count])
        for variable, weight in zip(variables[count:], weights[count:]):
            variable.assign(weight)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal wrapper.

        A subclass with its own arguments adds them.
        """
        own = {} if self._reduce_dtype is None else {"reduce_dtype": self._reduce_dtype.name}
        return {"inner_optimizer": keras_api.serialize_optimizer(self.inner_optimizer), **own}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "OptimizerWrapper":
        """Makes a wrapper, and the optimizer in it.

        Args:
            config: dict that `get_config` returned.
            custom_objects: dict from names to the classes that they stand for, for the inner
                optimizer.

        Returns:
            A wrapper.
        """
        config = dict(config)
        inner = config.pop("inner_optimizer")
        if isinstance(inner, dict):
            inner = keras_api.deserialize_optimizer(inner, custom_objects=custom_objects)
        return cls(inner, **config)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OptimizerWrapper":
        # If attributes were copied one by one, delegation would look for the inner optimizer before
        # it is there.
        inner_optimizer = copy.deepcopy(self.inner_optimizer, memo)
        return type(self).from_config({**self.get_config(), "inner_optimizer": inner_optimizer})

    def _own_variables(self) -> dict[str, tf.Variable]:
        """Returns the variables of the wrapper alone, by their names in files."""
        return {}

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Saves the wrapper's own variables, and those that Keras does not save itself.

        Args:
            store: dict-like, of names and arrays.
        """
        inner = () if self._adapter.is_saved_by_keras else enumerate(self._inner_variables())
        for name, variable in (*self._own_variables().items(), *inner):
            store[str(name)] = tf.convert_to_tensor(variable).numpy()

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Loads the variables of this optimizer, or of one that is not wrapped.

        Args:
            store: dict-like, of names and arrays. If their number is not that of the inner
                optimizer's variables, the variables stay as they are, with a warning; and so do
                those of a loss scale that it lacks.

        Raises:
            ValueError: the variables are those of another optimizer.
        """
        from keras_mp.wrappers import saved_variables

        saved_variables.load(self, store)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        if save_type == "savedmodel":
            from keras_mp.wrappers import saved_variables

            is_new = self._model() is not None and self._adapter.is_revived_without_state
            saved_variables.saved_model_begins(OptimizerWrapper, loses_state=is_new)
        return super()._trackable_children(save_type, **kwargs)  # pyright: ignore

    def _serialize_to_proto(self, object_proto: Any, **kwargs: Any) -> None:
        from keras_mp.wrappers import saved_variables

        del kwargs
        saved_variables.write_family(self, object_proto)


class _CallableList(list):
    """A list that may be called.

    Some families of optimizers have `variables()`, others `variables`.
    """

    def __call__(self) -> "_CallableList":
        return self


def _only_inner(wrapper: OptimizerWrapper, name: str) -> AttributeError:
    return AttributeError(
        f"{type(wrapper).__name__} has no attribute {name!r}, only its inner optimizer has: use "
        f"`optimizer.inner_optimizer.{name}`. The wrapper only passes on hyperparameters, here "
        f"{sorted(wrapper._delegated - _OF_INNER | {'learning_rate'})}."
    )


def _checked(tape: Any) -> Any:
    if not (tape is None or isinstance(tape, tf.GradientTape)):
        raise TypeError(
            "`tape` must be a tf.GradientTape; pass `grad_loss` and `name` by keyword. "
            f"Received: tape={tape!r} (of type {type(tape)})"
        )
    return tape


# All that Keras's base classes have and the wrapper lacks is the inner optimizer's, also what a
# newer Keras adds there.
for _base in keras_api.OPTIMIZER_BASES:
    for _public in {name for name in dir(_base) if not name.startswith("_")} - {
        *vars(OptimizerWrapper)
    }:
        setattr(OptimizerWrapper, _public, trackables.delegated(_public))
