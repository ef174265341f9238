"""Facts about the optimizers of a `GradScaler`, as the bits of one int.

An optimizer goes through these states:

    ready --scale--> scaled --unscale--> unscaled --step--> applied --update--> ready
"""

import functools

import tensorflow as tf

from keras_mp.step.record import Truth

# Facts about all optimizers: a loss was scaled; a tape has scaled the loss, and unscaled its
# gradients.
SCALED, BY_TAPE = 1, 2
# Facts about one optimizer: its gradients were unscaled; a step was made of them; something was
# wrong, and was reported; its gradients were unscaled after the last loss was scaled; one of them
# was not finite.
UNSCALED, APPLIED, SPOILED, JUST_UNSCALED, OVERFLOWED = 1, 2, 4, 8, 16
EVERY_FACT = 31
# The numbers of optimizers: 0 for one that was not named, or is the only one; 1 to
# `MAX_OPTIMIZERS`; and one number for all others. A step that was refused counts as one of
# optimizer 0.
UNNAMED, MAX_OPTIMIZERS, OTHERS = 0, 10, 11

ALL_BITS = 2**63 - 1


def bits_of(index: int, facts: int) -> int:
    """Returns the bits of facts about one optimizer."""
    return facts << (2 + 5 * index)


def bits_of_any(facts: int) -> int:
    """Returns the bits of facts about every optimizer."""
    return sum(bits_of(index, facts) for index in range(OTHERS + 1))


class Facts:
    """The facts about a step.

    They are an int in eager. In a graph they are a tensor, some bits of which are known. What is
    known spares operations. The rules about facts are the same in both cases, since the answers of
    `has` are combined with `both` and `negated`.

    Attributes:
        ones: int. The bits that are known to be 1.

    Args:
        ones: int. As the attribute. Defaults to 0.
        tensor: int64 scalar tensor. Defaults to None, for which all bits are known.
        known: int. The bits that are known. Defaults to all; with a tensor, to the bits of `ones`.
    """

    def __init__(
        self, ones: int = 0, tensor: tf.Tensor | None = None, known: int | None = None
    ) -> None:
        everything = ALL_BITS if tensor is None else ones
        self.ones, self._known = ones, everything if known is None else known
        self._tensor = tensor if self._known != ALL_BITS else None

    def has_begun(self) -> Truth:
        """Whether some loss was scaled, or gradients unscaled, but not yet applied."""
        return both(
            self.has(SCALED | bits_of(UNNAMED, UNSCALED)),
            negated(self.has(bits_of(UNNAMED, APPLIED))),
        )

    @property
    def number(self) -> int | None:
        """All facts as an int, or None if they are only known at run time."""
        return self.ones if self._tensor is None else None

    @property
    def tensor(self) -> tf.Tensor:
        """All facts, an int64 scalar tensor."""
        return tf.constant(self.ones, tf.int64) if self._tensor is None else self._tensor

    def has(self, bits: int) -> Truth:
        """Whether any of some facts is true."""
        if self.ones & bits:
            return True
        unknown = bits & ~self._known
        return tf.not_equal(self.tensor & unknown, 0) if unknown else False

    def changed(self, *, add: int = 0, remove: int = 0, when: Truth = True) -> "Facts":
        """Returns the facts after some have become true and others false.

        They change if `when` is true.
        """
        if tf.is_tensor(when):
            if tf.executing_eagerly():
                when = bool(when)
            else:
                now = tf.where(when, _changed(self.tensor, add, remove), self.tensor)
                unknown = add & ~self.ones | remove & (self.ones | ~self._known)
                return Facts(self.ones & ~unknown, now, self._known & ~unknown)
        if not when:
            return self
        tensor = None if self._tensor is None else _changed(self._tensor, add, remove)
        return Facts(self.ones & ~remove | add, tensor, self._known | add | remove)


def _changed(facts: tf.Tensor, add: int, remove: int) -> tf.Tensor:
    kept = facts & ~remove if remove else facts
    return kept | add if add else kept


def both(*truths: Truth) -> Truth:
    """Whether all are true; a bool as far as Python knows."""
    if any(truth is False for truth in truths):
        return False
    unknown = [truth for truth in truths if truth is not True]
    return functools.reduce(tf.logical_and, unknown) if unknown else True


def negated(truth: Truth) -> Truth:
    """Whether a truth is false; a bool if Python knows."""
    return not truth if isinstance(truth, bool) else tf.logical_not(truth)
