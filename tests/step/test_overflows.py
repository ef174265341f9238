"""Whose gradients were not finite, on which replica, is known of a step that is skipped."""

import collections
import gc

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

import keras_mp
from benchmarks import overhead
from keras_mp.step import skip_report
from tests import steps
from tests.common import IS_KERAS_3, MODES, assert_all_equal, mirrored, once, placed, value
from tests.models import FAMILIES, compiled_model, make_optimizer

# What Keras 3 says of a gradient that is None.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")

# A large gradient travels alone, small ones are packed, that of the table is sparse.
SHAPES = {"small": [3, 4], "large": [96, 96], "table": [8, 2], "other": [5]}
ROWS = [1, 3, 1]
BAD = [np.inf, -np.inf, np.nan]


@tf.custom_gradient
def backward(x, gradient):
    """0, with a gradient of one's own."""
    return tf.zeros([]), lambda upstream: (upstream * gradient, None)


class Program:
    """Makes steps with given losses and gradients, on each replica others."""

    def __init__(self, mode="function", replicas=1, strategy=None, **arguments):
        alone = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
        self.strategy = strategy or alone
        self.replicas = self.strategy.num_replicas_in_sync
        with self.strategy.scope():
            self.variables = [tf.Variable(tf.ones(s), name=n) for n, s in SHAPES.items()]
            self.unused = tf.Variable(1.0, name="unused")
            self.optimizer = keras_mp.LossScaleOptimizer(
                make_optimizer(FAMILIES[0]), **{"warn_after_skips": None, **arguments}
            )
            self.optimizer.build([*self.variables, self.unused])
        self._step = placed(mode, self._on_replicas)

    def _on_replicas(self, losses, *gradients):
        self.strategy.run(self.replica_step, args=(losses, gradients))

    def replica_step(self, losses, gradients):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            loss = losses[replica]
            for v, gradient in zip(self.variables, gradients, strict=True):
                x = tf.gather(v, ROWS) if v is self.variables[2] else tf.convert_to_tensor(v)
                loss += backward(x, gradient[replica])
            scaled = self.optimizer.scale_loss(loss)
        variables = [*self.variables, self.unused]
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables))

    def state(self):
        """All variables on all replicas."""
        variables = [*self.variables, *self.optimizer.variables]
        variables = [v if isinstance(v, tf.Variable) else v.value for v in variables]
        return [value(each) for v in variables for each in getattr(v, "values", [v])]

    def good(self):
        """Losses and gradients that are finite."""
        shapes = [[len(ROWS), 2] if n == "table" else s for n, s in SHAPES.items()]
        gradients = [np.full([self.replicas, *s], 2.0**-10, "float32") for s in shapes]
        return [np.ones([self.replicas], "float32"), *gradients]

    def step(self, values):
        self._step(*map(tf.constant, values))


def expected_of(values):
    """What `Overflow` says of such losses and gradients: of the losses, and of the gradients."""
    kinds = ["NaN" if np.isnan(x) else "finite" if np.isfinite(x) else "Inf" for x in values[0]]
    rows = [
        (name, replica, int(np.isinf(g).sum()), int(np.isnan(g).sum()))
        for name, of_replicas in zip(SHAPES, values[1:], strict=True)
        for replica, g in enumerate(of_replicas)
        if not np.isfinite(g).all()
    ]
    return kinds, rows


def said(overflow):
    """The same, as it was said."""
    for i, loss in enumerate(overflow.losses):
        assert loss.place.replica == i
    rows = [(g.variable, g.place.replica, g.infs, g.nans) for g in overflow.gradients]
    return [loss.kind for loss in overflow.losses], rows


def without_numbers(rows):
    """What is said of a step that XLA compiled: which gradients, but of how many values."""
    return [(*row[:2], None, None) for row in rows]


def spoil(values, rng):
    """Puts Inf and NaN into a few gradients, and sometimes into a loss."""
    for _ in range(rng.integers(1, 6)):
        gradient = values[rng.integers(1, len(values))][rng.integers(len(values[0]))]
        gradient.flat[rng.integers(gradient.size, size=rng.integers(1, 4))] = rng.choice(BAD)
    if rng.random() < 0.3:
        values[0][rng.integers(len(values[0]))] = rng.choice(BAD)


