import re

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import layers
from tests.common import IS_KERAS_3, MODES, Mixes, pairs, placed, unscaled


def layer_that_calls(function, **attributes):
    class Fails(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(strict_dtypes=True, **kwargs)
            for name, value in attributes.items():
                setattr(self, name, value)

        def call(self, x):
            return function(self, x)

    return Fails


def makes(name):
    """The cure where a function makes a tensor."""
    return rf"pass the dtype: `tf.{name}\(..., dtype=self.compute_dtype\)`"


MISTAKES = {
    "random": (lambda self, x: x + tf.random.normal([2]), makes("random.normal")),
    "constant": (lambda self, x: x * tf.constant(2.0), makes("constant")),
    "concat": (lambda self, x: tf.concat([x, tf.ones([2])], 0), makes("ones")),
    "cast": (
        lambda self, x: x - tf.cast(tf.range(2), tf.float32),
        "let `tf.cast` make a tensor of `self.compute_dtype`",
    ),
    "matmul": (lambda self, x: tf.matmul(x[tf.newaxis], tf.eye(2)), makes("eye")),
    "where": (lambda self, x: tf.where(x > 0, x, tf.zeros([2])), makes("zeros")),
    "stack": (lambda self, x: tf.stack([x, tf.ones([2])]), makes("ones")),
    "einsum": (lambda self, x: tf.einsum("i,i->", x, tf.ones([2])), makes("ones")),
    "foreign": (lambda self, x: x / WIDE, "Likely cures: pass `dtype=self.compute_dtype`"),
    "foreign first": (lambda self, x: WIDE / x, "Likely cures: pass `dtype=self.compute_dtype`"),
    "dropout": (lambda self, x: tf.nn.dropout(x, WIDE[0] / 4), "Likely cures: pass"),
    "assign": (lambda self, x: WIDE_VARIABLE.assign(x), "Likely cures: pass"),
    "convert": (
        lambda self, x: tf.convert_to_tensor(x, dtype=tf.float32),
        "let `tf.convert_to_tensor` make a tensor",
    ),
}
WIDE = tf.constant([1.0, 2.0])
WIDE_VARIABLE = tf.Variable([1.0, 2.0])


@pytest.mark.parametrize(
    ("mistake", "mode", "policy"),
    [
        case
        for case in pairs(sorted(MISTAKES), MODES, ["mixed_float16", "mixed_bfloat16"])
        # TensorFlow multiplies bfloat16 with float32.
        if (case[0], case[-1]) != ("matmul", "mixed_bfloat16")
    ],
)
def test_an_error_about_dtypes_names_layer_line_dtypes_and_cure(
    mistake, mode, policy, kernels_of_tensorflow
):
    function, cure = MISTAKES[mistake]
    layer = layer_that_calls(function)(dtype=policy, name="mine")
    call = placed(mode, layer)
    with pytest.raises(TypeError, match=cure) as caught:
        call(tf.ones([2]))
    message = str(caught.value)
    compute = layer.compute_dtype
    assert f"Layer 'mine' (of type Fails) computes in {compute}" in message
    assert f"met {compute} and float32" in message or f"met float32 and {compute}" in message
    line = function.__code__.co_firstlineno
    assert f"in line {line} of {__file__}" in message
    assert message.count("computes in") == 1


def changes_in_a_loop(self, x):
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * WIDE), (0, x))


def changes_in_a_loop_of_autograph(self, x):
    for _ in tf.range(3):
        x = tf.cast(x, tf.float32)
    return x


def differs_between_branches(self, x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: WIDE)


def differs_between_branches_of_autograph(self, x):
    if tf.reduce_sum(x) > 0:
        x = WIDE
    return x


def cast_in_a_loop(self, x):
    return tf.while_loop(lambda h: tf.reduce_sum(h) < 0, lambda h: (tf.cast(h, "float32"),), (x,))


@pytest.mark.parametrize(
    "function",
    [
        changes_in_a_loop,
        changes_in_a_loop_of_autograph,
        differs_between_branches,
        differs_between_branches_of_autograph,
        cast_in_a_loop,
    ],
)
def test_control_flow_that_changes_the_dtype_is_explained(function):
    class Fails(layers.Layer):
        call = function

    if IS_KERAS_3 and "autograph" in function.__name__:
        pytest.skip("Keras 3 does not convert `call`.")
    layer = Fails(dtype="mixed_float16", strict_dtypes=True)
    with pytest.raises(TypeError, match="computes in float16, and its `call` met float"):
        tf.function(layer)(tf.ones([2]))


@pytest.mark.parametrize("mode", MODES)
def test_an_error_about_a_bare_variable_names_it(mode):
    make = layer_that_calls(lambda self, x: x * self.gain, gain=tf.Variable([1.0, 2.0]))
    with pytest.warns(keras_mp.MixedPrecisionWarning):
        layer = make(dtype="mixed_float16")
    call = placed(mode, layer)
    with pytest.raises(TypeError, match="`self.gain` is a bare tf.Variable; make it with"):
        call(tf.ones([2]))


def test_a_bare_variable_elsewhere_is_not_blamed():
    def call(self, x):
        x = x * tf.cast(self.step, self.compute_dtype)
        return x + WIDE

    make = layer_that_calls(call, step=tf.Variable(0.0))
    with pytest.warns(keras_mp.MixedPrecisionWarning):
        layer = make(dtype="mixed_float16")
    with pytest.raises(TypeError, match="Likely cures: pass"):
        layer(tf.ones([2]))


