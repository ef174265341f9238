import inspect
import re
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, mirrored
from tests.models import compiled_model

stock = tf.keras.mixed_precision


@pytest.mark.parametrize(
    ("name", "compute", "variable", "scale"),
    [
        ("mixed_float16", "float16", "float32", keras_mp.DynamicLossScale),
        ("mixed_bfloat16", "bfloat16", "float32", type(None)),
        ("float32", "float32", "float32", type(None)),
        ("float16", "float16", "float16", type(None)),
        ("int32", "int32", "int32", type(None)),
    ],
)
def test_what_a_name_means(name, compute, variable, scale):
    policy = keras_mp.Policy(name)
    assert policy.name == name
    assert (policy.compute_dtype, policy.variable_dtype) == (compute, variable)
    assert type(policy.loss_scale) is scale
    assert policy.scales_loss == (scale is not type(None))
    assert policy.should_cast_variables == (compute != variable)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, ValueError) for name in ("mixed_float32", "mixed_float64", "", "floaty")),
        *((name, TypeError) for name in (1, True, 3.5, ["float32"], ...)),
    ],
    ids=str,
)
def test_what_is_no_name_is_refused(name, error):
    with pytest.raises(error, match=re.escape(f"Received: name={name!r}")):
        keras_mp.Policy(name)


# Defect 7: proposed, never shipped.
def test_loss_scale_argument():
    assert keras_mp.Policy("mixed_float16", loss_scale=None).loss_scale is None
    assert keras_mp.Policy("mixed_float16", 128).loss_scale.loss_scale_value == 128
    assert isinstance(keras_mp.Policy("float32", "dynamic").loss_scale, keras_mp.DynamicLossScale)
    own = keras_mp.DynamicLossScale(8)
    assert keras_mp.Policy("mixed_float16", own).loss_scale is own
    automatic = keras_mp.Policy("mixed_float16")
    assert automatic.loss_scale is automatic.loss_scale


@pytest.mark.parametrize("bad", [0, -0.5, True, "fixed", float("nan")])
def test_bad_loss_scales_are_refused(bad):
    with pytest.raises((TypeError, ValueError), match="Received"):
        keras_mp.Policy("mixed_float16", loss_scale=bad)


def test_never_changes():
    policy = keras_mp.Policy("mixed_float16")
    for name in ("name", "compute_dtype", "variable_dtype", "loss_scale", "anything"):
        with pytest.raises(AttributeError):
            setattr(policy, name, "float32")
    with pytest.raises(AttributeError):
        del policy._name


def test_equal_by_name_and_loss_scale():
    make = keras_mp.Policy
    same = [
        make("mixed_float16"),
        make("mixed_float16", "dynamic"),
        make("mixed_float16", keras_mp.DynamicLossScale()),
    ]
    assert all(a == b and hash(a) == hash(b) for a in same for b in same)
    different = {
        make("mixed_float16"),
        make("mixed_float16", None),
        make("mixed_float16", 128),
        make("mixed_float16", keras_mp.DynamicLossScale(8)),
        make("mixed_bfloat16"),
        make("float32"),
    }
    assert len(different) == 6
    assert make("float32") != stock.Policy("float32")
    assert make("float32") != "float32"
    assert make.from_config(stock.Policy("mixed_float16").get_config()) == make("mixed_float16")


def test_the_signature_is_that_of_the_constructor():
    arguments = ["name", "loss_scale", "output_dtype", "model_outputs"]
    assert list(inspect.signature(keras_mp.Policy).parameters) == arguments


def test_repr():
    assert repr(keras_mp.Policy("mixed_float16")) == '<Policy "mixed_float16">'
    assert repr(keras_mp.Policy("float32")) == '<Policy "float32">'
    unscaled, fixed = keras_mp.Policy("mixed_float16", None), keras_mp.Policy("mixed_bfloat16", 4)
    assert repr(unscaled) == '<Policy "mixed_float16", loss_scale=None>'
    assert "loss_scale=FixedLossScale(loss_scale_value=4.0)" in repr(fixed)


