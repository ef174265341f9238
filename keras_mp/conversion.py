"""`convert`: the same model, with the same weights, under another policy."""

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.models import low_precision_weights
from keras_mp.models.layer_paths import layers_by_path
from keras_mp.policy import policy_scope
from keras_mp.support.dtypes import FLOATING, LOW_PRECISION_NAMES

_FLOATING_NAMES = tuple(dtype.name for dtype in FLOATING)
# Models and inputs that were loaded may have other policies than the layers that compute.
_NOT_COMPUTING = (tf.keras.Model, tf.keras.layers.InputLayer)


def convert(model: tf.keras.Model, policy: Any) -> tf.keras.Model:
    """Makes a model that differs only in its policy: train mixed, export float32.

    The new model is made from the config of the old one, with other policies in it, and gets its
    weights. If the model has layers that compute in 16 bits, these are converted, and layers that
    were kept in float32 stay in float32. If it has none, all layers are converted. Inputs, and
    layers that do not compute in floating point, are left alone. The result is not compiled. The
    optimizer's state may be carried over with a `tf.train.Checkpoint`.

    If a `MasterWeightOptimizer` keeps the digits of weights in 16 bits, the weights are converted
    with all of their digits. In the other direction, its `assign_float32_weights` takes the weights
    of the old model.

    With a dict, only the layers with the given paths, and the layers inside of them, get other
    policies. A path consists of the names on the way down to a layer, such as "encoder/dense"; the
    path "" stands for all layers that no other path names. `keras_mp.numerics.tune` and `advice`
    give such dicts, which `convert` also takes as JSON.

    Args:
        model: A model of `tf.keras`: Sequential, functional, or a subclass with a `get_config`.
        policy: As for `set_global_policy`: a name, a dtype or a policy. Or a dict from paths of
            layers to such policies; or what `keras_mp.numerics.tune` or `advice()` returned; or the
            dict, or the result of `tune`, as JSON: a text, or a path that ends with ".json".

    Returns:
        A new model of the same class.

    Raises:
        TypeError: `model` is not a model of `tf.keras`.
        ValueError: The model cannot be made from its config, or its weights do not fit into the new
            model; the message names the layer and has its error. Or no layer has one of the paths,
            or the layer's config has no policy. Or the JSON has something else in it.

    Example:

    >>> model = tf.keras.Sequential(
    ...     [tf.keras.Input([2]), tf.keras.layers.Dense(3, dtype="mixed_bfloat16")]
    ... )
    >>> in_float32 = keras_mp.convert(model, "float32")
    >>> model(tf.ones([1, 2])).dtype, in_float32(tf.ones([1, 2])).dtype
    (tf.bfloat16, tf.float32)
    >>> policies = {"": "mixed_bfloat16", in_float32.layers[-1].name: "float32"}
    >>> mixed = keras_mp.convert(in_float32, policies)
    >>> mixed.layers[-1].compute_dtype
    'float32'
    """
    keras_api.check_model(model)
    try:
        weights = low_precision_weights.float32_values(model)
    except ValueError as error:
        raise ValueError(
            f"The model {model.name!r} has no weights yet: build it, or call it, before it is "
            f"converted. Keras said: {error}"
        ) from error
    policies, dtypes = _read(policy), _FLOATING_NAMES
    if isinstance(policies, Mapping):
        _check_paths(model, policies)
    else:
        policies = {"": policies}
        if not compute_dtypes(model).isdisjoint(LOW_PRECISION_NAMES):
            dtypes = LOW_PRECISION_NAMES
    wanted = {path: _scoped(each) for path, each in policies.items()}
    names = _names_of_classes(model)
    classes = {name: cls for cls, name in names.items()}
    with (
        # Layers that a constructor makes, and that have no dtype in a config, follow the model's
        # policy.
        policy_scope(wanted.get("", model.dtype_policy.name)),
        tf.keras.utils.custom_object_scope(classes),
        keras_api.trusted_scope(),
    ):
        try:
            config = model.get_config()
            by_path, functions = layers_by_path(model), {}
            for path, layer_config, serialized_layer in _layer_configs(config):
                layer: Any = by_path.get(path)
                if type(layer) in names:
                    # Other classes may have the name by which Keras registered this one.
                    serialized_layer.update(registered_name=names[type(layer)])
                if isinstance(layer, tf.keras.layers.Lambda):
                    functions |= keras_api.name_functions(layer, layer_config)
                dtype = _nearest(path, wanted)
                if dtype is not None and _compute_dtype(layer_config["dtype"]) in dtypes:
                    layer_config["dtype"] = tf.keras.utils.serialize_keras_object(dtype)
                    if isinstance(layer if path else model, tf.keras.Sequential):
                        _read_float32(layer_config)
            # On Keras 3, a scope hides the one around it.
            with tf.keras.utils.custom_object_scope({**classes, **functions}):
                converted = type(model).from_config(config)
            if model.built and not converted.built:
                converted.build_from_config(model.get_build_config())
        except Exception as error:  # A user's class may raise anything.
            culprit, error = _culprit(model) or (model, error)
            what = "it" if culprit is model else f"its layer {culprit.name!r}"
            raise ValueError(
                f"The model {model.name!r} cannot be converted, since {what} cannot be recreated "
                f"from a config: give the class {type(culprit).__name__} a `get_config` with all "
                "arguments of the constructor, or build the model yourself under the other policy "
                f"and use `set_weights`. Received: {type(error).__name__}: {error}"
            ) from error
    shapes = [[tuple(v.shape) for v in keras_api.variables(m)] for m in (model, converted)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The model {model.name!r} cannot be converted: a model created from its config has "
            "other weights. Layers that the constructor does not create must be in the config. "
            f"Expected shapes {shapes[0]}. Received: {shapes[1]}"
        )
    _check_layers(model, converted, wanted)
    converted.set_weights(weights)
    for layer in keras_api.flatten_layers(converted):
        if isinstance(layer, tf.keras.layers.Normalization):
            # It computes with constants, which on Keras 3 are made of its weights here.
            layer.finalize_state()
    return converted


