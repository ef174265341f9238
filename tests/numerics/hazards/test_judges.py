"""Judges of hazards get numbers by name: each says something on one side of its border only."""

import pytest

from keras_mp.numerics.hazards import HAZARDS, dtypes, probabilities, rounded, states, step, values

SUM = {"op": "Sum", "dtype": "bfloat16", "length": 4096, "is_loss": False}
CAST = {"moved": 64, "error": 0.1, "largest": 2.0, "back": "float16"}
# By judge: numbers that are no finding, and those that are one; the hazard, and what is said of it.
JUDGED = {
    values.judge_sum: (
        {**SUM, "error": 0.01},
        {**SUM, "error": 0.02},
        *("a long sum in 16 bits", "adds up 4,096 numbers in bfloat16, and is up to 2.0%"),
    ),
    values.judge_labels: (
        {"dtype": "float16", "lost": 0.009, "infinite": 0, "largest": 5.0},
        {"dtype": "float16", "lost": 0.009, "infinite": 3, "largest": 1e5},
        *("outputs in 16 bits", "up to 100000, 3 are infinite"),
    ),
    rounded.judge_input: (
        {"dtype": "bfloat16", "is_of_ids": True, "lost": 0.5, "infinite": 0, "others": 0}
        | {"largest": 300.0},
        {"dtype": "bfloat16", "is_of_ids": True, "lost": 0.0, "infinite": 0, "others": 7}
        | {"largest": 300.0},
        *("inputs that are rounded", "go up to 300, 7 become other integers"),
    ),
    states.judge_sum: (
        {"dtype": "bfloat16", "least": -1.0, "most": 1.0},
        {"dtype": "bfloat16", "least": 1.0, "most": 1.0},
        *("a sum that stops in 16 bits", "from 256 on, that changes nothing"),
    ),
    states.judge_average: (
        {"dtype": "float16", "kept": 0.99, "largest": 0.0},
        {"dtype": "float16", "kept": 0.99, "largest": 1.0},
        *("an average that sticks in 16 bits", "keeps 0.99 of itself"),
    ),
    probabilities.judge_before_a_logarithm: (
        {"kind": "sigmoid", "dtype": "float16", "worst": 0.04},
        {"kind": "sigmoid", "dtype": "float16", "worst": 0.06},
        *("a sigmoid in 16 bits", "it is 0.06 away from that of float32"),
    ),
    probabilities.judge_cross_entropy: (
        {"dtype": "bfloat16", "loss": 1.01, "exact": 1.0},
        {"dtype": "bfloat16", "loss": 1.02, "exact": 1.0},
        *("a loss in 16 bits", "its mean is 1.02; in float32 it is 1"),
    ),
    dtypes.judge_layer_in_float32: (
        {"hazard": "a layer that ignores its policy", "share": 0.009, "policy": "mixed_float16"},
        {"hazard": "a layer that ignores its policy", "share": 0.02, "policy": "mixed_float16"},
        *("a layer that ignores its policy", "2% of the multiplications"),
    ),
    dtypes.judge_cast_there_and_back: (
        {**CAST, "there": "float8_e4m3fn", "is_to_8_bits": True, "off": 0.001},
        {**CAST, "there": "float32", "is_to_8_bits": False, "off": 0.0},
        *("a cast there and back", "moves 64 bytes in the forward pass, and rounds"),
    ),
    dtypes.judge_odd_shape: (
        {"share": 0.05, "sizes": (8, 50)},
        {"share": 0.2, "sizes": (8, 50)},
        *("a shape that is slow on tensor cores", "have the sizes 8 x 50"),
    ),
    step.judge_small_gradients: (
        {"small": 9, "others": 100},
        {"small": 10, "others": 100},
        *("float16 without loss scaling", "10% of the numbers in gradients"),
    ),
    step.judge_factor: (
        {"factor": 100.0, "loss": 1.0, "scale": 8.0},
        {"factor": 64.0, "loss": 1.0, "scale": 8.0},
        *("a loss multiplied by a number", "is multiplied by 64, and then by the loss scale, 8"),
    ),
    step.judge_epsilon: (
        {"epsilon": 0.0, "dtypes": ["float32"], "variables": 1, "size": 8, "bad": 0},
        {"epsilon": 0.0, "dtypes": ["float32"], "variables": 1, "size": 8, "bad": 2},
        *("an epsilon that is 0", "2 of their 8 numbers are not finite"),
    ),
    step.judge_weights: (
        {"bad": 4, "scale": 8.0, "loss_is_finite": True, "bad_in_gradients": 0.0},
        {"bad": 4, "scale": 8.0, "loss_is_finite": True, "bad_in_gradients": 1.0},
        *("a step that cannot be skipped", "makes 4 numbers of the weights infinite"),
    ),
    step.judge_updates: (
        {"dtype": "bfloat16", "constants": [], "lost": 9, "moving": 100},
        {"dtype": "bfloat16", "constants": ["beta_2=0.999 is 1"], "lost": 50, "moving": 100},
        *("updates that are lost", "50% of 100 weights in bfloat16"),
    ),
}


@pytest.mark.parametrize("judge", JUDGED, ids=lambda judge: f"{judge.__module__}.{judge.__name__}")
def test_a_judge_needs_numbers_alone(judge):
    sound, broken, hazard, why = JUDGED[judge]
    assert judge in {each.judge for each in HAZARDS}
    assert judge(**sound) is None
    said = judge(**broken)
    assert said.hazard == hazard
    assert why in said.why
    assert said.cure
