"""What attaches to the core of keras_mp, which does not import it."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_mp import compile_hook, hardware, keras_api, kernels
from keras_mp._version import __version__
from keras_mp.grappler import passes
from keras_mp.kernels import normalization, recurrent, slow
from keras_mp.layer_calls import layer_call
from keras_mp.models import model_steps, saved_files
from keras_mp.op_autocast import promotion
from keras_mp.policy import MIXED, Policy, global_policy
from keras_mp.step import workers
from keras_mp.support import host, observers
from keras_mp.support.dtypes import LOW_PRECISION_NAMES


class _OfKerasMp(observers.Observer):
    """Tells the parts of keras_mp what happens."""

    def reach_begins(self) -> None:
        # A scope may be all that a program uses of keras_mp, or come before the first policy.
        promotion.install()
        kernels.install()
        keras_api.replace_slow_layers(recurrent.lstm, normalization.batch_normalization)

    def policy_was_made(self, policy: Policy) -> None:
        if policy.name in MIXED:
            hardware.warn_if_slow(MIXED[policy.name])
        layer_call.install()
        saved_files.install()
        model_steps.scale_own_loops()

    def policy_is_set(self, policy: Policy) -> None:
        if policy.name in MIXED:
            passes.refuse_policy(f"set_global_policy({policy.name!r})")
        # The other Keras may have been imported since, whose models are refused.
        compile_hook.install()

    def model_is_compiled(self, model: tf.keras.Model) -> None:
        # Variables initialize the devices, perhaps long after the policy was made.
        hardware.warn_if_slow()
        for layer in keras_api.flatten_layers(model):
            if layer.compute_dtype in LOW_PRECISION_NAMES and layer.variable_dtype == "float32":
                passes.refuse_policy(
                    f"the model {model.name!r}, whose layer {layer.name!r} has the policy "
                    f"{layer.dtype_policy.name!r}"
                )

    def model_was_compiled(self, model: tf.keras.Model) -> None:
        how = "which XLA compiles (unless you pass jit_compile=False to `compile`)"
        if model.run_eagerly or model.jit_compile:
            how = "which runs eagerly" if model.run_eagerly else how
            passes.warn_if_not_rewritten(f"the model {model.name!r}, {how}")

    def scaler_was_made(self) -> None:
        hardware.warn_if_slow()

    def step_begins(self) -> None:
        if host.is_compiled_by_xla():
            passes.warn_if_not_rewritten("a step that XLA compiles (jit_compile=True)")

    def workers_meet(self, owner: Any, grads: Sequence[Any], facts: Mapping[str, Any]) -> None:
        workers.check_alike(owner, grads, facts)


def attach() -> None:
    """Attaches them once, for `import keras_mp`."""
    observers.attach(_OfKerasMp())
    compile_hook.install()
    workers.FACTS["global policy"] = lambda: repr(global_policy())
    workers.FACTS["version of keras_mp"] = lambda: __version__
    workers.FACTS["operations in float32 for speed"] = slow.fact_for_workers
