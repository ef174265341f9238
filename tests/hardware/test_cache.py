import json
import pathlib

import pytest
import tensorflow as tf

from keras_mp.hardware import cache, devices
from tests.hardware.machines import EPYC, XEON


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "keras_mp"


def test_what_was_written_is_read_by_the_same_machine_only(folder):
    this, other = cache.describe("CPU"), cache.describe("A GPU")
    assert cache.read(this) is None
    cache.write(this, XEON, {})
    assert cache.read(this) == (XEON, {})
    assert cache.read(other) is None
    cache.write(other, EPYC, {})
    cache.write(this, EPYC, {})
    assert cache.read(this) == (EPYC, {})
    assert len(list(folder.iterdir())) == 2


def test_kernels_are_remembered_with_the_speeds(folder):
    machine = cache.describe("CPU")
    kernels = {"Elu": {"float16": 4.5, "bfloat16": 0.9}}
    cache.write(machine, XEON, kernels)
    assert cache.read(machine) == (XEON, kernels)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setattr(devices, "cpu_info", lambda: {"flags": "fpu"}),
        lambda m: m.setattr(cache, "_cores", lambda: 99),
        lambda m: m.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 99),
        lambda m: m.setattr(tf.version, "VERSION", "2.99"),
        lambda m: m.setenv("TF_ENABLE_ONEDNN_OPTS", "0"),
        lambda m: m.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ],
)
def test_what_speeds_depend_on_makes_another_machine(folder, monkeypatch, change):
    cache.write(cache.describe("CPU"), XEON, {})
    change(monkeypatch)
    assert cache.read(cache.describe("CPU")) is None


def with_speed(value):
    speeds = json.loads(json.dumps(XEON))
    speeds["convolution"]["bfloat16"] = value
    return as_json(speeds=speeds)


def as_json(**changes):
    whole = {"format": 2, "machine": cache.describe("CPU"), "speeds": XEON, "kernels": {}}
    return json.dumps({**whole, **changes})


@pytest.mark.parametrize(
    "text",
    [
        lambda: "",
        lambda: '{"machine": ',
        lambda: "\x00\xff",
        lambda: "[]",
        lambda: "null",
        lambda: '{"speeds": 1}',
        lambda: as_json(machine={}),
        lambda: as_json(speeds={}),
        lambda: json.dumps({"machine": cache.describe("CPU"), "speeds": XEON}),
        lambda: as_json(format=1),
        lambda: as_json(kernels=None),
        lambda: as_json(kernels=[]),
        lambda: as_json(kernels={"Elu": 1}),
        lambda: as_json(kernels={"Elu": {"float16": "slow"}}),
        lambda: with_speed(0),
        lambda: with_speed(-1),
        lambda: with_speed("fast"),
        lambda: with_speed(None),
        lambda: with_speed(float("nan")),
        lambda: with_speed(float("inf")),
    ],
)
def test_a_file_that_is_no_such_file_is_as_good_as_none(folder, text):
    machine = cache.describe("CPU")
    cache.write(machine, XEON, {})
    [path] = folder.iterdir()
    path.write_text(text(), encoding="latin-1")
    assert cache.read(machine) is None
    cache.write(machine, EPYC, {})
    assert cache.read(machine) == (EPYC, {})


@pytest.mark.parametrize("kind", ["a file where a folder should be", "a folder in the way", "home"])
def test_where_nothing_can_be_written_nothing_is(tmp_path, monkeypatch, kind):
    machine = cache.describe("CPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if kind == "a file where a folder should be":
        (tmp_path / "keras_mp").touch()
    elif kind == "a folder in the way":
        cache._path(machine).mkdir(parents=True)
    else:

        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(pathlib.Path, "home", no_home)
    cache.write(machine, XEON, {})
    assert cache.read(machine) is None
    assert not list(tmp_path.glob("keras_mp/tmp*"))


def test_the_usual_cache_folder(monkeypatch, tmp_path):
    machine = cache.describe("CPU")
    monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path)
    for folder in (None, "", "relative"):
        if folder is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert cache._path(machine).parent == tmp_path / ".cache" / "keras_mp"


def test_a_machine_is_described_in_what_json_can_hold():
    machine = cache.describe("CPU")
    assert json.loads(json.dumps(machine)) == machine
