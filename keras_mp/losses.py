"""Losses that compute in float32, whatever the dtype of the model.

RFC 293, "Loss dtype".

Beside the base class and `Crossentropy`, there is a class for each built-in loss of the running
`tf.keras`, with the same name, the same arguments, and `dtype`.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api, regularizers
from keras_mp.support import dtypes, features, marks, messages
from keras_mp.support import softmax_and_cross_entropy as fusion


@keras_api.register_serializable
class Loss(keras_api.BaseLoss):
    """A base class of losses whose `call` runs in float32, whatever the model's dtype.

    It is a `tf.keras.losses.Loss` and is used like one: override `call`. The arguments of `call`
    are

    - floating-point predictions cast to `dtype`;
    - floating-point labels cast to `dtype`;
    - integer, bool and string labels as they are, so that class ids are not rounded.

    Reduction, masks, sample weights and distribution are Keras's.

    Args:
        reduction: str. As for `tf.keras.losses.Loss`.
        name: str. Name of the loss.
        dtype: The dtype in which `call` runs, `"float32"` by default. Pass `"float64"` to keep
            float64.

    Raises:
        ValueError: `dtype` is not of floating point.

    Example:

    >>> class SumOfSquares(keras_mp.losses.Loss):
    ...     def call(self, y_true, y_pred):
    ...         return tf.reduce_sum(tf.square(y_true - y_pred))
    >>> predictions = tf.fill([1000, 1], tf.constant(10, tf.float16))
    >>> float(SumOfSquares()(tf.zeros([1000, 1]), predictions))  # float16 ends at 65,504
    100000.0

    Source: RFC 293, "Loss dtype".
    """

    dtype: str

    def __init__(self, *args: Any, dtype: str | tf.DType = "float32", **kwargs: Any) -> None:
        super().__init__(*args, dtype=_standardize_dtype(dtype), **kwargs)

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Computes the loss.

        Args:
            y_true: tensor or structure of tensors. The labels.
            y_pred: tensor or structure of tensors. The predictions.
            sample_weight: tensor. Weights of the samples; None weighs all of them alike.

        Returns:
            The reduced loss, of the loss's dtype.
        """
        y_pred = _map_tensors(self._cast, y_pred)
        y_true = _map_tensors(self._cast_label, y_true)
        return self.reduce(y_true, y_pred, sample_weight)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal loss."""
        return {**super().get_config(), "dtype": self.dtype}

    def __repr__(self) -> str:
        config = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"<{type(self).__name__}({config})>"

    def _cast(self, value: tf.Tensor) -> tf.Tensor:
        return marks.cast_prediction(value, self.dtype)

    def _cast_label(self, label: tf.Tensor) -> tf.Tensor:
        return self._cast(label)


class _BuiltIn(Loss):
    """A built-in loss of `tf.keras`, whose class there is `_keras_class`."""

    _keras_class: type
    _section = "Loss dtype"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        call = _signature(self._keras_class).bind(*args, **kwargs)
        call.apply_defaults()
        self._arguments = call.arguments
        super().__init__(**call.arguments)

    def get_config(self) -> dict[str, Any]:
        now = {"name": self.name, "reduction": self.reduction, "dtype": self.dtype}
        return {**self._arguments, **now}

    def _cast(self, value: tf.Tensor) -> tf.Tensor:
        # Labels that are compared with predictions need the same dtype.
        is_number = value.dtype.is_integer or value.dtype.is_bool
        return tf.cast(value, self.dtype) if is_number else super()._cast(value)


class _OfClassIds(_BuiltIn):
    def _cast_label(self, label: tf.Tensor) -> tf.Tensor:
        # A class id is not cast, even a float one: Keras makes an integer of it.
        return label


class _Huber(_BuiltIn):
    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        # Keras 2 itself casts to floatx, even from float64.
        huber = keras_api.LossFunctionWrapper(_huber, delta=self._arguments["delta"])
        return huber.call(y_true, y_pred)


class _CrossEntropy(_BuiltIn):
    """A cross entropy that looks for the logits from which its predictions were made."""

    _activation = "Softmax"
    _section = "Softmax and cross entropy"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._of_logits = self._make_of_logits()
        self._has_warned = False

    @tf.autograph.experimental.do_not_convert
    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        logits = None
        # Keras pads ragged predictions for dense labels, and so pads probabilities with zeros.
        if isinstance(y_true, tf.RaggedTensor) or not isinstance(y_pred, tf.RaggedTensor):
            axis = self._arguments.get("axis", -1)
            logits = fusion.logits_of(y_pred, self._activation, axis)
        if logits is not None:
            if self._arguments["from_logits"]:
                self._warn(
                    f"{type(self).__name__}(from_logits=True) was given probabilities, the output "
                    f"of a {self._activation.lower()}. The loss is computed from the logits, "
                    "which are its input. Leave out `from_logits`, or the activation."
                )
            logits = marks.cast_prediction(fusion.finite(logits), self.dtype)
            return self._of_logits.call(y_true, logits)
        # Keras would take any logits that are noted on a tensor, even those of another activation.
        own = tf.identity(y_pred) if tf.is_tensor(y_pred) else y_pred
        result = super().call(y_true, own)  # pyright: ignore
        if not self._arguments["from_logits"] and (
            fusion.ran_in_float16(y_pred, self._activation)
            # Looking at values takes time, so it is only done where nothing else tells.
            or (not self._has_warned and fusion.lost_to_float16(y_true, y_pred, result))
        ):
            self._warn(
                f"{type(self).__name__} was given probabilities that were computed in float16, in "
                "which small ones are lost, and could not find their logits. Let the model return "
                "logits and pass from_logits=True to the loss, or give the layer with the "
                f'{self._activation.lower()} dtype="float32", and put nothing between it and the '
                "loss."
            )
        return result

    def _make_of_logits(self) -> tf.keras.losses.Loss:
        arguments = {**self._arguments, "from_logits": True}
        taken = inspect.signature(self._keras_class).parameters
        return self._keras_class(**{name: arguments[name] for name in taken})

    def _warn(self, message: str) -> None:
        if not self._has_warned and not keras_api.is_symbolic():
            self._has_warned = True
            messages.warn(message)


class _BinaryCrossEntropy(_CrossEntropy):
    _activation = "Sigmoid"


class _SparseCrossEntropy(_OfClassIds, _CrossEntropy):
    pass


class _FocalCrossEntropy(_CrossEntropy):
    def _make_of_logits(self) -> tf.keras.losses.Loss:
        # Keras's own loss takes the softmax of the logits, and then its logarithm.
        names = ("alpha", "gamma", "label_smoothing", "axis")
        return keras_api.LossFunctionWrapper(
            fusion.categorical_focal_crossentropy,
            **{name: self._arguments[name] for name in names},
        )


_BASES: dict[str, type[_BuiltIn]] = {
    "BinaryCrossentropy": _BinaryCrossEntropy,
    "BinaryFocalCrossentropy": _BinaryCrossEntropy,
    "CTC": _OfClassIds,
    "CategoricalCrossentropy": _CrossEntropy,
    "CategoricalFocalCrossentropy": _FocalCrossEntropy,
    "CategoricalGeneralizedCrossEntropy": _OfClassIds,
    "Circle": _OfClassIds,
    "Huber": _Huber,
    "SparseCategoricalCrossentropy": _SparseCrossEntropy,
}

_DOC = """`tf.keras.losses.{name}`, computed in `dtype`.

    It is a subclass of that class and of `keras_mp.losses.Loss`.

    Args:
        **kwargs: those of `tf.keras.losses.{name}`, which may be passed by position too.
        dtype: The floating-point dtype of the computation, `"float32"` by default.

    Example:

    >>> keras_mp.losses.{name}().dtype
    'float32'

    Source: RFC 293, "{section}".
    """


def _signature(keras_class: type) -> inspect.Signature:
    """Returns the arguments of a loss of `tf.keras`, and `dtype`."""
    signature = inspect.signature(keras_class)
    others = [p for name, p in signature.parameters.items() if name != "dtype"]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    dtype = inspect.Parameter("dtype", kind, default="float32")
    return signature.replace(parameters=[*others, dtype])


def _make(name: str) -> type[Loss]:
    keras_class, base = getattr(tf.keras.losses, name), _BASES.get(name, _BuiltIn)
    loss_class = type(
        name,
        (base, keras_class),
        {
            "__doc__": _DOC.format(name=name, section=base._section),
            "__module__": __name__,
            "__signature__": _signature(keras_class),
            "_keras_class": keras_class,
        },
    )
    return keras_api.register_serializable(loss_class)


# All built-in losses of both Kerases. Those that the running `tf.keras` has are made below.
BinaryCrossentropy: type[Loss]
BinaryFocalCrossentropy: type[Loss]
CTC: type[Loss]
CategoricalCrossentropy: type[Loss]
CategoricalFocalCrossentropy: type[Loss]
CategoricalGeneralizedCrossEntropy: type[Loss]
CategoricalHinge: type[Loss]
Circle: type[Loss]
CosineSimilarity: type[Loss]
Dice: type[Loss]
Hinge: type[Loss]
Huber: type[Loss]
KLDivergence: type[Loss]
LogCosh: type[Loss]
MeanAbsoluteError: type[Loss]
MeanAbsolutePercentageError: type[Loss]
MeanSquaredError: type[Loss]
MeanSquaredLogarithmicError: type[Loss]
Poisson: type[Loss]
SparseCategoricalCrossentropy: type[Loss]
SquaredHinge: type[Loss]
Tversky: type[Loss]

_names = [
    name
    for name, annotation in inspect.get_annotations(sys.modules[__name__]).items()
    if annotation == type[Loss] and hasattr(tf.keras.losses, name)
]
_classes = {name: _make(name) for name in _names}
globals().update(_classes)
_of_keras = {vars(ours)["_keras_class"]: ours for ours in _classes.values()}
_of_function = {keras_class().fn: ours for keras_class, ours in _of_keras.items()}


@keras_api.register_serializable
class Crossentropy(Loss):
    """The cross entropy that fits the shapes.

    It is binary, sparse categorical or categorical. It is what `compile(loss="crossentropy")` means
    in Keras 3. Predictions whose last axis has the size 1 are binary. Otherwise, labels are class
    ids if they have one axis less than the predictions, or a last axis of size 1.

    Args:
        reduction: str. As for `tf.keras.losses.Loss`.
        name: str. Name of the loss.
        dtype: The floating-point dtype of the computation, `"float32"` by default.

    Example:

    >>> loss = keras_mp.losses.Crossentropy()
    >>> float(loss([1], [[0.5, 0.5]])) == float(loss([[0, 1]], [[0.5, 0.5]]))
    True
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._binary = _classes["BinaryCrossentropy"](dtype=self.dtype)
        self._sparse = _classes["SparseCategoricalCrossentropy"](dtype=self.dtype)
        self._categorical = _classes["CategoricalCrossentropy"](dtype=self.dtype)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Computes the cross entropy of each sample."""
        loss = self._categorical
        if y_pred.shape[-1] == 1:
            loss = self._binary
        elif len(y_true.shape) < len(y_pred.shape) or y_true.shape[-1] == 1:
            loss = self._sparse
        return loss.call(loss._cast_label(y_true), y_pred)

    def _cast_label(self, label: tf.Tensor) -> tf.Tensor:
        return label


def get(identifier: Any, dtype: str | tf.DType = "float32") -> Any:
    """Returns the loss of keras_mp for a loss of `tf.keras`, its name, or its config.

    Args:
        identifier: Name, config, function, class or instance of a built-in loss; or anything else
            that `tf.keras.losses.get` takes.
        dtype: The floating-point dtype in which a built-in loss computes, unless it computes in a
            wider one already.

    Returns:
        For built-in losses, a `keras_mp.losses.Loss` with the same arguments. Your own functions
        and losses, also subclasses of built-in ones, are returned as they are, and so is None.

    Raises:
        ValueError: Keras knows no such loss, or `dtype` is not of floating point.

    Example:

    >>> keras_mp.losses.get("mse").dtype
    'float32'
    >>> keras_mp.losses.get(tf.keras.losses.Huber(delta=2.0), dtype="float64").dtype
    'float64'

    Source: RFC 293, "Loss dtype".
    """
    dtype = _standardize_dtype(dtype)
    name = {"name": identifier} if isinstance(identifier, str) else {}
    if name and identifier.lower() in keras_api.CROSSENTROPY_NAMES:
        return Crossentropy(dtype=dtype, **name)
    if name and identifier in _classes:
        return _classes[identifier](dtype=dtype)
    if inspect.isclass(identifier) and issubclass(identifier, tf.keras.losses.Loss):
        return get(identifier(), dtype)
    loss = tf.keras.losses.get(identifier)
    if type(loss) in _of_keras and features.is_on(keras_api.names.LOSSES):
        arguments = keras_api.arguments_of_loss(loss)
        of_both = (dtype, arguments.pop("dtype", dtype))
        widest = max(of_both, key=lambda each: tf.as_dtype(each).size)
        return _of_keras[type(loss)](dtype=widest, **arguments)
    if inspect.isfunction(loss) and loss in _of_function:
        return _of_function[loss](dtype=dtype, **(name or {"name": loss.__name__}))
    return loss


def for_compile(losses: Any, dtype: str) -> Any:
    """Replaces built-in losses given to `Model.compile` by those of keras_mp.

    Args:
        losses: the argument `loss` of `compile`: a loss, or any nest of losses.
        dtype: The dtype that they should compute in.

    Returns:
        The same nest with losses of keras_mp in the place of built-in ones. A loss that Keras does
        not know is left in place, so that `compile` raises its own error.

    Example:

    >>> from keras_mp import losses
    >>> for_both = losses.for_compile({"a": "mse", "b": None}, "float32")
    >>> type(for_both["a"]).__name__, for_both["b"]
    ('MeanSquaredError', None)
    """

    def convert(loss: object) -> object:
        try:
            return get(loss, dtype)
        except (TypeError, ValueError):
            return loss

    return tf.nest.map_structure(convert, losses)


def as_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function get float32 instead of any other floating-point dtype.

    It is a decorator for your own losses, metrics and regularizers, whose arguments keras_mp
    leaves alone: called by yourself, they get what you pass. A decorated function keeps its name
    and is saved like any other.

    Args:
        function: A function of tensors, or a `tf.keras.regularizers.Regularizer`.

    Returns:
        A function that casts floating-point tensors and arrays among its arguments to float32,
        nested ones too. A regularizer becomes a `keras_mp.regularizers.Float32Regularizer`.

    Raises:
        TypeError: `function` cannot be called, or is a loss or a metric object.

    Example:

    >>> @keras_mp.losses.as_float32
    ... def sum_of_squares(y_true, y_pred):
    ...     return tf.reduce_sum(tf.square(y_true - y_pred))
    >>> float(sum_of_squares(tf.zeros([1]), tf.constant([300], tf.float16)))
    90000.0

    Source: RFC 293, "Loss dtype".
    """
    if isinstance(function, tf.keras.regularizers.Regularizer):
        return regularizers.Float32Regularizer(function)
    if isinstance(function, tf.keras.losses.Loss | tf.keras.metrics.Metric | type) or not callable(
        function
    ):
        raise TypeError(
            "`as_float32` is for functions and regularizers. A loss that subclasses "
            "`keras_mp.losses.Loss` computes in float32; a metric that is passed to `compile` "
            f"gets float32 predictions. Received: {function!r} (of type {type(function)})"
        )

    @functools.wraps(function)
    def in_float32(*args: Any, **kwargs: Any) -> object:
        args, kwargs = tf.nest.map_structure(_cast_tensor, (args, kwargs))
        return function(*args, **kwargs)

    return in_float32


