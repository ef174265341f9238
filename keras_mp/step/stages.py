"""The stages of optimizers in a step, as far as Python knows them.

    ready --scale--> scaled --unscale--> unscaled --apply--> applied

`optimizer_stages` has the stages of a `LossScaleOptimizer`, `grad_scaler_stages` those of a
`GradScaler`. Their rules are functions of one stage, which are called here, or looked up in a table
where only run time knows the stage.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Truth = bool | tf.Tensor
Rule = Callable[[Any], Any]


class KnownStages:
    """The stages of one optimizer or of several, as far as Python knows them.

    In eager they are known, and in a graph that has seen all calls of the step. In other graphs
    several stages are possible, and a tensor has the numbers of the right ones.

    Attributes:
        possible: for each optimizer, the tuple of the stages that are possible, in their order. A
            stage is a member of an IntEnum.

    Args:
        possible: iterable, as the attribute.
        tensor: int64 tensor, a vector, or a scalar for one optimizer; None (the default) if one
            stage is possible for each.
    """

    def __init__(self, possible: Iterable[Any], tensor: tf.Tensor | None = None) -> None:
        self.possible: Any = tuple(possible)
        self._tensor = tensor

    def known(self) -> Any:
        """Returns the stage of the first optimizer, or None if only run time knows it."""
        return self.possible[0][0] if len(self.possible[0]) == 1 else None

    @property
    def numbers(self) -> Any:
        """The numbers of the stages: an int or an array if all are known, else a tensor."""
        if self._tensor is not None:
            return self._tensor
        numbers = [int(stages[0]) for stages in self.possible]
        return np.array(numbers, np.int64) if len(numbers) > 1 else numbers[0]

    def holds(self, rule: Rule, rows: Sequence[int] | None = None) -> Truth:
        """Whether a rule holds for all of some optimizers; a bool as far as Python knows.

        Args:
            rule: function of a stage.
            rows: sequence of int. The optimizers. Defaults to all.
        """
        unknown = []
        for row in range(len(self.possible)) if rows is None else rows:
            answers = [rule(stage) for stage in self.possible[row]]
            if not any(answers):
                return False
            if not all(answers):
                unknown.append(row)
        if not unknown:
            return True
        numbers = self._tensor
        if rows is not None and len(self.possible) > 1:
            numbers = _looked_up(numbers, unknown if len(unknown) > 1 else unknown[0])
        found = _looked_up(_table(rule, self.possible), numbers)
        return tf.reduce_all(found) if found.shape.rank else found

    def after(
        self, rule: Rule, row: int | None = None, when: Truth = True, otherwise: Rule | None = None
    ) -> "KnownStages":
        """Returns the stages that come after a call, which are these if none changes.

        Args:
            rule: function that takes a stage, and returns the next one.
            row: int. The optimizer that it is about. Defaults to None, for all.
            when: bool, or bool scalar tensor. Whether it is this rule. Defaults to True.
            otherwise: the rule if it is not.
        """
        rules: list[Any] = [rule, otherwise]
        if isinstance(when, bool):
            rules = [rule if when else otherwise]
        possible = list(self.possible)
        for each in range(len(possible)) if row is None else [row]:
            possible[each] = _moved(possible[each], rules)
        if all(map(operator.is_, possible, self.possible)):
            return self
        if max(map(len, possible)) == 1:
            return KnownStages(possible)
        table, *other = [_table(rule, self.possible) for rule in rules]
        numbers = _looked_up(tf.where(when, table, *other) if other else table, self.numbers)
        if row is not None and len(possible) > 1:
            numbers = tf.where(np.arange(len(possible)) == row, numbers, self.numbers)
        return KnownStages(possible, numbers)


def _moved(stages: tuple[Any, ...], rules: Sequence[Rule]) -> tuple[Any, ...]:
    after = [rule(stage) for rule in rules for stage in stages]
    if after == [*stages] * len(rules):
        return stages
    return tuple(after if len(after) == 1 else sorted({*after}))


def negated(truth: Truth) -> Truth:
    """Whether a truth is false; a bool if Python knows."""
    return not truth if isinstance(truth, bool) else tf.logical_not(truth)


def _table(rule: Rule, possible: Sequence[Any]) -> Any:
    kind: Any = type(possible[0][0])
    return np.array([rule(stage) for stage in kind])


def _looked_up(table: Any, index: Any) -> tf.Tensor:
    # `tf.gather` would make another operation, for the axis.
    return tf.raw_ops.Gather(params=table, indices=index)
