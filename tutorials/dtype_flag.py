"""A training program with the `--dtype` flag of RFC 293, on scikit-learn's digits.

python -m tutorials.dtype_flag [--dtype float32|mixed_float16|mixed_bfloat16] [--epochs N]
"""

import tensorflow as tf
from absl import app, flags
from sklearn import datasets, model_selection

import keras_mp

FLAGS = flags.FLAGS

flags.DEFINE_enum(
    "dtype", "float32", ("float32", "mixed_float16", "mixed_bfloat16"), "Dtype policy to use."
)
flags.DEFINE_integer("epochs", 10, "Epochs to train for.", lower_bound=1)


def create_model(num_layers: int) -> tf.keras.Model:
    """Makes a model under the global policy, which it does not set: that is up to `main`.

    Args:
        num_layers: int. How many hidden layers.
    """
    hidden = [tf.keras.layers.Dense(64, activation="relu") for _ in range(num_layers)]
    return tf.keras.Sequential([tf.keras.Input((64,)), *hidden, tf.keras.layers.Dense(10)])


def main(_: list[str]) -> None:
    """Trains the model and prints how well it does."""
    keras_mp.set_global_policy(FLAGS.dtype)
    tf.keras.utils.set_random_seed(0)
    model = create_model(num_layers=2)
    model.compile(
        tf.keras.optimizers.Adam(0.003),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    images, labels = datasets.load_digits(return_X_y=True)
    images, test_images, labels, test_labels = model_selection.train_test_split(
        (images / 16).astype("float32"), labels, test_size=0.2, random_state=0
    )
    model.fit(images, labels, batch_size=32, epochs=FLAGS.epochs, verbose=0)
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"{FLAGS.dtype}: layers compute in {model.layers[0].compute_dtype}")
    print(f"test accuracy {accuracy:.3f}")
    if isinstance(model.optimizer, keras_mp.LossScaleOptimizer):
        print(f"loss scale {model.optimizer.loss_scale:.0f}")
        print(f"steps skipped {int(model.optimizer.steps_skipped)}")


if __name__ == "__main__":
    app.run(main)
