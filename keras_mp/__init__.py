"""Mixed precision training for tf.keras, as TensorFlow RFC 293 proposed it."""

import importlib
from typing import TYPE_CHECKING, Any

from keras_mp import (
    callbacks,
    extensions,
    hardware,
    layers,
    loss_scale,
    losses,
    regularizers,
)
from keras_mp._version import __version__
from keras_mp.all_reduce_optimizer import AllReduceOptimizer
from keras_mp.kernels.slow import enable_float32_where_faster
from keras_mp.kernels.sums import enable_float32_sums
from keras_mp.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from keras_mp.loss_scale_optimizer import LossScaleOptimizer
from keras_mp.master_weight_optimizer import MasterWeightOptimizer
from keras_mp.model_summary import summary
from keras_mp.op_autocast import autocast, autocast_inputs, autocast_ops, autocast_state
from keras_mp.optimizer_wrapper import OptimizerWrapper
from keras_mp.policy import Policy, global_policy, policy_scope, set_global_policy
from keras_mp.step.state_rollback import training_step
from keras_mp.support.messages import MixedPrecisionWarning
from keras_mp.variables import (
    AutoCastVariable,
    autocast_dtype,
    autocast_scope,
    autocast_variable,
    cast_once,
    in_current_scope,
    recompute_grad,
)

if TYPE_CHECKING:
    from keras_mp import compat, graph_rewrite, numerics, plots
    from keras_mp.conversion import convert
    from keras_mp.grad_scaler import GradScaler
    from keras_mp.graph_rewrite import (
        disable_mixed_precision_graph_rewrite,
        enable_mixed_precision_graph_rewrite,
    )
    from keras_mp.loss_scale_gradient_tape import LossScaleGradientTape
    from keras_mp.step.overflow import Overflow

__all__ = [
    "AllReduceOptimizer",
    "AutoCastVariable",
    "DynamicLossScale",
    "FixedLossScale",
    "GradScaler",
    "LossScale",
    "LossScaleGradientTape",
    "LossScaleOptimizer",
    "MasterWeightOptimizer",
    "MixedPrecisionWarning",
    "OptimizerWrapper",
    "Overflow",
    "Policy",
    "__version__",
    "autocast",
    "autocast_dtype",
    "autocast_inputs",
    "autocast_ops",
    "autocast_scope",
    "autocast_state",
    "autocast_variable",
    "callbacks",
    "cast_once",
    "compat",
    "convert",
    "disable_mixed_precision_graph_rewrite",
    "enable_float32_sums",
    "enable_float32_where_faster",
    "enable_mixed_precision_graph_rewrite",
    "global_policy",
    "graph_rewrite",
    "hardware",
    "in_current_scope",
    "layers",
    "loss_scale",
    "losses",
    "numerics",
    "plots",
    "policy_scope",
    "recompute_grad",
    "regularizers",
    "set_global_policy",
    "summary",
    "training_step",
]

# The modules whose names most programs do not use. They are imported when they are needed.
_LATER = {
    "GradScaler": "grad_scaler",
    "LossScaleGradientTape": "loss_scale_gradient_tape",
    "Overflow": "step.overflow",
    "compat": "compat",
    "convert": "conversion",
    "disable_mixed_precision_graph_rewrite": "graph_rewrite",
    "enable_mixed_precision_graph_rewrite": "graph_rewrite",
    "graph_rewrite": "graph_rewrite",
    "numerics": "numerics",
    "plots": "plots",
}

extensions.attach()


if not TYPE_CHECKING:  # Otherwise a type checker would accept any name.

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_LATER[name]}")
        return vars(module).get(name, module)


def __dir__() -> list[str]:
    # Once imported, the package's own modules would be listed beside the public names.
    return __all__
