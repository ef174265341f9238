"""Layers and activations of `tf.keras` and functions of TensorFlow, and what they are called on."""

import functools
import inspect
import re

import tensorflow as tf

import keras_mp
from tests.op_autocast import operations

L, A = tf.keras.layers, tf.keras.activations
VECTOR, SEQUENCE, IMAGE, VOLUME = [4, 16], [4, 8, 16], [2, 12, 12, 3], [1, 6, 6, 6, 4]
_OF_RANK = {"1D": SEQUENCE, "2D": IMAGE, "3D": VOLUME}
# Arguments, what a layer is called on if it is not what its rank says, and what names of layers
# begin with: the longest is taken.
_ARGUMENTS = {
    name: (arguments, shape)
    for arguments, shape, names in (
        ((4, 3), None, "ConvLSTM Conv SeparableConv LocallyConnected"),
        ((3,), None, "DepthwiseConv"),
        ((2,), None, "Adaptive AveragePooling"),
        ((0.5,), None, "SpatialDropout"),
        ((0.5,), VECTOR, "Dropout AlphaDropout Gaussian"),
        ((), VECTOR, "ActivityRegularization"),
        (("relu",), VECTOR, "Activation"),
        ((8,), VECTOR, "Dense"),
        ((10, 4), VECTOR, "Embedding ReversibleEmbedding"),
        ((3,), VECTOR, "RepeatVector"),
        (((4, 4),), VECTOR, "Reshape"),
        ((8,), SEQUENCE, "GRU LSTM SimpleRNN"),
        (("abc,cd->abd", (None, 8)), SEQUENCE, "EinsumDense"),
        (((2, 1),), SEQUENCE, "Permute"),
        ((), IMAGE, "BatchNormalization RandomColorJitter RandomErasing RandomFlip"),
        ((), IMAGE, "RandomGaussianBlur AutoContrast Contrast Equalization Solarization"),
        ((3,), IMAGE, "GroupNormalization"),
        ((4,), IMAGE, "RandomPosterization"),
        ((0.2,), IMAGE, "Random"),
        ((0.5,), IMAGE, "Rescaling"),
        ((6, 6), IMAGE, "Resizing CenterCrop RandomCrop"),
        ((), [2, 4096], "MelSpectrogram"),
        ((), [2, 4096, 1], "STFTSpectrogram"),
    )
    for name in names.split()
}
_MERGED = ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")
_NOT_TRIED = {
    # They are no layers to call, or need more than arguments and a shape.
    *("AbstractRNNCell", "DenseFeatures", "FlaxLayer", "InputLayer", "JaxLayer", "Lambda", "Layer"),
    *("GRUCell", "GroupedQueryAttention", "GroupQueryAttention", "LSTMCell", "MaxNumBoundingBoxes"),
    *("Pipeline", "SimpleRNNCell", "StackedRNNCells", "TFSMLayer", "TorchModuleWrapper", "Wrapper"),
    # XLA has no strings and tables, and not all of images.
    *("AugMix", "CategoryEncoding", "CutMix", "MixUp", "RandomContrast", "RandomElasticTransform"),
    *("RandAugment", "RandomHeight", "RandomPerspective", "RandomShear", "RandomWidth"),
    *("Discretization", "HashedCrossing", "Hashing", "IntegerLookup", "StringLookup"),
    *("TextVectorization", "RandomRotation", "RandomTranslation", "RandomZoom"),
}
_OTHERS = {
    "Attention": (lambda: L.Attention(), [SEQUENCE, SEQUENCE]),
    "AdditiveAttention": (lambda: L.AdditiveAttention(), [SEQUENCE, SEQUENCE]),
    "MultiHeadAttention": (lambda: L.MultiHeadAttention(2, 32), ([4, 32, 64],) * 2),
    "Dot": (lambda: L.Dot(1), [VECTOR, VECTOR]),
    "Bidirectional": (lambda: L.Bidirectional(L.LSTM(8)), SEQUENCE),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(8)), SEQUENCE),
    "RNN": (lambda: L.RNN(L.LSTMCell(8)), SEQUENCE),
    "SpectralNormalization": (lambda: L.SpectralNormalization(L.Dense(8)), VECTOR),
}
_NAMES = """
    nn.softmax nn.log_softmax nn.gelu nn.silu nn.elu nn.selu nn.leaky_relu nn.l2_loss
    nn.l2_normalize nn.moments math.reduce_sum math.reduce_mean math.reduce_logsumexp
    math.reduce_std math.cumsum math.cumprod math.unsorted_segment_sum nn.embedding_lookup
    tensor_scatter_nd_add einsum norm
"""
FUNCTIONS = {
    "gelu by tanh": functools.partial(tf.nn.gelu, approximate=True),
    **{
        name: function
        for group in operations.GROUPS.values()
        for name, function in group.items()
        if name in _NAMES.split()
    },
}
# In one module, so that XLA compiles many at once and a fault is not one of a hundred.
_TOGETHER = 12


