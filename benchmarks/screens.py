"""What the tools of `keras_mp.numerics` print of a sound model: the end of docs/numerics.md.

python -m benchmarks.screens [PATH]
"""

import pathlib
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import keras_mp
from benchmarks import common

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "numerics.md"
BATCH, BLOCKS, WORDS, LENGTH = 8, 4, 500, 32

# Of the lines of docs/*.md.
_WIDTH = 120

_TITLE = "## Output of the tools"
_HEAD = """{title}

The model is a transformer of {blocks} blocks under `mixed_float16`, with random weights and one
batch of {batch} random samples. Equal layers of repeated blocks share one row, with the numbers of
the worst; `to_text(rows=None)` of each result prints every row.

`python -m benchmarks.screens` writes this section. Here: {machine}.
"""


class Screen(NamedTuple):
    """What a tool prints of a model.

    Attributes:
        call: str. What has printed it.
        text: str.
    """

    call: str
    text: str


def transformer() -> tuple[Any, Any, Any]:
    """A transformer, and a batch: x and y."""
    layers = tf.keras.layers
    inputs = tf.keras.Input([LENGTH], dtype="int32")
    x = layers.Embedding(WORDS, 64, name="embedding")(inputs)
    for i in range(BLOCKS):
        normalized = layers.LayerNormalization(name=f"block_{i}_norm_1")(x)
        attention = layers.MultiHeadAttention(4, 16, name=f"block_{i}_attention")
        x = layers.Add(name=f"block_{i}_add_1")([x, attention(normalized, normalized)])
        normalized = layers.LayerNormalization(name=f"block_{i}_norm_2")(x)
        wider = layers.Dense(256, activation="gelu", name=f"block_{i}_up")(normalized)
        x = layers.Add(name=f"block_{i}_add_2")(
            [x, layers.Dense(64, name=f"block_{i}_down")(wider)]
        )
    x = layers.LayerNormalization(name="norm")(x)
    logits = layers.Dense(WORDS, dtype="float32", name="logits")(x)
    words = np.random.default_rng(0).integers(0, WORDS, [2, BATCH, LENGTH]).astype("int32")
    return tf.keras.Model(inputs, logits, name="transformer"), *words


def screens() -> Iterator[Screen]:
    """Runs each tool on the model."""
    numerics = keras_mp.numerics
    tf.keras.utils.set_random_seed(0)
    with keras_mp.policy_scope("mixed_float16"):
        model, x, y = transformer()
        model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    checked = numerics.check(model, (x, y))
    yield Screen("check(model, (x, y))", str(checked))
    yield Screen("check(model, (x, y)).report", str(checked.report))
    yield Screen("check(model, (x, y)).advice()", str(checked.advice()))
    profiled = numerics.profile(model, (x, y), steps=0)
    yield Screen("profile(model, (x, y), steps=0)", str(profiled))
    watching = numerics.watch(every=1)
    model.fit(x, y, batch_size=BATCH, callbacks=[watching], verbose=0)
    yield Screen("watch(every=1), report()", str(watching.report()))


def section() -> Iterator[str]:
    """Yields the lines of the section."""
    keras = tf.keras.__version__
    machine = f"{common.machine()}, Keras {keras}"
    paragraphs = _HEAD.format(title=_TITLE, batch=BATCH, blocks=BLOCKS, machine=machine).split(
        "\n\n"
    )
    yield "\n\n".join(textwrap.fill(each, _WIDTH) for each in paragraphs) + "\n"
    for screen in screens():
        yield f"### `{screen.call}`\n"
        yield f"```\n{screen.text}\n```\n"


def main() -> int:
    """Writes the section, which is the last of the page."""
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    text = path.read_text() if path.exists() else ""
    before, _, _ = text.partition(_TITLE)
    path.write_text(before + "\n".join(section()).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
