"""All ways to make a step, of what scales, a loss and variables.

A step passes its arguments on to the loss, and returns nothing.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

import keras_mp
from tests.common import mirrored, placed

Step = Callable[..., None]
Loss = Callable[..., Any]


class Doubled(keras_mp.OptimizerWrapper):
    """Applies gradients twice as large."""

    def apply_gradients(self, grads_and_vars: Iterable[Any], **kwargs: Any) -> Any:
        doubled = [(2 * tf.convert_to_tensor(g), v) for g, v in grads_and_vars]
        return super().apply_gradients(doubled, **kwargs)


def by_hand(rate: float = 1.0) -> Callable[[Iterable[Any]], None]:
    """What takes pairs of gradients and variables, and is no object of an optimizer."""

    def apply(pairs: Iterable[Any]) -> None:
        for gradient, variable in pairs:
            variable.assign_sub(rate * tf.convert_to_tensor(gradient))

    return apply


@contextlib.contextmanager
def our_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collects keras_mp's warnings in a list, and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", keras_mp.MixedPrecisionWarning)
        yield caught


def taped(
    loss: Loss,
    variables: list[Any],
    apply: Callable[[Iterable[Any]], Any],
    scale: Callable[[Any], Any] = lambda loss: loss,
    unscale: Callable[[Any], Any] = lambda gradients: gradients,
    tape: Callable[[], Any] = tf.GradientTape,
) -> Step:
    """Scales the loss on a tape, unscales the gradients, and applies them."""

    def step(*args: Any) -> None:
        with tape() as recorded:
            scaled = scale(loss(*args))
        apply(zip(unscale(recorded.gradient(scaled, variables)), variables))

    return step


def unscaled(optimizer: Any, loss: Loss, variables: list[Any]) -> Step:
    """Without loss scaling, or with gradients that the optimizer takes for scaled."""
    return taped(loss, variables, optimizer.apply_gradients)


def rfc(optimizer: Any, loss: Loss, variables: list[Any]) -> Step:
    """The calls of the RFC."""
    scale, unscale = optimizer.get_scaled_loss, optimizer.get_unscaled_gradients
    return taped(loss, variables, optimizer.apply_gradients, scale, unscale)


def rfc_callable(optimizer: Any, loss: Loss, variables: list[Any]) -> Step:
    """The calls of the RFC with a loss that is a function."""

    def scaled(*args: Any) -> Any:
        return optimizer.get_scaled_loss(lambda: loss(*args))()

    unscale = optimizer.get_unscaled_gradients
    return taped(scaled, variables, optimizer.apply_gradients, unscale=unscale)


def keras_3(optimizer: Any, loss: Loss, variables: list[Any]) -> Step:
    """The calls of Keras 3."""
    return taped(loss, variables, optimizer.apply_gradients, optimizer.scale_loss)


def keras_3_apply(optimizer: Any, loss: Loss, variables: list[Any]) -> Step:
    """The calls of Keras 3, with the newer of its names."""

    def apply(pairs: Iterable[Any]) -> None:
        optimizer.apply(*map(list, zip(*pairs)))

    return taped(loss, variables, apply, optimizer.scale_loss)


def minimize(optimizer: Any, loss: Loss, variables: list[Any]) -> Step:
    """One call, with a loss that is a function."""

    def step(*args: Any) -> None:
        optimizer.minimize(lambda: loss(*args), var_list=variables)

    return step


def minimize_tensor(optimizer: Any, loss: Loss, variables: list[Any]) -> Step:
    """One call, with a tensor and its tape."""

    def step(*args: Any) -> None:
        with tf.GradientTape() as tape:
            computed = loss(*args)
        optimizer.minimize(computed, variables, tape=tape)

    return step


def compute_gradients(optimizer: Any, loss: Loss, variables: list[Any]) -> Step:
    """Both halves of `minimize`."""

    def step(*args: Any) -> None:
        optimizer.apply_gradients(optimizer.compute_gradients(lambda: loss(*args), variables))

    return step


def scaling_tape(loss_scale: Any, loss: Loss, sources: Any, **arguments: Any) -> Any:
    """The gradients of a loss that a LossScaleGradientTape scales."""
    with keras_mp.LossScaleGradientTape(loss_scale, **arguments) as tape:
        computed = loss()
    return tape.gradient(computed, sources)


def on_replicas(step: Callable[..., Any], mode: str = "function", count: int = 2) -> Any:
    """A step that replicas make, each with its own part of the arguments."""

    def run(*args: Any) -> Any:
        def of_replica() -> Any:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return step(*(tf.gather(each, replica) for each in args))

        return mirrored(count).run(of_replica)

    return placed(mode, run)


def by_replica(value: Any, count: int = 2) -> list[Any]:
    """What a variable or a result is on each replica."""
    return [each.numpy() for each in mirrored(count).experimental_local_results(value)]


# The calls before gradients are applied, with which a step is made in two halves.
RFC = ("get_scaled_loss", "get_unscaled_gradients")
KERAS_3 = ("scale_loss",)
DIALECTS = [RFC, KERAS_3, ("scale_loss", "get_unscaled_gradients")]


def halves(
    optimizer: Any, loss: Loss, variables: list[Any], calls: tuple[str, ...] = KERAS_3
) -> tuple[Callable[..., list[Any]], Callable[[list[Any]], None]]:
    """Computes gradients, with calls of one of the `DIALECTS`; and applies them."""

    def compute(*args: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            scaled = getattr(optimizer, calls[0])(loss(*args))
        gradients = tape.gradient(scaled, variables)
        return optimizer.get_unscaled_gradients(gradients) if calls[1:] else gradients

    def apply(gradients: list[Any], **kwargs: Any) -> None:
        optimizer.apply_gradients(zip(gradients, variables), **kwargs)

    return compute, apply


WAYS = {
    way.__name__: way
    for way in (
        *(rfc, rfc_callable, keras_3, keras_3_apply),
        *(minimize, minimize_tensor, compute_gradients),
    )
}


def scaler(
    grad_scaler: keras_mp.GradScaler,
    optimizer: Any,
    loss: Loss,
    variables: list[Any],
    kind: str = "scaler",
) -> Step:
    """The calls of a GradScaler, of one of the `SCALERS`."""

    def apply(pairs: Iterable[Any]) -> None:
        grad_scaler.step(optimizer, pairs)
        grad_scaler.update()

    if kind == "scaler and tape":
        return taped(
            *(loss, variables, apply),
            tape=lambda: keras_mp.LossScaleGradientTape(grad_scaler, max_retries=0),
        )
    if kind == "scaler that unscales":
        return taped(loss, variables, apply, grad_scaler.scale, grad_scaler.unscale)
    return taped(loss, variables, apply, grad_scaler.scale)


SCALERS = ["scaler", "scaler that unscales", "scaler and tape"]
# What takes a loss scale and makes steps with it.
KINDS = [*WAYS, *SCALERS, "tensorflow 1"]


def with_scale(
    kind: str,
    loss_scale: Any,
    loss: Loss,
    variables: list[Any],
    rate: float = 0.01,
    make: Callable[[float], Any] = tf.keras.optimizers.SGD,
) -> Step:
    """A step of one of the `KINDS`, with an optimizer that is made for it.

    Its attribute `scales` is what scales the loss, and `optimizer` the optimizer.
    """
    if kind == "tensorflow 1":
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(rate)
        scales = keras_mp.compat.v1.LossScaleOptimizer(optimizer, loss_scale)
        step = minimize(scales, loss, variables)
    elif kind in SCALERS:
        optimizer, scales = make(rate), keras_mp.GradScaler(loss_scale)
        keras_mp.OptimizerWrapper(optimizer).build(variables)
        step = scaler(scales, optimizer, loss, variables, kind)
    else:
        optimizer = make(rate)
        scales = keras_mp.LossScaleOptimizer(optimizer, loss_scale)
        scales.build(variables)
        step = WAYS[kind](scales, loss, variables)
    step.optimizer, step.scales = optimizer, scales
    return step