def _layers():
    """Returns functions that make layers, and the shapes of what they are called on, by name."""
    found = dict(_OTHERS)
    for name, kind in vars(L).items():
        is_layer = inspect.isclass(kind) and issubclass(kind, L.Layer) and kind.__name__ == name
        if not is_layer or name in found or name in _NOT_TRIED:
            continue
        if name in _MERGED:
            found[name] = kind, [VECTOR, VECTOR]
            continue
        fits = [start for start in _ARGUMENTS if name.startswith(start)]
        arguments, shape = _ARGUMENTS[max(fits, key=len)] if fits else ((), None)
        rank = re.search("[123]D", name)
        shape = shape or (_OF_RANK[rank[0]] if rank else VECTOR)
        if "ConvLSTM" in name:
            shape = [2, 3, *shape[1:]]
        found[name] = (lambda kind=kind, arguments=arguments: kind(*arguments)), shape
    return found


def _tensor(shape):
    return tf.reshape(tf.linspace(0.0, 1.0, tf.reduce_prod(shape)), shape)


def _tensors(shapes):
    if isinstance(shapes, tuple):  # Several arguments.
        return tuple(map(_tensor, shapes))
    if isinstance(shapes[0], list):
        return ([_tensor(each) for each in shapes],)
    return (_tensor(shapes),)


def _calls():
    """Returns functions, and what they are called on, by name. Layers have their weights."""
    calls = {}
    for name, (make, shapes) in _layers().items():
        tensors = _tensors(shapes)
        layer = make()
        # Symbolic: this CPU may have no kernel in 16 bits.
        layer(*tf.nest.map_structure(lambda x: tf.keras.Input(x.shape[1:], x.shape[0]), tensors))
        calls[name] = functools.partial(_call_layer, layer), tensors
    for name, function in {**_activations(), **FUNCTIONS}.items():
        calls[name] = function, (_tensor(VECTOR),)
    return calls


def _call_layer(layer, *tensors):
    takes = inspect.signature(layer.call).parameters
    return layer(*tensors, **({"training": True} if "training" in takes else {}))


def _activations():
    no_activations = ("deserialize", "get", "serialize", "threshold")
    return {
        f"activation {name}": function
        for name, function in vars(A).items()
        if inspect.isfunction(function) and name not in no_activations
    }


def together(dtype):
    """Returns functions that compute many layers, activations and functions with their gradients.

    Args:
        dtype: str. That of the inputs.

    Returns:
        dict of the names of what a function computes, and the function and its arguments.
    """
    calls = sorted(_calls().items())
    groups = [calls[i : i + _TOGETHER] for i in range(0, len(calls), _TOGETHER)]
    return {
        ", ".join(dict(group)): (_all_of(group, dtype), [a for _, (_, a) in group])
        for group in groups
    }


def _all_of(group, dtype):
    def compute(arguments):
        results = []
        for (_, (function, _)), tensors in zip(group, arguments, strict=True):
            tensors = tf.nest.map_structure(lambda x: tf.cast(x, dtype), tensors)
            with tf.GradientTape() as tape, keras_mp.autocast_scope(dtype):
                tape.watch(tensors)
                results.append(function(*tensors))
            results.append(tape.gradient(results[-1], tensors))
        return results

    return compute
