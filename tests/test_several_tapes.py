"""Several tapes in a `train_step`, some of which record while another computes gradients."""

import pytest
import tensorflow as tf

import keras_mp
from tests.common import distances, mirrored, once
from tests.test_step_tapes import TINY, expect_as_in_float32, moved, plain, trained, update


def apply(model, *gradients):
    variables = model.trainable_variables
    sums = [sum(parts[1:], parts[0]) for parts in zip(*gradients)]
    model.my_optimizer.apply_gradients(zip(sums, variables))


def one_outlives_the_other(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape() as first, tf.GradientTape() as second:
        loss = model.loss_of(x, y)
        twice = 2 * loss
        of_second = second.gradient(loss, variables)
    apply(model, first.gradient(twice, variables), of_second)
    return loss


def among_three(model, x, y):
    variables = model.trainable_variables
    with (
        tf.GradientTape(),
        tf.GradientTape(persistent=True) as kept,
        tf.GradientTape() as last,
    ):
        loss = model.loss_of(x, y)
        gradients = [tape.gradient(loss, variables) for tape in (last, kept, kept)]
    apply(model, *gradients)
    return loss


def while_it_records(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        loss = model.loss_of(x, y)
        gradients = tape.gradient(loss, variables)
        other = model.loss_of(x, y)
    apply(model, gradients, tape.gradient(other, variables))
    return loss


def while_it_is_stopped(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape(persistent=True) as kept, tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
        with kept.stop_recording(), tape.stop_recording():
            gradients = [each.gradient(loss, variables) for each in (kept, tape)]
        other = model.loss_of(x, y)
    apply(model, *gradients, kept.gradient(other, variables))
    return loss


def entered_again(model, x, y):
    variables, tape, gradients = model.trainable_variables, tf.GradientTape(), []
    for _ in range(2):
        with tape:
            loss = model.loss_of(x, y)
        gradients.append(tape.gradient(loss, variables))
    apply(model, *gradients)
    return loss


def differentiated(model, x, y):
    """The loss has gradients of variables in it, which the outer tape differentiates."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            loss = model.loss_of(x, y) / TINY
        gradients = inner.gradient(loss, model.trainable_variables)
        squares = tf.add_n([tf.reduce_sum(tf.square(each)) for each in gradients])
        loss = TINY * (loss + 0.1 * squares)
    update(model, tape, loss)
    return loss


def adversarial(model, x, y):
    """The signs of gradients that float16 cannot hold."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = model.loss_of(x, y)
        loss = model.loss_of(x + 0.5 * tf.sign(inner.gradient(loss, x)), y)
    update(model, tape, loss)
    return loss


STEPS = [
    one_outlives_the_other,
    among_three,
    while_it_records,
    while_it_is_stopped,
    entered_again,
    differentiated,
    adversarial,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_tapes_scale_while_others_record(step):
    expect_as_in_float32(trained(step, "mixed_float16", {"run_eagerly": True}), step)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("step", [among_three, differentiated, adversarial])
def test_tapes_scale_in_a_function_while_others_record(step, is_compiled):
    expect_as_in_float32(trained(step, "mixed_float16", {"jit_compile": is_compiled}), step)


@once
@pytest.mark.parametrize("step", [among_three, adversarial])
def test_tapes_scale_on_replicas_while_others_record(step):
    def run(policy):
        with mirrored(2).scope():
            return moved(trained(step, policy, {}, batch_size=16))

    assert max(distances(run("mixed_float16"), run("float32"))) < 0.02


@once
def test_a_penalty_with_large_gradients_leaves_the_scale_alone():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = 1e4 * model(x, training=True)
            penalty = tf.reduce_mean(tf.square(inner.gradient(out, x)))
            loss = model.loss_of(x, y) + 1e-16 * penalty
        update(model, tape, loss)
        return loss

    _, _, model = trained(step, keras_mp.Policy("mixed_float16"), {})
    assert float(model.optimizer.loss_scale()) == 2.0**15


@once
def test_a_tape_that_is_stopped_twice_is_an_error_as_in_tensorflow():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            model.loss_of(x, y)
            with tape.stop_recording():
                stopped = tape.stop_recording()
                with pytest.raises(ValueError, match="not recording"):
                    stopped.__enter__()
        return plain(model, x, y)

    trained(step, "mixed_float16", {"run_eagerly": True})


def with_penalty(model, x, y):
    """One loss is scaled by its optimizer and then added to; the other one by the tape."""
    first, second = (layer.trainable_variables for layer in model.inside)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.cast(model.inside[0](x), tf.float32)))
        scaled_loss = model.optimizer.scale_loss(TINY * loss) + 0.0 * tf.reduce_sum(first[0])
    model.optimizer.apply_gradients(zip(tape.gradient(scaled_loss, first), first))
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
    model.my_optimizer.apply_gradients(zip(tape.gradient(loss, second), second))
    return loss


def with_penalty_in_one_tape(model, x, y):
    first, second = (layer.trainable_variables for layer in model.inside)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.square(tf.cast(model.inside[0](x), tf.float32)))
        scaled_loss = model.optimizer.scale_loss(TINY * loss) + 0.0 * tf.reduce_sum(first[0])
        other = model.loss_of(x, y)
    model.my_optimizer.apply_gradients(zip(tape.gradient(other, second), second))
    model.optimizer.apply_gradients(zip(tape.gradient(scaled_loss, first), first))
    return loss


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("step", [with_penalty, with_penalty_in_one_tape])
def test_a_scaled_loss_that_is_added_to_leaves_other_losses_to_their_tapes(step, is_eager):
    def run(policy):
        inner = tf.keras.optimizers.SGD(1e5)
        if policy == "float32":
            inner = keras_mp.LossScaleOptimizer(inner, 1)
        return moved(trained(step, policy, {"optimizer": inner, "run_eagerly": is_eager}))

    assert max(distances(run("mixed_float16"), run("float32"))) < 0.02
