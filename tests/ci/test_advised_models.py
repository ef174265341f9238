"""Advice is put to the test: by doing what it says, on models that suffer, each from something
else, and on as many healthy ones, of which it must say nothing."""

import dataclasses
import re

import numpy as np
import pytest

import keras_mp
from tests.ci.advised_models import HEALTHY, SUFFERING
from tests.numerics.tools import dtypes, runners, underflow

INITIAL_LOSS_SCALE = 2.0**15
TOLERANCE = 0.001
SCALE = re.compile(
    r"Start the loss scale at 2\^(\d+): between 2\^(-?\d+) and 2\^(\d+) no gradient in b?float16 "
    r"loses more than 0\.1 %, in the batch\."
)
AT = re.compile(r"At 2\^(\d+), (.+?) of `(.+?)` is (below|beyond) (b?float16)\.")
BFLOAT16 = "bfloat16 would lose nothing that float16 loses here, and needs no loss scale: "


def check(case, model):
    checked = keras_mp.numerics.check(model, case.batch(), loss=case.loss)
    # The factors of the cases.
    factor = "a loss multiplied by a number"
    hazards = tuple(each for each in checked.hazards if each.hazard != factor)
    return dataclasses.replace(checked, hazards=hazards)


def lost_gradients(case, model, scale, noise):
    """Variables whose gradients are lost by really running at a scale: {name: share}."""
    narrow, wide = runners(model, *case.batch(), loss=case.loss)
    run, exact = narrow.run(scale).gradients_by_path(), wide.run().gradients_by_path()
    lost = {}
    for path, gradient in run.items():
        if gradient is None or ("gradient", path) in noise:
            continue
        value, right = np.asarray(gradient, "float64"), np.asarray(exact[path], "float64")
        share = underflow(value, right) if np.isfinite(value).all() else 1.0
        if share > TOLERANCE:
            lost[path] = share
    return lost


def lost_outputs(checked):
    """The layers that lose what they return: no healthy layer here is off by a tenth of that."""
    rows = checked.comparison.layers
    return {row.path for row in rows if row.output is not None and row.output.relative > 0.05}


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("name", SUFFERING)
def test_a_model_that_follows_advice_to_its_end_loses_nothing(name):
    case = SUFFERING[name]
    model, dtype, scale = case.model(), case.dtype, INITIAL_LOSS_SCALE
    checked = check(case, model)
    assert checked.advice() != ([], {}, None)
    for _ in range(8):
        advice = checked.advice()
        if str(advice) == "Nothing is lost.":
            break
        for sentence in advice.sentences:
            assert sentence.startswith(("Run `", BFLOAT16)) or SCALE.search(sentence), sentence
            if at := AT.search(sentence):
                lost = lost_gradients(case, model, 2.0 ** int(at[1]), checked.report.noise)
                assert at[3] in lost or "output" in at[2], sentence
        if advice.policies:
            model = keras_mp.convert(model, advice.policies)
        if advice.loss_scale:
            scale = advice.loss_scale
        if dtype == "float16":
            model.compile(keras_mp.LossScaleOptimizer("sgd", scale), case.loss)
        if {*dtypes(model).values()} <= {"float32"}:
            return  # There is nothing left to be lost.
        checked = check(case, model)
        if advice.loss_scale and not checked.advice().policies:
            [numbers] = filter(None, map(SCALE.search, advice.sentences))
            for exponent in map(int, numbers.groups()):
                lost = lost_gradients(case, model, 2.0**exponent, checked.report.noise)
                assert not lost, (exponent, lost)
    assert checked.advice() == ([], {}, None)
    assert not checked.findings
    assert not lost_outputs(checked)
    at = scale if dtype == "float16" else 1.0
    assert not lost_gradients(case, model, at, checked.report.noise)
    x, _ = case.batch()
    exact = keras_mp.convert(model, "float32")
    difference = np.linalg.norm(model(x) - exact(x)) / np.linalg.norm(exact(x))
    assert difference < {"float16": 0.02, "bfloat16": 0.1}[dtype]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_is_told_nothing(name):
    case = HEALTHY[name]
    checked = check(case, case.model())
    assert (checked.findings, checked.advice()) == ((), ([], {}, None))