# What is told of one replica does not depend on the Keras, but how its optimizer is called does.
@pytest.mark.parametrize(
    ("replicas", "mode", "count"),
    [
        *((1, mode, 5) for mode in MODES),
        *(pytest.param(*case, marks=once) for case in ((2, "function", 40), (4, "function", 40))),
        pytest.param(2, "eager", 1, marks=once),
    ],
)
def test_names_replicas_variables_and_steps(replicas, mode, count):
    program, rng = Program(mode, replicas), np.random.default_rng(replicas)
    program.step(program.good())
    assert program.optimizer.last_overflow is None
    step = 1
    for number in range(1, count + 1):
        if rng.random() < 0.2:
            program.step(program.good())
            step += 1
        before = program.state()
        values = program.good()
        spoil(values, rng)
        scale = float(program.optimizer.loss_scale)
        program.step(values)
        step += 1
        assert_all_equal(program.state(), before)
        overflow = program.optimizer.last_overflow
        assert (overflow.step, overflow.steps_skipped) == (step, number)
        assert overflow.loss_scale == scale
        losses, rows = expected_of(values)
        assert said(overflow) == (losses, without_numbers(rows) if mode == "jit" else rows)
        assert overflow.loss_is_finite == np.isfinite(values[0]).all()
    for i, loss in enumerate(overflow.losses):
        assert (loss.place.device, loss.place.worker) == (f"CPU:{i}", 0)
    program.step(program.good())
    assert program.optimizer.last_overflow == overflow


@once
def test_what_only_the_sum_or_the_wire_makes_infinite():
    program = Program(replicas=2, loss_scale=keras_mp.DynamicLossScale(1))
    values = program.good()
    values[1][0, 0, 0] = 1e5  # finite, but not in float16, as which it is sent
    values[2][:, 5, 5] = 4e4  # the sum of both is too large
    program.step(values)
    overflow = program.optimizer.last_overflow
    rows = [(g.variable, g.place and g.place.replica, g.infs) for g in overflow.gradients]
    assert rows == [("small", 0, 1), ("large", None, 1)]
    assert overflow.loss_is_finite
    assert "only the sum" in str(overflow)
    assert [len(line.split()) for line in str(overflow).splitlines()[3:]]


@once
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("calls", ["rfc", "scaler"])
def test_before_the_user_clips(mode, calls):
    a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable([3.0], name="b")
    inner = make_optimizer(FAMILIES[0])
    if calls == "rfc":
        optimizer = keras_mp.LossScaleOptimizer(inner)
        optimizer.build([a, b])
        scale, unscale = optimizer.get_scaled_loss, optimizer.get_unscaled_gradients
        apply = optimizer.apply_gradients
    else:
        optimizer = keras_mp.GradScaler()
        keras_mp.OptimizerWrapper(inner).build([a, b])
        scale, unscale = optimizer.scale, optimizer.unscale

        def apply(pairs):
            optimizer.step(inner, pairs)
            optimizer.update()

    def loss(factor):
        return tf.reduce_sum(a) + tf.reduce_sum(b * factor)

    def clipped(gradients):
        return tf.clip_by_global_norm(unscale(gradients), 1.0)[0]

    step = placed(mode, steps.taped(loss, [a, b], apply, scale, clipped))
    step(tf.constant(1.0))
    assert optimizer.last_overflow is None
    step(tf.constant(np.nan))
    assert optimizer.last_overflow.variables == ["b"]
    assert optimizer.last_overflow.step == 2
    assert np.isfinite(value(a)).all()


def test_clipped_by_the_inner_optimizer():
    v, w = tf.Variable(1.0, name="v"), tf.Variable(1.0, name="w")
    inner = make_optimizer(FAMILIES[0], global_clipnorm=1.0)
    optimizer = keras_mp.LossScaleOptimizer(inner)
    optimizer.minimize(lambda: v + np.inf * w, [v, w])
    assert optimizer.last_overflow.variables == ["w"]


@once
@pytest.mark.parametrize("mode", MODES)
def test_each_optimizer_of_a_scaler(mode):
    scaler = keras_mp.GradScaler(warn_after_skips=3)
    variables = [tf.Variable(1.0, name=name) for name in ("generator", "critic")]
    optimizers = [tf.keras.optimizers.SGD(0.1) for _ in variables]
    for optimizer, v in zip(optimizers, variables):
        optimizer.build([v])

    def step(factors):
        with tf.GradientTape(persistent=True) as tape:
            scaled = scaler.scale([v * f for v, f in zip(variables, tf.unstack(factors))])
        for optimizer, loss, v in zip(optimizers, scaled, variables):
            scaler.step(optimizer, [(tape.gradient(loss, v), v)])
        scaler.update()

    step = placed(mode, step)

    def skips(*factors):
        step(tf.constant(factors))
        overflow = scaler.last_overflow
        return overflow.variables, overflow.step, int(scaler.steps_skipped)

    assert skips(np.inf, 1.0) == (["generator"], 1, 1)
    assert skips(1.0, 1.0) == (["generator"], 1, 1)
    assert skips(1.0, np.nan) == (["critic"], 3, 2)
    assert skips(np.inf, np.nan) == (["critic"], 4, 4)
    about = "3 steps in a row.*The loss of the last one was Inf or NaN.*not finite: 'critic'\\."
    with pytest.warns(keras_mp.MixedPrecisionWarning, match=about):
        assert skips(1.0, np.nan) == (["critic"], 5, 5)


