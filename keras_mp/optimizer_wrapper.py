"""The base class of optimizers that wrap another one.

RFC 293, "OptimizerWrapper". The attributes of a wrapper are in `wrapper_delegation`.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.hooks import observers
from keras_mp.step import gradients, replicas
from keras_mp.step.optimizer_adapter import Loss, VarList
from keras_mp.step.scaled_step import make_step
from keras_mp.support import trackables
from keras_mp.support.autograph import allow_conversion, do_not_convert
from keras_mp.wrappers.inner_optimizers import adapter_of, chain, hint, refuse_second_sum
from keras_mp.wrappers.wrapper_delegation import WrapperDelegation, delegate_rest, names_of_wrappers
from keras_mp.wrappers.wrapper_saving import WrapperSaving

_models: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


@keras_api.register_serializable
class OptimizerWrapper(
    WrapperDelegation,
    WrapperSaving,
    trackables.DelegatingTrackable,
    *keras_api.OPTIMIZER_BASES,
):
    """An optimizer that wraps another one and looks like it.

    A wrapper has the variables of the inner optimizer, and its hyperparameters, which can be read
    and written. A `tf.train.Checkpoint` of the wrapper is one of the inner optimizer.

    The hyperparameters of `tf.keras.optimizers.legacy` optimizers are those that they registered,
    and `clipnorm`, `clipvalue`, `global_clipnorm`; the hyperparameters of all others are the keys
    of the config. Everything else of the inner optimizer is reached through `inner_optimizer`. To
    read or set it on the wrapper is an AttributeError that says so. Methods that only the class of
    an inner optimizer has are not delegated, since they would bypass the wrapper.

    A subclass overrides `apply_gradients`, and also `minimize` if it computes gradients
    differently. The gradients that it gets are unscaled, however the loss was scaled, whether the
    wrapper is inside a `LossScaleOptimizer` or around one.

    Args:
        inner_optimizer: An optimizer of `tf.keras`.
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

    _reduce_dtype: tf.DType | None

    def __init__(
        self,
        inner_optimizer: tf.keras.optimizers.Optimizer,
        reduce_dtype: str | tf.DType | None = None,
    ) -> None:
        # The constructor of Keras's base class is not called: it would make a second iteration
        # counter and a second learning rate, which nothing would ever use.
        adapter = adapter_of(inner_optimizer)
        if adapter is None:
            raise TypeError(
                "Expected an optimizer of `tf.keras`, which is "
                f"{keras_api.ROOT_PACKAGE} in this process{hint(inner_optimizer)}. "
                f"Received: inner_optimizer={inner_optimizer!r} (of type {type(inner_optimizer)})"
            )
        if adapter.overrides_minimize:
            raise TypeError(
                "The optimizer overrides `minimize`, but a wrapper calls `compute_gradients` and "
                "`apply_gradients` instead, so the override would have no effect. Override one of "
                "these, or train without a wrapper: in mixed_bfloat16, which needs no loss scale. "
                f"Received: inner_optimizer={inner_optimizer!r} (of type {type(inner_optimizer)})"
            )
        self._set_own(
            _adapter=adapter,
            _trackable=inner_optimizer,
            _hyperparameters=adapter.hyperparameters() - names_of_wrappers(type(self)),
            _reduce_dtype=None,
        )
        if reduce_dtype is not None:
            self.reduce_dtype = reduce_dtype

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        method = vars(cls).get("apply_gradients")
        if method is None or "_takes_scaled_gradients" in vars(cls):
            return

        @functools.wraps(method)
        def apply_gradients(
            self: OptimizerWrapper,
            grads_and_vars: Iterable[tuple[Any, Any]],
            *args: Any,
            scaled: bool = False,
            **kwargs: Any,
        ) -> Any:
            # They are unscaled even if a LossScaleOptimizer further inside would unscale them
            # later.
            with self._unscaled(grads_and_vars, scaled) as pairs:
                return allow_conversion(method)(self, pairs, *args, **kwargs)

        cls.apply_gradients = do_not_convert(apply_gradients)

    def __repr__(self) -> str:
        how = "" if self._reduce_dtype is None else f", reduce_dtype={self.reduce_dtype!r}"
        return f"<{type(self).__name__} of {self.inner_optimizer!r}{how}>"

    @property
    def reduce_dtype(self) -> str | None:
        """The dtype in which this wrapper sums float32 gradients over replicas.

        It is None if the inner optimizer sums them. Another dtype may be set at any time. A
        `tf.function` keeps the dtype that was set when it was traced.
        """
        return None if self._reduce_dtype is None else self._reduce_dtype.name

    @reduce_dtype.setter
    def reduce_dtype(self, value: str | tf.DType) -> None:
        refuse_second_sum(self.inner_optimizer, type(self).__name__)
        hint = (
            " Gradients in float16 have to be scaled: use LossScaleOptimizer(optimizer, "
            "reduce_dtype='float16')."
        )
        dtype = replicas.to_reduce_dtype(value, ("bfloat16", "float32"), hint)
        self._set_own(_reduce_dtype=dtype)

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
        self._set_weights_to_come()

    def compiled_for(self, model: tf.keras.Model) -> None:
        """Remembers the model that is trained.

        Args:
            model: A model of `tf.keras`.
        """
        for optimizer in chain(self):
            if isinstance(optimizer, OptimizerWrapper):
                _models[optimizer] = weakref.ref(model)

    def _model(self) -> tf.keras.Model | None:
        reference = _models.get(self)
        return None if reference is None else reference()

    def _variables_of_model(self) -> Sequence[Any]:
        model = self._model()
        return model.trainable_variables if model is not None and model.built else ()

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Lets the inner optimizer set final values, such as averages, if it has any.

        Args:
            var_list: iterable of the model's trainable variables.
        """
        if hasattr(self.inner_optimizer, "finalize_variable_values"):
            self.inner_optimizer.finalize_variable_values(var_list)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the inner optimizer's slots.

        Only legacy optimizers have any.
        """
        inner = self.inner_optimizer
        return inner.get_slot_names() if hasattr(inner, "get_slot_names") else []

    @do_not_convert
    def minimize(
        self,
        loss: Loss,
        var_list: VarList,
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
            The result of `apply_gradients`.
        """
        pairs = self.compute_gradients(loss, var_list, tape, grad_loss)
        return self.apply_gradients(pairs, name=name)

    def _only_differentiates(self) -> bool:
        return _is_of_keras_mp(type(self).compute_gradients) and self._adapter.only_differentiates

    def _overrides_minimize(self) -> bool:
        return not _is_of_keras_mp(type(self).minimize)

    @do_not_convert
    def compute_gradients(
        self,
        loss: Loss,
        var_list: VarList,
        tape: tf.GradientTape | None = None,
        grad_loss: tf.Tensor | None = None,
    ) -> list[tuple[Any, Any]]:
        """Computes gradients: the first half of `minimize`, with the same arguments.

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
    def apply(
        self,
        grads: Iterable[Any],
        trainable_variables: Iterable[Any] | None = None,
        *,
        scaled: bool = False,
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
    def _unscaled(
        self, pairs: Iterable[tuple[Any, Any]], scaled: bool
    ) -> Iterator[Iterable[tuple[Any, Any]]]:
        """Context manager that unscales gradients early.

        It unscales them as a LossScaleOptimizer further inside would. If an exception leaves it,
        the record of that optimizer's calls is as it was before.

        Args:
            pairs: iterable of (gradient, variable) pairs.
            scaled: bool, as in `apply_gradients`.

        Yields:
            The pairs of unscaled gradients.
        """
        wrappers = (each for each in chain(self) if isinstance(each, OptimizerWrapper))
        scaling = next((each for each in wrappers if hasattr(each, "_scaler")), None)
        if scaling is None and scaled:
            raise ValueError(
                "The gradients cannot be scaled: no LossScaleOptimizer is among the optimizers. "
                f"Received: scaled={scaled!r} for {self!r}"
            )
        if scaling is None:
            yield pairs
            return
        calls = scaling._scaler.calls
        with calls.as_before_an_exception():
            pairs = list(pairs)
            grads = scaling._adapter.widened([g for g, _ in pairs])
            if scaled:
                calls.begin_by_hand(grads)
            grads = calls.unscale_early(grads, [v for _, v in pairs])
            yield [(g, v) for g, (_, v) in zip(grads, pairs, strict=True)]

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

        Args:
            grads_and_vars: iterable of (gradient, variable) pairs.
            name: str. Name of the operation.
            skip_gradients_aggregation: bool. True where the gradients are summed already.
            experimental_aggregate_gradients: bool. False is the older spelling of
                `skip_gradients_aggregation=True`.
            scaled: bool. True if you have multiplied the loss by the loss scale of the
                `LossScaleOptimizer` that is inside. Defaults to False.

        Returns:
            The result of the inner optimizer.

        Raises:
            ValueError: the gradients are said to be scaled, and no optimizer inside scales any.
        """
        is_summed = skip_gradients_aggregation or not experimental_aggregate_gradients
        given = contextlib.nullcontext(grads_and_vars)
        with self._unscaled(grads_and_vars, scaled) if scaled else given as pairs:
            return self._apply(list(pairs), name, not is_summed)

    def _apply(self, pairs: list[tuple[Any, Any]], name: str | None, aggregate: bool) -> Any:
        if self._reduce_dtype is None:
            return self._adapter.apply(pairs, name, aggregate)
        pairs = gradients.checked_pairs(pairs)
        if not pairs:
            return self.iterations
        self.build([variable for _, variable in pairs])
        if replicas.number_of_workers() > 1:
            grads, facts = [gradient for gradient, _ in pairs], {"reduce_dtype": self.reduce_dtype}
            observers.tell(observers.Observer.workers_meet, self, grads, facts)
        how = {"reduce_dtype": self._reduce_dtype, "aggregate": aggregate, "name": name}
        operation, _ = make_step(self._adapter, pairs, **how)
        return self.iterations if operation is None else operation


def _is_of_keras_mp(method: Callable[..., Any]) -> bool:
    return (method.__module__ or "").startswith("keras_mp.")


delegate_rest(OptimizerWrapper)
keras_api.convert_wrappers_to_legacy(OptimizerWrapper, OptimizerWrapper._with_inner)
