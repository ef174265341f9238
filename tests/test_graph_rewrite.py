"""The graph rewrite: on and off, what it refuses, what it says, and what models learn under it."""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import keras_mp
from keras_mp import graph_rewrite, hardware
from tests import steps
from tests.common import IS_KERAS_3, TAKES_BFLOAT16_REWRITE, needs_bfloat16_rewrite, once
from tests.models import FAMILIES, compiled_model, make_optimizer

K = tf.keras
V1 = tf.compat.v1
enable = keras_mp.enable_mixed_precision_graph_rewrite
disable = keras_mp.disable_mixed_precision_graph_rewrite
IN_SESSIONS = tf.__internal__.train.is_mixed_precision_graph_rewrite_enabled
# TensorFlow's name of each rewrite.
PASSES = {"float16": "auto_mixed_precision", "bfloat16": "auto_mixed_precision_onednn_bfloat16"}


def passes_that_are_on():
    options = tf.config.optimizer.get_experimental_options()
    return [dtype for dtype, name in PASSES.items() if options.get(name)]


def ignored(function, *args, **kwargs):
    """Calls a function that warns of this machine, or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        return function(*args, **kwargs)


def sgd():
    return V1.train.GradientDescentOptimizer(0.1)


# Which optimizer comes back.


@needs_bfloat16_rewrite
@pytest.mark.parametrize("name", [*FAMILIES, "of TensorFlow 1"])
def test_an_optimizer_is_wrapped_for_float16_only(name):
    make, wrapper, scale = lambda: make_optimizer(name), keras_mp.LossScaleOptimizer, 64
    if name == "of TensorFlow 1":
        make, wrapper = sgd, keras_mp.compat.v1.LossScaleOptimizer
        scale = keras_mp.compat.v1.FixedLossScaleManager(64)
    inner = make()
    optimizer = ignored(enable, inner, scale, dtype="float16")
    assert type(optimizer) is wrapper
    assert optimizer.inner_optimizer is inner
    assert float(optimizer.loss_scale()) == 64
    disable()
    inner = make()
    assert enable(inner, dtype="bfloat16") is inner


# Which dtype is chosen.


def chosen(monkeypatch, policy, gpus=(), takes_float16=False):
    monkeypatch.setattr(hardware, "best_policy", lambda: policy)
    monkeypatch.setattr(
        "keras_mp.support.cpu.takes_rewrite", lambda dtype: takes_float16 or dtype == "bfloat16"
    )
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: list(gpus))
    enable(K.optimizers.SGD())
    [dtype] = passes_that_are_on()
    disable()
    return dtype


def test_what_is_fast_is_chosen(monkeypatch):
    assert chosen(monkeypatch, "float32", takes_float16=True) == "float16"
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="will leave graphs in float32"):
        assert chosen(monkeypatch, "float32") == "float16"
    if TAKES_BFLOAT16_REWRITE:
        assert chosen(monkeypatch, "mixed_bfloat16") == "bfloat16"


@needs_bfloat16_rewrite
def test_float16_is_chosen_on_a_gpu_and_bfloat16_does_not_reach_it(monkeypatch):
    monkeypatch.setattr(hardware, "why_slow", lambda dtype: None)
    monkeypatch.setattr(hardware, "warn_if_slow", lambda dtype=None: None)
    assert chosen(monkeypatch, "mixed_bfloat16", gpus=["GPU"]) == "float16"
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="on CPUs only"):
        enable(K.optimizers.SGD(), dtype="bfloat16")


# What is refused, and leaves everything as it was.


def refused(optimizer, match, error=ValueError, **kwargs):
    before = passes_that_are_on()
    with pytest.raises(error, match=match):
        enable(optimizer, **{"dtype": "bfloat16", **kwargs})
    assert passes_that_are_on() == before


def test_a_mixed_policy_before():
    keras_mp.set_global_policy("mixed_bfloat16")
    refused(K.optimizers.SGD(), "do the same by different means")
    keras_mp.set_global_policy(None)
    set_stock = K.config.set_dtype_policy if IS_KERAS_3 else K.mixed_precision.set_global_policy
    set_stock("mixed_float16")
    refused(K.optimizers.SGD(), "The global policy is 'mixed_float16'")


@needs_bfloat16_rewrite
def test_a_mixed_policy_after():
    enable(K.optimizers.SGD(), dtype="bfloat16")
    is_refused = pytest.raises(ValueError, match="The graph rewrite to bfloat16 is on")
    with is_refused:
        keras_mp.set_global_policy("mixed_float16")
    with is_refused, keras_mp.policy_scope("mixed_bfloat16"):
        pass
    assert keras_mp.global_policy().name == "float32"
    keras_mp.set_global_policy("float64")


@needs_bfloat16_rewrite
def test_a_model_with_a_mixed_policy():
    layer = K.layers.Dense(1, dtype="mixed_bfloat16", name="narrow")
    model = K.Sequential([K.Input([2]), layer])
    enable(K.optimizers.SGD(), dtype="bfloat16")
    with pytest.raises(ValueError, match="whose layer 'narrow' has the policy 'mixed_bfloat16'"):
        model.compile("sgd", "mse")
    disable()
    model.compile("sgd", "mse")


@needs_bfloat16_rewrite
def test_a_second_rewrite():
    enable(K.optimizers.SGD(), dtype="bfloat16")
    refused(K.optimizers.SGD(), "is on already, for bfloat16. Use a second optimizer as it is")
    disable()
    ignored(enable, K.optimizers.SGD(), dtype="float16")
    refused(
        K.optimizers.SGD(),
        "in a keras_mp.LossScaleOptimizer or keras_mp.compat.v1.LossScaleOptimizer with float16",
    )


# What turns the rewrite on without keras_mp, and off.
TURNED_ON = {
    "by tf.compat.v1.mixed_precision.enable": (
        lambda: V1.mixed_precision.enable_mixed_precision_graph_rewrite(sgd()),
        V1.mixed_precision.disable_mixed_precision_graph_rewrite,
    ),
    **{
        f"by tf.config.optimizer.*{name}": [
            functools.partial(tf.config.optimizer.set_experimental_options, {name: is_on})
            for is_on in (True, False)
        ]
        for name in PASSES.values()
    },
}


@pytest.mark.parametrize("by", TURNED_ON)
def test_what_a_program_has_turned_on_itself_is_refused_and_stays_on(by):
    turn_on, turn_off = TURNED_ON[by]
    turn_on()
    try:
        before = passes_that_are_on(), IN_SESSIONS()
        refused(sgd(), f"already, {by}")
        with pytest.warns(keras_mp.MixedPrecisionWarning, match=f"rewritten {by}.*still will be"):
            disable()
        assert (passes_that_are_on(), IN_SESSIONS()) == before
        assert any(before)
    finally:
        turn_off()


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras_mp.LossScaleOptimizer("sgd"),
        lambda: K.mixed_precision.LossScaleOptimizer(K.optimizers.SGD()),
        lambda: keras_mp.OptimizerWrapper(keras_mp.LossScaleOptimizer("sgd")),
        lambda: keras_mp.compat.v1.LossScaleOptimizer(sgd()),
        lambda: V1.mixed_precision.MixedPrecisionLossScaleOptimizer(sgd(), 8),
    ],
    ids=["ours", "stock", "wrapper of ours", "ours of v1", "stock of v1"],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_optimizer_that_scales_the_loss(make, dtype):
    refused(make(), "already scales the loss", dtype=dtype)


def test_an_optimizer_inside_of_one_that_scales_the_loss():
    for inner, wrap in (
        (K.optimizers.SGD(), keras_mp.LossScaleOptimizer),
        (sgd(), keras_mp.compat.v1.LossScaleOptimizer),
    ):
        outer = wrap(inner)
        refused(inner, "already scales the loss")
        del outer


def test_wrong_arguments():
    refused("sgd", "Expected an optimizer of `tf.keras`", TypeError)
    refused(None, "Received: optimizer=None", TypeError)
    refused(K.optimizers.SGD(), "Received: dtype='float64'", dtype="float64")
    refused(K.optimizers.SGD(), "loss_scale=None", dtype="float16", loss_scale=None)
    refused(K.optimizers.SGD(), "Received: .*-0.5", dtype="float16", loss_scale=-0.5)


def test_turning_off_what_is_not_on_is_said():
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="nothing to turn off"):
        disable()


# What the rewrite does not reach.


def small_model(**kwargs):
    layers = K.layers.Dense(8, "relu"), K.layers.Dense(1)
    return compiled_model(*layers, inputs=4, optimizer=K.optimizers.SGD(0.1), **kwargs)


@needs_bfloat16_rewrite
@pytest.mark.parametrize(
    ("how", "why"), [("jit_compile", "which XLA compiles"), ("run_eagerly", "which runs eagerly")]
)
def test_a_model_without_graphs_of_tensorflow(how, why):
    enable(K.optimizers.SGD(), dtype="bfloat16")
    with pytest.warns(keras_mp.MixedPrecisionWarning, match=why):
        small_model(**{how: True})


def test_a_step_that_xla_compiles():
    optimizer = ignored(enable, K.optimizers.SGD(0.1), dtype="float16")
    of_v1 = keras_mp.compat.v1.LossScaleOptimizer(sgd())
    scaler, plain = keras_mp.GradScaler(), K.optimizers.SGD(0.1)
    v = tf.Variable([1.0])
    optimizer.build([v])
    plain.build([v])

    for minimize in (
        lambda: optimizer.minimize(lambda: v**2, [v]),
        lambda: of_v1.minimize(lambda: v**2),
        steps.scaler(scaler, plain, lambda: v**2, [v]),
    ):
        step = tf.function(minimize, jit_compile=True, autograph=False)
        with pytest.warns(keras_mp.MixedPrecisionWarning, match="does not reach a step that XLA"):
            step.get_concrete_function()


# Reports.


def dtypes_of(graphs, op):
    nodes = [node for graph in graphs for node in graph.node if node.op == op]
    return {tf.as_dtype(node.attr["T"].type).name for node in nodes}


@needs_bfloat16_rewrite
def test_what_fit_runs():
    x, y = np.ones([8, 4], "float32"), np.ones([8, 1], "float32")
    enable(K.optimizers.SGD(), dtype="bfloat16")
    model = small_model()
    report = graph_rewrite.report(model, x, y)
    assert report.by_dtype()["bfloat16"]["MatMul"] >= 3
    assert "MatMul" not in report.by_dtype()["float32"]
    with context.collect_graphs() as graphs:
        model.fit(x, y, verbose=0)
    assert dtypes_of(graphs, "MatMul") | dtypes_of(graphs, "_FusedMatMul") == {"bfloat16"}
    assert {w.dtype for w in model.get_weights()} == {np.dtype("float32")}


@needs_bfloat16_rewrite
def test_a_function_of_several_arguments():
    enable(K.optimizers.SGD(), dtype="bfloat16")

    @tf.function
    def product(x, *, times):
        return tf.matmul(x, x) * times

    x = tf.TensorSpec([4, 4])
    report = graph_rewrite.report(product, x, times=2.0)
    assert report.name == "product"
    assert report.by_dtype()["bfloat16"]["MatMul"] == 1
    concrete = product.get_concrete_function(x, times=2.0)
    assert graph_rewrite.report(concrete).operations == report.operations


@needs_bfloat16_rewrite
def test_what_has_no_graph():
    with pytest.raises(RuntimeError, match="report.. needs the graph rewrite, which is off"):
        graph_rewrite.report(tf.function(lambda x: x), 1.0)
    enable(K.optimizers.SGD(), dtype="bfloat16")
    with pytest.raises(TypeError, match="write tf.function.f. for a Python function f"):
        graph_rewrite.report(lambda x: x, 1.0)
    with pytest.raises(TypeError, match="Only graphs are rewritten"):
        graph_rewrite.report([])
    with tf.Graph().as_default():
        one = tf.constant(1.0)
    with tf.Graph().as_default():
        other = tf.constant(1.0)
    with pytest.raises(ValueError, match="of one tf.Graph"):
        graph_rewrite.report([one, other])


@needs_bfloat16_rewrite
def test_a_model_takes_one_batch():
    enable(K.optimizers.SGD(), dtype="bfloat16")
    x, y = np.ones([8, 4], "float32"), np.ones([8, 1], "float32")
    model = small_model(jit_compile=False)
    for args, kwargs in (
        ((), {}),
        ((tf.data.Dataset.from_tensors((x, y)),), {}),
        ((x, y), {"sample_weight": np.ones(8)}),
    ):
        with pytest.raises(TypeError, match="Expected one batch after the model, by position"):
            graph_rewrite.report(model, *args, **kwargs)
    specs = tf.TensorSpec([8, 4]), tf.TensorSpec([8, 1])
    of_specs, of_arrays = (graph_rewrite.report(model, *each) for each in (specs, (x, y)))
    assert of_specs.by_dtype()["bfloat16"]["MatMul"] == of_arrays.by_dtype()["bfloat16"]["MatMul"]
    uncompiled = K.Sequential([K.Input([4]), K.layers.Dense(1)])
    with pytest.raises(ValueError, match="Expected a model that is compiled"):
        graph_rewrite.report(uncompiled, x, y)


@needs_bfloat16_rewrite
def test_a_model_of_several_inputs():
    enable(K.optimizers.SGD(), dtype="bfloat16")
    inputs = {name: K.Input([4], name=name) for name in ("a", "b")}
    outputs = K.layers.Dense(1)(K.layers.Concatenate()(list(inputs.values())))
    model = K.Model(inputs, outputs)
    model.compile("sgd", "mse", jit_compile=False)
    batch = {name: np.ones([8, 4], "float32") for name in inputs}, np.ones([8, 1], "float32")
    assert graph_rewrite.report(model, *batch).by_dtype()["bfloat16"]["MatMul"] == 2


# Sessions.


@needs_bfloat16_rewrite
def test_sessions_are_rewritten_by_the_config():
    x = np.ones([4, 4], "float32")
    enable(sgd(), dtype="bfloat16")
    with tf.Graph().as_default():
        placed = V1.placeholder(tf.float32, [4, 4])
        product = tf.tanh(tf.matmul(tf.nn.relu(tf.matmul(placed, placed)), placed))
        assert graph_rewrite.report(product).by_dtype()["bfloat16"]["MatMul"] == 2
        assert graph_rewrite.report([product.op]).by_dtype()["bfloat16"]["MatMul"] == 2

        def dtypes(config):
            metadata = V1.RunMetadata()
            options = V1.RunOptions(output_partition_graphs=True)
            with V1.Session(config=config) as session:
                session.run(product, {placed: x}, options=options, run_metadata=metadata)
            return dtypes_of(metadata.partition_graphs, "MatMul") or dtypes_of(
                metadata.partition_graphs, "Relu"
            )

        given = V1.ConfigProto(allow_soft_placement=True)
        assert dtypes(None) == {"bfloat16"}
        assert dtypes(given) == {"float32"}
        assert dtypes(graph_rewrite.session_config(given)) == {"bfloat16"}
        assert dtypes(graph_rewrite.session_config()) == {"bfloat16"}
        disable()
        assert dtypes(None) == {"float32"}


@once
@pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=needs_bfloat16_rewrite)]
)
def test_one_pass_is_on_and_a_config_for_sessions_has_it_and_all_else(dtype):
    name = PASSES[dtype]
    given = V1.ConfigProto(allow_soft_placement=True)
    given.graph_options.rewrite_options.remapping = 2
    tf.config.optimizer.set_experimental_options({"min_graph_nodes": 7})
    ignored(enable, sgd(), dtype=dtype)
    try:
        assert passes_that_are_on() == [dtype]
        assert IN_SESSIONS() == (dtype == "float16")
        config = graph_rewrite.session_config(given)
        rewriter = config.graph_options.rewrite_options
        assert getattr(rewriter, name) == rewriter.ON
        assert (rewriter.remapping, config.allow_soft_placement) == (rewriter.OFF, True)
        assert getattr(given.graph_options.rewrite_options, name) == rewriter.DEFAULT
        rewriter = graph_rewrite.session_config().graph_options.rewrite_options
        assert (getattr(rewriter, name), rewriter.min_graph_nodes) == (rewriter.ON, 7)
    finally:
        tf.config.optimizer.set_experimental_options({"min_graph_nodes": 0})
        disable()
    assert not passes_that_are_on()
    assert not IN_SESSIONS()


@needs_bfloat16_rewrite
def test_what_tensorflow_turns_off_is_off():
    enable(K.optimizers.SGD(), dtype="bfloat16")
    tf.config.optimizer.set_experimental_options({PASSES["bfloat16"]: False})
    keras_mp.set_global_policy("mixed_bfloat16")


@needs_bfloat16_rewrite
def test_a_config_needs_the_rewrite():
    with pytest.raises(RuntimeError, match="session_config.. needs the graph rewrite"):
        graph_rewrite.session_config()
    enable(sgd(), dtype="bfloat16")
    with pytest.raises(TypeError, match="must be a tf.compat.v1.ConfigProto"):
        graph_rewrite.session_config({})


# Sums.


def gradient_of_bias(x):
    kernel, bias = tf.Variable(tf.ones([2, 3])), tf.Variable(tf.zeros([3]))
    output = tf.Variable(tf.ones([3, 1]))

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            h = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, kernel), bias))
            loss = tf.reduce_sum(tf.matmul(h, output))
        return tape.gradient(loss, [bias, kernel])

    return gradient(x)[0].numpy().tolist()


@needs_bfloat16_rewrite
def test_the_gradient_of_a_bias_does_not_stop_at_256():
    x = tf.ones([10_000, 2])
    enable(K.optimizers.SGD(), dtype="bfloat16")
    assert gradient_of_bias(x) == [10_000] * 3
    disable()
    keras_mp.enable_float32_sums(False)
    enable(K.optimizers.SGD(), dtype="bfloat16")
    # What is wrong in this TensorFlow, or right: it is left as it is.
    wrong = keras_mp.kernels.sums.TABLE.is_wrong("BiasAddGrad", "bfloat16", "NHWC")
    assert (gradient_of_bias(x) == [10_000] * 3) == (not wrong)
    keras_mp.enable_float32_sums(True)
    disable()
    assert "BiasAddGrad" in graph_rewrite.op_lists("bfloat16")["infer"]


@pytest.mark.parametrize(
    ("flags", "onednn"), [("avx512f", "0"), ("avx2 fma", "1")], ids=["no oneDNN", "no AVX512"]
)
@pytest.mark.parametrize("sums_are_wide", [True, False])
def test_bfloat16_on_cpus_that_do_not_take_it(monkeypatch, flags, onednn, sums_are_wide):
    monkeypatch.setattr("keras_mp.support.cpu.flags", lambda: set(flags.split()))
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    keras_mp.enable_float32_sums(sums_are_wide)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="will leave graphs in float32"):
        enable(K.optimizers.SGD(), dtype="bfloat16")
    with pytest.raises(RuntimeError, match="shows no lists"):
        graph_rewrite.op_lists("bfloat16")


@pytest.mark.skipif(TAKES_BFLOAT16_REWRITE, reason="TensorFlow rewrites graphs on this CPU.")
def test_a_report_on_a_cpu_that_leaves_graphs_as_they_are():
    ignored(enable, K.optimizers.SGD(), dtype="bfloat16")
    report = graph_rewrite.report(tf.function(lambda x: tf.exp(x @ x)), tf.ones([8, 8]))
    assert report.by_dtype() == {"float32": {"Exp": 1, "MatMul": 1}}
    assert {each.why for each in report.operations} == {"not on this CPU"}
