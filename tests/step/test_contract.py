"""The contract of the calls of a step: an order of calls, a place, and the step that comes of it.

A row is an order of calls, and what comes of it: by how much the weights move, in gradients (one
number if only the first moves), and the messages; a `!` comes before an error. Further cells are of
the places in which something else comes of it. The loss scale is 4: a weight that moves by 4 was
given a scaled gradient, one that moves by 0.25 a gradient that was divided once too often.
"""

import contextlib
import functools
import warnings
from concurrent import futures
from unittest import mock

import pytest
import tensorflow as tf

import keras_mp
from tests.common import mirrored, once, ours, value
from tests.models import make_optimizer

pytestmark = once

SCALE = 4.0
GRADIENT = 0.5

# Where calls are made: one after the other in eager; each in a thread of its own, in eager; all in
# one function; in the body of a loop there; in two functions, of which the first computes gradients
# and the second takes them; each in a function of its own; in one that XLA compiles; on two
# replicas, each call in a `run` of its own; on two replicas, in one function. Functions are traced
# before the first one runs. Calls of one name are one function, which goes by the calls that were
# seen before it was traced, whenever it runs: if a program changes its dialect then, or forgets a
# call, nothing tells the function.
PLACES = [
    *("eager", "threads", "one trace", "loop", "two traces", "own traces", "compiled"),
    *("replicas", "traced replicas"),
]
# Several of them, or one, as the tables call them.
ALIASES = {"called": ["eager", "threads", "replicas"], "own": ["own traces"]}

# `scale` is get_scaled_loss, `unscale` get_unscaled_gradients, `compute` compute_gradients.
# `by_hand` multiplies by the loss scale, `apply_scaled` is apply_gradients(scaled=True); `wrapped`
# is that of a wrapper that looks at the gradients. `fail` is one that raises an exception, which
# the program catches. (Replicas raise it where they meet, so the program cannot.) `_w` is another
# weight.
LOSS_SCALE_OPTIMIZER = """
scale_loss apply                         | 1
scale unscale apply                      | 1
scale_loss unscale apply                 | 1
by_hand apply_scaled                     | 1
compute apply                            | 1
scale apply                              | 1 not_unscaled
unscale apply                            | 0.25 not_scaled
apply                                    | 1 neither
by_hand apply                            | 4 neither
scale_loss scale_loss apply              | 1
scale scale unscale apply                | 1
scale scale_loss apply                   | 1
scale_loss scale unscale apply           | 1
scale unscale scale_loss apply           | 1
scale_loss unscale unscale apply         | 0.25
scale unscale unscale apply              | 0.25
unscale scale apply                      | 1 not_unscaled
unscale scale_loss apply                 | 1
scale_loss apply apply                   | 5 neither | own: 2
scale unscale apply apply                | 2 neither | own: 2
scale unscale apply unscale apply        | 1.25 not_scaled | own: 1.25
scale_loss apply unscale apply           | 2 not_scaled | own: 1.25
scale_loss apply apply_w                 | 1,1 | threads: 1,4 neither
scale_loss apply_w apply                 | 1,1 | threads: 4,1 neither
scale_loss apply_w apply apply           | 5,1 neither | threads: 8,1 neither neither | own: 2,1
scale unscale apply_w apply              | 1,1 | threads: 1,1 neither
scale apply_w apply                      | 4,1 not_unscaled neither
                                         | own: 1,1 not_unscaled not_unscaled
apply unscale apply_w                    | 1,0.25 neither not_scaled
unscale apply_w apply                    | 0.25,0.25 not_scaled
                                         | called: 0.25,0.25 not_scaled neither
                                         | own: 0.25,0.25 not_scaled not_scaled
apply_w apply                            | 1,1 neither | eager, threads, own: 1,1 neither neither
compute apply_w apply                    | 1,1 | threads: 1,1 neither
compute compute apply                    | 1
compute scale_loss apply                 | 1
scale_loss compute apply                 | 1
compute scale unscale apply              | 1
scale_loss minimize_w apply              | 1,1
scale minimize_w unscale minimize_w apply | 1,2
minimize_w apply                         | 1,1 neither
scale_loss apply minimize_w apply        | 5,1 neither | own: 2,1
scale_loss by_hand apply_scaled          | 1
scale unscale apply_scaled               | 0.25
by_hand apply_scaled apply               | 5 neither
apply scale_loss apply                   | 2 neither | own: 5 neither
scale apply scale unscale apply          | 2 not_unscaled | own: 1.25 not_unscaled
unscale apply scale_loss apply           | 1.25 not_scaled | own: 4.25 not_scaled
scale_loss apply scale unscale apply     | 2 | own: 1.25
scale unscale apply scale_loss apply     | 2 | own: 5
scale_loss scale unscale apply_w apply   | 1,1 neither | own: 1,1
scale scale_loss apply_w apply           | 4,1 neither | own: 1,1
scale_loss scale_loss scale_loss apply   | 1
scale unscale scale unscale apply        | 1
unscale unscale apply                    | 0.0625 not_scaled
unscale minimize_w apply                 | 0.25,1 not_scaled
compute minimize_w apply                 | 1,1
scale_loss minimize_w minimize_w apply   | 1,2
apply_scaled                             | 0.25
scale_loss apply_scaled                  | 1
scale_loss wrapped                       | 1
scale unscale wrapped                    | 1
scale_loss unscale wrapped               | 1
compute wrapped                          | 1
wrapped                                  | 1 neither
scale wrapped                            | 1 not_unscaled
scale_loss wrapped wrapped               | 5 neither | own: 2
scale_loss wrapped scale unscale apply   | 2
scale_loss wrapped_w wrapped             | 1,1 | threads: 4,1 neither
scale_loss wrapped_w apply               | 1,1 | threads: 4,1 neither
scale_loss wrapped_w apply wrapped_w     | 1,5 neither | threads: 4,5 neither neither | own: 1,2
scale_loss apply_w wrapped               | 1,1 | threads: 4,1 neither
scale unscale wrapped_w wrapped          | 1,1 | threads: 1,1 neither
scale_loss fail apply                    | 1
scale_loss apply_w fail apply            | 1,1 | threads: 4,1 neither neither
scale unscale fail apply                 | 1
fail scale_loss apply                    | 1 neither
scale_loss apply fail apply              | 5 neither neither | own: 2
scale fail unscale apply                 | 1 not_unscaled
"""

