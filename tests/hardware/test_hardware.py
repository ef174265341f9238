import importlib
import inspect
import pathlib
import time
from concurrent import futures

import pytest
import tensorflow as tf

import keras_mp
from tests.common import mirrored
from tests.layers.common import SimpleDense

hardware = keras_mp.hardware
cpu, devices = keras_mp.support.cpu, hardware.devices

# Of two CPUs with instructions for bfloat16 and for float16.
SPEEDS = {
    "matrix product": {"float32": 275e9, "bfloat16": 154e9, "float16": 250e9},
    "convolution": {"float32": 84e9, "bfloat16": 53e9, "float16": 80e9},
}


@pytest.fixture
def fresh(monkeypatch):
    """A process in which nobody was warned and nothing was measured."""
    monkeypatch.setattr(hardware, "_settled", set())
    monkeypatch.setattr(hardware, "_waiting", set())
    hardware._measured.cache_clear()
    yield
    hardware._measured.cache_clear()


@pytest.fixture
def machine(monkeypatch, fresh):
    """Sets what TensorFlow and the operating system say of the machine."""

    def describe(gpus=(), tpus=0, cpu_flags=""):
        visible = {"GPU": list(range(len(gpus))), "TPU": list(range(tpus))}
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible[kind])
        details = [
            {"device_name": "A GPU", **({"compute_capability": cc} if cc else {})} for cc in gpus
        ]
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details[gpu])
        monkeypatch.setattr(cpu, "info", lambda: {"flags": f"fpu {cpu_flags}"})
        monkeypatch.setattr(cpu, "has_units", inspect.unwrap(cpu.has_units))

    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    return describe


@pytest.fixture
def clock(monkeypatch, fresh):
    """Sets what a clock says when it is asked, and returns the devices that it was asked for."""
    asked = []

    def set_speeds(speeds):
        def measure(device):
            assert tf.executing_eagerly()
            asked.append(device)
            time.sleep(0.02)  # Long enough for another thread to come in.
            if isinstance(speeds, Exception):
                raise speeds
            return speeds

        monkeypatch.setattr(hardware.stopwatch, "measure", measure)
        return asked

    return set_speeds


def model(policy):
    layers = [tf.keras.Input([2]), tf.keras.layers.Dense(1, dtype=policy)]
    return tf.keras.Sequential(layers)


NO_UNITS = "a CPU with bfloat16 units that TensorFlow uses, and there is none."
UNITS = "this CPU, which has units"
ON_A_GPU = "bfloat16 is fast on A GPU"
FLOAT16_ON_A_GPU = "float16 is fast on A GPU"
BOTH = {"gpus": [(7, 5)], "cpu_flags": "avx512_bf16"}


# What is fast on a machine, the best policy, and the reason for it.
@pytest.mark.parametrize(
    ("description", "fast", "policy", "reason"),
    [
        ({}, [], "float32", NO_UNITS),
        ({"cpu_flags": "avx512_bf16"}, ["bfloat16"], "mixed_bfloat16", UNITS),
        ({"cpu_flags": "amx_bf16"}, ["bfloat16"], "mixed_bfloat16", UNITS),
        ({"cpu_flags": "avx512_fp16"}, [], "float32", "bfloat16 needs a GPU"),
        ({"gpus": [(6, 1)]}, [], "float32", "there is A GPU (compute capability 6.1)"),
        ({"gpus": [(7, 0)]}, ["float16"], "mixed_float16", FLOAT16_ON_A_GPU),
        (BOTH, ["float16"], "mixed_float16", FLOAT16_ON_A_GPU),
        ({"gpus": [(8, 0)]}, ["float16", "bfloat16"], "mixed_bfloat16", ON_A_GPU),
        ({"gpus": [(9, 0), (7, 0)]}, ["float16"], "mixed_float16", f"{FLOAT16_ON_A_GPU} (comp"),
        ({"gpus": [(9, 0), (6, 0)]}, [], "float32", "there is A GPU (compute capability 6.0)"),
        ({"gpus": [None]}, [], "float32", "probably not an Nvidia GPU"),
        ({"tpus": 8}, ["bfloat16"], "mixed_bfloat16", "TPU"),
    ],
    ids=str,
)
def test_what_is_fast(machine, description, fast, policy, reason):
    machine(**description)
    gpus = "an Nvidia GPU of compute capability 7.0", "a GPU of compute capability 8.0"
    for dtype, needs in zip(("float16", "bfloat16"), gpus):
        assert (hardware.why_slow(dtype) is None) == (dtype in fast)
        said = "fast here." if dtype in fast else f"slow here: {dtype} needs {needs}"
        assert devices.verdict(dtype).startswith(f"{dtype} is {said}")
    assert hardware.best_policy() == policy
    assert isinstance(hardware.best_policy(), str)
    name, why = devices.best_policy()
    assert name == policy
    assert reason in why


