"""The one installer of what keras_mp replaces: when a row acts, order, threads, errors."""

import inspect
import sys
import threading
import time
import types
from concurrent import futures

import pytest
import tensorflow as tf

from keras_mp import hooks
from keras_mp.hooks import Everywhere, Method, Replacement, When, installer, reach
from keras_mp.hooks import once as in_process
from keras_mp.tensorflow_api.features import Feature
from keras_mp.tensorflow_api.names import MissingName, Name
from tests.common import once

pytestmark = once

REGION = reach.Region(tf.bfloat16)


def adding(letter):
    def make(own):
        def call(text):
            return f"{letter}({own(text)})"

        return call

    return make


@pytest.fixture
def library():
    """Two modules of one library, of which the second has imported a function of the first."""

    def spell(text):
        return text

    spell.__module__ = "a_library.first"
    modules = {name: types.ModuleType(name) for name in ("a_library.first", "a_library.second")}
    for module in modules.values():
        module.spell = spell
    before = dict(installer._replaced)
    sys.modules.update(modules)
    yield modules
    for function in installer._replaced.keys() - before:
        del installer._replaced[function]
    for name in modules:
        del sys.modules[name]


@pytest.fixture
def first(library):
    return library["a_library.first"]


@pytest.mark.parametrize("when", When)
def test_a_row_acts_where_it_says(first, when):
    own = first.spell
    hooks.install([Replacement(Method(first, "spell"), adding("a"), when)])
    assert first.spell is not own
    acts_elsewhere = when in (When.ALWAYS, When.OUT_OF_REACH)
    assert first.spell("x") == ("a(x)" if acts_elsewhere else "x")
    with reach.entered(tf.float16):
        assert first.spell("x") == ("a(x)" if when in (When.ALWAYS, When.IN_REACH) else "x")
    with reach.in_region(REGION):
        assert first.spell("x") == ("x" if when == When.OUT_OF_REACH else "a(x)")
    assert first.spell.__name__ == "spell"
    assert inspect.unwrap(first.spell) is own


def test_what_is_made_while_autograph_converts_a_function_is_not_converted(first):
    files = []

    def make(own):
        call = lambda text: own(text)  # noqa: E731
        files.append(call.__code__.co_filename)
        return call

    @tf.function
    def traced():
        hooks.install([Replacement(Method(first, "spell"), make, When.ALWAYS)])

    traced()
    assert files == [__file__]


def test_rows_of_one_function_lie_around_one_another_in_one_function(first):
    place = Method(first, "spell")
    hooks.install([Replacement(place, adding("reach")), Replacement(place, adding("reach, later"))])
    ours = first.spell
    hooks.install([Replacement(place, adding("always"), When.ALWAYS)])
    assert first.spell is ours
    assert ours("x") == "always(x)"
    with reach.in_region(REGION):
        assert ours("x") == "reach, later(reach(always(x)))"


def in_threads(function, count=8):
    barrier = threading.Barrier(count)
    with futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda _: (barrier.wait(), function()), range(count)))


def test_threads_that_install_the_same_at_once_install_it_once(first):
    row = Replacement(Method(first, "spell"), adding("a"), When.ALWAYS)
    in_threads(lambda: hooks.install([row]))
    assert first.spell("x") == "a(x)"


def test_what_is_done_once_others_wait_for_and_what_failed_is_tried_again():
    done, seen = [], []

    @in_process.once
    def inner():
        done.append("failed" if not done else "inner")
        if done == ["failed"]:
            raise ValueError("the first")

    @in_process.once
    def outer():
        inner()
        time.sleep(0.01)
        done.append("outer")

    with pytest.raises(ValueError, match="the first"):
        outer()
    in_threads(lambda: (outer(), inner(), seen.append(list(done))))
    assert seen == [["failed", "inner", "outer"]] * 8


def test_a_function_is_replaced_in_all_modules_that_have_it(library, first):
    second = library["a_library.second"]
    second.alias = own = second.spell
    hooks.install([Replacement(Everywhere(own), adding("a"), When.ALWAYS)])
    assert first.spell is second.spell
    assert first.spell("x") == "a(x)"
    assert second.alias is own
    # The public function is ours now. A row for it is one for TensorFlow's own.
    row = Replacement(Everywhere(first.spell), adding("b"), When.ALWAYS)
    hooks.install([row])
    assert second.spell("x") == "b(a(x))"


def test_all_names_under_which_modules_have_it(library, first):
    first.alias = first.spell
    hooks.install([Replacement(Everywhere(first.spell, ("alias",)), adding("a"), When.ALWAYS)])
    assert first.alias is first.spell
    assert first.alias("x") == "a(x)"


def test_a_property(first):
    class Owner:
        @property
        def spelled(self):
            return "x"

    row = Replacement(
        Method(Owner, "spelled"), lambda own: lambda self: f"a({own(self)})", When.ALWAYS
    )
    hooks.install([row])
    assert Owner().spelled == "a(x)"


def test_all_or_none_is_replaced(first):
    own = first.spell
    rows = [
        Replacement(Method(first, "spell"), adding("a")),
        Replacement(Name("tf.__internal__.there_is_no_such_name"), adding("b")),
    ]
    with pytest.raises(MissingName, match="no_such_name"):
        hooks.install(rows)
    assert first.spell is own
    assert not set(rows) & set(hooks.installed())


def test_a_row_that_cannot_be_made_changes_nothing(first):
    def make(own):
        raise ValueError("no")

    first.other = lambda text: text
    place = Method(first, "spell")
    hooks.install([Replacement(place, adding("a"), When.ALWAYS)])
    more = Replacement(place, adding("b"), When.ALWAYS)
    with pytest.raises(ValueError, match="no"):
        hooks.install([more, Replacement(Method(first, "other"), make)])
    assert first.spell("x") == "a(x)"
    assert first.other("x") == "x"
    assert more not in hooks.installed()


def test_a_feature_that_is_off_is_left_out(first):
    name = Name("tf.__internal__.there_is_no_such_name")
    feature = Feature("something", "Nothing else changes.", (name,))
    rows = [
        Replacement(name, adding("a"), feature=feature),
        Replacement(Method(first, "spell"), adding("b"), When.ALWAYS),
    ]
    with pytest.warns(UserWarning, match="does without a feature: something"):
        hooks.install(rows)
    assert first.spell("x") == "b(x)"
    assert rows[0] not in hooks.installed()