# `_2` is another optimizer, with the other weight; `tape` is a LossScaleGradientTape. `fail` is a
# step whose optimizer raises an exception, and `wrong` are calls that raise, of wrong arguments.
GRAD_SCALER = """
scale step update                        | 1
scale unscale step update                | 1
scale unscale_any step update            | 1
scale scale step update                  | 1
scale unscale scale unscale step update  | 1
scale unscale scale step update          | 4
scale step scale step_2 update           | 1,1
scale unscale unscale_2 step step_2 update | 0.25,0.25
scale unscale step step_2 update         | 1,0.25
scale unscale_any step step_2 update     | 1,0.25
scale step unscale_2 step_2 update       | 1,1
tape step update                         | 1
tape tape step update                    | 1
tape step step_2 update                  | 1,1
step                                     | 0 no_loss | called: 0 ! no_loss
unscale                                  | 0 no_loss | called: 0 ! no_loss
update                                   | 0 no_step | called: 0 ! no_step
scale update                             | 0 no_step | called: 0 ! no_step
scale unscale update                     | 0 no_step | called: 0 ! no_step
scale step update step                   | 1 no_loss | called: 1 ! no_loss | own: 2
scale step update unscale                | 1 no_loss | called: 1 ! no_loss | own: 1
scale step update update                 | 1 no_step | called: 1 ! no_step | own: 1
scale step step                          | 0 ! no_update | called: 1 ! no_update | own: 2
scale step scale step                    | 0 ! no_update | called: 1 ! no_update | own: 2
scale unscale unscale                    | 0 ! twice | own: 0
scale unscale_any unscale_any            | 0 ! twice | own: 0
scale unscale unscale_any                | 0 ! twice
scale unscale_any unscale step update    | 0.25 | traced replicas: 0 ! twice
scale step unscale                       | 0 ! too_late | called: 1 ! too_late | own: 1
scale step unscale_any                   | 0 ! too_late | called: 1 ! too_late | own: 1
scale step step_2 unscale_any            | 0 ! whose | called: 1,1 ! whose
tape unscale                             | 0 ! twice
tape scale                               | 0 ! two_ways | own: 0
scale tape                               | 0 ! two_ways | own: 0
scale step tape                          | 0 ! two_ways | called: 1 ! two_ways | own: 1
tape step scale                          | 0 ! two_ways | called: 1 ! two_ways | own: 1
tape step step                           | 0 ! no_update | called: 1 ! no_update | own: 2
tape update                              | 0 no_step | called: 0 ! no_step
scale step update scale step update      | 2
scale unscale step update scale step update | 2 | own: 5
scale step update tape step update       | 2 | own: 1.25
scale step update scale unscale step update | 2 | own: 1.25
scale scale unscale step update          | 1
scale unscale_2 step_2 step update       | 0.25,1
scale unscale step unscale_2 step_2 update | 1,0.25
scale step scale step_2 scale update     | 1,1
scale step step_2 update step            | 1,1 no_loss | called: 1,1 ! no_loss | own: 2,1
scale step_2 step_2                      | 0 ! no_update | called: 0,1 ! no_update | own: 0,2
scale unscale unscale step               | 0 ! twice | own: 0.25
scale unscale_2 unscale_any step         | 0 ! twice
unscale scale step update                | 0 no_loss spoiled | called: 0 ! no_loss | own: 1 no_loss
step scale step update                   | 0 ! no_update no_loss | called: 0 ! no_loss
                                         | own: 0 no_loss
step update                              | 0 no_loss | called: 0 ! no_loss
update scale step update                 | 1 no_step | called: 0 ! no_step
scale update scale step update           | 1 no_step | called: 0 ! no_step
scale unscale update scale step update   | 1 no_step | called: 0 ! no_step | own: 4 no_step
tape unscale_2                           | 0 ! twice
tape scale step                          | 0 ! two_ways | own: 1
scale tape step                          | 0 ! two_ways | own: 1
scale fail step update                   | 1
scale unscale fail step update           | 1
tape fail step update                    | 1
scale fail update                        | 0 no_step | called: 0 ! no_step
scale step_2 step update                 | 1,1
scale unscale unscale_2 step_2 step update | 0.25,0.25
scale unscale_2 scale unscale step step_2 update | 1,1
scale unscale unscale unscale step       | 0 ! twice | own: 0.0625
scale unscale unscale scale unscale step update | 0 ! twice | own: 1
scale wrong step update                  | 1
scale unscale wrong step update          | 1
scale step wrong update                  | 1
unscale unscale step update              | 0 ! twice no_loss | called: 0 ! no_loss
                                         | own: 0 no_loss spoiled
step step update                         | 0 ! no_update no_loss | called: 0 ! no_loss
                                         | own: 0 no_loss
step scale update                        | 0 no_loss | called: 0 ! no_loss
scale fail scale step update             | 1
scale unscale fail update                | 0 no_step | called: 0 ! no_step
scale fail step step                     | 0 ! no_update | called: 1 ! no_update | own: 2
scale unscale_any fail step update       | 1
scale unscale_any scale step update      | 4
update update                            | 0 no_step no_step | called: 0 ! no_step
                                         | own, traced replicas: 0 no_step
scale step update update scale step update | 2 no_step | called: 1 ! no_step | own: 2
tape tape step tape step                 | 0 ! no_update | called: 1 ! no_update | own: 2
tape scale step_2                        | 0 ! two_ways | own: 0,1
scale step tape step_2                   | 0 ! two_ways | called: 1 ! two_ways | own: 1,1
tape step scale step_2                   | 0 ! two_ways | called: 1 ! two_ways | own: 1,1
scale unscale tape step                  | 0 ! two_ways | own: 1
tape update scale step update            | 1 no_step | called: 0 ! no_step
scale step_2 unscale step update         | 1,1
scale unscale_2 step step_2 update       | 0.25,1
step_2 scale step update                 | 1 no_loss | called: 0 ! no_loss
scale step unscale scale step update     | 0 ! too_late | called: 1 ! too_late | own: 2
scale unscale_any unscale_2 step_2 step update | 0 ! whose | called: 0,0.25 ! whose
                                         | traced replicas: 0 ! twice
tape fail update                         | 0 no_step | called: 0 ! no_step
fail scale step update                   | 0 ! no_update no_loss | called: 0 ! no_loss
                                         | own: 1 no_loss
scale step fail                          | 0 ! no_update | called: 1 ! no_update | own: 1
scale unscale step scale unscale_2 step_2 update | 1,1
"""

