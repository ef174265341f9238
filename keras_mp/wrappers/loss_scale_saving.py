"""Saving of a `LossScaleOptimizer`: config, state and layouts of checkpoints."""

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp import loss_scale as loss_scale_lib
from keras_mp.step.scaler import Scaler
from keras_mp.support import messages
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.wrappers import older_spellings
from keras_mp.wrappers.wrapper_saving import WrapperSaving

if TYPE_CHECKING:
    from typing_extensions import Self


class LossScaleSaving(WrapperSaving):
    """The part of a `LossScaleOptimizer` that saves and loads it."""

    _name: str | None
    _scaler: Scaler
    _skip_nonfinite: bool
    aggregate_in_float16: bool
    dynamic: bool
    policy_in_file: str | None
    reduce_dtype: str
    _config_of_skips: Callable[[], dict[str, Any]]

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Saves the state of the loss scale and of the inner optimizer.

        Args:
            store: dict-like, of names and arrays.
        """
        self._scaler.report.ask()
        super().save_own_variables(store)
        for name, variable in self._state().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Loads the variables of this optimizer, or of one that is not wrapped.

        Args:
            store: dict-like, of names and arrays. Variables that it lacks stay as they are, with a
                warning.

        Raises:
            ValueError: the variables are those of another optimizer.
        """
        super().load_own_variables(store)
        saved, state = set(store.keys()), self._state()
        for name in saved & set(state):
            state[name].assign(store[name][()])
        missing = sorted(set(state) - saved)
        if missing:
            messages.warn(
                f"The file holds no {', '.join(missing)} for the optimizer, so they stay as "
                "they are: it was saved without loss scaling, with another kind of loss scale, or "
                f"with another LossScaleOptimizer. Expected {sorted(state)}. Received: "
                f"{sorted(saved)}"
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal optimizer.

        The config of an optimizer has its current learning rate. In the same way, this one has the
        state of the loss scale, for which an `.h5` file has no other place.
        """
        config = {
            **super().get_config(),
            "name": self._name,
            "loss_scale": self._config_of_scale(),
            "aggregate_in_float16": self.aggregate_in_float16,
            "reduce_dtype": self.reduce_dtype,
            **self._config_of_skips(),
            "skip_nonfinite": self._skip_nonfinite,
        }
        with tf.init_scope():
            if tf.executing_eagerly():
                state = {name: tf.convert_to_tensor(v) for name, v in self._state().items()}
                config["state"] = {name: value.numpy().item() for name, value in state.items()}
                config["state"]["policy"] = self._policy_of_model()
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "Self":
        """Makes an optimizer from a config of this class, or of Keras's own.

        Args:
            config: dict that `get_config` returned: here, on tf_keras, on Keras 3, or in TensorFlow
                2.2 and 2.3.
            custom_objects: dict from names to the classes that they stand for, for the inner
                optimizer.

        Returns:
            An optimizer.
        """
        config = dict(config)
        if "optimizer" in config:
            config["inner_optimizer"] = config.pop("optimizer")
        saved = config.pop("state", {})
        optimizer = super().from_config(config, custom_objects)
        optimizer.policy_in_file = saved.get("policy")
        for name, variable in optimizer._state().items():
            if name in saved:
                variable.assign(saved[name])
        return optimizer

    def keras_layout(self) -> Any:
        """Returns an object with the checkpoint layout of Keras's `LossScaleOptimizer`.

        On Keras 2, both classes lay out their checkpoints alike, so this optimizer itself is
        returned. On Keras 3 they do not, so checkpoints of Keras's class are read, and written for
        it, by way of this object.

        Returns:
            An object for `tf.train.Checkpoint`.

        Example:

        >>> import tempfile
        >>> sgd = tf.keras.optimizers.SGD()
        >>> other = tf.keras.mixed_precision.LossScaleOptimizer(sgd, initial_scale=64.0)
        >>> _ = other.apply_gradients([(tf.constant(64.0), tf.Variable(1.0))])
        >>> optimizer = keras_mp.LossScaleOptimizer("sgd")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = tf.train.Checkpoint(optimizer=other).save(directory + "/checkpoint")
        ...     checkpoint = tf.train.Checkpoint(optimizer=optimizer.keras_layout())
        ...     _ = checkpoint.restore(path).expect_partial()
        >>> float(optimizer.loss_scale()), int(optimizer.iterations)
        (64.0, 1)
        """
        return keras_api.keras_layout(self)

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # In checkpoints, the children that both layouts share come before those that differ.
        # Nothing is restored before all children have been looked up.
        if name == keras_api.KERAS_LAYOUT_CHILD:
            raise ValueError(
                "This is a checkpoint of tf.keras's own LossScaleOptimizer, whose layout in Keras "
                "3 differs from that of other optimizers. Restore it with "
                "`tf.train.Checkpoint(optimizer=optimizer.keras_layout()).restore(path)`. Nothing "
                "was restored."
            )
        if name == older_spellings.INNER_CHILD:
            return self.inner_optimizer
        return super()._lookup_dependency(name, *args, **kwargs)  # pyright: ignore

    def _state(self) -> dict[str, tf.Variable]:
        state = {"steps_skipped": self._scaler.steps_skipped}
        if self.dynamic:
            scale: Any = self._scaler.loss_scale
            state["loss_scale"] = scale.loss_scale
            state["num_good_steps"] = scale.num_good_steps
            state["num_bad_steps"] = scale.num_bad_steps
        return state

    def _policy_of_model(self) -> str | None:
        """Returns the policy of the model's 16-bit layers.

        Without a model, it is the policy in the file.
        """
        model = self._model()
        if model is None:
            return self.policy_in_file
        layers = [each for each in keras_api.flatten_layers(model) if each is not model]
        half = (each for each in layers if each.compute_dtype in LOW_PRECISION_NAMES)
        return next((each.dtype_policy.name for each in half), None)

    def _config_of_scale(self) -> dict[str, Any] | None:
        scaler = self._scaler
        return loss_scale_lib.serialize(scaler.loss_scale) if scaler.calls.scales else None
