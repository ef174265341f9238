"""One training step: the loss scale, the calls, the gradients, the verdict, skipped steps.

RFC 293, "LossScaleOptimizer Overview" and "The new LossScale class". This
subpackage knows no optimizer of `tf.keras`; an `OptimizerAdapter` calls it.
"""
