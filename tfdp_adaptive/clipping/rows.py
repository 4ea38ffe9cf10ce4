"""Per-example gradients that lie in a few rows of a table: embeddings."""

import dataclasses
from typing import Any, Tuple

import tensorflow as tf

from tfdp_adaptive.clipping import factors

# Equal rows of sequences up to this length meet in a Gram matrix; of longer ones
# they are merged by a scatter.
SHORT = 64


@dataclasses.dataclass(frozen=True)
class Rows:
  """`errors[:, t]` added to row `ids[:, t]`: embeddings.

  Attributes:
    ids: [n, T] integers.
    errors: [n, T, d].
    shape: The variable's shape, [rows, d].
  """

  ids: Any
  errors: Any
  shape: Tuple[int, ...]

  def route(self, scaled):
    """'once', 'gram' or 'merge', from static shapes."""
    del scaled
    length = self.ids.shape[1]
    if length == 1:
      return 'once'
    return 'gram' if length is not None and length <= SHORT else 'merge'

  def squared_norms(self, scales):
    if self.route(True) == 'gram':
      same = tf.cast(self._same(), self.errors.dtype)
      return [self._gram(same, self._scaled(self.errors, scale)) for scale in scales]
    merged = self._merged()
    return [factors.sum_squares(self._scaled(merged, scale)) for scale in scales]

  def weighted_sums(self, weights):
    return [self._scatter(self.errors * factors.along(w, self.errors)) for w in weights]

  def weighted_squares(self, weights):
    squares = tf.square(self._merged())
    return [self._scatter(squares * factors.along(w, squares)) for w in weights]

  def folded(self, times):
    return dataclasses.replace(
        self, ids=factors.fold(self.ids, times), errors=factors.fold(self.errors, times))

  def simplified(self):
    return self

  def explicit(self):
    n = tf.shape(self.ids)[0]
    rows = self.ids + tf.cast(tf.range(n)[:, tf.newaxis] * self.shape[0], self.ids.dtype)
    flat = tf.math.unsorted_segment_sum(
        tf.reshape(self.errors, [-1, self.shape[1]]), tf.reshape(rows, [-1]), n * self.shape[0])
    return factors.explicit(tf.reshape(flat, (-1,) + self.shape))

  def _scatter(self, values):
    return tf.math.unsorted_segment_sum(
        tf.reshape(values, [-1, self.shape[1]]), tf.reshape(self.ids, [-1]), self.shape[0])

  def _scaled(self, errors, scale):
    return errors if factors.absent(scale) else errors * tf.gather(scale, self.ids)

  def _same(self):
    return tf.equal(self.ids[:, :, tf.newaxis], self.ids[:, tf.newaxis])

  def _gram(self, same, errors):
    """||sum_t 1_t e_t'||^2 = sum_{tu} [id_t = id_u] (e_t'e_u)."""
    outer = tf.matmul(errors, errors, transpose_b=True)
    lengths = tf.sqrt(tf.linalg.diag_part(outer))
    magnitude = factors.wide_sum(lengths * tf.linalg.matvec(same, lengths))
    lost = self.ids.shape[1]**2 * self.shape[1] * factors.tiny(errors.dtype)
    return factors.gram(same, outer, magnitude) + lost

  def _merged(self):
    """[n, T, d]: errors of equal ids of an example summed at their first place."""
    if self.route(True) == 'once':
      return self.errors
    n, length = tf.shape(self.ids)[0], tf.shape(self.ids)[1]
    first = tf.argmax(tf.cast(self._same(), tf.int32), 2, output_type=tf.int32)
    place = first + tf.range(n)[:, tf.newaxis] * length
    flat = tf.math.unsorted_segment_sum(
        tf.reshape(self.errors, [-1, self.shape[1]]), tf.reshape(place, [-1]), n * length)
    return tf.reshape(flat, tf.shape(self.errors))