TENSORFLOW_1 = """
compute apply                       | 1
compute apply apply                 | 2 | eager, replicas: 2 not_computed
compute compute apply               | 1
compute_w apply                     | 1 | eager, replicas: 1 not_computed
compute_w compute apply_w apply     | 1,1
compute compute_w apply apply_w     | 1,1
apply                               | 1 not_computed
apply compute apply                 | 2 not_computed
minimize_w apply                    | 1,1 not_computed
compute minimize_w apply            | 1,1
compute minimize_w minimize_w apply | 1,2
compute apply compute apply         | 2
compute compute apply apply         | 2 | eager, replicas: 2 not_computed
apply apply                         | 2 not_computed not_computed
                                    | own, replicas, traced replicas: 2 not_computed
compute_w compute_w apply_w apply   | 1,1 | eager, replicas: 1,1 not_computed
compute apply_w                     | 0,1 | eager, replicas: 0,1 not_computed
compute fail apply                  | 1
"""


MESSAGES = {
    "neither": "Neither get_scaled_loss() nor",
    "not_unscaled": "get_unscaled_gradients() was not",
    "not_scaled": "get_scaled_loss() was not",
    "no_loss": "no loss was scaled",
    "no_step": "without a step()",
    "no_update": "update() was not called",
    "twice": "that are unscaled already",
    "too_late": "after step() with the same",
    "two_ways": "unclear what is scaled",
    "whose": "there are several",
    "spoiled": "called wrongly",
    "not_computed": "did not compute",
}


