"""Benchmarks: side by side with Keras's own classes, as ratios. `python -m benchmarks`."""
