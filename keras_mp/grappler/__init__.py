"""TensorFlow's own passes that rewrite graphs to 16 bits: on and off, their lists, what they did.

TensorFlow 1.15's graph rewrite, on today's grappler. What is here needs TensorFlow only.
"""