@once
def test_many_skips_name_the_variables():
    names = ["first", "second", "third"]
    layers = [tf.keras.layers.Dense(2, name=n) for n in names]
    optimizer = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0]), warn_after_skips=4)
    model = compiled_model(*layers, optimizer=optimizer)
    variables = model.trainable_variables

    @tf.function
    def step(factors):
        with tf.GradientTape() as tape:
            loss = tf.zeros([])
            for v, factor in zip(variables, tf.unstack(factors), strict=True):
                loss += backward(tf.convert_to_tensor(v), factor)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables))

    good, second = np.ones(6, "float32"), np.ones(6, "float32")
    second[2] = np.inf  # the kernel of the second layer
    both = second.copy()
    both[4] = np.nan
    last = np.array([1, 1, 1, 1, 1, np.inf], "float32")
    for factors in (last, last, good):  # which are not of the same streak
        step(tf.constant(factors))
    for factors in (second, both, second):
        step(tf.constant(factors))
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="4 steps in a row") as caught:
        step(tf.constant(both))
    text = str(caught[0].message)
    assert optimizer.last_overflow.variables == ["second/kernel", "third/kernel"]
    assert [g.layer for g in optimizer.last_overflow.gradients] == ["second", "third"]
    assert "gradients were not finite: 'third/kernel', 'second/kernel'." in text
    assert "The loss of the last one was finite" in text
    optimizer.warn_after_skips = 5  # It may warn again: of the first five of six names.
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="'second/bias'.* and 1 more") as caught:
        step(tf.constant(np.full(6, np.inf, "float32")))
    assert "'first/kernel'" not in str(caught[0].message)


def skipped(optimizer, gradients, variables):
    """Makes a step, in eager, of unscaled gradients; returns the overflow."""
    optimizer.get_scaled_loss(tf.constant(1.0))
    gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, variables))
    return optimizer.last_overflow


def test_what_only_sums_make_infinite():
    large, half = tf.Variable(tf.ones([2]), name="large"), tf.Variable(tf.ones([2, 1], tf.float16))
    optimizer = keras_mp.LossScaleOptimizer(
        make_optimizer(FAMILIES[0]), keras_mp.DynamicLossScale(1, min_loss_scale=1)
    )
    optimizer.build([large, half])
    rows = tf.IndexedSlices(tf.constant([[4e4], [4e4]], tf.float16), [1, 1], [2, 1])
    # An optimizer would add up what has equal indices. Each value is finite.
    other = tf.Variable(tf.ones([2]))
    for gradients, variables in (
        ([tf.constant([1.0, 1.0]), rows], [large, half]),
        ([tf.constant([3e38, 3e38]), None], [large, half]),
        ([tf.constant([3e38, 0.0])] * 2, [large, other]),
    ):
        overflow = skipped(optimizer, gradients, variables)
        assert overflow.gradients == ()
        assert "but their sum was not" in str(overflow)


def test_variables_of_one_name_are_told_apart():
    optimizer = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0]))
    variables = [tf.Variable(1.0, name=name) for name in ("v", "w", "v")]
    overflow = skipped(optimizer, [tf.constant(x) for x in (1.0, 1.0, np.nan)], variables)
    assert overflow.variables == ["v (2 of 2)"]
    overflow = skipped(optimizer, [tf.constant(np.nan)] * 3, variables)
    assert overflow.variables == ["v (1 of 2)", "w", "v (2 of 2)"]


@once
def test_what_is_known_of_variables_that_are_gone_is_dropped():
    scaler = keras_mp.GradScaler(warn_after_skips=None)

    def skip():
        v = tf.Variable(1.0)
        scaler.scale(tf.constant(1.0))
        scaler.step(lambda pairs: None, [(tf.constant(np.nan), v)])
        scaler.update()

    for _ in range(2):
        skip()
        gc.collect()
    notes = [name for name in scaler._scaler.variables() if name.startswith("note_")]
    assert len(notes) == 1


