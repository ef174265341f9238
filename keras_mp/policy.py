"""Dtype policies that carry a loss scale, and the global policy.

RFC 293, "Dtype policies overview", "The global policy" and "A policy's loss scale".
"""

import abc
import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp import loss_scale as loss_scale_lib
from keras_mp.support import dtypes, messages, observers

# The 16-bit dtypes of mixed policies.
MIXED = {f"mixed_{name}": name for name in dtypes.LOW_PRECISION_NAMES}


class _Unchanging(abc.ABCMeta):
    """The class of policies, which are complete when all constructors have returned.

    A subclass may have an abstract class among its bases.
    """

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.__init__, self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        policy = super().__call__(*args, **kwargs)
        vars(policy).update(_is_complete=True)
        return policy


@keras_api.register_policy
class Policy(keras_api.BasePolicy, metaclass=_Unchanging):
    """A dtype policy of `tf.keras` that also says how a model's loss is scaled.

    It is a real `tf.keras.mixed_precision.Policy`, so Keras's layers and models take it as `dtype=`
    and as the global policy. A policy never changes. Two policies are equal if their configs are.

    `import keras_mp` hooks `tf.keras.Model.compile`. If a model has a `keras_mp.Policy`, `compile`
    gives it an optimizer wrapped in `keras_mp.LossScaleOptimizer`, with a copy of the policy's loss
    scale. Layers with a policy that computes in 16 bits add up 16-bit numbers in float32 where
    TensorFlow's kernels would lose terms (`keras_mp.enable_float32_sums`).

    Args:
        name: str or dtype. `"mixed_float16"` or `"mixed_bfloat16"` (16-bit computations, float32
            variables), or a dtype in any form that `tf.as_dtype` takes, for both.
        loss_scale: `"auto"` (the default: `"dynamic"` for `"mixed_float16"` and None for every
            other name), None (no loss scaling), `"dynamic"`, a positive number (a fixed
            scale), or a `keras_mp.LossScale`.
        output_dtype: None (the default: the compute dtype), or, for `"mixed_float16"` and
            `"mixed_bfloat16"`, `"float32"`. With `"float32"`, a layer computes what a float32 layer
            computes, to the last bit, and it is one to Keras: its `compute_dtype` is `"float32"`.
            But the gradients of its matrix products and convolutions, two thirds of the work, are
            computed in 16 bits. It is meant for the head of a model.
        model_outputs: `"float32"` (the default) or None. With `"float32"`, a model that no other
            layer calls returns float32 in the place of 16 bits: to the program, to `train_step` and
            `predict`, and from an exported signature. If a matrix product, a softmax or a sigmoid
            makes an output, the output is what the last layer returns with
            `output_dtype="float32"`. None returns the numbers as the last layer computes them.

    Attributes:
        output_dtype: `"float32"` if only gradients are computed in 16 bits; or None, for the
            compute dtype.
        model_outputs: `"float32"` if a model's outputs are to be float32; or None, which leaves
            them in the dtype of the last layer.
        low_precision_dtype: The 16-bit DType of layers, or only of the gradients of products; or
            None.
        is_of_float32: bool. Whether it is the policy of a float32 layer that rounds what it
            returns.

    Raises:
        TypeError: `name`, `loss_scale`, `output_dtype` or `model_outputs` is of a wrong type.
        ValueError: there is no such policy, a loss scale is out of range, or the policy cannot have
            such a dtype of outputs.

    Example:

    >>> policy = keras_mp.Policy("mixed_float16", loss_scale=128)
    >>> policy
    <Policy "mixed_float16", loss_scale=FixedLossScale(loss_scale_value=128.0)>
    >>> policy.compute_dtype, policy.variable_dtype
    ('float16', 'float32')
    >>> tf.keras.layers.Dense(1, dtype=policy).dtype_policy == policy
    True
    >>> keras_mp.Policy("mixed_bfloat16", output_dtype="float32")
    <Policy "mixed_bfloat16", output_dtype="float32">
    >>> with keras_mp.policy_scope("mixed_bfloat16"):
    ...     model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    >>> model.layers[0](tf.ones([1, 1])).dtype, model(tf.ones([1, 1])).dtype
    (tf.bfloat16, tf.float32)

    Source: RFC 293, "Dtype policies overview"; `output_dtype` is a word of JMP (`jmp.Policy`).
    """

    _is_complete = False

    def __init__(
        self,
        name: str | tf.DType | None,
        loss_scale: str | float | loss_scale_lib.LossScale | None = "auto",
        output_dtype: str | tf.DType | None = None,
        model_outputs: str | tf.DType | None = "float32",
    ) -> None:
        self.output_dtype: str | None = None
        self.low_precision_dtype: tf.DType | None = None
        self.is_of_float32, self._in_float32 = False, None
        self.model_outputs = _standardize_model_outputs(model_outputs)
        keras_api.init_base_policy(self, _standardize_name(name))
        self.output_dtype = self._standardize_output_dtype(output_dtype)
        computes_in = MIXED.get(super().name, super().name)
        is_low = computes_in in dtypes.LOW_PRECISION_NAMES
        self.low_precision_dtype = tf.as_dtype(computes_in) if is_low else None
        if isinstance(loss_scale, str) and loss_scale == "auto":
            loss_scale = "dynamic" if self.name == "mixed_float16" else None
        if isinstance(loss_scale, str) and loss_scale == "dynamic":
            # It is made at the first access: a program makes its policy in its first line, and
            # variables would keep it from configuring its devices afterwards.
            self._loss_scale = None
            self._loss_scale_config = loss_scale_lib.DEFAULT_DYNAMIC
        else:
            self._loss_scale = loss_scale_lib.get(loss_scale)
            self._loss_scale_config = loss_scale_lib.serialize(self._loss_scale)
        if self.low_precision_dtype is not None:
            observers.tell(observers.Observer.policy_was_made, self)

    @property
    def loss_scale(self) -> loss_scale_lib.LossScale | None:
        """The `LossScale` that `Model.compile` copies, or None."""
        if self._loss_scale is None and self._loss_scale_config is not None:
            vars(self)["_loss_scale"] = loss_scale_lib.get(self._loss_scale_config)  # pyright: ignore
        return self._loss_scale

    @property
    def name(self) -> str:
        """The name that the policy was made with."""
        return keras_api.policy_name(self, super().name)

    @property
    def compute_dtype(self) -> str | None:
        """The dtype in which Keras's layers compute.

        It is `"float32"` if that is the output dtype.
        """
        if self.is_of_float32:
            return "float32"
        return super().compute_dtype if self.output_dtype is None else self.output_dtype

    @property
    def variable_dtype(self) -> str | None:
        """The dtype of weights."""
        return "float32" if self.is_of_float32 else super().variable_dtype

    def in_float32(self) -> "Policy":
        """Returns the policy for a float32 layer that rounds what it returns.

        The result is equal to this policy, so the layer is saved with this one.
        """
        if self.low_precision_dtype is None or self.is_of_float32:
            return self
        if self._in_float32 is None:
            other: Any = object.__new__(type(self))
            vars(other).update(vars(self), is_of_float32=True)
            vars(self)["_in_float32"] = other  # pyright: ignore[reportIndexIssue]
        return self._in_float32

    @property
    def scales_loss(self) -> bool:
        """Whether there is a loss scale."""
        return self._loss_scale_config is not None

    @property
    def should_cast_variables(self) -> bool:
        """Whether the compute dtype and the variable dtype differ."""
        return self.compute_dtype != self.variable_dtype

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` makes an equal policy.

        It leaves out an automatic loss scale and default outputs, so that Keras's own class can
        read it.
        """
        config: dict[str, Any] = {"name": super().name}
        if not self._has_automatic_scale:
            config["loss_scale"] = self._loss_scale_config
        if self.output_dtype is not None:
            config["output_dtype"] = self.output_dtype
        if self.model_outputs is None:
            config["model_outputs"] = None
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: object = None) -> "Policy":
        """Makes a policy from a config of this class or of Keras's own.

        Args:
            config: dict with the key `name`, and with the other arguments that differ from their
                defaults.
            custom_objects: not used; TensorFlow passes it.

        Returns:
            A policy.
        """
        del custom_objects
        return cls(**config)

    def __setattr__(self, name: str, value: object) -> None:
        if self._is_complete:
            raise AttributeError(
                "A policy does not change; make another one. "
                f"Received: {name}={value!r} for {self!r}"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A policy does not change. Received: del {name} for {self!r}")

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Policy):
            return NotImplemented
        return self.get_config() == other.get_config()

    def __hash__(self) -> int:
        of_outputs = self.output_dtype, self.model_outputs
        return hash((str(self.name), of_outputs, repr(self._loss_scale_config)))

    def __copy__(self) -> "Policy":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Policy":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_config, (self.get_config(),)

    @property
    def _has_automatic_scale(self) -> bool:
        automatic = loss_scale_lib.DEFAULT_DYNAMIC if self.name == "mixed_float16" else None
        return self._loss_scale_config == automatic

    def _standardize_output_dtype(self, output_dtype: str | tf.DType | None) -> str | None:
        if output_dtype is None:
            return None
        dtype = dtypes.parse(output_dtype)
        if dtype is None:
            raise TypeError(
                "`output_dtype` must be None or a dtype. "
                f"Received: output_dtype={output_dtype!r} (of type {type(output_dtype)})"
            )
        if dtype.name == self.compute_dtype:
            return None
        if dtype != tf.float32 or self.name not in MIXED:
            raise ValueError(
                "The output dtype is the compute dtype or, for 'mixed_float16' and "
                f"'mixed_bfloat16', float32. Received: output_dtype={output_dtype!r} for the "
                f"policy {self.name!r}, which computes in {self.compute_dtype!r}"
            )
        return dtype.name

    def __repr__(self) -> str:
        parts = [f'"{self.name}"']
        if not self._has_automatic_scale:
            # The property is not used: it would make variables, and so initialize the devices.
            is_to_be_made = self._loss_scale is None and self.scales_loss
            loss_scale = "dynamic" if is_to_be_made else self._loss_scale
            parts.append(f"loss_scale={loss_scale!r}")
        if self.output_dtype is not None:
            parts.append(f'output_dtype="{self.output_dtype}"')
        if self.model_outputs is None:
            parts.append("model_outputs=None")
        return f"<Policy {', '.join(parts)}>"


def global_policy() -> Any:
    """Returns the global policy, the default for layers and models.

    Until a policy is set, it follows `tf.keras.backend.floatx()`. A policy that was set with
    `tf.keras`'s own function is returned as its `keras_mp.Policy` (but a quantized one as it is).

    Returns:
        A `keras_mp.Policy`.

    Example:

    >>> keras_mp.global_policy()
    <Policy "float32">

    Source: RFC 293, "The global policy".
    """
    return _to_policy(keras_api.get_global_policy())


def set_global_policy(policy: Any) -> None:
    """Sets the global policy, for keras_mp and for `tf.keras`.

    Set it before the model is made, since layers keep the policy that they were made with. It holds
    in all threads; on Keras 3 not in those that set a policy with Keras's own function.

    Args:
        policy: A policy's name, a dtype, a `keras_mp.Policy`, a policy of `tf.keras`, or None to
            follow `floatx` again. A quantized policy of Keras 3 may also be given by its name.

    Raises:
        ValueError: The policy does not compute in floating point, or it is a mixed one while the
            graph rewrite is on.

    Example:

    >>> keras_mp.set_global_policy("mixed_bfloat16")
    >>> tf.keras.layers.Dense(1).compute_dtype
    'bfloat16'
    >>> keras_mp.set_global_policy(None)

    Source: RFC 293, "The global policy".
    """
    policy = _checked(policy)
    keras_api.set_global_policy(policy)


@contextlib.contextmanager
def policy_scope(policy: Any) -> Iterator[Any]:
    """Sets the global policy for a block.

    The previous policy is restored afterwards, even after an error. It holds in this thread, and
    for work that belongs to this thread: replicas, and functions that are traced in the block.
    Other threads do not see it. In the block, `set_global_policy` only changes the policy of the
    block.

    Args:
        policy: As for `set_global_policy`.

    Yields:
        The global policy inside the block.

    Example:

    >>> with keras_mp.policy_scope("mixed_float16"):
    ...     layer = tf.keras.layers.Dense(1)
    >>> layer.compute_dtype, keras_mp.global_policy().name
    ('float16', 'float32')
    """
    with keras_api.policy_scope(_checked(policy)):
        yield global_policy()


def _checked(policy: Any) -> Any:
    """Returns the argument of `set_global_policy` as a policy, or None."""
    if policy is not None:
        policy = _to_policy(policy)
        if policy.compute_dtype and not tf.as_dtype(policy.compute_dtype).is_floating:
            raise ValueError(
                "The global policy must be of a floating-point dtype, since most layers support no "
                "other. Expected 'float16', 'bfloat16', 'float32', 'float64', 'mixed_float16' or "
                f"'mixed_bfloat16'. Received: policy={policy!r}"
            )
        observers.tell(observers.Observer.policy_is_set, policy)
        if policy.name in dtypes.LOW_PRECISION_NAMES:
            messages.warn(
                f"The global policy {policy.name!r} keeps variables in {policy.name} too, in which "
                f"models train poorly. Use 'mixed_{policy.name}', which keeps them in float32. Or "
                "let keras_mp.MasterWeightOptimizer(optimizer) keep their digits, as Model.compile "
                "does under this policy."
            )
    return policy


def _standardize_name(name: str | tf.DType | None) -> str | None:
    if name is None or (isinstance(name, str) and (name in MIXED or name == "_infer")):
        return name
    # TensorFlow would take an int for the number of a dtype.
    dtype = None if isinstance(name, int) else dtypes.parse(name)
    if dtype is None:
        kind = ValueError if isinstance(name, str) else TypeError
        raise kind(
            "Cannot interpret the policy's name. Expected 'mixed_float16', 'mixed_bfloat16' or a "
            f"dtype such as 'float32'. Received: name={name!r} (of type {type(name)})"
        )
    return dtype.name


def _standardize_model_outputs(model_outputs: str | tf.DType | None) -> str | None:
    if model_outputs is None or dtypes.parse(model_outputs) == tf.float32:
        return model_outputs and "float32"
    kind = ValueError if isinstance(model_outputs, str | tf.DType) else TypeError
    raise kind(
        "`model_outputs` must be 'float32' or None. "
        f"Received: model_outputs={model_outputs!r} (of type {type(model_outputs)})"
    )


def _to_policy(policy: Any) -> Any:
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, keras_api.BasePolicy):
        # A quantized policy is of a subclass of Keras's own, and has no counterpart here.
        return Policy(policy.name) if type(policy) is keras_api.BasePolicy else policy
    quantized = keras_api.quantized_policy(policy) if isinstance(policy, str) else None
    return Policy(policy) if quantized is None else quantized