# Calls that take gradients, which may be in a function of their own.
TAKERS = ("apply", "step", "update", "wrapped", "fail")


class Face:
    """What makes calls by name, with two weights. A call takes a gradient and returns one."""

    def __init__(self):
        # So that a function of the program may assign to them in a replica.
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.v, self.w = (tf.Variable(8.0, aggregation=aggregation) for _ in range(2))

    def make(self, calls, gradient):
        gradient *= 1
        for call in calls:
            gradient = self.call(call, gradient)
        return gradient

    def loss_of(self, variable):
        return variable * GRADIENT


class Looking(keras_mp.OptimizerWrapper):
    def apply_gradients(self, grads_and_vars, **kwargs):
        return super().apply_gradients([(g * 1, v) for g, v in grads_and_vars], **kwargs)


class OfLossScaleOptimizer(Face):
    def __init__(self):
        super().__init__()
        self.inner = make_optimizer("new.SGD", 1.0, momentum=0.0)
        self.scaling = keras_mp.LossScaleOptimizer(self.inner, SCALE)
        self.scaling.build([self.v, self.w])
        self.wrapper = Looking(self.scaling)

    def call(self, call, gradient):
        optimizer, v, w = self.scaling, self.v, self.w
        if call == "scale_loss":
            return optimizer.scale_loss(tf.constant(GRADIENT)) * 1
        if call == "scale":
            return optimizer.get_scaled_loss(tf.constant(GRADIENT)) * 1
        if call == "unscale":
            return optimizer.get_unscaled_gradients([gradient])[0] * 1
        if call == "by_hand":
            return GRADIENT * optimizer.loss_scale()
        if call == "compute":
            return optimizer.compute_gradients(lambda: self.loss_of(v), [v])[0][0] * 1
        if call == "minimize_w":
            optimizer.minimize(lambda: self.loss_of(w), [w])
        elif call == "fail":
            failing = mock.patch.object(self.inner, "apply_gradients", side_effect=OSError)
            with contextlib.suppress(OSError), failing:
                optimizer.apply_gradients([(gradient, v)])
        elif call.startswith("wrapped"):
            self.wrapper.apply_gradients([(gradient, w if call == "wrapped_w" else v)])
        else:
            variable = w if call == "apply_w" else v
            optimizer.apply_gradients([(gradient, variable)], scaled=call == "apply_scaled")
        return gradient