def _cast_tensor(value: object) -> object:
    is_one = tf.is_tensor(value) or isinstance(value, np.ndarray)
    return marks.cast_prediction(value, "float32") if is_one else value


def _standardize_dtype(dtype: str | tf.DType | None) -> str:
    if dtype is None:
        return "float32"
    standard = dtypes.parse(getattr(dtype, "compute_dtype", dtype))
    if standard not in dtypes.FLOATING:
        raise ValueError(
            "The `dtype` of a loss must be a floating-point dtype. Expected 'float32', 'float64', "
            f"'bfloat16' or 'float16'. Received: dtype={dtype!r}"
        )
    return standard.name


def _map_tensors(function: Callable[[tf.Tensor], tf.Tensor], structure: Any) -> Any:
    """Applies a function to all tensors of a structure.

    Arrays and numbers are converted to tensors. None stays None. Nested lists of numbers are one
    tensor.
    """
    leaves = tf.nest.flatten(structure)
    if tf.nest.is_nested(structure) and all(map(_is_scalar, leaves)):
        structure = tf.convert_to_tensor(structure)

    def apply(leaf: Any) -> tf.Tensor | None:
        if leaf is None:
            return None
        return function(leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf))

    return tf.nest.map_structure(apply, structure)


def _is_scalar(value: object) -> bool:
    scalars = (bool, int, float, complex, str, bytes, np.generic)
    return isinstance(value, scalars) or (isinstance(value, tf.Tensor) and value.shape.rank == 0)


def _huber(y_true: tf.Tensor, y_pred: tf.Tensor, delta: float) -> tf.Tensor:
    error = y_pred - y_true
    size = tf.abs(error)
    limit = tf.convert_to_tensor(delta, size.dtype)
    inside, outside = 0.5 * tf.square(error), limit * size - 0.5 * tf.square(limit)
    return tf.reduce_mean(tf.where(size <= limit, inside, outside), axis=-1)
