# SPDX-License-Identifier: Apache-2.0
"""Small variables are clipped together as they are one by one."""

import math

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import factors

layers = compat.keras.layers


@pytest.mark.parametrize('seed', range(20))
def test_what_is_bundled_comes_apart_again(seed, monkeypatch):
  """Sums of scaled squares by bundle, and by variable in float64."""
  monkeypatch.setattr(bookkeeping, 'MANY', 1)
  rng = np.random.default_rng(seed)
  shapes = [tuple(rng.integers(1, 6, rng.integers(0, 3))) for _ in range(rng.integers(1, 9))]
  shapes += [(bookkeeping.SMALL,), (bookkeeping.SMALL + 1,)]
  dtypes = rng.choice([np.float32, np.float64], len(shapes))
  gradients = [rng.normal(size=(3, *shape)).astype(dtype) for shape, dtype in zip(shapes, dtypes)]
  kinds = [int(kind) for kind in rng.integers(0, 2, len(shapes))]
  scale = [rng.uniform(0.5, 2, shape).astype(dtype) if kind else ()
           for shape, dtype, kind in zip(shapes, dtypes, kinds)]
  per_variable = [None if rng.random() < 0.2 else factors.explicit(tf.constant(g))
                  for g in gradients]
  bundled, per_bundle = bookkeeping.bundled(per_variable, kinds)
  for bundle, factor in zip(bundled, per_bundle):
    assert len({(kinds[i], dtypes[i]) for i in bundle}) == 1
    assert len(bundle) == 1 or all(math.prod(shapes[i]) <= bookkeeping.SMALL for i in bundle)
    assert (factor is None) == (per_variable[bundle[0]] is None)
  small = {(kinds[i], dtypes[i]) for i, one in enumerate(per_variable)
           if one is not None and math.prod(shapes[i]) <= bookkeeping.SMALL}
  assert len(small) == sum(  # As few as there can be.
      math.prod(shapes[first]) <= bookkeeping.SMALL and per_variable[first] is not None
      for first, *_ in bundled)
  weights = rng.uniform(size=3)
  totals = [None if factor is None else factor.squared_sum(tf.constant(weights), one)
            for factor, one in zip(per_bundle, bookkeeping.flat(scale, bundled))]
  variables = [tf.Variable(np.zeros(shape, dtype)) for shape, dtype in zip(shapes, dtypes)]
  for i, total in enumerate(bookkeeping.apart(totals, bundled, variables)):
    scaled = gradients[i].astype(float) * (scale[i] if kinds[i] else 1)
    weighted = weights.reshape([3] + [1] * len(shapes[i])) * scaled
    exact = np.sum(weighted**2, 0) if per_variable[i] is not None else np.zeros(shapes[i])
    assert total.shape == shapes[i] and total.dtype == dtypes[i]
    np.testing.assert_allclose(total, exact, rtol=1e-5, atol=1e-30)


def test_few_small_variables_are_not_copied():
  few = [factors.explicit(tf.ones([3, 5])) for _ in range(bookkeeping.MANY - 1)]
  assert bookkeeping.bundled(few, [0] * len(few)) == ([(i,) for i in range(len(few))], few)
  more = [*few, few[0]]
  assert len(bookkeeping.bundled(more, [0] * len(more))[0]) == 1


def test_more_small_variables_take_few_more_operations():
  """Biases beside each other: at most twelve operations each behind the backward pass."""
  def operations(count):
    model = compat.keras.Sequential([layers.LayerNormalization() for _ in range(count)])
    x = tf.random.stateless_normal([4, 8], [1, 2])
    model(x)
    asked = oracle.request(0.5)

    def norms_and_sums(*gradients):
      given = [factors.explicit(t) for t in gradients]
      sums, _ = bookkeeping.clip_factors(
          model.trainable_variables, given, tf.fill([4], True), *[one for one, in asked])
      return sums.total

    specs = [tf.TensorSpec([4, 8])] * (2 * count)
    traced = tf.function(norms_and_sums).get_concrete_function(*specs)
    return len(traced.graph.as_graph_def().node) + sum(
        len(f.node_def) for f in traced.graph.as_graph_def().library.function)

  assert operations(9) - operations(4) <= 12 * 10


def test_bundles_are_of_bounded_size():
  """Adapters of a large model are many small variables: held twice, they would fill the memory."""
  given = [factors.explicit(tf.zeros([2, bookkeeping.SMALL])) for _ in range(100)]
  bundled, per_bundle = bookkeeping.bundled(given, [0] * 100)
  assert [i for bundle in bundled for i in bundle] == list(range(100))
  assert len(bundled) == -(-100 * bookkeeping.SMALL // bookkeeping.FULL)
  assert all(factor.shape[0] < bookkeeping.FULL + bookkeeping.SMALL for factor in per_bundle)
