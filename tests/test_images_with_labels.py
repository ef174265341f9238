"""Layers of images round images, and neither labels, nor boxes, nor masks (Keras 3)."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import once

pytestmark = once

L = tf.keras.layers
BOXES = {"bounding_box_format": "xyxy"}
LAYERS = {
    "RandomFlip": lambda: L.RandomFlip("horizontal", seed=1, **BOXES),
    "Resizing": lambda: L.Resizing(24, 32, **BOXES),
    "CenterCrop": lambda: L.CenterCrop(40, 60, **BOXES),
    "RandomBrightness": lambda: L.RandomBrightness(0.1, seed=1),
    "MixUp": lambda: L.MixUp(seed=1),
    "CutMix": lambda: L.CutMix(seed=1),
    "Pipeline": lambda: L.Pipeline([L.RandomFlip("vertical", seed=1, **BOXES)]),
}


def data(name):
    result = {
        "images": np.random.default_rng(0).uniform(0, 255, [2, 48, 64, 3]).astype("float32"),
        "labels": np.array([[0.123456, 2049.0], [7.0, 1001.0]], "float32"),
    }
    if name not in ("MixUp", "CutMix"):
        result["segmentation_masks"] = np.full([2, 48, 64, 1], 1001, "int32")
    if name not in ("MixUp", "CutMix", "RandomBrightness"):
        boxes = np.array([[[10.3, 20.7, 33.1, 45.9]]] * 2, "float32")
        result["bounding_boxes"] = {"boxes": boxes, "labels": np.array([[1001], [2049]], "int32")}
    return result


def called(policy, name, where):
    with keras_mp.policy_scope(policy):
        layer = LAYERS[name]()
    if where == "eager":
        return layer(data(name))
    dataset = tf.data.Dataset.from_tensors(data(name)).map(lambda batch: layer(batch))
    return next(iter(dataset))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("where", ["map", "eager"])
def test_what_is_no_image_is_that_of_float32(name, where):
    if not hasattr(L, name):
        pytest.skip("This Keras has no such layer.")
    found = called("mixed_bfloat16", name, where)
    expected = called("float32", name, where)
    assert found.pop("images").dtype == tf.bfloat16
    expected.pop("images")
    for value, right in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert value.dtype == right.dtype
        np.testing.assert_array_equal(value, right)


def test_symbolic_results_have_the_right_dtype():
    layer = L.RandomFlip(dtype=keras_mp.Policy("mixed_bfloat16"))
    inputs = {"images": tf.keras.Input([8, 8, 3]), "labels": tf.keras.Input([2])}
    found = layer(inputs)
    assert (found["images"].dtype, found["labels"].dtype) == ("bfloat16", "float32")


def test_other_layers_round_what_they_call_images():
    class Generates(L.Layer):
        reads_raw = False

        def call(self, x):
            return {"images": x, "noise": x}

    found = Generates(dtype=keras_mp.Policy("mixed_bfloat16"))(tf.ones([2]))
    assert {value.dtype for value in found.values()} == {tf.bfloat16}