def _read_float32(sequential_config: dict[str, Any]) -> None:
    """Lets a Sequential model take float32.

    Keras 3 adds an input in the dtype of the first layer where the program has made none.
    """
    for layer_config in sequential_config.get("layers", ()):
        config = layer_config["config"]
        if layer_config["class_name"] == "InputLayer" and config["dtype"] in LOW_PRECISION_NAMES:
            config["dtype"] = "float32"


def _read(policy: Any) -> Any:
    """Returns a policy or a dict of policies, read from a result or JSON if need be."""
    text = policy = getattr(policy, "policies", policy)
    if isinstance(policy, str | os.PathLike) and os.fspath(policy).endswith(".json"):
        text = pathlib.Path(policy).read_text(encoding="utf-8")
    elif not (isinstance(policy, str) and policy.lstrip().startswith("{")):
        return policy
    policies = json.loads(text)
    if isinstance(policies, dict):
        policies = policies.get("policies", policies)
    if not isinstance(policies, dict) or not all(isinstance(v, str) for v in policies.values()):
        raise ValueError(
            "Expected a JSON object that maps paths of layers to names of policies, or the result "
            f"of `keras_mp.numerics.tune(...).to_json()`. Received: {text[:200]}"
        )
    return policies


def compute_dtypes(model: tf.keras.Model) -> set[str]:
    """Returns the dtypes in which the layers of a model compute.

    Models inside of it are left out.

    Args:
        model: A model of `tf.keras`.
    """
    layers = keras_api.flatten_layers(model)
    return {layer.compute_dtype for layer in layers if not isinstance(layer, _NOT_COMPUTING)}


def paths_in_config(model: tf.keras.Model) -> set[str]:
    """Returns the paths of the layers whose policies are in the config of a model.

    Args:
        model: A model of `tf.keras` with a `get_config`.
    """
    return {path for path, *_ in _layer_configs(model.get_config())}


def _names_of_classes(model: tf.keras.Model) -> dict[type, str]:
    """Returns names for the classes of layers that Keras does not find by their names.

    They are their own names, where no other class has the same.
    """
    names: dict[type, str] = {}
    for cls in dict.fromkeys(map(type, keras_api.flatten_layers(model))):
        # Some of Keras's applications have their own classes. `Add` is a layer and an operation.
        is_public = issubclass(cls, tf.keras.Model) or hasattr(tf.keras.layers, cls.__name__)
        if not is_public or cls.__module__.partition(".")[0] != keras_api.ROOT_PACKAGE:
            is_taken = cls.__name__ in names.values()
            names[cls] = f"{cls.__name__} ({len(names)})" if is_taken else cls.__name__
    return names


