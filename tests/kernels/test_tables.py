"""Which kernels are slow says a table: that of keras_mp for the kind of CPU, or a named file."""

import json

import pytest
import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

import keras_mp
from keras_mp import hardware
from keras_mp.hardware import tuning
from keras_mp.kernels import measured, slow, tables
from keras_mp.step import workers
from keras_mp.support import cpu
from tests.common import once

pytestmark = once
TIMES = {"Elu": {"float16": 9.0, "bfloat16": 0.5}}


@pytest.fixture(autouse=True)
def own_table():
    tables._of_process.cache_clear()
    yield
    tables._of_process.cache_clear()
    hardware.use_table(None)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(tables.of_file(TIMES, tuning.machine()))
    return path


def test_the_table_that_ships_has_all_kernels():
    for times in measured.BY_KIND.values():
        assert set(times) == {*slow.KERNELS, measured.MATRIX_PRODUCT, measured.CONVOLUTION}
        assert all(time >= 0 for by_dtype in times.values() for time in by_dtype.values())


def test_a_cpu_that_was_not_measured_gets_what_is_slow_on_all(monkeypatch):
    monkeypatch.setattr(cpu, "kind", lambda: "Arm BF16")
    table = tables.current()
    assert not table.is_of_kind
    assert "not measured (Arm BF16)" in hardware.table_in_use()
    for op in slow.KERNELS:
        for dtype in ("bfloat16", "float16"):
            is_slow = [times[op][dtype] > 1.5 for times in measured.BY_KIND.values()]
            assert (table.time(op, dtype) > 1.5) == all(is_slow)
    # On each CPU that was met.
    assert slow.is_slow("Conv3DBackpropFilterV2", "float16", device="CPU")
    assert hardware.best_policy() == "float32"


def test_a_kind_that_was_not_measured_is_judged_by_the_nearest_one_below(monkeypatch):
    assert set(measured.NEAREST_BELOW.values()) <= set(measured.BY_KIND)
    for kind, below in measured.NEAREST_BELOW.items():
        assert kind not in measured.BY_KIND
        table = tables._of_kind(kind)
        assert (table.times, table.is_of_kind) == (measured.BY_KIND[below], False)
        assert f"of the kind {below!r}, the nearest one below {kind!r}" in table.source


@pytest.mark.parametrize("way", ["environment", "function"])
def test_a_file_that_is_named(way, file, monkeypatch):
    if way == "function":
        hardware.use_table(file)
    else:
        monkeypatch.setenv(tables.VARIABLE, str(file))
    assert slow.is_slow("Elu", "float16", device="CPU")
    assert not slow.is_slow("Elu", "bfloat16", device="CPU")
    # What it does not have is as in the table that ships.
    own = tables._of_kind(cpu.kind())
    assert tables.current().time("Tanh", "float16") == own.time("Tanh", "float16")
    assert str(file) in hardware.table_in_use()
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    hardware.use_table(None)
    # What the environment named at first is the table of the whole process.
    assert ("keras_mp's table" in hardware.table_in_use()) == (way == "function")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "\x00\xff",
        '{"format": 2, "times": {}}',
        '{"format": 1}',
        '{"format": 1, "times": []}',
        '{"format": 1, "times": {"Elu": 1}}',
        '{"format": 1, "times": {"Elu": {"float16": 1}}}',
        '{"format": 1, "times": {"Elu": {"float16": "slow", "bfloat16": 1}}}',
        '{"format": 1, "times": {"Elu": {"float16": NaN, "bfloat16": 1}}}',
        '{"format": 1, "times": {"Elu": {"float16": -1, "bfloat16": 1}}}',
        None,
    ],
)
def test_a_file_that_is_none_is_refused(text, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="Received: path="):
        hardware.use_table(path)
    monkeypatch.setenv(tables.VARIABLE, str(path))
    with pytest.raises(ValueError, match="Received: KERAS_MP_TABLE="):
        tables.current()


def test_workers_compare_what_they_compute_in_float32(file):
    [fact] = [fact for name, fact in workers.FACTS.items() if "use_table" in name]
    before = fact()
    assert "Conv2DBackpropFilter (float16)" in before
    file.write_text(tables.of_file({"Conv2DBackpropFilter": {"float16": 1, "bfloat16": 1}}, {}))
    hardware.use_table(file)
    assert "Conv2DBackpropFilter (float16)" not in fact()
    keras_mp.enable_float32_where_faster(False)
    try:
        assert fact() == "none"
    finally:
        keras_mp.enable_float32_where_faster()


