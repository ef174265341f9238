"""Benchmarks: side by side with stock, as ratios. `python -m benchmarks`."""
