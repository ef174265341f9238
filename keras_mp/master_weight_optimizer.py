"""The optimizer wrapper that trains weights in 16 bits as if they were float32.

RFC 293 keeps variables in float32. Large models are fine-tuned with variables in 16 bits, which the
optimizers of `tf.keras` cannot train: in bfloat16, 0.999 is 1, and 1 + 2**-9 is 1.
"""

import random
import re
from collections.abc import Iterable, MutableMapping
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.all_reduce_optimizer import AllReduceOptimizer
from keras_mp.master_weights import methods
from keras_mp.master_weights.adapter import Float32Adapter, size_in_bytes
from keras_mp.optimizer_wrapper import OptimizerWrapper
from keras_mp.support import dtypes, validation
from keras_mp.support.autograph import do_not_convert
from keras_mp.support.native_variables import native_variable as native
from keras_mp.wrappers.inner_optimizers import chain

# Wrappers that go around a `MasterWeightOptimizer`.
OUTER_WRAPPERS: tuple[type, ...] = (keras_api.KerasLossScaleOptimizer, AllReduceOptimizer)
_SLOT_DTYPES = ("float32", "bfloat16")
_KEPT = re.compile("(remainder|carry|copy)_[0-9]+")


@keras_api.register_serializable
class MasterWeightOptimizer(OptimizerWrapper):
    """An optimizer that sees float32 weights where a model has them in 16 bits.

    The inner optimizer computes in float32 and keeps float32 slots. One of three methods keeps the
    digits of its weights that the variables in 16 bits leave out:

    - `"split"`: the remainder, beside the weight. With a bfloat16 weight it makes up the float32
      weight, bit for bit, so that training is that of `mixed_bfloat16`. It takes 17 bits: 16, and
      one that tells in which direction a tie was rounded. With a float16 weight it takes 16 bits,
      and nothing is lost from 2**-16 to 65520; smaller weights lose digits below 2**-39.
    - `"copy"`: a float32 copy of the weight, in 32 bits.
    - `"stochastic_rounding"`: nothing. A weight is rounded up or down at random, so that its
      expected value is right. Each step draws other numbers, the same on all replicas and workers.

    Variables in other dtypes are left to the inner optimizer. The variables are seen in float32 one
    after the other, so no float32 copy of all weights is in memory. A weight that is set by other
    means, such as `model.load_weights`, is taken as it is.

    A `LossScaleOptimizer` or an `AllReduceOptimizer` goes around it.

    Args:
        inner_optimizer: The optimizer to wrap: an instance, a name such as `"adam"`, or a config.
        method: `"split"` (the default), `"copy"` or `"stochastic_rounding"`.
        slot_dtype: `"float32"` (the default) or `"bfloat16"`. The dtype of the inner optimizer's
            slots; slots in bfloat16 are rounded stochastically.
        seed: int. The seed of stochastic rounding. Defaults to None, for a seed that
            `tf.keras.utils.set_random_seed` determines.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer of `tf.keras`, or it is one that goes
            around a MasterWeightOptimizer.
        ValueError: `method` or `slot_dtype` is another one.

    Example:

    >>> optimizer = keras_mp.MasterWeightOptimizer(tf.keras.optimizers.SGD(2.0**-10))
    >>> v = tf.Variable(1.0, dtype=tf.bfloat16)
    >>> for _ in range(4):
    ...     _ = optimizer.apply_gradients([(tf.constant(1.0, tf.bfloat16), v)])
    >>> [weight] = optimizer.float32_weights()
    >>> float(weight), float(v)
    (0.99609375, 0.99609375)

    Source: for PyTorch, apex and DeepSpeed keep copies, bf16-fused-adam the lower half, and torchao
    rounds stochastically.
    """

    _adapter: Float32Adapter

    def __init__(
        self,
        inner_optimizer: Any,
        method: str = "split",
        slot_dtype: str | tf.DType = "float32",
        seed: int | None = None,
    ) -> None:
        super().__init__(inner_optimizer)
        slots: Any = dtypes.parse(slot_dtype)
        for name, given, value, known in (
            ("method", method, method, methods.NAMES),
            ("slot_dtype", slot_dtype, getattr(slots, "name", None), _SLOT_DTYPES),
        ):
            if value not in known:
                raise ValueError(f"`{name}` must be one of {known}. Received: {name}={given!r}")
        seed = validation.integer_or_none("seed", seed) or random.randint(1, 10**9)
        adapter = Float32Adapter(self._adapter, method, slots, seed, self._track_trackable)
        self.__dict__.update(_adapter=adapter, _method=method, _slot_dtype=slots, _seed=seed)

    def _refuse(self, optimizer: Any) -> None:
        refused = (*OUTER_WRAPPERS, MasterWeightOptimizer)
        wrong = [type(each).__name__ for each in chain(optimizer) if isinstance(each, refused)]
        if wrong:
            raise TypeError(
                f"A MasterWeightOptimizer goes inside of a {wrong[0]}, not around it: {wrong[0]}"
                f"(MasterWeightOptimizer(optimizer)). Received: inner_optimizer={optimizer!r}"
            )

    def __repr__(self) -> str:
        slots = "" if self._slot_dtype == tf.float32 else f", slot_dtype={self.slot_dtype!r}"
        how = f"method={self._method!r}{slots}"
        return f"<{type(self).__name__} of {self.inner_optimizer!r}, {how}>"

    method = property(lambda self: self._method, doc="How the digits of weights are kept.")
    slot_dtype = property(lambda self: self._slot_dtype.name, doc="The dtype of their slots.")

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables, and those that are kept beside the weights."""
        variables = super().variables
        variables.extend(self._adapter.beside.values())
        return variables

    def get_weights(self) -> list[Any]:
        """Returns the values of `variables`, as arrays."""
        return [tf.convert_to_tensor(variable).numpy() for variable in self.variables]

    def _own_variables(self) -> dict[str, tf.Variable]:
        return self._adapter.beside.copy()

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Loads variables that `save_own_variables` saved.

        The inner optimizer alone may have saved them as well.

        Args:
            store: dict-like, of names and arrays. If it has no variables from beside the weights,
                the float32 weights become those in 16 bits.

        Raises:
            ValueError: the variables are those of another optimizer, or of one that kept the digits
                of its weights by another method.
        """
        for name in set(store.keys()):
            self._refuse_other_method(name)
        super().load_own_variables(store)

    def _refuse_other_method(self, name: str) -> None:
        match = _KEPT.fullmatch(name)
        of_method = {"split": ("remainder", "carry"), "copy": ("copy",)}.get(self._method)
        if match and of_method is not None and match[1] not in of_method:
            raise ValueError(
                "The file keeps the digits of float32 weights by another method. Load it with an "
                "optimizer of that method, and pass the result of its `float32_weights()` to "
                f"`assign_float32_weights` of this one. Expected {of_method}, of "
                f"method={self._method!r}. Received: {match[1]!r}"
            )

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._refuse_other_method(name)
        return super()._lookup_dependency(name, *args, **kwargs)

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
        # A legacy optimizer makes a slot as soon as a checkpoint has a value for it. Since the
        # order in which variables are made decides how they are rounded, all of them are made in
        # the usual order.
        self.build([*self._variables_of_model(), kwargs["variable"]])
        [kwargs["variable"]] = self._adapter.views([kwargs["variable"]])
        return self.inner_optimizer._create_or_restore_slot_variable(*args, **kwargs)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        is_saved_by_keras = self._adapter.is_saved_by_keras
        if save_type == "savedmodel" and self._adapter.beside and not is_saved_by_keras:
            raise ValueError(
                "When tf.keras loads the SavedModel, it would create the slots of a legacy "
                "optimizer in 16 bits, and fail. To serve the model, leave the optimizer out "
                "(`model.save(path, include_optimizer=False)`, `model.export(path)`); to train "
                f"on, use a tf.train.Checkpoint. Received: {self!r}"
            )
        return {**super()._trackable_children(save_type, **kwargs), **self._adapter.beside}

    def float32_weights(self) -> list[tf.Tensor]:
        """Returns the weights as the inner optimizer sees them.

        Returns:
            list of tensors, in the order of the variables that the optimizer was built with.

        Raises:
            ValueError: it has not been built yet.
        """
        views = self.as_float32(self._adapter.built_variables())
        return [tf.convert_to_tensor(view) for view in views]

    def as_float32(self, variables: Iterable[Any]) -> list[Any]:
        """Returns variables as the inner optimizer sees them.

        Args:
            variables: iterable of variables.

        Returns:
            list of variables: float32 views of those in 16 bits that the optimizer was built with;
            all others as they are.
        """
        return self._adapter.views(variables)

    def bytes_a_weight(self) -> float | None:
        """Returns the number of bytes that a weight takes, or None if not built.

        They are the bytes of its variable, of the variables beside it and of its slots.

        Example:

        >>> optimizer = keras_mp.MasterWeightOptimizer(tf.keras.optimizers.Adam())
        >>> optimizer.build([tf.Variable(tf.zeros([1000], tf.bfloat16))])
        >>> round(optimizer.bytes_a_weight(), 1)  # 2 + 2 and a bit + 4 + 4
        12.1
        """
        if not self._adapter.is_built:
            return None
        weights = self._adapter.built_variables()
        count = sum(weight.shape.num_elements() for weight in map(native, weights))
        variables = [*weights, *self.variables]
        return sum(size_in_bytes(variable) for variable in variables) / max(count, 1)

    def assign_float32_weights(self, weights: Iterable[Any]) -> None:
        """Sets the weights with all of their digits.

        Args:
            weights: iterable of arrays or tensors, as `float32_weights` returns them, or as a model
                with float32 variables has them.

        Raises:
            ValueError: the optimizer has not been built yet, or has another number of variables.
        """
        views = self.as_float32(self._adapter.built_variables())
        for view, weight in zip(views, list(weights), strict=True):
            view.assign(weight)

    @do_not_convert
    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Lets the inner optimizer set the final values of variables, such as averages.

        Args:
            var_list: iterable of the model's trainable variables.
        """
        with self._adapter.updates.step():
            super().finalize_variable_values(self._adapter.views(var_list))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal optimizer."""
        how = {"method": self.method, "slot_dtype": self.slot_dtype, "seed": self._seed}
        return {**super().get_config(), **how}