def test_the_summary_says_which_table(file):
    hardware.use_table(file)
    layers = [tf.keras.Input([2]), tf.keras.layers.Dense(1, dtype="mixed_bfloat16")]
    lines = []
    keras_mp.summary(tf.keras.Sequential(layers), lines.append)
    assert str(file) in " ".join(lines)


def test_what_a_file_says_of_the_machine(file):
    machine = json.loads(file.read_text())["machine"]
    assert machine["kind"] == cpu.kind()
    assert set(machine) == {"cpu", "kind", "threads", "tensorflow"}


FLAGS = "fpu avx2 avx512f avx512bw"
ZEN = f"{FLAGS} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN} avx512_fp16 amx_bf16"


@pytest.mark.parametrize(
    ("machine", "flags", "environment", "kind"),
    [
        ("x86_64", "fpu avx2", {}, "x86 without oneDNN"),
        ("x86_64", "fpu avx2", {"TF_ENABLE_ONEDNN_OPTS": "1"}, "AVX2"),
        ("x86_64", "fpu avx2 avx_vnni", {}, "AVX2"),
        ("x86_64", FLAGS, {}, "x86 without oneDNN"),
        ("x86_64", f"{FLAGS} avx512_vnni", {}, "AVX512"),
        ("x86_64", ZEN, {}, "AVX512-BF16"),
        ("x86_64", ZEN, {"TF_ENABLE_ONEDNN_OPTS": "0"}, "x86 without oneDNN"),
        ("x86_64", ZEN, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "AVX512"),
        ("x86_64", ZEN, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2"),
        ("x86_64", f"{ZEN} avx512_fp16", {}, "AVX512-FP16"),
        ("x86_64", SAPPHIRE_RAPIDS, {}, "AMX-BF16"),
        ("x86_64", SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX10_1_512"}, "AVX512-FP16"),
        ("x86_64", f"{SAPPHIRE_RAPIDS} amx_fp16", {}, "AMX-FP16"),
        ("AMD64", "", {}, "x86 without oneDNN"),
        ("aarch64", "fp asimd bf16", {"TF_ENABLE_ONEDNN_OPTS": "1"}, "Arm BF16"),
        ("aarch64", "fp asimd bf16", {}, "aarch64"),
        ("aarch64", "fp asimd", {}, "aarch64"),
        ("arm64", "", {}, "arm64"),
    ],
)
def test_kinds_of_cpus(machine, flags, environment, kind, monkeypatch):
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "info", lambda: {"flags": flags})
    for name in ("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cpu.kind() == kind


@pytest.mark.parametrize("more", ["", " amx_fp16"], ids=["AMX-BF16", "AMX-FP16"])
def test_a_cpu_with_amx_trains_in_bfloat16(more, monkeypatch):
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu.platform, "system", lambda: "Linux")
    monkeypatch.setattr(cpu, "info", lambda: {"flags": f"{SAPPHIRE_RAPIDS}{more}"})
    for name in ("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert hardware.best_policy() == "mixed_bfloat16"
    assert hardware.why_slow("bfloat16") is None
    assert "1.3 times" in hardware.why_slow("float16")
    assert slow.is_slow("Conv2DBackpropFilter", "float16", device="CPU")
    assert slow.is_slow("DepthwiseConv2dNativeBackpropFilter", "float16", device="CPU")
    assert not slow.is_slow("Conv2DBackpropInput", "float16", device="CPU")
    # Without its units it is another CPU.
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    tables._of_process.cache_clear()
    assert hardware.best_policy() == "float32"


def test_whether_tensorflow_computes_with_onednn_is_what_it_says_itself():
    assert cpu.uses_onednn() == _pywrap_util_port.IsMklEnabled()


def test_the_arm_cpu_on_which_onednn_is_on(monkeypatch):
    monkeypatch.setattr(cpu.platform, "system", lambda: "Linux")
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    for part, is_on in (("0xd40", True), ("0xd0c", False)):
        monkeypatch.setattr(
            cpu, "info", lambda part=part: {"CPU implementer": "0x41", "CPU part": part}
        )
        assert cpu.uses_onednn() == is_on
