"""The hazards that `check` looks for in a training step.

Each has two functions. The one measures: it goes through a `TracedStep` and yields what is
`Observed`, with names for the numbers that tell whether it matters. The other judges these numbers,
and returns what is `Said`, or None. To add a hazard, write both, put them into `HAZARDS`, causes
before their consequences, test the judge with numbers, and plant the defect in a model.
"""

from keras_mp.numerics.causes import Hazard
from keras_mp.numerics.hazards import (
    dtypes,
    not_finite,
    probabilities,
    states,
    step,
    values,
)

HAZARDS = (
    Hazard(values.batches, values.judge_batch),
    Hazard(values.epsilons, values.judge_epsilon),
    Hazard(values.inputs, values.judge_input),
    Hazard(not_finite.numbers, not_finite.judge),
    Hazard(values.sums, values.judge_sum),
    Hazard(values.labels, values.judge_labels),
    Hazard(probabilities.before_a_logarithm, probabilities.judge_before_a_logarithm),
    Hazard(probabilities.sums, probabilities.judge_sum),
    Hazard(probabilities.cross_entropies, probabilities.judge_cross_entropy),
    Hazard(dtypes.layers_in_float32, dtypes.judge_layer_in_float32),
    Hazard(dtypes.casts_there_and_back, dtypes.judge_cast_there_and_back),
    Hazard(dtypes.float64_data, dtypes.judge_float64_data),
    Hazard(dtypes.float64_layers, dtypes.judge_float64_layer),
    Hazard(dtypes.without_tensor_cores, dtypes.judge_without_tensor_cores),
    Hazard(dtypes.odd_shapes, dtypes.judge_odd_shape),
    Hazard(step.small_gradients, step.judge_small_gradients),
    Hazard(step.factors, step.judge_factor),
    Hazard(step.clipping, step.judge_clipping),
    Hazard(step.accumulation, step.judge_accumulation),
    Hazard(step.epsilon, step.judge_epsilon),
    Hazard(step.weights, step.judge_weights),
    Hazard(step.replicas, step.judge_replicas),
    Hazard(step.updates, step.judge_updates),
    Hazard(values.dropouts, values.judge_dropout),
    Hazard(values.written_weights, values.judge_written_weight),
    Hazard(states.sums, states.judge_sum),
    Hazard(states.averages, states.judge_average),
)