def test_a_model_knows_what_its_variables_are_called():
    class Scaled(tf.keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=[], initializer="ones")
            self.bare = tf.Variable(1.0)

        def call(self, x):
            return x * self.factor

    shared = tf.keras.layers.Dense(2, name="shared")
    inner = tf.keras.Sequential([tf.keras.Input([2]), Scaled(name="scaled"), shared], name="inner")
    outer = tf.keras.Sequential([tf.keras.Input([2]), shared, inner], name="outer")
    optimizer = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0]))
    model = compiled_model(outer, optimizer=optimizer)
    variables = model.trainable_variables
    shared.trainable = False
    infinite = [tf.fill(variable.shape, np.float32(np.inf)) for variable in variables]
    overflow = skipped(model.optimizer, infinite, variables)
    names = ["outer/shared/kernel", "outer/shared/bias", "outer/inner/scaled/factor"]
    if len(variables) == 4:  # as in Keras 2
        names.append("outer/inner/scaled/bare")
    assert overflow.variables == names


def test_fixed_scales_and_files_know_of_nothing(tmp_path):
    v = tf.Variable(1.0)
    fixed = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0]), 8)
    assert skipped(fixed, [tf.constant(np.inf)], [v]) is None
    bad = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0]), 8, skip_nonfinite=True)
    v.assign(1.0)
    assert skipped(bad, [tf.constant(np.inf)], [v]).loss_scale == 8
    names = saved(bad, tmp_path)
    other = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0]), 8, skip_nonfinite=True)
    other.build([v])
    assert names == saved(other, tmp_path)
    assert len(bad.get_config()["state"]) == len(other.get_config()["state"])


def saved(optimizer, folder):
    """What a checkpoint holds of an optimizer."""
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(folder / "checkpoint"))
    return {name for name, _ in tf.train.list_variables(path)}


@pytest.mark.skipif(not IS_KERAS_3, reason="Only optimizers of Keras 3 accumulate gradients.")
def test_what_was_accumulated():
    inner = tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    optimizer = keras_mp.LossScaleOptimizer(inner)
    variables = [tf.Variable(1.0, name=name) for name in ("v", "w")]
    optimizer.build(variables)
    skipped(optimizer, [tf.constant(1.0), tf.constant(np.inf)], variables)
    assert optimizer.last_overflow is None  # It was added to nothing yet.
    overflow = skipped(optimizer, [tf.constant(np.nan), tf.constant(1.0)], variables)
    rows = [(g.variable, g.place is None, g.infs, g.nans) for g in overflow.gradients]
    assert rows == [("v", False, 0, 1), ("w", True, 1, 0)]
    assert overflow.step == 1


@once
def test_of_an_optimizer_of_tensorflow_1():
    inner = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    optimizer = keras_mp.compat.v1.LossScaleOptimizer(inner)
    variables = [tf.Variable(1.0, name=name) for name in ("v", "w")]
    optimizer.minimize(lambda: variables[0] + variables[1] * np.inf, var_list=variables)
    assert optimizer.last_overflow.variables == ["w"]
    assert optimizer.last_overflow.step is None
    assert str(optimizer.last_overflow).startswith("A step was skipped")
    assert "'w'" in optimizer.last_overflow.summary


def operations_of(graph):
    """How many there are, with those of the functions that a graph calls."""
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


def graph_of_step(wrapper, cell):
    step = overhead.make_step(cell, wrapper, overhead.make_variables(cell))
    return step.func.get_concrete_function(*step.args).graph.as_graph_def()


def test_a_graph_has_no_more_operations_than_with_keras():
    def count(wrapper):
        graphs = [graph_of_step(wrapper, overhead.Cell("graph", "SGD", 20, 256)) for _ in range(2)]
        # Functions that all graphs share are traced once in a process.
        first, second = ({f.signature.name: f for f in g.library.function} for g in graphs)
        shared = sum(len(second[name].node_def) for name in {*first} & {*second})
        return operations_of(graphs[1]) - shared

    assert count("keras_mp") <= count("Keras")


def test_a_variable_adds_few_operations_to_what_counts_in_a_skipped_step():
    def added_by_one(wrapper):
        cells = [overhead.Cell("graph", "SGD", count, 1) for count in (20, 21)]
        few, more = (operations_of(graph_of_step(wrapper, cell)) for cell in cells)
        return more - few

    assert added_by_one("keras_mp") - added_by_one("bare") <= 3


@once
@pytest.mark.parametrize("replicas", [1, 2])
def test_good_steps_in_eager_run_not_an_operation_more(replicas, monkeypatch):
    def count():
        program, seen = Program("eager", replicas), collections.Counter()

        def callback(op_type, *args, **kwargs):
            seen[op_type] += 1

        values = list(map(tf.constant, program.good()))
        program._step(*values)
        op_callbacks.add_op_callback(callback)
        try:
            program._step(*values)
        finally:
            op_callbacks.remove_op_callback(callback)
        return seen

    ours = count()
    monkeypatch.setattr(skip_report, "noted", lambda *args: [])
    assert ours == count()
    assert ours["Mul"]
