"""Paths of the layers and variables of a model: the names on the way down to them."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.support.native_variables import native_variable

# Variables and the layers that have them, by their paths.
_Weights = dict[str, tuple[tf.Variable, tf.keras.layers.Layer]]


def layers_by_path(
    model: tf.keras.layers.Layer, inputs: bool = False
) -> dict[str, tf.keras.layers.Layer]:
    """Returns the layers below a model, each once, by their paths.

    A path consists of the names from below the model down to the layer, with slashes between them,
    such as "encoder/attention". If neighbours have the same name, the second one gets a "#2" at its
    end, and so on.

    Args:
        model: A model of `tf.keras`.
        inputs: bool. Whether InputLayers, which compute nothing, are among them. Defaults to False.

    Returns:
        dict, each layer before those inside of it.

    Example:

    >>> from keras_mp.models.layer_paths import layers_by_path
    >>> inner = tf.keras.Sequential([tf.keras.layers.Dense(1, name="dense")], name="inner")
    >>> list(layers_by_path(tf.keras.Sequential([tf.keras.Input([1]), inner])))
    ['inner', 'inner/dense']
    """
    visited = {id(model)}

    def below(layer: Any, path: str) -> Iterator[tuple[str, tf.keras.layers.Layer]]:
        names: Counter[str] = Counter()
        for child in _children(layer):
            is_left_out = isinstance(child, tf.keras.layers.InputLayer) and not inputs
            if not is_left_out and id(child) not in visited:
                visited.add(id(child))
                names[child.name] += 1
                count = f"#{names[child.name]}" if names[child.name] > 1 else ""
                yield f"{path}{child.name}{count}", child
                yield from below(child, f"{path}{child.name}{count}/")

    return dict(below(model, ""))


def output_layers(model: tf.keras.layers.Layer) -> set[int]:
    """Returns the ids of the layers that make the outputs of a model.

    The layers around these are among them, and all layers of a subclassed model: nothing tells
    which of them make its outputs.

    Args:
        model: A model of `tf.keras`.
    """
    found, waiting = set(), [model]
    for layer in waiting:
        outputs = keras_api.output_layers(layer) if isinstance(layer, tf.keras.Model) else None
        if outputs is None and isinstance(layer, (tf.keras.Model, tf.keras.layers.Wrapper)):
            outputs = _children(layer)
        waiting += [each for each in outputs or () if id(each) not in found]
        found.update(map(id, outputs or ()))
    return found


def variables_by_path(model: tf.keras.layers.Layer) -> _Weights:
    """Returns the trainable variables of a model, each once, by their paths.

    Args:
        model: A model of `tf.keras`, built.

    Returns:
        dict from paths, such as "encoder/dense/kernel", to tuples of the variable and of the
        innermost layer that has it. That is the model itself if the variable is an attribute of the
        model.
    """
    trained = {id(variable) for variable in model.trainable_variables}
    found = _weights_by_path(model).items()
    return {path: (weight, layer) for path, (weight, layer) in found if id(weight) in trained}


def paths_of_weights(model: tf.keras.Model) -> dict[int, str]:
    """Returns the paths of all weights of a model, as in `variables_by_path`.

    Args:
        model: A model of `tf.keras`, built.

    Returns:
        dict to paths from the ids of weights, and from the ids of the `tf.Variable`s inside the
        weights of Keras 3.
    """
    paths: dict[int, str] = {}
    with keras_api.autocast_scope(None):
        for path, (weight, _) in _weights_by_path(model).items():
            paths[id(weight)] = paths[id(native_variable(weight))] = path
    return paths


def variables_inside(model: tf.keras.layers.Layer) -> list[Any]:
    """Returns the variables of a model or layer, even those unknown to Keras 3.

    Args:
        model: A model or layer of `tf.keras`.

    Returns:
        list of `tf.Variable`s, each once: the weights, the variables of metrics and of random
        numbers, and each `tf.Variable` that a layer has as an attribute, or in a list, a dict or a
        `tf.Module`.
    """
    attributes = [list(vars(layer).values()) for layer in keras_api.flatten_layers(model)]
    known = [each for each in model.variables if hasattr(each, "assign")]
    known += _variables_in(attributes)
    return list({id(each): each for each in map(native_variable, known)}.values())


def _variables_in(value: Any) -> Iterator[tf.Variable]:
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, tf.Module) and not isinstance(value, tf.keras.layers.Layer):
        yield from value.variables
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(each)


def _weights_by_path(model: tf.keras.layers.Layer) -> _Weights:
    owners: dict[int, tuple[str, tf.keras.layers.Layer]] = {}
    for path, layer in {"": model, **layers_by_path(model)}.items():
        # The path of a layer that is in several others leads through one of them only.
        inside = {id(weight) for child in _children(layer) for weight in child.weights}
        own = [weight for weight in keras_api.variables(layer) if id(weight) not in inside]
        owners |= {id(weight): (path, layer) for weight in own}
    found: _Weights = {}
    for weight in keras_api.variables(model):
        path, layer = owners[id(weight)]
        name, count = f"{path}/{_name_in(layer, weight)}".lstrip("/"), 1
        while (unique := f"{name}#{count}" if count > 1 else name) in found:
            count += 1
        found[unique] = weight, layer
    return found


def _name_in(layer: tf.keras.layers.Layer, weight: tf.Variable) -> str:
    """Returns the name of a weight, or of the attribute that it is if it has none."""
    # On Keras 2, the name of a variable is a path of scopes.
    name = weight.name.partition(":")[0].rpartition("/")[2]
    if not re.fullmatch(r"[Vv]ariable(_\d+)?", name):
        return name
    return next((each for each, value in vars(layer).items() if value is weight), name)


def _children(layer: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
    # A Sequential of Keras 3 has a functional model inside, which is just another view of it.
    is_sequential = isinstance(layer, tf.keras.Sequential)
    children = layer.layers if is_sequential else keras_api.layers_inside(layer)
    return [child for child in children if not isinstance(child, tf.keras.metrics.Metric)]