class Sgd:
    fails = False

    def __call__(self, pairs):
        if self.fails:
            raise OSError
        for gradient, variable in pairs:
            variable.assign_sub(gradient)


sgd = Sgd()


def other(pairs):
    sgd(pairs)


class OfGradScaler(Face):
    def __init__(self):
        super().__init__()
        self.scaling = keras_mp.GradScaler(SCALE)

    def call(self, call, gradient):
        scaler = self.scaling
        if call == "scale":
            return scaler.scale(tf.constant(GRADIENT)) * 1
        if call == "unscale":
            return scaler.unscale([gradient], sgd)[0] * 1
        if call == "unscale_2":
            return scaler.unscale([gradient], other)[0] * 1
        if call == "unscale_any":
            return scaler.unscale([gradient])[0] * 1
        if call == "tape":
            with keras_mp.LossScaleGradientTape(scaler) as tape:
                loss = self.loss_of(self.v)
            return tape.gradient(loss, self.v)
        if call == "step":
            scaler.step(sgd, [(gradient, self.v)])
        elif call == "fail":
            with contextlib.suppress(OSError), mock.patch.object(sgd, "fails", True):
                scaler.step(sgd, [(gradient, self.v)])
        elif call == "step_2":
            scaler.step(other, [(gradient, self.w)])
        elif call == "wrong":
            for wrong in (
                *(lambda: scaler.scale(tf.constant(1)), lambda: scaler.scale([None])),
                *(lambda: scaler.unscale("abc", sgd), lambda: scaler.step(sgd, [])),
                lambda: scaler.step(7, [(gradient, self.v)]),
                lambda: scaler.step(sgd, [(None, self.v)]),
                *(lambda: scaler.update("a"), lambda: scaler.update(0.5 / 2**30)),
            ):
                with pytest.raises((TypeError, ValueError)):
                    wrong()
        else:
            scaler.update()
        return gradient


class OfTensorFlow1(Face):
    def __init__(self):
        super().__init__()
        inner = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        self.scaling = keras_mp.compat.v1.LossScaleOptimizer(inner, SCALE)

    def call(self, call, gradient):
        what, _, which = call.partition("_")
        optimizer, variable = self.scaling, self.w if which else self.v
        if what == "fail":
            failing = mock.patch.object(
                optimizer.inner_optimizer, "apply_gradients", side_effect=OSError
            )
            with contextlib.suppress(OSError), failing:
                optimizer.apply_gradients([(gradient, variable)])
        elif what == "compute":
            pairs = optimizer.compute_gradients(lambda: self.loss_of(variable), var_list=[variable])
            return pairs[0][0] * 1
        elif what == "minimize":
            optimizer.minimize(lambda: self.loss_of(variable), var_list=[variable])
        else:
            optimizer.apply_gradients([(gradient, variable)])
        return gradient


def rows(face, table):
    """Cases of a face, the calls, and a dict of what comes of them by place."""
    cases = []
    for line in table.strip().splitlines():
        calls, *cells = (part.strip() for part in line.split("|"))
        if calls:
            fails = not {"fail", "wrong"}.isdisjoint(calls.split())
            places = [place for place in PLACES if not (fails and "replicas" in place)]
            expected = dict.fromkeys(places, cells.pop(0))
            cases.append(pytest.param(face, calls, expected, id=calls))
        for cell in cells:
            names, cell = cell.split(": ")
            for name in names.split(", "):
                where = set(ALIASES.get(name, [name])).intersection(places)
                expected.update(dict.fromkeys(where, cell))
    return cases