def test_global_policy_follows_floatx_until_set():
    # The RFC's own example, in order.
    assert keras_mp.global_policy().name == "float32"
    tf.keras.backend.set_floatx("float16")
    assert keras_mp.global_policy().name == "float16"
    keras_mp.set_global_policy("float64")
    assert keras_mp.global_policy().name == "float64"
    tf.keras.backend.set_floatx("float32")
    assert keras_mp.global_policy().name == "float64"
    keras_mp.set_global_policy(None)
    assert keras_mp.global_policy().name == "float32"
    for floatx in ("float64", "float32", "float64"):
        keras_mp.set_global_policy("mixed_bfloat16")
        keras_mp.set_global_policy(None)
        keras_mp.global_policy()
        tf.keras.backend.set_floatx(floatx)
        assert tf.keras.layers.Dense(1).dtype_policy.name == floatx
        assert keras_mp.global_policy().name == floatx
    # Keras 3 has made a policy of float64 for the layer and kept it, until somebody looks.
    tf.keras.backend.set_floatx("float32")
    assert keras_mp.global_policy() == keras_mp.Policy("float32")
    assert tf.keras.layers.Dense(1).dtype_policy.name == "float32"


def test_the_stock_spelling_has_the_same_effect():
    policy = keras_mp.Policy("mixed_float16", loss_scale=128)
    for each in (keras_mp, stock):
        each.set_global_policy(policy)
        assert keras_mp.global_policy() is stock.global_policy() is policy
        assert tf.keras.layers.Dense(1).dtype_policy is policy
        keras_mp.set_global_policy(None)
    stock.set_global_policy("float32")  # so that it does not follow floatx
    tf.keras.backend.set_floatx("float64")
    assert keras_mp.global_policy() == keras_mp.Policy("float32")
    assert tf.keras.layers.Dense(1).dtype_policy.name == "float32"


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("mixed_bfloat16", "mixed_bfloat16"),
        *((form, "float64") for form in (tf.float64, np.float64, np.dtype("float64"), "double")),
        (stock.Policy("mixed_float16"), "mixed_float16"),
    ],
    ids=str,
)
def test_forms_that_can_be_set(form, name):
    keras_mp.set_global_policy(form)
    assert keras_mp.global_policy() == keras_mp.Policy(name)
    assert type(tf.keras.layers.Dense(1).dtype_policy) is keras_mp.Policy
    if not isinstance(form, stock.Policy):
        assert keras_mp.Policy(form).name == name
    if IS_KERAS_3:
        assert keras_mp.Policy(None) == keras_mp.Policy(name)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        *((name, "Received") for name in ("int32", "bool", "string", tf.complex64)),
        # What only looks like a quantized policy.
        *((n, "polic|quantiz") for n in ("int8", "int9_from_float32", "int8_from_", "a_from_b")),
    ],
)
def test_only_floating_point_can_be_global(name, match):
    before = keras_mp.global_policy()
    with pytest.raises(ValueError, match=match):
        keras_mp.set_global_policy(name)
    with pytest.raises(ValueError, match=match), keras_mp.policy_scope(name):
        pass
    assert keras_mp.global_policy() == before


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_variables_are_warned_about(name):
    with pytest.warns(keras_mp.MixedPrecisionWarning, match=f"Use 'mixed_{name}'") as caught:
        keras_mp.set_global_policy(name)
    assert caught[0].filename == __file__
    assert keras_mp.global_policy().name == name


def test_policy_scope_restores():
    with keras_mp.policy_scope("mixed_float16") as policy:
        assert policy == keras_mp.global_policy() == keras_mp.Policy("mixed_float16")
        with keras_mp.policy_scope("float64"):
            assert keras_mp.global_policy().name == "float64"
        assert keras_mp.global_policy() is policy
    tf.keras.backend.set_floatx("float64")
    assert keras_mp.global_policy().name == "float64"  # it follows floatx again
    keras_mp.set_global_policy("float32")
    with pytest.raises(RuntimeError), keras_mp.policy_scope("mixed_float16"):
        raise RuntimeError
    assert keras_mp.global_policy().name == "float32"
    with keras_mp.policy_scope(None):
        assert keras_mp.global_policy().name == "float64"
    assert keras_mp.global_policy().name == "float32"


