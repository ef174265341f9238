"""What both Kerases offer to the rest of keras_mp.

Each of `keras2` and `keras3` defines:

- `BaseCallback`: `tf.keras`'s own callback. No batch is waited for because it is there.
- `BaseLayer`: `tf.keras`'s own layer, but its inputs are not cast, and `add_weight` takes the name
  of arguments only, of which `autocast` must be there, and makes `AutoCastVariable`s.
- `BaseLoss`: `tf.keras`'s own loss, with a `dtype` that is a str, and `reduce(y_true, y_pred,
  sample_weight)`, which does what Keras's own `__call__` does, but passes labels on as they are.
- `BasePolicy`: `tf.keras`'s own dtype policy class.
- `init_base_policy(policy, name)`: what a subclass of it calls first.
- `LossFunctionWrapper`: the loss that computes a function.
- `KerasLossScaleOptimizer`: `tf.keras.mixed_precision.LossScaleOptimizer`.
- `OPTIMIZER_BASES`: the classes that Keras takes for an optimizer.
- `CROSSENTROPY_NAMES`: what `compile(loss=)` takes for the cross entropy that fits the shapes.
- `COMPILE_OWNER`: the class on which `Model.compile` is defined.
- `APPLY_TAKES_SCALED_GRADIENTS`: does the wrapper of `tf.keras` unscale in `apply_gradients`?
- `arguments_of_loss(loss)`: with which arguments a built-in loss was made.
- `autocast_dtype()`: the dtype that `tf.keras` casts variables to in this thread, or None.
- `autocast_scope(dtype)`: context manager that sets it.
- `autocast_variables(weights)`: the `AutoCastVariable`s among the weights of a layer, or in them.
- `build_loss(model, predictions)`: makes the metrics that the loss of a compiled model updates.
- `compile_without_wrapping(compile, call)`: Keras's own, with bound arguments; wraps nothing.
- `flatten_layers(model)`: the model and all layers below it.
- `layers_inside(layer)`: those right below it.
- `patch_fit(model)`: lets several workers train a compiled model with `fit`.
- `output_layers(model)`: the layers that make a model's outputs, or None where nothing tells.
- `is_in_keras_wrapper(optimizer)`: does Keras's own `LossScaleOptimizer` wrap it, as far as one can
  tell?
- `is_symbolic()`: does Keras only ask for shapes?
- `is_weight(value)`: is it what layers of `tf.keras` have as weights?
- `widen_predictions(model)`: lets the metrics of a compiled model see predictions in float32, and
  keeps labels from being narrowed to the predictions' dtype before our losses see them.
- `get_global_policy()`, `set_global_policy(policy)`: `tf.keras`'s global policy; None is floatx.
- `policy_scope(policy)`: context manager in which this thread, and replicas that it starts, have
  another global policy; `set_global_policy` in it changes that of the scope.
- `thread_missed_global_policy()`: does this thread's Keras not know the global policy?
- `trusted_scope()`: context manager in which layers are made of configs that hold code, too.
- `get_optimizer(identifier)`: instance, name or config to optimizer.
- `optimizer_adapter(optimizer)`: the `OptimizerAdapter` of an optimizer, or None.
- `quantized_policy(name)`: the quantized policy of that name, or None.
- `refuse_keras_wrapper(optimizer, wrapper)`: keeps Keras's own `LossScaleOptimizer` from wrapping
  an optimizer whose loss a wrapper of ours scales.
- `register_serializable`: decorator.
- `register_policy`: decorator; without keras_mp, `tf.keras` makes a policy of its own of such a
  policy's config.
- `serialize_optimizer`, `deserialize_optimizer`.
- `states(model)`: the variables of stateful layers, which are not among the model's weights.
- `steps_per_execution(model)`: how many steps a call of `train_function` makes, in `fit`.
- `keras_layout(optimizer)`: a trackable of what a `LossScaleOptimizer` of ours shares with
  Keras's own, under the names by which checkpoints of the latter know it.
- `KERAS_LAYOUT_CHILD`: what is below an optimizer in checkpoints of Keras's own only, or None.
"""
