"""The table of a model's dtypes."""

import functools
import re
import warnings

import pytest
import tensorflow as tf

import keras_mp
from keras_mp import hardware
from tests.common import Subclassed

K = tf.keras
L = K.layers


def table(model):
    """What is printed: {layer as printed: cells}, {mark: note}, other lines."""
    lines = []
    assert keras_mp.summary(model, lines.append) is None
    end = lines.index("", 2)
    header, *body = lines[2:end]
    starts = [header.index(name) for name in header.split()]
    rows = {}
    for line in body:
        cells = [line[a:b].rstrip() for a, b in zip(starts, [*starts[1:], None])]
        rows[cells[0]] = [cell.strip() for cell in cells[1:]]
    after = "\n".join(lines[end + 1 :])
    notes = {f"[{m}]": " ".join(n.split()) for m, n in re.findall(_NOTE, after, re.DOTALL)}
    return rows, notes, [lines[0], *after.split("\n")]


_NOTE = r"\[(\d+)\] (.*?)(?=\n\[|\nWhere|\nb?float16 is|\Z)"


def notes_of(model):
    """{layer's name: its notes as one text}."""
    rows, notes, _ = table(model)
    return {
        layer.split(" (")[0].strip(): " ".join(notes[mark] for mark in cells[4].split())
        for layer, cells in rows.items()
    }


# Models return what their layers do.
UNCHANGED = keras_mp.Policy("mixed_float16", model_outputs=None)


def head(**kwargs):
    return K.Sequential([K.Input([8]), L.Dense(10, "softmax", name="last", **kwargs)], name="head")


def functional():
    inputs = K.Input([8], name="x")
    x = L.Dense(16, name="hidden")(inputs)
    x = L.Dense(8, "softmax", name="gate")(x)
    return K.Model(inputs, head()(x), name="whole")


def test_the_table_of_a_nested_model():
    keras_mp.set_global_policy(UNCHANGED)
    rows, notes, others = table(functional())
    assert list(rows.items()) == [
        ("x (InputLayer)", ["-", "-", "float32", "0", ""]),
        ("hidden (Dense)", ["float16", "float32", "float16", "144", ""]),
        ("gate (Dense)", ["float16", "float32", "float16", "136", ""]),
        ("head (Sequential)", ["float16", "float32", "float16", "90", ""]),
        ("  last (Dense)", ["float16", "float32", "float16", "90", "[1]"]),
    ]
    assert notes["[1]"].startswith("A softmax output in float16")
    assert 'Activation("softmax", dtype="float32")' in notes["[1]"]
    assert others[0] == "Model 'whole' (Functional), policy mixed_float16"
    assert others[1] == "Parameters: 370, trainable: 370"


@pytest.mark.parametrize(
    ("last", "returns"),
    [
        *((each, ", returns float32") for each in (lambda: L.Dense(8), lambda: head())),
        *((functools.partial(L.Dense, 8, dtype=d), "") for d in ("float32", "mixed_bfloat16")),
        (lambda: L.Dense(8, dtype=UNCHANGED), ""),
    ],
)
def test_the_dtype_that_the_model_returns(last, returns):
    keras_mp.set_global_policy("mixed_float16")
    model = K.Sequential([K.Input([8]), L.Dense(8), last()])
    is_float32 = model(tf.ones([1, 8])).dtype == tf.float32
    assert is_float32 or not returns
    first = table(model)[2][0]
    assert first == f"Model {model.name!r} (Sequential), policy mixed_float16{returns}"


@pytest.mark.parametrize(("dtype", "has_units"), [("bfloat16", True), ("bfloat16", False)])
def test_the_note_about_the_machine(monkeypatch, dtype, has_units):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    monkeypatch.setattr("keras_mp.support.cpu.has_units", lambda dtype: has_units)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        keras_mp.set_global_policy(f"mixed_{dtype}")
        notes = table(functional())[2]
    assert f"{dtype} is {'fast' if has_units else 'slow'} here" in str(notes)


