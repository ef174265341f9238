"""The interface by which a step calls an optimizer."""

import pytest
import tensorflow as tf

from keras_mp.step.optimizer_adapter import DelegatingAdapter, OptimizerAdapter
from tests.common import once

pytestmark = once

# What an adapter around another one does itself, or a subclass of it.
_ITSELF = {"apply", "build", "overrides_minimize", "slot_makers", "widened"}


class _Told(OptimizerAdapter):
    def apply(self, grads_and_vars, name, aggregate):
        return None


def test_an_adapter_around_another_one_delegates_the_rest():
    public = {name for name in vars(OptimizerAdapter) if not name.startswith("_")}
    delegated = public & vars(DelegatingAdapter).keys()
    assert public - delegated == _ITSELF & public


@pytest.mark.parametrize("name", ["is_saved_by_keras", "takes_float32_gradients"])
def test_it_has_what_the_other_one_has(name):
    class Around(DelegatingAdapter):
        apply = _Told.apply

    inner = _Told(tf.Module())
    setattr(inner, name, "inner's")
    assert getattr(Around(tf.Module(), inner), name) == "inner's"
