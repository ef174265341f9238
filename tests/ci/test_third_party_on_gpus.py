"""Models that others wrote, rewritten for a GPU, train as in float32 but for rounding.

They run on the CPU, whose kernels compute the same operations in the same dtypes. With the extra
`third-party`.
"""

import pytest
import tensorflow as tf

import keras_mp
from benchmarks.acceptance import third_party_models
from keras_mp import graph_rewrite
from tests.common import IS_KERAS_3, needs_cuda
from tests.grappler import rewritten
from tests.grappler.rewritten import distance, update

pytestmark = needs_cuda
KERAS = "Keras 3" if IS_KERAS_3 else "tf_keras"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of what the models do
@pytest.mark.parametrize("name", third_party_models.MODELS[KERAS])
def test_a_step(name):
    pytest.importorskip(third_party_models.PACKAGES[KERAS])
    tf.keras.utils.set_random_seed(0)
    example = third_party_models.MODELS[KERAS][name]()
    model = example.model
    third_party_models.turn_dropout_off(model)
    optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.01), 128)
    model.compile(optimizer, jit_compile=False, **example.compile_arguments)
    batch = (example.inputs,) if example.labels is None else (example.inputs, example.labels)
    function, arguments = graph_rewrite._step_of_training(model, batch, {})
    concrete = function.get_concrete_function(*arguments)

    exact = update(model, concrete, *arguments)
    for device in ("GPU 6.1", "GPU 7.0", "GPU 8.0", "GPU 9.0"):
        report = graph_rewrite.report(concrete, device=device)
        in_float16 = report.by_dtype().get("float16", {})
        step = rewritten.of_function(concrete, device)
        error = distance(update(model, step, *tf.nest.flatten(arguments)), exact)
        if device == "GPU 6.1":
            assert not in_float16
            assert error < 1e-4  # sums in another order
        else:
            assert in_float16["MatMul"] + in_float16.get("Conv2D", 0) > 2
            assert 0 < error < rewritten.tolerance(report)