def test_tensor_cores(machine):
    for gpus, dtypes in (((), ()), ([(6, 1), None], ()), ([(7, 0)], ["float16"])):
        machine(gpus=gpus, cpu_flags="amx_bf16")
        assert [d for d in ("float16", "bfloat16") if hardware.has_tensor_cores(d)] == [*dtypes]
    machine(gpus=[(6, 1), (8, 0)])
    assert hardware.has_tensor_cores("float16")
    assert hardware.has_tensor_cores("bfloat16")


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
    keras_mp.set_global_policy("mixed_float16")
    keras_mp.set_global_policy("mixed_bfloat16")
    model("mixed_bfloat16").compile("sgd", "mse")


def test_a_gpu_that_is_hidden_after_the_policy_was_made_does_not_count(machine):
    machine(gpus=[(8, 0)])
    keras_mp.set_global_policy("mixed_bfloat16")
    machine()
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="there is none"):
        model(None).compile("sgd", "mse")


def test_no_cpuinfo_means_no_bfloat16(monkeypatch):
    def fail(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(cpu, "info", cpu.info.__wrapped__)  # It has been read before.
    monkeypatch.setattr(pathlib.Path, "read_text", fail)
    assert not hardware.cpu_has_bfloat16()


def test_programs_measure_nothing(clock, machine, monkeypatch):
    asked = clock(SPEEDS)
    monkeypatch.setattr("keras_mp.hardware.turns.take", pytest.fail)
    machine(cpu_flags="avx512_bf16")
    policy = keras_mp.Policy("mixed_bfloat16")
    keras_mp.set_global_policy("mixed_bfloat16")
    assert SimpleDense(dtype=policy)(tf.ones([2, 10])).dtype == tf.bfloat16
    compiled = model(policy)
    compiled.compile("sgd", "mse")
    compiled.fit(tf.ones([2, 2]), tf.ones([2, 1]), verbose=0)
    keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD())
    keras_mp.summary(compiled, len)
    assert hardware.best_policy() == "mixed_bfloat16"
    strategy = mirrored(2)
    strategy.run(hardware.warn_if_slow)
    assert not asked


def test_what_cannot_be_measured_has_no_speeds(clock):
    asked = clock(tf.errors.ResourceExhaustedError(None, None, "no memory"))
    assert hardware.speeds() is None
    assert asked == ["CPU:0"]
    clock(SPEEDS)
    with tf.Graph().as_default():
        assert hardware.speeds(anew=True) is None


def test_threads_that_ask_at_once_get_one_measurement(clock):
    asked = clock(SPEEDS)
    with futures.ThreadPoolExecutor(4) as pool:
        got = [pool.submit(hardware.speeds) for _ in range(4)]
    assert [each.result() for each in got] == [SPEEDS] * 4
    assert asked == ["CPU:0"]