def test_a_float32_model_is_not_remarked_on():
    rows, notes, others = table(functional())
    assert {cells[0] for cells in rows.values()} == {"float32", "-"}
    assert not notes
    assert others[1:] == ["Parameters: 370, trainable: 370"]
    notes = notes_of(ends_in(L.Dense(8, name="half", dtype="mixed_float16"), L.Dense(8)))
    assert [name for name, text in notes.items() if text] == ["half"]
    assert "right for an output" not in notes["half"]


def ends_in(*layers):
    return K.Sequential([K.Input([8]), L.Dense(8), *layers])


@pytest.mark.parametrize(
    ("make", "is_noted"),
    [
        (lambda: ends_in(L.Dense(8, "softmax")), True),
        (lambda: ends_in(L.Softmax()), True),
        (lambda: ends_in(L.Activation("softmax")), True),
        (lambda: K.Sequential([L.Dense(8), L.Softmax()]), True),
        (lambda: ends_in(head()), True),
        (lambda: ends_in(L.Reshape([2, 4]), L.TimeDistributed(L.Dense(8, "softmax"))), True),
        (lambda: ends_in(L.Activation("softmax", dtype="float32")), False),
        (lambda: ends_in(L.Dense(8, "sigmoid")), False),
        (lambda: ends_in(L.Softmax(), L.Dense(8)), False),
        (lambda: attention(), False),  # which has a layer for it
        (lambda: two_heads(), True),
    ],
)
def test_which_softmax_is_an_output(make, is_noted):
    keras_mp.set_global_policy(UNCHANGED)
    found = [name for name, text in notes_of(make()).items() if "A softmax output" in text]
    assert len(found) == is_noted


def attention():
    inputs = K.Input([4, 8])
    return K.Model(inputs, L.MultiHeadAttention(2, 4)(inputs, inputs))


def two_heads():
    inputs = K.Input([8])
    wide, narrow = (L.Dense(8, "softmax", dtype=dtype)(inputs) for dtype in ("float32", None))
    return K.Model(inputs, {"a": wide, "b": narrow})


def test_a_softmax_that_the_model_returns_in_float32_is_not_remarked_on():
    keras_mp.set_global_policy("mixed_float16")
    model = ends_in(L.Dense(8, "softmax"))
    assert not any("A softmax output" in text for text in notes_of(model).values())
    with keras_mp.policy_scope("float32"):
        K.mixed_precision.set_global_policy("mixed_float16")
        model = ends_in(L.Dense(8, "softmax"))
    assert any("A softmax output" in text for text in notes_of(model).values())


@pytest.mark.parametrize(
    ("cores", "units", "is_noted"),
    [("float16", 10, False), ("float16", 1001, True), ("bfloat16", 1001, False)],
)
def test_a_head_is_noted_where_much_is_in_it(monkeypatch, cores, units, is_noted):
    monkeypatch.setattr(hardware, "has_tensor_cores", lambda dtype: dtype == cores)
    keras_mp.set_global_policy("mixed_float16")
    model = K.Sequential([K.Input([64]), L.Dense(64), L.Dense(64), L.Dense(units, name="last")])
    assert notes_of(model)["last"].startswith(f"{units} units") == is_noted


def test_sizes_that_tensor_cores_like_less(monkeypatch):
    monkeypatch.setattr(hardware, "has_tensor_cores", lambda dtype: True)
    keras_mp.set_global_policy("mixed_float16")
    inputs = K.Input([8, 8, 3])
    x = L.Conv2D(6, 3, name="conv")(inputs)
    x = L.Conv2D(16, 3, name="even")(x)
    x = L.TimeDistributed(L.LSTM(5, name="lstm"))(x)
    x = L.Flatten()(x)
    model = K.Model(inputs, L.Dense(3, dtype="float32", name="wide")(x))
    notes = notes_of(model)
    for name, count in (("conv", 6), ("lstm_cell", 5)):
        assert notes[name].startswith(f"{count} units or filters")
    assert [notes["lstm"], notes["even"], "filters" in notes["wide"]] == ["", "", False]


