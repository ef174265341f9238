"""A table of the dtypes in a model, with notes on possible mistakes."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_mp import hardware, keras_api
from keras_mp.hardware import devices
from keras_mp.layer_calls import model_outputs
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.models import layer_paths, low_precision_weights
from keras_mp.support import text_tables

_DIGITS = {"float16": "3 digits, and those below 3e-8 are 0", "bfloat16": "2 digits"}
_UNKNOWN = "-"

# An output layer with a smaller share of the parameters takes too little time to be worth a note.
_LARGE_SHARE = 0.1


def summary(model: tf.keras.Model, print_fn: Callable[[str], Any] | None = None) -> None:
    """Prints in which dtype each layer computes, keeps variables and returns.

    The first line says so if the model returns as float32 what its last layers compute in 16 bits.
    Layers inside of others are indented. Numbers in the last column refer to notes below the table.
    The notes are about:

    - a softmax in float16 or bfloat16 whose probabilities the model returns in that dtype, as with
      a policy of Keras or one with `model_outputs=None`;
    - units or filters of a 16-bit layer that are not a multiple of 8, where this machine has
      tensor cores, which are fastest with those (not of an output layer, a head for a few classes
      say, unless a tenth of the model's parameters are in it);
    - a layer that does not follow the model's policy, or does not cast its inputs.

    Below the table are the method by which a `MasterWeightOptimizer` keeps the digits of weights in
    16 bits, and the bytes that a weight takes, including slots; a warning if no layer follows the
    model's policy; the table that says which kernels are slow; and whether the dtypes in which the
    model computes are fast on this machine.

    Output dtypes are those that Keras found when it connected the layers. (Keras 3 believes that a
    Lambda returns its compute dtype.) "-" stands for unknown values: a subclassed model has no
    outputs that Keras knows of, and a model that is not built has no parameters.

    Args:
        model: A model of `tf.keras`: Sequential, functional or subclassed, built or not.
        print_fn: Called with each line, without its end. Defaults to `print`.

    Raises:
        TypeError: `model` is not a model of `tf.keras`.

    Example:

    >>> layers = tf.keras.layers
    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([8]), layers.Dense(16, name="a"), layers.Dense(8, "softmax", name="b")],
    ...     name="small",
    ... )
    >>> keras_mp.summary(model)
    Model 'small' (Sequential), policy float32
    <BLANKLINE>
    Layer      Compute  Variables  Output   Parameters  Notes
    a (Dense)  float32  float32    float32         144
    b (Dense)  float32  float32    float32         136
    <BLANKLINE>
    Parameters: 280, trainable: 280
    """
    keras_api.check_model(model)
    for line in _lines(model):
        (print_fn or print)(line)


def policy_not_followed(model: tf.keras.Model, optimizers: Any) -> str | None:
    """Returns a warning if no layer of a 16-bit model computes in 16 bits.

    It is a 16-bit model by its own policy, or by the policy under which it was saved: a class may
    not save a policy, but then the optimizer's config names it.

    Args:
        model: A model of `tf.keras`.
        optimizers: An optimizer, None, or a structure of them, as the model is compiled with.

    Returns:
        The problem and the cure, or None.
    """
    if keras_api.output_layers(model) is not None:  # Then its config holds its layers' dtypes.
        return None
    no_layers = (tf.keras.Model, tf.keras.layers.InputLayer, tf.keras.metrics.Metric)
    layers = [each for each in keras_api.flatten_layers(model) if not isinstance(each, no_layers)]
    dtypes = {layer.compute_dtype for layer in layers if _is_floating(layer.compute_dtype)}
    if not dtypes or dtypes & _DIGITS.keys():
        return None
    if model.compute_dtype in _DIGITS:
        name, problem = model.dtype_policy.name, "Its own policy is"
        cure = "pass dtype=self.dtype_policy to the layers that its class makes"
    else:
        saved_under = (optimizer.policy_in_file for optimizer in wrappers_among(optimizers))
        name, problem = next(filter(None, saved_under), None), "It was saved under"
        cure = "let its class return the dtype in `get_config`"
    return name and (
        f"{problem} {name!r}, and none of its layers computes in 16 bits. If it comes from a file, "
        f'load it under keras_mp.policy_scope("{name}"), or {cure}. (If it was saved in float32, '
        f'keras_mp.convert(model, "{name}") changes its dtype.)'
    )


def _lines(model: tf.keras.Model) -> Iterator[str]:
    outputs = layer_paths.output_layers(model)
    layers = layer_paths.layers_by_path(model, inputs=True)
    narrow = [layer for layer in layers.values() if layer.compute_dtype in _DIGITS]
    ends = [layer.dtype_policy for layer in narrow if id(layer) in outputs]
    is_widened = any(model_outputs.returns_float32(model, each) for each in ends)
    policy = model.dtype_policy.name + (", returns float32" if is_widened else "")
    yield f"Model {model.name!r} ({type(model).__name__}), policy {policy}"
    yield ""
    notes: dict[str, int] = {}
    rows = [["Layer", "Compute", "Variables", "Output", "Parameters", "Notes"]]
    for path, layer in layers.items():
        of_layer = _notes(layer, id(layer) in outputs, model)
        marks = [f"[{notes.setdefault(note, len(notes) + 1)}]" for note in of_layer]
        name = f"{'  ' * path.count('/')}{layer.name} ({type(layer).__name__})"
        # An input computes nothing.
        is_input = isinstance(layer, tf.keras.layers.InputLayer)
        dtypes = (None, None) if is_input else (layer.compute_dtype, layer.variable_dtype)
        cells = *(dtype or _UNKNOWN for dtype in dtypes), _output_dtypes(layer), _parameters(layer)
        rows.append([name, *cells, " ".join(marks)])
    yield from text_tables.aligned(rows, left=(0, 1, 2, 3, 5))
    yield ""
    yield f"Parameters: {_parameters(model)}, trainable: {_parameters(model, 'trainable_weights')}"
    for line in low_precision_weights.bytes_of_weights(model):
        yield from text_tables.wrapped(line)
    for note, mark in notes.items():
        yield from text_tables.wrapped(f"[{mark}] {note}", " " * len(f"[{mark}] "))
    not_followed = policy_not_followed(model, getattr(model, "optimizer", None))
    if not_followed:
        yield from text_tables.wrapped(not_followed)
    computed_in = sorted({layer.compute_dtype for layer in narrow})
    if any(map(hardware.why_slow, computed_in)):
        yield "Where the time goes: print(keras_mp.numerics.profile(model, (x, y)))"
    for dtype in computed_in:
        yield from text_tables.wrapped(devices.verdict(dtype))


def _output_dtypes(layer: tf.keras.layers.Layer) -> str:
    try:
        outputs = tf.nest.flatten(layer.output)
    except (AttributeError, ValueError, RuntimeError):
        return _UNKNOWN
    return ", ".join(dict.fromkeys(tf.as_dtype(output.dtype).name for output in outputs))


def _parameters(layer: tf.keras.layers.Layer, which: str = "weights") -> str:
    return f"{_count(layer, which):,}" if layer.built else _UNKNOWN


def _count(layer: tf.keras.layers.Layer, which: str = "weights") -> int:
    # Keras 2 has a vocabulary among the weights.
    weights = getattr(layer, which) if layer.built else ()
    return sum(math.prod(weight.shape) for weight in weights if hasattr(weight, "shape"))


def _notes(layer: tf.keras.layers.Layer, is_output: bool, model: tf.keras.Model) -> Iterator[str]:
    if isinstance(layer, tf.keras.layers.InputLayer) or not _is_floating(layer.compute_dtype):
        return
    dtype, is_low = layer.compute_dtype, layer.compute_dtype in _DIGITS
    activation = getattr(layer, "activation", None)
    is_softmax = activation is tf.keras.activations.softmax
    is_softmax |= isinstance(layer, tf.keras.layers.Softmax)
    is_rounded = is_low and is_output and is_softmax
    if is_rounded and not model_outputs.returns_float32(model, layer.dtype_policy):
        yield (
            f"A softmax output in {dtype}: probabilities have about {_DIGITS[dtype]}. Pass "
            'dtype="float32" to the layer, or give the softmax one of its own: '
            'Activation("softmax", dtype="float32").'
        )
    if is_low and (size := _slow_size(layer, is_output, model)):
        yield f"{size} units or filters: tensor cores are fastest with multiples of 8."
    if (dtype, layer.variable_dtype) != (model.compute_dtype, model.variable_dtype):
        note = (
            f"Its policy is {layer.dtype_policy.name}, not the model's: it was given a dtype of "
            "its own, or made under another global policy."
        )
        if is_low and model.compute_dtype not in _DIGITS:
            note += " Or the model is from a file: Keras does not store the policy of a model."
        elif is_output and not is_low and model.compute_dtype in _DIGITS:
            note += " That is right for an output."
        yield note
    if dtype != layer.variable_dtype and not keras_api.casts_inputs(layer):
        yield "It does not cast its inputs: it was created with autocast=False."


def _slow_size(layer: tf.keras.layers.Layer, is_output: bool, model: tf.keras.Model) -> int | None:
    """Returns the units or filters of a layer if another number would be faster here."""
    size = getattr(layer, "units", None) or getattr(layer, "filters", None)
    is_odd = isinstance(size, int) and size % 8 and not keras_api.layers_inside(layer)
    if not is_odd or not hardware.has_tensor_cores(layer.compute_dtype):
        return None
    return size if not is_output or 0 < _count(layer) >= _LARGE_SHARE * _count(model) else None


def _is_floating(dtype: str | None) -> bool:
    return dtype is not None and tf.as_dtype(dtype).is_floating
