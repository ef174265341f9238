"""Models that others wrote, rewritten for a GPU, train as in float32 but for rounding."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from benchmarks import common, third_party_models, third_party_numerics
from keras_mp import graph_rewrite, keras_api
from tests.common import needs_cuda
from tests.grappler import rewritten

KERAS = "Keras 3" if keras_api.ROOT_PACKAGE == "keras" else "tf_keras"
GPUS = ("GPU 6.1", "GPU 7.0", "GPU 8.0", "GPU 9.0")
MODELS = {
    **third_party_models.MODELS[KERAS],
    **{name: third_party_numerics._application(name) for name in ("MobileNetV2", "ResNet50V2")},
}

pytestmark = needs_cuda
