"""What inner optimizers do beside taking steps: each against the same one without loss scaling."""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, MODES, assert_all_equal, made, mirrored, pairs, placed, value
from tests.models import FAMILIES, classifier, compiled_model, digits, make_optimizer, state

keras_3_only = pytest.mark.skipif(not IS_KERAS_3, reason="Only Keras 3 accumulates and overwrites.")
legacy_only = pytest.mark.skipif(IS_KERAS_3, reason="Legacy optimizers are of Keras 2.")


def step_function(optimizer, v, mode, calls="keras_3"):
    """A step with a given gradient, made in one of `steps.WAYS`, or without scaling."""
    way = steps.WAYS.get(calls, steps.unscaled)
    optimizer.build([v])
    compiled = placed(mode, way(optimizer, lambda gradient: tf.reduce_sum(v * gradient), [v]))
    return lambda gradient: compiled(tf.constant(gradient, tf.float32))


@keras_3_only
@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        *(("eager", "keras_3"), ("function", "minimize"), ("function", "rfc"), ("jit", "keras_3")),
        *(("eager", "scaler"), ("function", "scaler")),
    ],
)
def test_accumulated_gradients_are_one_step_with_one_verdict(mode, calls):
    inf, nan = np.inf, np.nan
    windows = [[1, 2, 3], [nan, 1, 1], [4, 5, 6], [1, inf, 1], [1, 1, nan], [7, 8, 9], [inf] * 3]

    def make():
        kwargs = {"momentum": 0.9, "gradient_accumulation_steps": 3, "clipnorm": 4.0}
        return tf.keras.optimizers.SGD(0.1, **kwargs), tf.Variable([1.0, 2.0])

    control, control_v = make()
    control_step = step_function(control, control_v, mode, calls="unscaled")
    inner, v = make()
    scale = keras_mp.DynamicLossScale(1024, increment_period=2)
    loss = lambda gradient: tf.reduce_sum(v * gradient)  # noqa: E731
    way = steps.with_scale(calls, scale, loss, [v], make=lambda rate: inner)
    scales, compiled = way.scales, placed(mode, way)
    step = lambda gradient: compiled(tf.constant(gradient, tf.float32))  # noqa: E731
    skipped = 0
    for window in windows:
        is_good = np.isfinite(sum(window))
        for factor in window:  # What is accumulated is no step yet.
            assert float(scale) == 1024 / 2**skipped
            assert int(scales.steps_skipped) == skipped
            step([factor, -factor])
            if is_good:
                control_step([factor, -factor])
        skipped += not is_good
        np.testing.assert_array_equal(v.numpy(), control_v.numpy())
        assert_all_equal(state(inner), state(control))
        assert int(scales.steps_skipped) == skipped
        assert bool(scales.last_step_skipped) == (not is_good)
        assert int(value(inner.iterations)) == int(value(control.iterations))
    assert skipped == 4
    for factor in (1, 2, 3, 4, 5, 6):  # Two good steps double the scale.
        step([factor, -factor])
    assert float(scale) == 1024 / 2**4 * 2


@keras_3_only
def test_an_overflow_of_the_accumulated_sum_skips_the_step():
    inner = tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    v = tf.Variable([1.0])
    optimizer = keras_mp.LossScaleOptimizer(inner, keras_mp.DynamicLossScale(1))
    step = step_function(optimizer, v, "eager")
    step([3e38])
    step([3e38])
    assert float(v[0]) == 1
    assert int(optimizer.steps_skipped) == 1


@keras_3_only
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", MODES)
def test_a_variable_without_a_gradient_accumulates_nothing(mode):
    used, unused = tf.keras.Variable([1.0, 2.0], name="used"), tf.keras.Variable(3.0, name="unused")
    inner = tf.keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer = keras_mp.LossScaleOptimizer(inner)
    optimizer.build([used, unused])
    step = placed(
        mode, lambda: optimizer.minimize(lambda: tf.reduce_sum(used.value), [used, unused])
    )
    for _ in range(2):
        step()
    assert_all_equal([value(used), value(unused)], [[0.5, 1.5], 3.0])


