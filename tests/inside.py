"""What tests need of the inside of keras_mp: code in reach, and what kernels are taken for.

All that tests of several rooms know of it is here; a test of a part alone imports that part.
"""

import functools
from typing import Any

import tensorflow as tf

from keras_mp import keras_api, kernels
from keras_mp.grappler import passes
from keras_mp.hooks import faces, reach
from keras_mp.kernels import (
    cast_policy,
    door,
    known_operations,
    lower_precision,
    recurrent,
    slow,
    sums,
    trials,
)
from keras_mp.op_autocast import context_manager, promotion
from keras_mp.step import scaled_losses
from keras_mp.support import cpu
from keras_mp.tensorflow_api import features, names

# Policies of operations in a region, and what each of them means.
OPERATIONS_OF_REGIONS, POLICIES_OF_REGIONS = cast_policy.ROWS, cast_policy.POLICIES
# Operations whose kernels are slow on some CPUs, and those that may add up wrongly.
SLOW_OPERATIONS, SUMS = slow.OPS, sums.KERNELS
# What does not work without one of TensorFlow's or Keras's private names, and such a name.
FEATURES, Name = features.FEATURES + keras_api.names.FEATURES, names.Name
dtype_in_reach = reach.current
enabled_rewrite = passes.enabled_dtype
low_precision_of = lower_precision.low_precision_of
slow_operations, usual_device = slow.slow_operations, trials.usual_device
uses_onednn, takes_rewrite = cpu.uses_onednn, cpu.takes_rewrite


def in_reach(dtype: Any) -> Any:
    """A block whose code counts as that of a layer of keras_mp; None for a layer of others."""
    kernels.install()
    promotion.install()
    return reach.entered(dtype and tf.as_dtype(dtype))


def set_units(has_units: Any, patch: Any = setattr) -> None:
    """Says for which dtypes the CPU has units, whatever it has."""
    patch(cpu, "has_units", functools.wraps(cpu.has_units)(has_units))


def set_slow(monkeypatch: Any, are_slow: bool = True) -> None:
    """Says whether kernels in 16 bits are slower than those in float32."""
    kernels.install()
    forget_operations(monkeypatch)
    for module in (slow, recurrent):
        monkeypatch.setattr(module, "is_slow", lambda *_: are_slow)


def set_wrong(monkeypatch: Any, table: Any, is_wrong: Any = True) -> None:
    """Says which kernels of a table are wrong, in the place of trying them out: all of them."""
    kernels.install()
    answer = is_wrong if callable(is_wrong) else lambda *_: is_wrong
    monkeypatch.setattr(table, "_asks", answer)


def set_device(monkeypatch: Any, kind: str = "GPU") -> None:
    """Says on which kind of device TensorFlow computes by default."""
    forget_operations(monkeypatch)
    monkeypatch.setattr(trials, "usual_device", lambda: kind)


def set_widening(monkeypatch: Any, widen: Any) -> None:
    """Puts a function in the place of the one that takes the float32 face of a tensor."""
    widen.__code__ = widen.__code__.replace(co_filename=promotion.__file__)
    monkeypatch.setattr(faces, "widened", widen)
    monkeypatch.setitem(door._WIDEN, faces.EXACT, widen)


def forget_operations(monkeypatch: Any) -> None:
    """Lets what was decided for each operation be decided again."""
    monkeypatch.setattr(known_operations, "BY_NAME", type(known_operations.BY_NAME)())


def forget_losses() -> None:
    """Forgets that an earlier test has scaled a loss."""
    type(scaled_losses.thread).noted = scaled_losses.ScaledLosses()


def forget_warning_of_regions() -> None:
    """Lets a region warn again that no dtype is fast here."""
    context_manager._warn_once.cache_clear()
