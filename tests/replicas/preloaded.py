"""What all worker processes have imported before they are forked. Nothing is computed here."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf

tf.keras  # noqa: B018 - is imported when it is first asked for

import keras_mp  # noqa: E402, F401
import tests.common  # noqa: E402, F401