def test_layers_that_do_not_follow_the_policy():
    keras_mp.set_global_policy("mixed_float16")
    early = L.Dense(8, name="early", dtype="float32")
    as_they_come = keras_mp.layers.Layer(name="as_they_come", autocast=False)
    last = L.Dense(8, name="last", dtype="float32")
    model = ends_in(early, L.Dense(8, name="half", dtype="float16"), as_they_come, last)
    notes = notes_of(model)
    assert notes["early"].startswith("Its policy is float32, not the model's")
    assert "right for an output" not in notes["early"]
    assert notes["last"].endswith("That is right for an output.")
    assert notes["half"].startswith("Its policy is float16, not the model's")
    assert notes["as_they_come"].endswith("autocast=False.")


class Block(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = L.Dense(8, name="inner")

    def call(self, x):
        return self.inner(x)


def test_a_subclassed_model_before_and_after_it_is_built():
    keras_mp.set_global_policy(UNCHANGED)
    layers = Block(name="block"), L.Dense(8, name="first"), L.Dense(8, "softmax", name="second")
    model = Subclassed(*layers, name="mine")
    rows, notes, others = table(model)
    names = ["block (Block)", "  inner (Dense)", "first (Dense)", "second (Dense)"]
    unknown = {name: ["float16", "float32", "-", "-"] for name in names}
    assert {layer: cells[:4] for layer, cells in rows.items()} == unknown
    assert rows["second (Dense)"][4] == "[1]"
    assert notes["[1]"].startswith("A softmax output")
    title = "Model 'mine' (Subclassed), policy mixed_float16"
    assert others[:2] == [title, "Parameters: -, trainable: -"]
    model(tf.ones([1, 8]))
    layers[1].trainable = False
    rows, _, others = table(model)
    assert [cells[3] for cells in rows.values()] == ["72"] * 4
    assert others[1] == "Parameters: 216, trainable: 144"


def test_shared_layers_appear_once_and_text_and_integers_are_left_alone():
    keras_mp.set_global_policy("mixed_float16")
    text = L.TextVectorization(output_sequence_length=3, name="text")
    text.adapt(["a few words"])
    inputs = K.Input([1], dtype="string", name="words")
    shared = L.Dense(8, name="shared")
    x = L.Embedding(1000, 8, name="embedding")(text(inputs))
    x = shared(shared(L.TimeDistributed(shared, name="wrapper")(x)))
    rows, notes, others = table(K.Model(inputs, x))
    assert rows["words (InputLayer)"][2] == "string"
    assert rows["text (TextVectorization)"][2] == "int64"
    assert rows["embedding (Embedding)"] == ["float16", "float32", "float16", "8,000", ""]
    assert sum("shared" in layer for layer in rows) == 1
    assert not notes
    assert others[1] == "Parameters: 8,072, trainable: 8,072"


def test_a_trained_and_loaded_model(tmp_path):
    keras_mp.set_global_policy("mixed_float16")
    model = head()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(tf.ones([4, 8]), tf.zeros([4, 1]), verbose=0)
    model.save(tmp_path / "model.keras")
    keras_mp.set_global_policy(None)
    rows, notes, _ = table(K.models.load_model(tmp_path / "model.keras"))
    assert rows["last (Dense)"] == ["float16", "float32", "float16", "90", "[1]"]
    assert notes["[1]"].endswith("Keras does not store the policy of a model.")


def test_it_prints_by_default_and_takes_models_only(capsys):
    keras_mp.summary(head())
    assert "last (Dense)" in capsys.readouterr().out
    with pytest.raises(TypeError, match="Expected a model.*Received: model=<"):
        keras_mp.summary(L.Dense(1))
