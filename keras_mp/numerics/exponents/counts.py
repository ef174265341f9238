"""The counts of histograms, in variables on each replica's device, which the host reads."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_mp.numerics.exponents.histogram import COLUMNS, ROWS, Histogram, count_exponents
from keras_mp.numerics.exponents.reports import Report
from keras_mp.numerics.exponents.rows import Row, RowKey
from keras_mp.support import host


class Observation(NamedTuple):
    """A tensor that a step has shown.

    Attributes:
        row: tuple of str, the kind and the path.
        tensor: tensor.
        divisor: float32 scalar tensor by which the values are still to be divided, or None.
        scale: float32 scalar tensor, what the loss was multiplied by, or None.
    """

    row: RowKey
    tensor: tf.Tensor
    divisor: tf.Tensor | None = None
    scale: tf.Tensor | None = None


class HistogramCounts:
    """Counts on each replica; read from the host. To be made in the scope of the strategy.

    Args:
        rows: kind and path of each histogram.
        strategy: `tf.distribute.Strategy`.

    Attributes:
        places: dict of rows and their indices.
    """

    def __init__(self, rows: Sequence[RowKey], strategy: tf.distribute.Strategy) -> None:
        self.places = {row: place for place, row in enumerate(rows)}
        self._strategy = strategy
        self._steps = host.local_variable("counted", 0)
        self._bins = host.local_variable("bins", np.zeros([len(rows), ROWS * COLUMNS], int))
        # The smallest loss scale at which a value of each row was not finite.
        overflowed_at = np.full(len(rows), np.inf)
        self._overflowed_at = host.local_variable("overflowed_at", overflowed_at, tf.float32)
        self._loss_scale = host.local_variable("loss_scale", 1.0, tf.float32)

    def add(self, observations: Sequence[Observation]) -> None:
        """Counts the values of tensors, on this replica."""
        bins = [tf.zeros([ROWS * COLUMNS], tf.int64)] * len(self.places)
        overflowed_at = [tf.constant(np.inf)] * len(self.places)
        for row, tensor, divisor, scale in observations:
            place = self.places[row]
            of_tensor = count_exponents(tensor, divisor)
            bins[place] = bins[place] + of_tensor
            if scale is not None:
                is_bad = tf.reduce_any(of_tensor[-COLUMNS:] > 0)
                at = tf.where(is_bad, tf.cast(scale, tf.float32), np.inf)
                overflowed_at[place] = tf.minimum(overflowed_at[place], at)
        self._bins.assign_add(tf.stack(bins))
        lowest = tf.minimum(self._overflowed_at, tf.stack(overflowed_at))
        self._overflowed_at.assign(lowest)

    def end_step(self, scale: tf.Tensor | None) -> None:
        """Counts a step.

        Args:
            scale: float32 scalar tensor, what the loss was multiplied by; None if by nothing.
        """
        self._steps.assign_add(1)
        if scale is not None:
            self._loss_scale.assign(scale)

    def read(self, step: int, dtypes: Mapping[RowKey, str], all_workers: bool) -> Report:
        """Returns what was counted since the last time, and begins anew.

        Args:
            step: int. How many steps had been made.
            dtypes: what each row was computed in.
            all_workers: bool. Whether to add up what the replicas of all workers have counted,
                each of which is to call this; or those of this worker.

        Returns:
            A `Report` of the rows of which a value was counted.
        """
        local = self._strategy.experimental_local_results
        if all_workers:
            bins, scales = self._strategy.run(self._of_replica)
            bins = self._strategy.reduce(tf.distribute.ReduceOp.SUM, bins, axis=None).numpy()
            scales = self._strategy.gather(scales, axis=0).numpy()
        else:
            bins = np.sum([each.numpy() for each in local(self._bins)], axis=0)
            scales = [each.numpy() for each in local(self._overflowed_at)]
        overflowed_at = np.min(scales, axis=0)
        counted, loss_scale = (
            local(variable)[0].numpy().item() for variable in (self._steps, self._loss_scale)
        )
        rows = [
            Row(
                *row,
                dtypes.get(row, ""),
                Histogram(bins[place].reshape(ROWS, COLUMNS)),
                float(overflowed_at[place]),
            )
            for row, place in self.places.items()
            if bins[place].any()
        ]
        for variable, value in ((self._bins, 0), (self._steps, 0), (self._overflowed_at, np.inf)):
            for each in local(variable):
                each.assign(tf.fill(each.shape, tf.constant(value, each.dtype)))
        return Report(rows, step=step, counted=counted, loss_scale=loss_scale)

    def _of_replica(self) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.identity(self._bins), tf.identity(self._overflowed_at)[tf.newaxis]
