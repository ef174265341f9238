import pathlib
import subprocess
import sys
import threading
import time
import warnings

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import hardware
from keras_mp.hardware import __main__ as program
from keras_mp.hardware import cache, devices, fast_dtypes, stopwatch
from keras_mp.kernels import slow
from tests.common import mirrored
from tests.hardware.machines import EPYC, XEON, pretend

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def fresh(monkeypatch):
    """A process in which nobody was warned and nothing was measured."""
    monkeypatch.setattr(hardware, "_settled", set())
    monkeypatch.setattr(hardware, "_waiting", set())
    monkeypatch.setattr(fast_dtypes, "_known", {})


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
        monkeypatch.setattr(devices, "cpu_info", lambda: {"flags": f"fpu {cpu_flags}"})

    return describe


@pytest.fixture
def measured(monkeypatch, fresh):
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

        monkeypatch.setattr(stopwatch, "measure", measure)
        monkeypatch.setattr(slow, "ratios", dict)
        monkeypatch.setenv("KERAS_MP_MEASURE", "1")
        # A folder in which nothing can be made.
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
        monkeypatch.delenv("KERAS_MP_CACHE", raising=False)
        return asked

    return set_speeds


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def model(policy):
    layers = [tf.keras.Input([2]), tf.keras.layers.Dense(1, dtype=policy)]
    return tf.keras.Sequential(layers)


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
        ({"gpus": [None]}, True, True),
        ({"tpus": 8}, True, False),
    ],
    ids=repr,
)
def test_what_is_fast_where_nothing_is_measured(
    machine, description, float16_is_slow, bfloat16_is_slow
):
    machine(**description)
    assert (hardware.why_slow("float16") is not None) == float16_is_slow
    assert (hardware.why_slow("bfloat16") is not None) == bfloat16_is_slow


def test_tensor_cores(machine):
    for gpus, dtypes in (((), ()), ([(6, 1), None], ()), ([(7, 0)], ["float16"])):
        machine(gpus=gpus, cpu_flags="amx_bf16")
        assert [d for d in ("float16", "bfloat16") if hardware.has_tensor_cores(d)] == [*dtypes]
    machine(gpus=[(6, 1), (8, 0)])
    assert hardware.has_tensor_cores("float16")
    assert hardware.has_tensor_cores("bfloat16")


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


def test_quiet_where_it_is_fast(machine, quiet):
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

    monkeypatch.setattr(pathlib.Path, "read_text", fail)
    assert not hardware.cpu_has_bfloat16()


# Flags do not tell: this machine has those of a fast one, as `why_slow` believed.
def test_compile_warns_with_figures_where_bfloat16_is_measured_to_be_slower(measured):
    asked = measured(XEON)
    keras_mp.set_global_policy("mixed_float16")
    keras_mp.set_global_policy("mixed_bfloat16")
    assert not asked
    with pytest.warns(keras_mp.MixedPrecisionWarning) as caught:
        model("mixed_bfloat16").compile("sgd", "mse")
    model("mixed_bfloat16").compile("sgd", "mse")
    assert asked == ["CPU:0"]
    assert [(str(w.message), w.filename) for w in caught] == [
        (
            "mixed_bfloat16 may run slower than float32 on this machine: bfloat16 matrix products "
            "take 1.8 times as long as float32 ones on this CPU (154 against 275 GF/s), and "
            "convolutions 1.6 times as long (53 against 84 GF/s). Results are right either way. "
            "Ignore this if the computation runs on devices that are not attached to this machine.",
            __file__,
        )
    ]


def test_compile_does_not_warn_where_bfloat16_is_measured_to_be_faster(measured, quiet):
    asked = measured(EPYC)
    keras_mp.set_global_policy("mixed_bfloat16")
    model("mixed_bfloat16").compile("sgd", "mse")
    assert asked == ["CPU:0"]
    assert not hardware._waiting