def _culprit(layer: tf.keras.layers.Layer) -> tuple[tf.keras.layers.Layer, Exception] | None:
    """Returns the innermost layer that cannot be made from its config, or None.

    It comes with the error.
    """
    try:
        type(layer).from_config(layer.get_config())
        return None
    except Exception as error:
        found = (layer, error)
    # Other layers make the layers inside of them in their constructors, without configs.
    is_model = isinstance(layer, tf.keras.Model) and keras_api.output_layers(layer) is not None
    has_configs = is_model or isinstance(layer, tf.keras.layers.Wrapper)
    inside = keras_api.layers_inside(layer) if has_configs else ()
    return next(filter(None, map(_culprit, inside)), found)


def _check_paths(model: tf.keras.Model, paths: Iterable[str]) -> None:
    layers, in_configs = {"": model, **layers_by_path(model)}, paths_in_config(model)
    # The policy of a model is the policy of its layers.
    models = {path for path, layer in layers.items() if isinstance(layer, tf.keras.Model)}
    known = [path for path in layers if path in in_configs | models]
    unknown = sorted(set(paths) - set(known))
    if unknown:
        raise ValueError(
            f"The model {model.name!r} has no layers with the paths {unknown}, or they are created "
            "by the layer or model that contains them, whose config has no policies for them: then "
            "name that layer, or let its class take policies for them. Expected some of "
            f"{known}. Received: {list(paths)}"
        )


def _check_layers(
    model: tf.keras.Model, converted: tf.keras.Model, wanted: Mapping[str, Any]
) -> None:
    """Gives layers the names that their configs do not have, and checks their dtypes.

    It refuses a model whose 16-bit layers are not in the dtype that was asked for.
    """
    copies = layers_by_path(converted).values()
    for (path, old), new in zip(layers_by_path(model).items(), copies, strict=True):
        if new.name != old.name:
            keras_api.rename(new, old.name)
        policy = _nearest(path, wanted)
        computes = not isinstance(old, _NOT_COMPUTING) and old.compute_dtype in LOW_PRECISION_NAMES
        if policy is not None and computes and new.compute_dtype != policy.compute_dtype:
            raise ValueError(
                f"The model {model.name!r} cannot be converted, since its layer {old.name!r} "
                f"stays in {new.compute_dtype}: let its class {type(old).__name__} pass its "
                "argument `dtype` to its base class, and to the layers that it creates. Received: "
                f"{policy.name!r}"
            )


def _nearest(path: str, policies: Mapping[str, Any]) -> Any:
    """Returns the policy of a layer, or of the innermost layer around it, or None."""
    while path and path not in policies:
        path = path.rpartition("/")[0]
    return policies.get(path)


def _scoped(policy: Any) -> Any:
    with policy_scope(policy) as scoped:
        return scoped


def _layer_configs(
    config: object, path: str | None = None, around: dict[str, Any] | None = None
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields the paths and configs of layers in the config of a model, however deep.

    The third item is the dict around the config, which names the class; it is empty if there is
    none.
    """
    if isinstance(config, dict):
        is_layer = {"trainable", "dtype"} <= config.keys()  # an input is not trainable
        if is_layer or {"name", "layers"} <= config.keys():  # a model of Keras 2 has no dtype
            # The first config is the model's own. Keras 3 leaves the name out of a config if the
            # constructor of the class does not call the rest of its arguments `kwargs`.
            path = "" if path is None else f"{path}/{config.get('name', '')}".lstrip("/")
        if is_layer:
            yield path or "", config, {} if around is None else around
        for key, value in config.items():
            yield from _layer_configs(value, path, config if key == "config" else None)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _layer_configs(value, path)


def _compute_dtype(dtype: object) -> str | None:
    """Returns the compute dtype of a `dtype` in a config; None if that is no policy."""
    name = dtype.get("config", {}).get("name") if isinstance(dtype, dict) else dtype
    return name.removeprefix("mixed_") if isinstance(name, str) else None
