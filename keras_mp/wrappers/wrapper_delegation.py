"""The attributes of a wrapper that are those of the inner optimizer.

RFC 293, "LossScaleOptimizer __getattribute__ and __setattr__ delegation".
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.wrappers.wrapper_saving import WrapperSaving

_ALIASES = {"lr": "learning_rate"}
# The methods that tf.train.Checkpoint calls on an optimizer with slots.
_CHECKPOINTS = ("_create_or_restore_slot_variable", "_restore_slot_variable")


class WrapperDelegation:
    """The part of an `OptimizerWrapper` that delegates to the inner optimizer."""

    # The name under which `DelegatingTrackable` looks for it.
    _trackable: Any
    _hyperparameters: set[str]

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        name = _ALIASES.get(name, name)
        if name in own.get("_hyperparameters", ()):
            return getattr(own["_trackable"], name)
        try:
            return object.__getattribute__(self, name)
        except AttributeError as error:
            inner = own.get("_trackable")
            if name in keras_api.READ_BY_CALLBACKS and inner is not None:
                return getattr(inner, name)
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

    def _set_own(self, **attributes: Any) -> None:
        """Sets attributes of the wrapper itself.

        Neither Keras nor checkpoints track them.
        """
        self.__dict__.update(attributes)

    def __dir__(self) -> list[str]:
        # Keras saves all of these by name. The inner optimizer is saved only once, as
        # `inner_optimizer`.
        names = set(object.__dir__(self)) | self._hyperparameters | {"lr"}
        return sorted(names - {"_trackable"})

    @property
    def inner_optimizer(self) -> tf.keras.optimizers.Optimizer:
        """The optimizer that is wrapped. Read-only."""
        return self._trackable

    @property
    def name(self) -> str:
        """The inner optimizer's name."""
        inner = self.inner_optimizer
        return getattr(inner, "name", None) or inner.get_config()["name"]

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of steps."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, value: tf.Variable) -> None:
        self.inner_optimizer.iterations = value

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float | tf.Tensor | Callable[..., Any]) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def optimizers(self) -> Any:
        """The optimizers in Keras 3's `MultiOptimizer`.

        Each of them has its own learning rate.

        Raises:
            AttributeError: the inner optimizer has no others inside.
        """
        return self.inner_optimizer.optimizers

    @property
    def built(self) -> bool:
        """Whether the inner optimizer has made its variables."""
        return self.inner_optimizer.built

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's variables, as a list that may also be called."""
        return _CallableList(self._inner_variables())

    def _inner_variables(self) -> Any:
        variables = self.inner_optimizer.variables
        return variables() if callable(variables) else variables

    @property
    def weights(self) -> list[Any]:
        """The inner optimizer's variables, under the older name."""
        return self.variables


def names_of_wrappers(cls: type) -> set[str]:
    """Returns the names that wrapper classes define, which no hyperparameter can hide.

    Args:
        cls: type. A subclass of `OptimizerWrapper`, or itself.
    """
    classes = cls.__mro__[: cls.__mro__.index(WrapperSaving) + 1]
    return {name for wrapper in classes for name in vars(wrapper)}


class _CallableList(list):
    """A list that may be called.

    Some families of optimizers have `variables()`, others `variables`.
    """

    def __call__(self) -> "_CallableList":
        return self


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner_optimizer, name)(*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"OptimizerWrapper.{name}"
    method.__doc__ = f"Calls `{name}` of the inner optimizer."
    return method


def delegate_rest(cls: type) -> None:
    """Delegates each public method of Keras's base classes that the wrapper lacks.

    This includes methods that a newer Keras adds there.

    Args:
        cls: `OptimizerWrapper`.
    """
    for base in keras_api.OPTIMIZER_BASES:
        for name in dir(base):
            is_method = callable(getattr(base, name))
            is_ours = any(name in vars(each) for each in (cls, WrapperDelegation, WrapperSaving))
            if is_method and not is_ours and (not name.startswith("_") or name in _CHECKPOINTS):
                setattr(cls, name, _delegate(name))


def _only_inner(wrapper: WrapperDelegation, name: str) -> str:
    return (
        f"{type(wrapper).__name__} has no attribute {name!r}, only its inner optimizer has: use "
        f"`optimizer.inner_optimizer.{name}`. The wrapper only passes on hyperparameters, here "
        f"{sorted(wrapper._hyperparameters | {'learning_rate'})}."
    )
