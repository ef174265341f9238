import pathlib
import warnings

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import hardware


@pytest.fixture
def machine(monkeypatch):
    """Sets what TensorFlow and the operating system say of the machine, and forgets warnings."""

    def describe(gpus=(), tpus=0, cpu_flags=""):
        devices = {"GPU": list(range(len(gpus))), "TPU": list(range(tpus))}
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: devices[kind])
        details = [
            {"device_name": "A GPU", **({"compute_capability": cc} if cc else {})} for cc in gpus
        ]
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details[gpu])
        monkeypatch.setattr(pathlib.Path, "read_text", lambda path: f"flags\t\t: fpu {cpu_flags}\n")
        monkeypatch.setattr(hardware, "_warned", set())

    return describe


@pytest.mark.parametrize(
    ("description", "float16_is_slow", "bfloat16_is_slow"),
    [
        ({}, True, True),
        ({"cpu_flags": "avx512_bf16"}, True, False),
        ({"cpu_flags": "amx_bf16"}, True, False),
        ({"gpus": [(6, 1)]}, True, True),
        ({"gpus": [(7, 0)]}, False, True),
        ({"gpus": [(7, 5)], "cpu_flags": "avx512_bf16"}, False, True),
        ({"gpus": [(8, 0)]}, False, False),
        ({"gpus": [(9, 0), (7, 0)]}, False, True),
        ({"gpus": [(9, 0), (6, 0)]}, True, True),
        ({"tpus": 8}, True, False),
    ],
    ids=repr,
)
def test_what_is_fast_where(machine, description, float16_is_slow, bfloat16_is_slow):
    machine(**description)
    assert (hardware.why_slow("float16") is not None) == float16_is_slow
    assert (hardware.why_slow("bfloat16") is not None) == bfloat16_is_slow


def test_the_reason_names_what_is_needed_and_what_is_there(machine):
    machine(gpus=[(6, 1)])
    assert "compute capability 7.0" in hardware.why_slow("float16")
    assert "A GPU (compute capability 6.1)" in hardware.why_slow("float16")


# Defect 14: Keras 3 gives no hint at all.
def test_warns_once_for_each_dtype_and_policy(machine):
    machine()
    for name in ("mixed_float16", "mixed_bfloat16"):
        with pytest.warns(keras_mp.MixedPrecisionWarning, match=name) as caught:
            keras_mp.Policy(name)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        keras_mp.Policy(name)
    keras_mp.Policy("float32")


def test_quiet_where_it_is_fast(machine):
    machine(gpus=[(8, 0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_mp.set_global_policy("mixed_float16")
        keras_mp.set_global_policy("mixed_bfloat16")


def test_no_cpuinfo_means_no_bfloat16(monkeypatch):
    def fail(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(pathlib.Path, "read_text", fail)
    assert not hardware.cpu_has_bfloat16()