@pytest.mark.parametrize("operation", ["matrix product", "convolution"])
@pytest.mark.parametrize(("ratio", "is_slow"), [(0.84, True), (0.86, False)])
def test_slow_is_what_takes_more_than_float32_in_either_operation(
    measured, operation, ratio, is_slow
):
    speeds = {name: dict.fromkeys(stopwatch.DTYPES, 1e11) for name in stopwatch.OPERATIONS}
    speeds[operation]["float16"] = ratio * 1e11
    measured(speeds)
    assert (hardware.why_slow("float16") is not None) == is_slow
    assert hardware.why_slow("bfloat16") is None


# It may be the only thing that a loop of one's own with layers of Keras calls of keras_mp.
def test_a_policy_warns_itself_once_the_machine_was_measured(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_MP_MEASURE", "1")
    pretend(XEON, tmp_path, monkeypatch)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="take 1.8 times as long"):
        keras_mp.Policy("mixed_bfloat16")


class Product(keras_mp.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=[2, 2])

    def call(self, x):
        return x @ self.kernel


def test_layers_and_policies_measure_nothing(measured, quiet):
    asked = measured(XEON)
    policy = keras_mp.Policy("mixed_bfloat16")
    assert Product(dtype=policy)(tf.ones([2, 2])).dtype == tf.bfloat16
    model(policy).compile("sgd", "mse")
    keras_mp.set_global_policy("mixed_bfloat16")
    Product()(tf.ones([2, 2]))
    assert not asked


def test_a_loop_of_ones_own_is_warned_where_it_makes_an_optimizer(measured):
    slow = {name: {**by_dtype, "float16": 1e9} for name, by_dtype in XEON.items()}
    asked = measured(slow)
    keras_mp.set_global_policy("mixed_float16")
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="float16 .* 275.0 times as long"):
        keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD())
    assert asked == ["CPU:0"]


def test_a_replica_does_not_measure_beside_another(measured, quiet):
    asked = measured(XEON)
    keras_mp.set_global_policy("mixed_bfloat16")
    strategy = mirrored(2)
    strategy.run(hardware.warn_if_slow)
    assert not asked
    with strategy.scope(), pytest.warns(keras_mp.MixedPrecisionWarning, match="1.8 times"):
        model("mixed_bfloat16").compile("sgd", "mse")
    assert asked == ["CPU:0"]


@pytest.mark.parametrize("flags", ["", "avx512_bf16"])
def test_a_graph_of_tensorflow_1_measures_nothing(measured, machine, flags):
    asked = measured(XEON)
    machine(cpu_flags=flags)
    keras_mp.set_global_policy("mixed_bfloat16")
    with tf.Graph().as_default(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hardware.warn_if_slow()
        assert hardware.speeds() is None
    assert not asked
    assert len(caught) == (not flags)
    if flags:
        with pytest.warns(keras_mp.MixedPrecisionWarning, match="1.8 times"):
            hardware.warn_if_slow()


def test_the_program_names_what_computes_in_float32_inside(measured, machine, capsys, monkeypatch):
    measured(XEON)
    machine(cpu_flags="avx512_bf16")
    found = {"Elu": {"float16": 4.56, "bfloat16": 0.5}, "Tanh": {"float16": 1.0, "bfloat16": 0.5}}
    monkeypatch.setattr(slow, "_known", {})
    slow.learn(found)
    monkeypatch.setattr(slow, "ratios", lambda: found)
    monkeypatch.setattr(slow, "forget", lambda: None)
    program.main([])
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if "in float32 inside" in line]
    assert line.startswith("In float16")
    assert line.endswith(": Elu (4.6)")


