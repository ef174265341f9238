"""Is one line enough? Programs written for float32, each with that line in both 16-bit dtypes.

`one_line_programs` has the programs. Each runs in float32, then under `mixed_float16` and
`mixed_bfloat16`, from the same weights, on the same batch.
"""

import json
import sys
import traceback
import warnings

import numpy as np
import tensorflow as tf

import keras_mp
from benchmarks import common

# With the usual 2**15 the first steps of such small problems are skipped, and losses could not be
# compared step by step.
INITIAL_SCALE = 2.0**10
DTYPES = ("float16", "bfloat16")
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
# Some dozens of roundings from input to loss, in eight steps that go on from one another.
ROUNDINGS = 32


def measure(names: list[str] | None = None) -> dict[str, dict]:
    """Trains the programs in each dtype.

    Args:
        names: of the kinds; all by default.
    """
    from benchmarks.acceptance import one_line_programs

    results: dict[str, dict] = {}
    for name in names or one_line_programs.PROGRAMS:
        results[name] = {}
        for dtype in ("float32", *DTYPES):
            print(f"{name}, {dtype} ...", file=sys.stderr, flush=True)
            results[name][dtype] = _train(one_line_programs.PROGRAMS[name], dtype)
    return results


def _train(program, dtype):
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(0)
    policy = keras_mp.Policy("float32")
    if dtype != "float32":
        scale = keras_mp.DynamicLossScale(INITIAL_SCALE) if dtype == "float16" else None
        policy = keras_mp.Policy(f"mixed_{dtype}", loss_scale=scale)
    try:
        with warnings.catch_warnings(record=True) as caught, keras_mp.policy_scope(policy):
            warnings.simplefilter("always")
            losses = program()
    except Exception as error:  # one that fails must not hide the rest
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    ours = [w for w in caught if issubclass(w.category, keras_mp.MixedPrecisionWarning)]
    return {
        "losses": losses,
        "warnings": [text for text in map(_text, ours) if not _is_expected(text)],
        "is_finite": bool(np.isfinite(losses).all()),
    }


def _text(warning: warnings.WarningMessage) -> str:
    return str(warning.message)


def _is_expected(text: str) -> bool:
    """Whether it says that 16 bits are slow here, or that a loop of its own scales no loss."""
    return "slow" in text or "of a loss that nobody has scaled" in text


def deviation(of_program: dict[str, dict], dtype: str) -> float:
    """Returns how far losses are from float32's at most, in terms of the largest."""
    exact = of_program["float32"]["losses"]
    found = of_program[dtype]["losses"]
    return max(abs(a - b) for a, b in zip(found, exact, strict=True)) / max(map(abs, exact))


def verdict(of_program: dict[str, dict], dtype: str) -> str:
    """Says "ok", or what is wrong with a program in a dtype."""
    for each in ("float32", dtype):
        if "error" in of_program[each]:
            return f"{each}: {of_program[each]['error']}"
    if not of_program[dtype]["is_finite"]:
        return "not finite"
    if of_program[dtype]["warnings"]:
        return of_program[dtype]["warnings"][0]
    tolerance = ROUNDINGS * UNIT_ROUNDOFF[dtype]
    return "ok" if deviation(of_program, dtype) <= tolerance else "too far"


def run() -> dict:
    """Trains all programs on both Kerases, and prints a table for each."""
    results: dict[str, dict] = {}
    for keras in common.KERASES:
        results[keras] = common.in_own_process("benchmarks.acceptance.one_line", keras=keras)
        common.print_table(
            f"{keras}: how far losses are from float32's at most, in terms of the largest",
            ["", *DTYPES],
            [
                [name, *(_column(each, dtype) for dtype in DTYPES)]
                for name, each in results[keras].items()
            ],
        )
    return results


def _column(of_program, dtype):
    outcome = verdict(of_program, dtype)
    if outcome not in ("ok", "too far"):
        return outcome
    distance = f"{deviation(of_program, dtype):.2%}"
    return distance if outcome == "ok" else f"{distance} {outcome}"


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:])))
