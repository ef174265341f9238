"""What keras_mp does with whole models: steps, tapes in steps, files, weights, paths."""