@pytest.fixture(name="threads")
def two_threads():
    with futures.ThreadPoolExecutor(1) as a, futures.ThreadPoolExecutor(1) as b:
        yield [lambda fn, *args, pool=each: pool.submit(fn, *args).result() for each in (a, b)]


def name_and_layers_dtype():
    return keras_mp.global_policy().name, tf.keras.layers.Dense(1).compute_dtype


def test_later_changes_reach_threads_that_ask_again(threads):
    in_a, in_b = threads
    for policy, name in (
        *(("mixed_float16", "mixed_float16"), ("float64", "float64")),
        *((None, "float32"), ("mixed_bfloat16", "mixed_bfloat16")),
    ):
        keras_mp.set_global_policy(policy)
        expected = name, name.removeprefix("mixed_")
        assert in_a(name_and_layers_dtype) == in_b(name_and_layers_dtype) == expected
    in_b(keras_mp.set_global_policy, "float64")
    assert in_a(name_and_layers_dtype) == name_and_layers_dtype() == ("float64", "float64")


def scales_when_compiled():
    return isinstance(compiled_model().optimizer, keras_mp.LossScaleOptimizer)


def test_scopes_of_two_threads_do_not_see_each_other(threads):
    in_a, in_b = threads
    of_a, of_b = keras_mp.policy_scope("mixed_bfloat16"), keras_mp.policy_scope("mixed_float16")
    in_a(of_a.__enter__)
    assert in_b(name_and_layers_dtype) == name_and_layers_dtype() == ("float32", "float32")
    in_b(of_b.__enter__)
    assert in_a(name_and_layers_dtype) == ("mixed_bfloat16", "bfloat16")
    in_a(of_a.__exit__, None, None, None)
    assert in_a(name_and_layers_dtype) == ("float32", "float32")
    assert in_b(name_and_layers_dtype) == ("mixed_float16", "float16")
    assert (in_a(scales_when_compiled), in_b(scales_when_compiled)) == (False, True)
    assert in_b(lambda: stock.global_policy().name) == "mixed_float16"
    in_b(of_b.__exit__, None, None, None)
    assert in_a(name_and_layers_dtype) == in_b(name_and_layers_dtype) == ("float32", "float32")
    assert name_and_layers_dtype() == ("float32", "float32")


def test_a_policy_that_another_thread_sets_waits_for_the_end_of_a_scope(threads):
    in_a, _ = threads
    scope = keras_mp.policy_scope("mixed_bfloat16")
    in_a(scope.__enter__)
    keras_mp.set_global_policy("float64")
    assert in_a(name_and_layers_dtype) == ("mixed_bfloat16", "bfloat16")
    in_a(scope.__exit__, None, None, None)
    assert in_a(name_and_layers_dtype) == ("float64", "float64")


@pytest.mark.parametrize("module", [keras_mp, stock])
def test_a_policy_that_is_set_in_a_scope_is_that_of_the_scope(module, threads):
    in_a, _ = threads
    with keras_mp.policy_scope("mixed_bfloat16"):
        with keras_mp.policy_scope("float32"):
            module.set_global_policy("float64")
            assert name_and_layers_dtype() == ("float64", "float64")
            assert in_a(name_and_layers_dtype) == ("float32", "float32")
        assert name_and_layers_dtype() == ("mixed_bfloat16", "bfloat16")
    assert name_and_layers_dtype() == ("float32", "float32")


