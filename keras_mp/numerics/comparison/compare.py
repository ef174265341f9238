"""Compares a model in two dtypes on the same batch, and tells defects from rounding.

A model in 16 bits drifts away from the same model in float32, and more so the deeper it is. Two
measurements tell whether that is a defect.

The layer's own share: each layer runs again in float32, on the inputs and upstream gradients that
it had in 16 bits. The results differ by the errors of this layer alone.

What rounding explains: the float32 model runs with inputs, weights and outputs that are moved at
random by as much as rounding moves them. Layers that amplify such errors, or a ReLU whose input
changes its sign, do so in these runs as well. Distances are given in units of the largest effect
in a few such runs.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.conversion import convert
from keras_mp.numerics import batches, own_thread
from keras_mp.numerics.batches import Batch, Structure
from keras_mp.numerics.comparison import own_share, records
from keras_mp.numerics.comparison.calls import RandomNumbers
from keras_mp.numerics.comparison.compared import Comparison
from keras_mp.numerics.comparison.differences import compare_layers, cure_in
from keras_mp.numerics.comparison.records import LayerRecord, Record
from keras_mp.numerics.comparison.runs import Runner, check_finite, check_same_calls
from keras_mp.numerics.comparison.training_loss import GivenLoss, loss_of
from keras_mp.numerics.distances import UNIT_ROUNDOFF
from keras_mp.support.progress import Progress


def runners(
    model: tf.keras.Model,
    batch: Batch,
    reference: Any = "float32",
    loss: GivenLoss | None = None,
    step: Callable[..., tf.Tensor] | None = None,
    training: bool = True,
) -> tuple[Runner, Runner]:
    """Returns what runs a model, and what runs its reference, with the same random numbers.

    Args:
        model: of `tf.keras`, built.
        batch: Batch.
        reference: a policy for a copy of the model, or a model with the same layers.
        loss: as for `check`.
        step: as for `check`.
        training: as for `check`.
    """
    numbers = RandomNumbers()

    def runner(each: tf.keras.Model, is_a_copy: bool) -> Runner:
        value = loss_of(each, model, batch, loss, is_a_copy)
        return Runner(each, batch, value, numbers=numbers, step=step, training=training)

    is_given = isinstance(reference, tf.keras.Model)
    wide = reference if is_given else convert(model, reference)
    return runner(model, False), runner(wide, not is_given)


def compare(narrow: Runner, wide: Runner) -> Comparison:
    """Runs a model in 16 bits and in float32, and says where the two part.

    Both runs have the same weights, the same batch and the same random numbers, and go forwards and
    backwards. Each layer is then run once more, in both dtypes, on what it got in the first run, so
    that what it does itself is told from what it was given. All of it runs in eager, functions that
    `tf.function` made included. Weights and states are put back.

    Distances are in units of what rounding explains, which is measured: the float32 model is run
    with inputs, weights and outputs that are moved at random by up to two unit roundoffs of the
    narrow dtype. More than 16 units are a finding. So a deep model may drift as far as its rounding
    errors take it, and a layer that loses more than that is named, with what it does.

    The loss is multiplied by the loss scale that the model is trained with: the current one of its
    optimizer, or the one that the policy starts with, or 2 ** 15 in float16. If gradients overflow,
    it is halved until they do not, as training would do.

    Args:
        narrow: Runner of the model.
        wide: Runner of the reference, with the same random numbers.

    Returns:
        A `Comparison`: `findings` is empty if rounding explains everything, `str` is a table.

    Raises:
        ValueError: the two do not call the same layers, or numbers of the batch are not finite and
            so the loss is not either.
    """
    with Progress("compare", parts=4) as progress:
        progress.begin("in 16 bits")
        run = narrow.run_as_trained()
        progress.begin("the reference")
        other = wide.run()
        check_finite(other, wide.batch, needs_loss=False)
        check_same_calls(run, other)
        progress.begin("the reference, with noise")
        references = records.explained_layers(wide, other, UNIT_ROUNDOFF[run.dtype])
        layers, first = compare_layers(list(zip(records.layers_of(run), references)))
        progress.begin("each layer by itself")
        layers, own = own_share.judge(layers, run, other)
    findings = own or ([first.finding(cure_in(narrow.model, first.layer))] if first else [])
    losses = run.loss, other.loss
    return Comparison(narrow.name, wide.name, layers, findings, losses, run.loss_scale)


def record(
    model: tf.keras.Model,
    x: Structure,
    y: Structure = None,
    sample_weight: Structure = None,
    *,
    loss: GivenLoss | None = None,
    step: Callable[..., tf.Tensor] | None = None,
    training: bool = True,
    seed: int = 0,
) -> Record:
    """Runs a model and keeps what each layer returned, and the gradients, to compare them later.

    Use it for runs that cannot be made side by side: of two commits, two machines, two versions of
    TensorFlow, two checkpoints. Save the record, and pass it to `check` with another one.
    Of a large tensor, a sample of 65,536 numbers is kept.

    Args:
        model: of `tf.keras`. It is run as it is.
        x: the inputs of a batch.
        y: its labels. Without them, or without a loss, the loss is a sum of the outputs with random
            signs.
        sample_weight: weights for the loss.
        loss: as for `check`.
        step: as for `check`.
        training: as for `check`.
        seed: int, of the random numbers, which two dtypes take different ones of: record both runs
            with `training=False`, or in the same dtype, or use `check`. Those of the program go on
            as if nothing had been recorded.

    Returns:
        A `Record`.

    Example:

    >>> import os, tempfile
    >>> model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2)])
    >>> path = os.path.join(tempfile.mkdtemp(), "today.npz")
    >>> keras_mp.numerics.record(model, tf.ones([3, 4])).save(path)
    >>> today = keras_mp.numerics.Record.load(path)
    >>> now = keras_mp.numerics.record(model, tf.ones([3, 4]))
    >>> keras_mp.numerics.check(now, reference=today).findings
    ()
    """
    batch = batches.as_fit_takes_it(model, (x, y, sample_weight))
    if step is None:
        batches.build(model, batch)
    with own_thread.random_numbers(seed):
        value, numbers = loss_of(model, model, batch, loss, is_a_copy=False), RandomNumbers()
        runner = Runner(model, batch, value, numbers=numbers, step=step, training=training)
        run = runner.run_as_trained()
        check_finite(run, batch, needs_loss=False)
        layers = records.explained_layers(runner, run, UNIT_ROUNDOFF[run.dtype])
    return Record(runner.name, layers, run.loss, run.loss_scale)


def compare_records(run: Record, reference: Record) -> Comparison:
    """Compares two recorded runs, and says where they part.

    A layer's own errors cannot be told from those of its inputs. So the finding is the first layer
    whose outputs are further apart than rounding explains; if there is none, it is the first layer
    of the backward pass whose gradients are.

    Args:
        run: what `record` returned, or `Record.load`.
        reference: the same, of the run to compare with.

    Returns:
        A `Comparison`.

    Raises:
        ValueError: the two have no layer in common.

    Example:

    >>> model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2, name="dense")])
    >>> before = keras_mp.numerics.record(model, tf.ones([3, 4]))
    >>> model.layers[0].set_weights([2 * weight for weight in model.layers[0].get_weights()])
    >>> after = keras_mp.numerics.record(model, tf.ones([3, 4]))
    >>> keras_mp.numerics.comparison.compare.compare_records(after, before).findings[0].path
    'dense'
    """
    layers, first = compare_layers(_pairs(run, reference))
    if not layers:
        raise ValueError(
            "The two records have no layer in common. Expected layers such as "
            f"{[layer.path for layer in reference.layers[:5]]}. "
            f"Received: {[layer.path for layer in run.layers[:5]]}"
        )
    findings = [first.finding(cure_in(None, first.layer))] if first else []
    losses = run.loss, reference.loss
    return Comparison(run.name, reference.name, layers, findings, losses, run.loss_scale)


def _pairs(run: Record, reference: Record) -> list[tuple[LayerRecord, LayerRecord]]:
    if [each.path for each in run.layers] == [each.path for each in reference.layers]:
        return list(zip(run.layers, reference.layers))
    others = {layer.path: layer for layer in reference.layers}
    return [(each, others[each.path]) for each in run.layers if each.path in others]
