"""Mixed precision training for tf.keras, as TensorFlow RFC 293 proposed it."""

from keras_mp import hardware, loss_scale
from keras_mp._version import __version__
from keras_mp.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from keras_mp.loss_scale_optimizer import LossScaleOptimizer
from keras_mp.messages import MixedPrecisionWarning
from keras_mp.optimizer_wrapper import OptimizerWrapper
from keras_mp.policy import Policy, global_policy, policy_scope, set_global_policy

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleOptimizer",
    "MixedPrecisionWarning",
    "OptimizerWrapper",
    "Policy",
    "__version__",
    "global_policy",
    "hardware",
    "loss_scale",
    "policy_scope",
    "set_global_policy",
]
