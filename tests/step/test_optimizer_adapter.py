"""The interface by which a step calls an optimizer."""

from keras_mp.step.optimizer_adapter import DelegatingAdapter, OptimizerAdapter
from tests.common import once

pytestmark = once

# What an adapter around another one does itself, or a subclass of it.
_ITSELF = {"apply", "build", "overrides_minimize", "slot_makers", "widened"}


def test_an_adapter_around_another_one_delegates_the_rest():
    public = {name for name in vars(OptimizerAdapter) if not name.startswith("_")}
    delegated = public & vars(DelegatingAdapter).keys()
    assert public - delegated == _ITSELF & public
