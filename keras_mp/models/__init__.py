"""Whole models: their steps and tapes, files, weights in 16 bits, paths of layers."""
