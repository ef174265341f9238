"""What is done once in a process is done once by all threads, and what failed is tried again."""

import threading
import time

import pytest

from keras_mp.hooks.once import once
from tests.common import once as on_one_keras

pytestmark = on_one_keras


def in_threads(function, count=8):
    barrier = threading.Barrier(count)

    def run():
        barrier.wait()
        function()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_several_threads_do_it_once():
    done, seen = [], []

    @once
    def do(value):
        time.sleep(0.01)
        done.append(value)

    def ask():
        do(1)
        seen.append(len(done))

    in_threads(ask)
    assert done == [1]
    # Those that came meanwhile have waited.
    assert seen == [1] * 8


def test_one_may_do_another():
    done = []
    inner = once(lambda: done.append("inner"))

    @once
    def outer():
        inner()
        done.append("outer")

    in_threads(lambda: (outer(), inner()))
    assert done == ["inner", "outer"]


def test_what_failed_is_tried_again():
    attempts = []

    @once
    def fail_first():
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        fail_first()
    fail_first()
    fail_first()
    assert len(attempts) == 2