def test_what_is_remembered_of_kernels_is_not_timed_again(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(slow, "_known", {})
    asked = measured(XEON)
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    monkeypatch.setattr(slow, "ratios", lambda: {"Elu": {"float16": 5.0, "bfloat16": 0.5}})
    hardware.speeds()
    monkeypatch.setattr(fast_dtypes, "_known", {})
    assert hardware.speeds() == XEON
    assert asked == ["CPU:0"]
    assert slow._known == {("Elu", "float16"): 5.0, ("Elu", "bfloat16"): 0.5}


def test_what_cannot_be_measured_is_not_judged(measured, quiet):
    asked = measured(tf.errors.ResourceExhaustedError(None, None, "no memory"))
    keras_mp.set_global_policy("mixed_bfloat16")
    model("mixed_bfloat16").compile("sgd", "mse")
    model("mixed_bfloat16").compile("sgd", "mse")
    assert asked == ["CPU:0"]
    assert hardware.speeds() is None
    assert hardware.best_policy() == "float32"


def test_threads_that_ask_at_once_get_one_measurement(measured):
    asked = measured(XEON)
    got = []
    threads = [threading.Thread(target=lambda: got.append(hardware.speeds())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [XEON] * 4
    assert asked == ["CPU:0"]


def test_what_is_returned_may_be_changed_and_measured_anew(measured):
    asked = measured(XEON)
    hardware.speeds()["convolution"].clear()
    assert hardware.speeds() == XEON
    assert len(asked) == 1
    hardware.speeds(anew=True)
    assert len(asked) == 2


def test_switched_off_only_speeds_measures(measured, monkeypatch, tmp_path, quiet):
    asked = measured(XEON)
    pretend(EPYC, tmp_path, monkeypatch)
    monkeypatch.setenv("KERAS_MP_MEASURE", "0")
    assert hardware.why_slow("float16").startswith("float16 needs an Nvidia GPU")
    assert hardware.best_policy() == "float32"
    assert not asked
    assert hardware.speeds() == XEON
    assert cache.read(cache.describe("CPU")) == (EPYC, {})


ONLY_PRODUCTS = {**XEON, "matrix product": EPYC["matrix product"]}
A_BIT = {name: {**XEON[name], "bfloat16": 1.1 * XEON[name]["float32"]} for name in XEON}


@pytest.mark.parametrize(
    ("description", "speeds", "policy", "reason"),
    [
        ({"gpus": [(7, 0)]}, XEON, "mixed_float16", "float16 is fast on A GPU"),
        ({"gpus": [(8, 0)]}, XEON, "mixed_bfloat16", "bfloat16 is fast on A GPU"),
        ({"gpus": [(9, 0), (7, 5)]}, XEON, "mixed_float16", "float16 is fast on A GPU"),
        ({"gpus": [(9, 0), (6, 0)]}, EPYC, "float32", "there is A GPU (compute capability 6.0)"),
        ({"tpus": 8}, XEON, "mixed_bfloat16", "TPU"),
        ({}, EPYC, "mixed_bfloat16", "matrix products take 0.53 times as long"),
        ({"cpu_flags": "avx512_bf16"}, XEON, "float32", "154 against 275 GF/s"),
        ({}, ONLY_PRODUCTS, "float32", "convolutions 1.6 times as long"),
        ({}, A_BIT, "float32", "0.91 times as long"),
        # Of a GPU that is not of Nvidia no table tells.
        ({"gpus": [None]}, EPYC, "mixed_bfloat16", "on this GPU"),
        ({"gpus": [None]}, XEON, "float32", "on this GPU"),
    ],
    ids=str,
)
def test_the_best_policy(machine, measured, description, speeds, policy, reason):
    asked = measured(speeds)
    machine(**description)
    assert hardware.best_policy() == policy
    assert isinstance(hardware.best_policy(), str)
    name, why = fast_dtypes.best_policy()
    assert name == policy
    assert reason in why
    if description.get("gpus") == [None]:
        assert asked == ["GPU:0"]


def test_the_program_prints_a_table_and_the_reason(measured, machine, capsys, monkeypatch):
    measured(XEON)
    machine(cpu_flags="avx512_bf16 avx512_fp16")
    assert program.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"TensorFlow {tf.__version__}" in lines[0]
    assert lines[1].startswith("16-bit units of the CPU: AVX512-BF16, AVX512-FP16; used by")
    assert lines[3:6] == [
        "GF/s (times float32)     float32    bfloat16     float16",
        "matrix product        275 (1.00)  154 (0.56)  250 (0.91)",
        "convolution            84 (1.00)   53 (0.63)   80 (0.95)",
    ]
    assert lines[7].startswith("bfloat16 is slow here: bfloat16 matrix products take 1.8 times")
    assert lines[8] == "float16 is fast here."
    assert lines[9].startswith("Best policy: float32, since bfloat16 matrix products take 1.8")


def test_the_program_measures_gpus_beside_the_table(measured, machine, capsys):
    asked = measured(XEON)
    machine(gpus=[(7, 5)])
    program.main([])
    printed = capsys.readouterr().out
    assert asked == ["GPU:0"]
    assert "154 (0.56)" in printed
    assert "A GPU (compute capability 7.5)" in printed.splitlines()[0]
    assert "bfloat16 needs a GPU of compute capability 8.0" in printed
    assert "Best policy: mixed_float16, since float16 is fast on A GPU" in printed
    machine(tpus=8)
    program.main([])
    assert "Nothing could be measured." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "environment", "units", "used"),
    [
        ("avx2", {}, [], []),
        ("avx512_bf16", {}, ["AVX512-BF16"], ["AVX512-BF16"]),
        ("avx512_bf16", {"TF_ENABLE_ONEDNN_OPTS": "0"}, ["AVX512-BF16"], []),
        ("avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, ["AVX512-BF16"], []),
        (
            "avx512_bf16 avx512_fp16 amx_bf16",
            {"ONEDNN_MAX_CPU_ISA": "avx512_core_fp16"},
            ["AVX512-BF16", "AVX512-FP16", "AMX-BF16"],
            ["AVX512-BF16", "AVX512-FP16"],
        ),
        (
            "avx512_bf16 avx512_fp16 amx_bf16",
            {"ONEDNN_MAX_CPU_ISA": "AVX10_1_512"},
            ["AVX512-BF16", "AVX512-FP16", "AMX-BF16"],
            ["AVX512-BF16", "AVX512-FP16"],
        ),
    ],
)
def test_units_and_what_tensorflow_uses(machine, monkeypatch, flags, environment, units, used):
    machine(cpu_flags=flags)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert devices.cpu_units() == (units, used)


@pytest.mark.parametrize(
    ("flags", "takes"),
    [("avx512_fp16 amx_bf16", False), ("amx_fp16", True), ("avx_ne_convert", True)],
)
def test_which_cpus_take_the_rewrite_to_float16(machine, monkeypatch, flags, takes):
    machine(cpu_flags=flags)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    assert hardware.cpu_takes_float16_rewrite() == takes
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert not hardware.cpu_takes_float16_rewrite()


@pytest.mark.parametrize("own", [None, "here"])
def test_what_writes_a_file(measured, machine, monkeypatch, tmp_path, own):
    measured(XEON)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if own:
        monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path / own))
    keras_mp.hardware.best_policy()
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="slower"):
        keras_mp.set_global_policy("mixed_bfloat16")
    model(None).compile("sgd", "mse")
    assert [path.name for path in tmp_path.iterdir()] == ([own] if own else [])
    program.main([])
    [folder] = tmp_path.iterdir()
    assert folder.name == (own or "keras_mp")
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("call", [hardware.why_slow, hardware.warn_if_slow])
def test_another_dtype_is_refused(call):
    with pytest.raises(ValueError, match="Expected 'float16' or 'bfloat16'. Received: dtype='f"):
        call("float8")


PROGRAM = """
import keras_mp
import tensorflow as tf

keras_mp.set_global_policy("mixed_bfloat16")
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.threading.set_intra_op_parallelism_threads(2)
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
assert len(tf.config.list_logical_devices("CPU")) == 2
tf.random.set_seed(1)
model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
before = tf.random.uniform([]).numpy()
tf.random.set_seed(1)
tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
model.compile(tf.keras.optimizers.SGD(), "mse")
assert tf.random.uniform([]).numpy() == before
print(keras_mp.hardware.why_slow("bfloat16"))
"""


# The real clock, in a program whose first line is a policy.
def test_a_program_configures_its_devices_and_measures_when_it_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    monkeypatch.setenv("KERAS_MP_MEASURE", "1")
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 1
    reason = done.stdout.strip()
    is_slow = reason != "None"
    assert ("mixed_bfloat16 may run slower" in done.stderr) == is_slow
    if is_slow:
        assert reason in done.stderr
        assert "GF/s" in reason