def test_what_is_returned_may_be_changed_and_measured_anew(clock):
    asked = clock(SPEEDS)
    hardware.speeds()["convolution"].clear()
    assert hardware.speeds() == SPEEDS
    assert len(asked) == 1
    hardware.speeds(anew=True)
    assert len(asked) == 2


def printed(capsys):
    """The lines that `python -m keras_mp.hardware` prints."""
    assert importlib.import_module("keras_mp.hardware.__main__").main([]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_program_prints_speeds_and_the_reason(clock, machine, capsys):
    clock(SPEEDS)
    machine(cpu_flags="avx512_bf16 avx512_fp16")
    lines = printed(capsys)
    assert f"TensorFlow {tf.__version__}" in lines[0]
    assert lines[1].startswith("16-bit units of the CPU: AVX512-BF16, AVX512-FP16; used by")
    assert lines[3:6] == [
        "GF/s (times float32)     float32    bfloat16     float16",
        "matrix product        275 (1.00)  154 (0.56)  250 (0.91)",
        "convolution            84 (1.00)   53 (0.63)   80 (0.95)",
    ]
    assert lines[7].startswith("float16 is slow here")
    assert lines[8] == "bfloat16 is fast here."
    assert lines[9].startswith("Best policy: mixed_bfloat16, since bfloat16 is fast on this CPU")
    [line] = [line for line in lines if "in float32 inside" in line]
    assert line.startswith("In float16 these are computed in float32 inside: Conv2DBackpropFilter,")


def test_the_program_measures_gpus(clock, machine, capsys):
    asked = clock(SPEEDS)
    machine(gpus=[(7, 5)])
    lines = printed(capsys)
    assert asked == ["GPU:0"]
    assert "A GPU (compute capability 7.5)" in lines[0]
    text = "\n".join(lines)
    assert "154 (0.56)" in text
    assert "bfloat16 needs a GPU of compute capability 8.0" in text
    assert "Best policy: mixed_float16, since float16 is fast on A GPU" in text


ALL, USED = "avx512_bf16 avx512_fp16 amx_bf16", ["AVX512-BF16", "AVX512-FP16"]


@pytest.mark.parametrize(
    ("flags", "environment", "units", "used"),
    [
        ("avx2", {}, [], []),
        ("avx512_bf16", {}, ["AVX512-BF16"], ["AVX512-BF16"]),
        ("avx512_bf16", {"TF_ENABLE_ONEDNN_OPTS": "0"}, ["AVX512-BF16"], []),
        ("avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ["AVX512-BF16"], []),
        (ALL, {"ONEDNN_MAX_CPU_ISA": "avx512_core_fp16"}, [*USED, "AMX-BF16"], USED),
        (ALL, {"ONEDNN_MAX_CPU_ISA": "AVX10_1_512"}, [*USED, "AMX-BF16"], USED),
    ],
)
def test_units_and_what_tensorflow_uses(machine, monkeypatch, flags, environment, units, used):
    machine(cpu_flags=flags)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cpu.units() == (units, used)
    # Units that TensorFlow does not use do not count.
    assert hardware.best_policy() == ("mixed_bfloat16" if "AVX512-BF16" in used else "float32")


@pytest.mark.parametrize(
    ("flags", "takes"),
    [
        *(("avx512_fp16 amx_bf16", False), ("amx_bf16 amx_fp16", True)),
        *(("avx_vnni avx_ne_convert", True), ("avx_ne_convert", False)),
    ],
)
def test_which_cpus_take_the_rewrite_to_float16(machine, monkeypatch, flags, takes):
    machine(cpu_flags=flags)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    assert hardware.cpu_takes_float16_rewrite() == takes
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert not hardware.cpu_takes_float16_rewrite()


@pytest.mark.parametrize("call", [hardware.why_slow, hardware.warn_if_slow])
def test_another_dtype_is_refused(call):
    with pytest.raises(ValueError, match="Expected 'float16' or 'bfloat16'. Received: dtype='f"):
        call("float8")