@keras_3_only
@pytest.mark.parametrize(
    ("mode", "calls"), pairs(MODES, ["minimize", "keras_3", "rfc", "nobody", "by hand"])
)
def test_what_comes_as_a_gradient_but_is_a_new_value_is_not_unscaled(mode, calls):
    # Layers that were quantized to float8 pass the next scale of a tensor off as a gradient.
    quantization = tf.keras.Variable([1.0, 2.0], name="scale")
    quantization.overwrite_with_gradient = True
    weight = tf.keras.Variable([1.0, 2.0], name="weight")
    variables = [weight, quantization]
    optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), 1024)
    optimizer.build(variables)

    @tf.custom_gradient
    def quantized(x, scale):
        return x * 1.0, lambda upstream: (upstream, tf.constant([3.0, 4.0]))

    def loss():
        return tf.reduce_sum(quantized(weight.value, quantization.value))

    if calls == "by hand":
        apply = functools.partial(optimizer.apply_gradients, scaled=True)
        step = steps.taped(loss, variables, apply, lambda loss: loss * optimizer.loss_scale())
    else:
        step = steps.WAYS.get(calls, steps.unscaled)(optimizer, loss, variables)
    step = placed(mode, step)
    for i in (1, 2):
        with warnings.catch_warnings():
            if calls == "nobody":
                warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
            step()
        np.testing.assert_array_equal(value(weight.value), np.array([1.0, 2.0]) - 0.5 * i)
        np.testing.assert_array_equal(value(quantization.value), [3, 4])


def fitted(policy, optimizer, callbacks=lambda: [], epochs=3):
    images, labels = (each[:256] for each in digits())
    targets, model = tf.one_hot(labels, 10), made(classifier, policy)
    model.compile(optimizer(), "mse", jit_compile=False)
    fit = {"validation_data": (images, targets), "callbacks": callbacks(), "verbose": 0}
    model.fit(images, targets, 32, epochs, shuffle=False, **fit)
    return model


def fit_with_and_without_us(*how, **more):
    """Fits the same model without and with loss scaling; returns both, with their `history`."""
    policies = None, keras_mp.Policy("float32", loss_scale="dynamic")
    control, ours = (fitted(policy, *how, **more) for policy in policies)
    assert isinstance(ours.optimizer, keras_mp.LossScaleOptimizer)
    assert not isinstance(control.optimizer, keras_mp.LossScaleOptimizer)
    assert ours.history.history == control.history.history
    assert_all_equal(control.get_weights(), ours.get_weights())
    return control, ours


def callbacks_that_set_the_rate():
    return [
        tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        # Nothing improves by as much, so it acts after each epoch but the first.
        tf.keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_callbacks_that_set_the_learning_rate(name):
    models = fit_with_and_without_us(lambda: make_optimizer(name, 0.1), callbacks_that_set_the_rate)
    for optimizer in (*(model.optimizer for model in models), models[1].optimizer.inner_optimizer):
        # Three epochs, and two plateaus.
        assert float(value(optimizer.learning_rate)) == pytest.approx(0.1 / 2**5)


def averaging():
    return tf.keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)