@pytest.mark.parametrize(
    ("face", "calls", "expected"),
    [
        *rows(OfLossScaleOptimizer, LOSS_SCALE_OPTIMIZER),
        *rows(OfGradScaler, GRAD_SCALER),
        *rows(OfTensorFlow1, TENSORFLOW_1),
    ],
)
def test_contract(face, calls, expected):
    calls = tuple(calls.split())
    found = {place: what_comes_of(face, calls, place) for place in expected}
    assert in_any_order(found) == in_any_order(expected)


def in_any_order(cells):
    """The cells by place; a function may give its messages in any order."""
    ordered = {place: cell.split() for place, cell in cells.items()}
    for place in ("one trace", "loop"):
        move, *names = ordered.get(place, [""])
        ordered[place] = [move, *sorted(names)]
    return ordered


def what_comes_of(face, calls, place):
    strategy = mirrored(2) if "replicas" in place else tf.distribute.get_strategy()
    with strategy.scope():
        face = face()
    gradient, error = tf.constant(GRADIENT), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for make in makers(face, calls, place, strategy):
                gradient = make(gradient)
        except ValueError as raised:
            error = f" ! {name_of(raised)}"
        face.scaling.steps_skipped  # noqa: B018 - tells what XLA compiled
    count = strategy.num_replicas_in_sync
    moves = [f"{(8 - float(value(each))) / GRADIENT / count:g}" for each in (face.v, face.w)]
    names = [name_of(each.message) for each in ours(caught)]
    if count > 1:
        names = dict.fromkeys(names)  # Each replica may warn.
    warned = "".join(f" {name}" for name in names)
    return ",".join(moves).removesuffix(",0") + error + warned


def makers(face, calls, place, strategy):
    """Functions of a gradient that return one, which make the calls in turn."""
    parts = [(call,) for call in calls]
    if place in ("eager", "one trace", "loop", "compiled", "traced replicas"):
        parts = [calls]
    elif place == "two traces":
        takes = [i for i, call in enumerate(calls) if call.startswith(TAKERS)]
        cut = takes[0] if takes else len(calls)
        parts = [part for part in (calls[:cut], calls[cut:]) if part]
    by_part = {part: functools.partial(face.make, part) for part in parts}
    if "replicas" in place:
        by_part = {part: on_replicas(make, strategy) for part, make in by_part.items()}
    if place == "loop":
        by_part = {part: in_loop(make) for part, make in by_part.items()}
    if place == "threads":
        by_part = {part: in_thread(make) for part, make in by_part.items()}
    if "trace" in place or place in ("loop", "compiled"):
        by_part = {part: traced(make, place == "compiled") for part, make in by_part.items()}
    return [by_part[part] for part in parts]


def on_replicas(make, strategy):
    return lambda gradient: strategy.run(make, args=(gradient,))


def in_loop(make):
    def turn(gradient, is_over):
        return make(gradient), True

    def loop(gradient):
        return tf.while_loop(lambda _, is_over: ~is_over, turn, [gradient, False])[0]

    return loop


def in_thread(make):
    def start(gradient):
        with futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(make, gradient).result()

    return start


def traced(make, jit_compile):
    function = tf.function(make, jit_compile=jit_compile, autograph=False)
    function.get_concrete_function(tf.TensorSpec([]))
    return function


def name_of(message):
    return next((name for name, text in MESSAGES.items() if text in str(message)), str(message))


@pytest.mark.parametrize("calls", ["scale_loss apply", "scale unscale apply", "compute apply"])
def test_a_whole_step_of_a_function_between_the_calls_of_eager_code(calls):
    face, gradient = OfLossScaleOptimizer(), tf.constant(GRADIENT)
    whole = traced(functools.partial(face.make, ("scale_loss", "apply_w")), False)
    for call in calls.split():  # Quietly.
        gradient = face.make([call], gradient)
        whole(gradient)
    assert float(face.v) == 8 - GRADIENT
    assert float(face.w) == 8 - GRADIENT * len(calls.split())
