"""The hazards that `keras_mp.numerics.audit` looks for.

Each is a function: it looks at a step that is being traced, a `Look`, and yields `Suspect`s, each
with tensors to measure and a function that makes a `Hazard` of their values, or nothing. To add a
hazard, write such a function, put it into `HAZARDS`, causes before what comes of them, and plant
the defect in a model in the tests.
"""

from collections.abc import Callable, Iterator

from keras_mp.numerics.hazards import dtypes, probabilities, step, updates, values
from keras_mp.numerics.hazards.look import Look, Suspect

HAZARDS: tuple[Callable[[Look], Iterator[Suspect]], ...] = (
    values.vanished_epsilon,
    values.not_finite,
    values.long_sums,
    values.labels_beyond_the_outputs,
    probabilities.softmax_before_a_logarithm,
    probabilities.softmax_that_does_not_add_up,
    probabilities.loss_in_16_bits,
    dtypes.layers_against_their_policy,
    dtypes.layers_of_another_policy,
    dtypes.casts_there_and_back,
    dtypes.float64,
    dtypes.dtypes_for_no_tensor_core,
    dtypes.shapes_for_no_tensor_core,
    step.gradients_that_vanish,
    step.loss_multiplied_by_a_number,
    step.clipping_before_unscaling,
    step.accumulation_under_a_moving_scale,
    step.epsilon_of_the_optimizer,
    step.weights_that_are_lost,
    step.replicas_that_do_not_agree,
    updates.updates_that_are_lost,
)
