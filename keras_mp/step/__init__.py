"""One training step: loss scale, calls, gradients, verdict, skipped steps.

RFC 293, "LossScaleOptimizer Overview" and "The new LossScale class". This subpackage knows no
optimizer of `tf.keras`; it calls one through an `OptimizerAdapter`.
"""