def test_replicas_and_functions_are_in_the_scope_around_them():
    strategy, seen = mirrored(2), []

    def replica():
        seen.append(name_and_layers_dtype())

    with keras_mp.policy_scope("mixed_bfloat16"):
        tf.function(lambda: strategy.run(replica))()
        strategy.run(replica)
    assert seen == [("mixed_bfloat16", "bfloat16")] * len(seen)
    assert len(seen) >= 4
    del seen[:]
    strategy.run(replica)
    assert seen == [("float32", "float32")] * 2


@pytest.mark.filterwarnings("ignore::keras_mp.MixedPrecisionWarning")
@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has one policy for all threads.")
@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16"])
def test_a_policy_that_a_thread_has_set_with_keras_is_its_own(name, threads):
    in_a, in_b = threads
    keras_mp.set_global_policy("mixed_float16")

    def work():
        stock.set_dtype_policy(name)
        compiled_model()
        return name_and_layers_dtype()

    own = name, name.removeprefix("mixed_")
    assert in_a(work) == own
    assert in_b(name_and_layers_dtype) == name_and_layers_dtype() == ("mixed_float16", "float16")
    keras_mp.set_global_policy("float64")
    assert in_a(name_and_layers_dtype) == own
    assert in_b(lambda: tf.keras.layers.Dense(1).compute_dtype) == "float64"
    in_a(keras_mp.set_global_policy, "float64")
    assert in_a(name_and_layers_dtype) == ("float64", "float64")


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_policy_outlives_a_session_of_keras(policy):
    keras_mp.set_global_policy(policy)
    tf.keras.backend.clear_session()
    assert name_and_layers_dtype() == (policy, policy.removeprefix("mixed_"))


@pytest.mark.skipif(not IS_KERAS_3, reason="Quantized policies are of Keras 3.")
@pytest.mark.parametrize(
    "name", ["int8_from_mixed_bfloat16", "int8_from_float32", "float8_from_mixed_bfloat16"]
)
def test_quantized_policies_pass_through(name):
    for form in (name, tf.keras.dtype_policies.get(name)):
        keras_mp.set_global_policy(form)
        assert stock.global_policy() == tf.keras.dtype_policies.get(name)
        assert keras_mp.global_policy() is stock.global_policy()
    assert tf.keras.layers.Dense(1).quantization_mode == name.partition("_")[0]
    keras_mp.set_global_policy("float32")
    with keras_mp.policy_scope(name) as policy:
        assert policy.name == stock.global_policy().name == name
    assert keras_mp.global_policy().name == "float32"


@pytest.mark.skipif(IS_KERAS_3, reason="_infer is of Keras 2.")
def test_infer_is_stocks():
    policy = keras_mp.Policy("_infer")
    assert (policy.name, policy.compute_dtype, policy.variable_dtype) == ("_infer", None, None)


def test_makes_no_variables():
    # A policy is set in a program's first line, before devices are configured.
    made = []

    def creator(next_creator, **kwargs):
        made.append(kwargs)
        return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        policy = keras_mp.Policy("mixed_float16")
        assert policy.scales_loss
        assert repr(keras_mp.Policy("mixed_bfloat16", "dynamic")).endswith("loss_scale='dynamic'>")
        assert not made
        assert float(policy.loss_scale) == 2**15
        assert made
        policy.loss_scale.loss_scale.assign(4)
    assert "mixed_float16" in repr(policy)


@pytest.mark.skipif(not IS_KERAS_3, reason="DTypePolicyMap is of Keras 3.")
def test_a_map_of_policies_round_trips():
    policies = tf.keras.dtype_policies.DTypePolicyMap(
        default_policy=keras_mp.Policy("mixed_float16", loss_scale=8)
    )
    policies["model/logits"] = keras_mp.Policy("float32")
    config = tf.keras.dtype_policies.serialize(policies)
    again = tf.keras.dtype_policies.deserialize(config)
    assert again["model/logits"] == keras_mp.Policy("float32")
    assert again.default_policy == keras_mp.Policy("mixed_float16", loss_scale=8)
    assert tf.keras.layers.Dense(1, dtype=again).compute_dtype == "float16"