def test_the_innermost_layer_explains():
    inner = layer_that_calls(MISTAKES["random"][0])(dtype="mixed_float16", name="inner")
    outer = layer_that_calls(lambda self, x: self.inner(x), inner=inner)(dtype="mixed_float16")
    with pytest.raises(TypeError, match="Layer 'inner'") as caught:
        outer(tf.ones([2]))
    assert str(caught.value).count("computes in") == 1


def raising(message):
    def call(self, x, y=None):
        raise ValueError(message)

    return call


class Masked(tf.keras.layers.Layer):
    call = raising("The mask is not compatible with the input")


OTHER_ERRORS = {
    "shape": lambda self, x: tf.matmul(x[tf.newaxis], tf.ones([3, 3], self.compute_dtype)),
    "integers": lambda self, x: tf.constant([1]) + tf.constant([1], tf.int64),
    "of the program": raising("neither float16 nor float32 has to do with it"),
    "types": raising("`a` and `b` have different types: float16 and float32"),
    "formats": raising("a float32 file is not compatible with the float16 format"),
    "inside": lambda self, x: self.inner(x, y=tf.ones([1])),  # Keras tells of both dtypes.
}


@pytest.mark.parametrize(("name", "mode"), pairs(OTHER_ERRORS, MODES))
def test_other_errors_stay_what_they_are(name, mode):
    inner = Masked(dtype="float32", autocast=False)
    layer = layer_that_calls(OTHER_ERRORS[name], inner=inner)(dtype="mixed_float16")
    call = placed(mode, layer)
    of_tensorflow = mode == "eager" and name in ("shape", "integers")
    expected = tf.errors.InvalidArgumentError if of_tensorflow else ValueError
    with pytest.raises(TypeError if name == "integers" and mode != "eager" else expected) as caught:
        call(tf.ones([2]))
    assert "computes in" not in str(caught.value)


class Branches(tf.keras.layers.Layer):
    """Has a branch on a tensor, whose sides differ in their dtypes."""

    def call(self, x):
        @tf.function
        def branch():
            y = x
            if tf.reduce_sum(x) > 0:
                y = tf.ones([4, 1])
            return y

        return branch()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_explanation_comes_before_the_lines_of_autograph(policy):
    keras_mp.set_global_policy(policy)
    layers = [tf.keras.layers.Dense(1), Branches(name="branches"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.compile("sgd", "mse")
    with pytest.raises(TypeError) as caught:
        model.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)
    text = str(caught.value).replace("Exception encountered when calling Branches.call().", "")
    first = text.replace("\x1b[1m", "").strip().splitlines()[0]
    assert first.startswith("Layer 'branches' (of type Branches) computes in")
    assert "Either cast one of them there" in first
    assert 'dtype="float32"' in first
    assert text.count("TensorFlow said") == 1


# In steps of Keras.


L = tf.keras.layers
WIDE_ROW = tf.constant([[1.5, 2.5]])
X = tf.ones([1, 2])
NARROW = {name: tf.Variable(tf.cast(X, name)) for name in ("float16", "bfloat16")}


def assigned(x):
    NARROW[x.dtype.name].assign(WIDE_ROW)


def float64(x):
    return x * tf.cast(WIDE_ROW, tf.float64)


REFUSED = {each.__name__: each for each in (assigned, float64)}


def line_of(function):
    return rf"in line {function.__code__.co_firstlineno + 1} of {re.escape(__file__)}"


def check(message, function, dtype, name):
    other = "float64" if name == "float64" else "float32"
    assert re.search(line_of(function), message)
    assert f"({dtype} and {other})" in message or f"({other} and {dtype})" in message
    assert "tf.cast(x, tf.float32)" in message or name == "float64"
    assert message.count("TensorFlow said") == 1


@pytest.mark.parametrize(
    ("name", "is_eager", "dtype", "step"),
    pairs(
        REFUSED, [True, False], ["float16", "bfloat16"], ["train_step", "test_step", "predict_step"]
    ),
)
def test_a_step_is_named(name, is_eager, dtype, step):
    class Trained(tf.keras.Model):
        def __init__(self):
            super().__init__(name="trained")
            self.inside = L.Dense(2)

        def run(self, data):
            x = data[0] if isinstance(data, (tuple, list)) else data
            hidden = self.inside(x)  # a layer returns 16 bits
            REFUSED[name](hidden)
            return {"loss": tf.reduce_sum(x)}

        train_step = test_step = predict_step = run

    with keras_mp.policy_scope(unscaled(dtype)):
        model = Trained()
        model.compile("sgd", run_eagerly=is_eager, jit_compile=False)
        run = {"train_step": model.fit, "test_step": model.evaluate, "predict_step": model.predict}
        in_eager = tf.errors.InvalidArgumentError if name == "float64" else ValueError
        with pytest.raises(in_eager if is_eager else (TypeError, ValueError)) as caught:
            run[step](X, verbose=0)
    message = str(caught.value)
    assert f"The {step} of the model 'trained' (of type Trained) met two dtypes" in message
    check(message, REFUSED[name], dtype, name)


def test_layers_in_other_policies_and_steps_of_other_models_say_nothing():
    layer = Mixes(float64, dtype="mixed_bfloat16" if not IS_KERAS_3 else "float32")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        layer(X)
    assert "TensorFlow said" not in str(caught.value)
