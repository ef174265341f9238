"""TensorFlow's own passes that rewrite graphs to 16 bits.

Here they are turned on and off, their lists are changed, and their work is reported.

TensorFlow 1.15's graph rewrite, on today's grappler. What is here needs TensorFlow only.
"""
