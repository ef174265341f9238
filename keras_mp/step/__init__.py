"""One training step: loss scale, calls, gradients, verdict, and what happens to a skipped one.

RFC 293, "LossScaleOptimizer Overview" and "The new LossScale class". No optimizer of `tf.keras` is
known here; an `OptimizerAdapter` drives it.
"""
