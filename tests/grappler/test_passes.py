"""TensorFlow's passes, on and off."""

import pytest
import tensorflow as tf

from keras_mp.grappler import passes
from tests.common import once

pytestmark = once

OF_SESSIONS = tf.__internal__.train.is_mixed_precision_graph_rewrite_enabled


def options():
    found = tf.config.optimizer.get_experimental_options()
    return [bool(found.get(name)) for name in passes.PASSES.values()]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_pass_is_on_and_then_off(dtype):
    assert passes.enabled_dtype() is None
    passes.turn_on(dtype)
    assert passes.enabled_dtype() == dtype
    assert options() == [dtype == "float16", dtype == "bfloat16"]
    assert OF_SESSIONS() == (dtype == "float16")
    passes.turn_off()
    assert passes.enabled_dtype() is None
    assert options() == [False, False]
    assert not OF_SESSIONS()


def test_what_tensorflow_turns_off_is_off():
    passes.turn_on("bfloat16")
    tf.config.optimizer.set_experimental_options({passes.PASSES["bfloat16"]: False})
    assert passes.enabled_dtype() is None


def test_a_pass_that_somebody_else_turned_on():
    assert passes.foreign_pass() is None
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
    try:
        assert "{'auto_mixed_precision': True}" in passes.foreign_pass()
    finally:
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False})
    passes.turn_on("float16")
    assert passes.foreign_pass() is None


def test_a_config_for_sessions_has_the_pass_and_all_else():
    arguments = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    arguments.graph_options.rewrite_options.remapping = 2
    config = passes.config_for_sessions(arguments, "bfloat16")
    rewriter = config.graph_options.rewrite_options
    assert rewriter.auto_mixed_precision_onednn_bfloat16 == rewriter.ON
    assert rewriter.remapping == rewriter.OFF
    assert config.allow_soft_placement
    before = arguments.graph_options.rewrite_options
    assert before.auto_mixed_precision_onednn_bfloat16 == before.DEFAULT


def test_a_config_of_nothing_has_the_options_of_tf_config():
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"remapping": False, "min_graph_nodes": 7})
    try:
        rewriter = passes.config_for_sessions(None, "float16").graph_options.rewrite_options
        assert (rewriter.remapping, rewriter.min_graph_nodes) == (rewriter.OFF, 7)
        assert rewriter.disable_model_pruning is before["disable_model_pruning"]
        assert rewriter.auto_mixed_precision == rewriter.ON
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": True, "min_graph_nodes": 0})


def test_a_config_without_the_passes():
    passes.turn_on("bfloat16")
    for arguments in (None, passes.config_for_sessions(None, "float16")):
        rewriter = passes.config_for_sessions(arguments, None).graph_options.rewrite_options
        assert rewriter.auto_mixed_precision_onednn_bfloat16 == rewriter.OFF
        assert rewriter.auto_mixed_precision == rewriter.OFF
