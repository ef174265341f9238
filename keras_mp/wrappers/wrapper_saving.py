"""Saving of an optimizer wrapper: config, weights and its part of a SavedModel."""

import copy
import functools
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api
from keras_mp.step.optimizer_adapter import OptimizerAdapter
from keras_mp.support import features, messages
from keras_mp.tensorflow_api import saving
from keras_mp.tensorflow_api.features import SAVED_MODELS

if TYPE_CHECKING:
    from typing_extensions import Self


class WrapperSaving:
    """The part of an `OptimizerWrapper` that saves and loads it."""

    if TYPE_CHECKING:

        def __init__(self, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None: ...

    _adapter: OptimizerAdapter
    _model: Callable[[], Any]
    _inner_variables: Callable[[], Sequence[Any]]
    inner_optimizer: Any
    _reduce_dtype: tf.DType | None
    variables: Any

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
            vars(self)["_weights_to_come"] = [np.array(weight) for weight in weights]
            return
        check_shapes(self.variables, weights)
        self.inner_optimizer.set_weights(weights)

    def _set_weights_to_come(self) -> None:
        weights = vars(self).pop("_weights_to_come", None)
        if weights is not None:
            with tf.init_scope():
                self.set_weights(weights)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal wrapper.

        A subclass with its own arguments adds them.
        """
        config = {"inner_optimizer": keras_api.serialize_optimizer(self.inner_optimizer)}
        if self._reduce_dtype is not None:
            config["reduce_dtype"] = self._reduce_dtype.name
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "Self":
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

    def _with_inner(self, inner_optimizer: tf.keras.optimizers.Optimizer) -> "Self":
        """Returns a wrapper like this one, with its state, around another optimizer."""
        return type(self).from_config({**self.get_config(), "inner_optimizer": inner_optimizer})

    def __deepcopy__(self, memo: dict[int, Any]) -> "Self":
        # If attributes were copied one by one, delegation would look for the inner optimizer before
        # it is there.
        return self._with_inner(copy.deepcopy(self.inner_optimizer, memo))

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Saves the inner optimizer's variables, if Keras does not save them itself.

        Args:
            store: dict-like, of names and arrays.
        """
        if not self._adapter.is_saved_by_keras:
            for i, variable in enumerate(self._inner_variables()):
                store[str(i)] = tf.convert_to_tensor(variable).numpy()

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Loads the variables of this optimizer, or of one that is not wrapped.

        Args:
            store: dict-like, of names and arrays. If their number is not that of the inner
                optimizer's variables, the variables stay as they are, with a warning.

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
                "The optimizer's variables were not loaded. If the file has an optimizer of the "
                "same kind, for the same model, build the optimizer first: "
                f"`model.optimizer.build(model.trainable_variables)`. Expected {len(variables)} "
                f"variables. Received: {len(saved)}"
            )

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        has_model = self._model() is not None
        if save_type == "savedmodel" and features.is_on(SAVED_MODELS):
            _let_wrappers_write_themselves()
        if save_type == "savedmodel" and has_model and self._adapter.is_revived_without_state:
            messages.warn(
                "tf.keras loads a model from a SavedModel with a new optimizer: without iterations "
                "and slots. To train on after loading, save the model as .keras or .h5, or "
                "use a tf.train.Checkpoint. To serve it, leave the optimizer out "
                "(`model.save(path, include_optimizer=False)`, `model.export(path)`)."
            )
        return super()._trackable_children(save_type, **kwargs)  # pyright: ignore

    def _serialize_to_proto(self, object_proto: Any, **kwargs: Any) -> None:
        # A SavedModel names the family of an optimizer, and at loading only that family takes its
        # slots. A wrapper may be an instance of several bases, so it writes the family of the inner
        # optimizer.
        del kwargs
        innermost = self.inner_optimizer
        while hasattr(innermost, "inner_optimizer"):
            innermost = innermost.inner_optimizer
        revived = saving.revived(innermost)
        if revived is not None:
            object_proto.user_object.CopyFrom(revived)
        object_proto.registered_name = ""  # Loading would look the name up, even without keras_mp.


@functools.cache
def _let_wrappers_write_themselves() -> None:
    """Lets a SavedModel ask wrappers what to write about them."""
    register = saving.register("keras_mp", predicate=lambda value: isinstance(value, WrapperSaving))
    register(WrapperSaving)


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
            "The weights are from another kind of optimizer, or for another model. Nothing was "
            f"set. Expected the shapes {expected}. Received: {received}"
        )