def test_averages_in_fit_which_keras_3_swaps_for_the_evaluation():
    def swap():
        return [tf.keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if IS_KERAS_3 else []

    fit_with_and_without_us(averaging, swap, epochs=2)


@keras_3_only
@pytest.mark.parametrize("wrap", [keras_mp.LossScaleOptimizer, lambda optimizer: optimizer])
def test_averages_of_an_optimizer_in_two_wrappers_are_swapped(wrap):
    optimizer, model = averaging(), classifier()
    model.compile(wrap(keras_mp.MasterWeightOptimizer(optimizer)), "mse")
    images, labels = digits()
    model.fit(images[:64], tf.one_hot(labels[:64], 10), verbose=0)
    before = model.get_weights()[0]
    swap = tf.keras.callbacks.SwapEMAWeights()
    model.fit(images[:64], tf.one_hot(labels[:64], 10), callbacks=[swap], verbose=0)
    averages = optimizer._model_variables_moving_average[0].numpy()
    assert np.abs(model.get_weights()[0] - before).max() > 0
    np.testing.assert_array_equal(model.get_weights()[0], averages)


def test_weight_decay_and_what_is_excluded_from_it():
    results = []
    for wrap, way in ((lambda o: o, "unscaled"), (keras_mp.LossScaleOptimizer, "keras_3")):
        variables = [tf.Variable([1.0, 2.0], name="kernel"), tf.Variable([1.0], name="bias")]
        optimizer = wrap(tf.keras.optimizers.AdamW(0.1, weight_decay=0.5))
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.build(variables)
        kernel, bias = variables
        loss = lambda: kernel[1] + 0 * kernel[0] + 0 * bias[0]  # noqa: E731
        step = getattr(steps, way)(optimizer, loss, variables)
        for _ in range(3):
            step()
        results.append([v.numpy() for v in variables])
    control, ours = results
    assert_all_equal(control, ours)
    assert ours[0][0] < 1
    assert ours[1][0] == 1


def halve(pairs):
    return [(0.5 * g, v) for g, v in pairs]


@legacy_only
@pytest.mark.parametrize("option", ["gradient_aggregator", "gradient_transformers"])
@pytest.mark.parametrize("calls", ["minimize", "keras_3", "rfc"])
def test_functions_that_a_legacy_optimizer_was_given_see_unscaled_gradients(option, calls):
    seen = []

    def function(pairs):
        pairs = list(pairs)
        seen.append(float(pairs[0][0][0]))
        return halve(pairs)

    given = function if option == "gradient_aggregator" else [function]
    inner = tf.keras.optimizers.legacy.SGD(1.0, **{option: given})
    optimizer, v = keras_mp.LossScaleOptimizer(inner), tf.Variable([1.0])
    step_function(optimizer, v, "eager", calls)([0.5])
    assert float(v[0]) == 0.75
    assert seen == [0.5]


@legacy_only
def test_an_optimizer_with_its_own_aggregation():
    class Halving(tf.keras.optimizers.SGD):
        def aggregate_gradients(self, grads_and_vars):
            return halve(super().aggregate_gradients(grads_and_vars))

    optimizer, v = keras_mp.LossScaleOptimizer(Halving(1.0)), tf.Variable([1.0])
    step_function(optimizer, v, "function")([0.5])
    assert float(v[0]) == 0.75


@legacy_only
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_an_aggregation_that_leaves_out_variables_and_changes_their_order(mode):
    class WithoutNone(tf.keras.optimizers.SGD):
        def aggregate_gradients(self, grads_and_vars):
            return [(g, v) for g, v in reversed(grads_and_vars) if g is not None]

    variables = [tf.Variable([1.0]) for _ in range(3)]
    optimizer = keras_mp.LossScaleOptimizer(WithoutNone(1.0))

    def step():
        for some in (variables, variables[1:]):
            optimizer.minimize(lambda: 0.5 * variables[1] + 0.25 * variables[2], some)

    placed(mode, step)()
    assert [float(v[0]) for v in variables] == [1, 0.0, 0.5]


def clips_each_example(base, method, norm=1.0):
    """An optimizer as those of differential privacy are: it clips the gradient of each example."""

    def compute(self, loss, var_list, *args, **kwargs):
        (tape,) = (a for a in [*args, *kwargs.values()] if isinstance(a, tf.GradientTape))
        if callable(loss):
            with tape:
                loss = loss()
        each = tape.jacobian(loss, var_list)
        each = [tf.reshape(g, [loss.shape[0], -1]) for g in each]
        norms = tf.norm(tf.concat(each, 1), axis=1, keepdims=True)
        means = [tf.reduce_mean(g * tf.minimum(1.0, norm / norms), 0) for g in each]
        return [(tf.reshape(m, v.shape), v) for m, v in zip(means, var_list)]

    return type("ClipsEachExample", (base,), {method: compute})


def clipping_optimizers():
    wrapped = clips_each_example(keras_mp.OptimizerWrapper, "compute_gradients")
    if IS_KERAS_3:
        return {"a wrapper": lambda: wrapped(tf.keras.optimizers.SGD(0.5))}
    new = clips_each_example(tf.keras.optimizers.SGD, "compute_gradients")
    legacy = clips_each_example(tf.keras.optimizers.legacy.SGD, "_compute_gradients")
    return {
        "new": lambda: new(0.5, jit_compile=False),
        "legacy": lambda: legacy(0.5),
        "a wrapper": lambda: wrapped(tf.keras.optimizers.SGD(0.5, jit_compile=False)),
        "a wrapped one": lambda: keras_mp.OptimizerWrapper(new(0.5, jit_compile=False)),
        "one with master weights": lambda: keras_mp.MasterWeightOptimizer(
            new(0.5, jit_compile=False)
        ),
    }


@pytest.mark.parametrize(
    ("kind", "calls", "mode"),
    pairs(clipping_optimizers(), ["minimize", "two halves", "tape"], MODES),
)
def test_gradients_of_examples_are_clipped_as_without_loss_scaling(kind, calls, mode):
    examples = tf.constant([[100.0, 0.0], [0.0, 0.25], [3.0, 4.0]])
    moved = []
    for scales in (False, True):
        optimizer, v = clipping_optimizers()[kind](), tf.Variable([1.0, 2.0])
        if scales:
            optimizer = keras_mp.LossScaleOptimizer(optimizer, 2.0**12)

        def loss():
            return tf.reduce_sum(v * examples, axis=1)

        def step():
            if calls == "tape":
                steps.minimize_tensor(optimizer, loss, [v])()
            elif calls == "minimize":
                optimizer.minimize(loss, [v], tape=tf.GradientTape())
            else:
                pairs = optimizer.compute_gradients(loss, [v], tf.GradientTape())
                optimizer.apply_gradients(pairs)

        if calls == "two halves" and kind == "legacy" and not scales:
            optimizer.compute_gradients = lambda f, v, t: optimizer._compute_gradients(f, v, tape=t)
        optimizer.build([v]) if hasattr(optimizer, "build") else None
        run = placed(mode, step)
        run(), run()
        moved.append(v.numpy())
    np.testing.assert_array_equal(moved[0], moved[1])
    np.testing.assert_allclose(moved[1], [1 - (1 + 0.6) / 3, 2 - (0.25 + 0.8) / 3], rtol=1e-6)


def overriding_minimize(base):
    def minimize(self, *args, **kwargs):
        return super(cls, self).minimize(*args, **kwargs)

    cls = type("Minimizes", (base,), {"minimize": minimize})
    return cls


def test_what_a_wrapper_would_leave_out_is_refused():
    wrapper = overriding_minimize(keras_mp.OptimizerWrapper)(tf.keras.optimizers.SGD(0.5))
    with pytest.raises(TypeError, match="overrides `minimize`"):
        keras_mp.LossScaleOptimizer(wrapper)
    if IS_KERAS_3:  # whose optimizers compute no gradients
        return
    for optimizers in (tf.keras.optimizers, tf.keras.optimizers.legacy):
        for wrap in (keras_mp.LossScaleOptimizer, keras_mp.AllReduceOptimizer):
            with pytest.raises(TypeError, match=r"overrides `minimize`.*mixed_bfloat16"):
                wrap(overriding_minimize(optimizers.SGD)(0.5))


@legacy_only
def test_gradients_of_a_graph_cannot_be_clipped_for_each_example():
    class Gradients(tf.keras.optimizers.legacy.SGD):
        def get_gradients(self, loss, params):
            return super().get_gradients(loss, params)

    with tf.Graph().as_default():
        v = tf.Variable(1.0)
        optimizer = keras_mp.LossScaleOptimizer(Gradients(0.5), 8)
        with pytest.raises(TypeError, match="would see the scaled loss"):
            optimizer.get_gradients(v * 2, [v])


@keras_3_only
@pytest.mark.parametrize("made_at_build", [False, True])
@pytest.mark.parametrize("wrap", [keras_mp.LossScaleOptimizer, keras_mp.OptimizerWrapper])
def test_several_optimizers_in_one_sum_once(wrap, made_at_build):
    if not hasattr(tf.keras.optimizers, "MultiOptimizer"):
        pytest.skip("This Keras has no MultiOptimizer.")
    with mirrored(2).scope():
        kernel, bias = (tf.keras.Variable(tf.ones([2]), name=name) for name in ("kernel", "bias"))
        sgd, momentum = tf.keras.optimizers.SGD(0.2), tf.keras.optimizers.SGD(0.2, momentum=0.5)
        chosen = tf.keras.optimizers.OptimizerMap(sgd, {"bias": momentum})
        if made_at_build:

            def chosen(v):
                return momentum if v.name == "bias" else sgd

        optimizer = wrap(tf.keras.optimizers.MultiOptimizer(chosen))
        optimizer.build([kernel, bias])

    loss = lambda: 0.5 * tf.reduce_sum(kernel.value + bias.value)  # noqa: E731
    way = steps.keras_3 if wrap is keras_mp.LossScaleOptimizer else steps.unscaled
    steps.on_replicas(way(optimizer, loss, [kernel, bias]))()
    for variable in (kernel, bias):
        np.testing.assert_allclose(value(variable), 0.8, rtol=1e-6)


@keras_3_only
def test_a_learning_rate_scheduler_finds_the_optimizers_inside():
    if not hasattr(tf.keras.optimizers, "MultiOptimizer"):
        pytest.skip("This Keras has no MultiOptimizer.")
    sgd, adam = tf.keras.optimizers.SGD(0.5), tf.keras.optimizers.Adam(0.5)
    chosen = tf.keras.optimizers.OptimizerMap(sgd, {".*bias": adam})
    keras_mp.set_global_policy("mixed_float16")
    model = compiled_model(optimizer=tf.keras.optimizers.MultiOptimizer(chosen))
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    scheduler = tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    x = np.ones([4, 2], "float32")
    model.fit(x, x[:, :1], verbose=0, callbacks=[scheduler])
    assert [float(each.learning_rate) for each in (sgd, adam)] == [0.25, 0.25]
    assert model.optimizer.optimizers == model.optimizer.inner_optimizer.optimizers
    plain = keras_mp.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
    assert not hasattr(plain, "optimizers")
