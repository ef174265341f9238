"""The hazards that `keras_mp.numerics.audit` looks for.

Each is a function that takes a `TracedStep`. It is a `Suspect` itself, or yields several, or
findings that need no measurement. A suspect yields tensors to measure, gets their values, and
returns a `Finding`, or None. To add a hazard, write such a function, put it into `HAZARDS`, causes
before their consequences, and plant the defect in a model in the tests.
"""

from collections.abc import Callable, Iterator

from keras_mp.numerics.hazards import (
    dtypes,
    not_finite,
    probabilities,
    rounded,
    states,
    step,
    values,
)
from keras_mp.numerics.hazards.traced_step import Suspect, TracedStep
from keras_mp.numerics.results import Finding

HAZARDS: tuple[Callable[[TracedStep], Suspect | Iterator[Suspect | Finding]], ...] = (
    values.vanished_epsilon,
    rounded.inputs_that_are_rounded,
    not_finite.not_finite,
    values.long_sums,
    values.labels_beyond_the_outputs,
    probabilities.softmax_before_a_logarithm,
    probabilities.softmax_that_does_not_add_up,
    probabilities.loss_in_16_bits,
    dtypes.layers_in_float32,
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
    step.updates_that_are_lost,
    rounded.weights_written_in_16_bits,
    states.states_in_16_bits,
)
