"""`python -m keras_mp`, as a user starts it."""

import math
import re
import struct
import sys
import time
import types

import pytest

from keras_mp.__main__ import main
from tests.common import run_program

_STEPS_PER_EPOCH = 44
_EPOCHS = 5  # the default
_ROW = re.compile(
    r"^(?P<policy>\w+) +(?P<accuracy>[\d.]+) +(?P<loss_scale>none|\d+) +"
    r"(?P<skipped>\d+) of (?P<steps>\d+) +(?P<milliseconds>[\d.]+) +(?P<activation_bytes>\d+)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A run with all three policies: what it printed, its table, its picture, how long it took.

    The table is {policy: {column: text}}.
    """
    picture = tmp_path_factory.mktemp("picture") / "digits.png"
    start = time.monotonic()
    printed = run_program("-m", "keras_mp", "--output", picture)
    table = {row["policy"]: row.groupdict() for row in _ROW.finditer(printed)}
    return types.SimpleNamespace(
        printed=printed, table=table, picture=picture, seconds=time.monotonic() - start
    )


def test_all_policies_reach_the_same_accuracy(comparison):
    assert list(comparison.table) == ["float32", "mixed_float16", "mixed_bfloat16"]
    accuracies = [float(row["accuracy"]) for row in comparison.table.values()]
    # A guess gets 0.1. Five epochs in float32 with five seeds got 0.969 to 0.975.
    assert min(accuracies) > 0.95
    assert max(accuracies) - min(accuracies) <= 0.02


def test_only_float16_has_a_loss_scale(comparison):
    row = comparison.table["mixed_float16"]
    assert int(row["steps"]) == _EPOCHS * _STEPS_PER_EPOCH
    # It has grown from its default of 2**15, and few steps were the price.
    exponent = math.log2(int(row["loss_scale"]))
    assert exponent == int(exponent) > 15
    assert 0 < int(row["skipped"]) < 0.1 * int(row["steps"])
    for policy in ("float32", "mixed_bfloat16"):
        assert comparison.table[policy]["loss_scale"] == "none"
        assert comparison.table[policy]["skipped"] == "0"


def test_activations_take_half_the_bytes_but_for_the_logits(comparison):
    # Two convolutions at 8x8, pooling, a convolution and flattening at 4x4; for a batch of 32.
    hidden, logits = 32 * (64 * 16 + 64 * 32 + 3 * 16 * 32), 32 * 10
    assert {policy: int(row["activation_bytes"]) for policy, row in comparison.table.items()} == {
        "float32": 4 * hidden + 4 * logits,
        "mixed_float16": 2 * hidden + 4 * logits,
        "mixed_bfloat16": 2 * hidden + 4 * logits,
    }


def test_time_per_step_fits_into_the_run(comparison):
    for row in comparison.table.values():
        # At least half of the steps take the median or longer.
        assert 0 < float(row["milliseconds"]) / 1000 * int(row["steps"]) / 2 < comparison.seconds


def test_progress(comparison):
    shown = re.findall(r"^(\w+), epoch (\d+): loss [\d.]+$", comparison.printed, re.M)
    assert shown == [
        (policy, str(1 + epoch)) for policy in comparison.table for epoch in range(_EPOCHS)
    ]


def test_picture(comparison):
    head = comparison.picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    # Of a size that a person can read.
    width, height = struct.unpack(">II", head[16:])
    assert width >= 800
    assert height >= 400
    assert f"picture is in {comparison.picture}" in comparison.printed


def test_bad_option(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--output", "no/such/folder/digits.png"])
    assert raised.value.code == 2
    assert "must be a file in an existing folder" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["matplotlib", "sklearn"])
def test_missing_extra(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=r'pip install "keras-mp\[tutorials\]"'):
        main([])
