# SPDX-License-Identifier: Apache-2.0
"""Public scales: units of inputs do not matter, and rare columns keep theirs."""

import numpy as np
import pytest

from tfdp_adaptive import compat
from tfdp_adaptive.advice import inputs

RNG = np.random.default_rng(0)


def table(count=400, units=(1.0, 1e4, 1e-3)):
  mixed = RNG.normal(size=[count, 3]) @ np.array([[1, .9, 0], [0, .5, .3], [0, 0, 1]])
  return (mixed * np.array(units) + np.array(units) * 7).astype(np.float32)


def test_scaled_columns_have_unit_variance_and_whitened_ones_no_correlation():
  x = table()
  found = inputs.all_of(x)
  assert list(found) == [inputs.AS_GIVEN, inputs.SCALED, inputs.WHITENED]
  scaled = found[inputs.SCALED](x)
  np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-3)
  np.testing.assert_allclose(scaled.var(0), 1, atol=1e-3)
  np.testing.assert_allclose(np.cov(found[inputs.WHITENED](x).T), np.eye(3), atol=.05)
  assert found[inputs.AS_GIVEN](x) is x


def test_units_change_nothing_of_what_is_scaled():
  x = table()
  for kind in (inputs.SCALED, inputs.WHITENED):
    one, other = (inputs.all_of(v)[kind](v) for v in (x, x * np.array([10, 1e-3, 1e3], 'f')))
    np.testing.assert_allclose(one, other, atol=2e-3)


def test_constant_and_rare_columns_keep_their_scale():
  x = table()
  rare = np.zeros([400, 2], np.float32)
  rare[:5, 0], rare[:, 1] = 1, 3
  both = np.concatenate([x, rare], 1)
  scaled = inputs.all_of(both)[inputs.SCALED]
  np.testing.assert_array_equal(scaled(both)[:, 3:], rare)


@pytest.mark.parametrize('x', [
    np.zeros([30, 4], np.int32), dict(a=table(30)), np.eye(40, 60, dtype=np.float32),
    np.full([30, 4, 4, 1], 2.0, np.float32)])
def test_what_has_no_scale_is_left_as_given(x):
  assert list(inputs.all_of(x)) == [inputs.AS_GIVEN]


def test_images_have_one_scale():
  x = (255 * RNG.random([30, 4, 4, 3]) * np.array([1, .5, .1])).astype(np.float32)
  found = inputs.all_of(x)
  assert list(found) == [inputs.AS_GIVEN, inputs.SCALED]
  scaled = found[inputs.SCALED](x)
  assert abs(scaled.std() - 1) < 1e-3 and abs(scaled.mean()) < 1e-3
  np.testing.assert_allclose(scaled[..., 0] / (x[..., 0] - x.mean()), 1 / x.std(), rtol=1e-3)


@pytest.mark.parametrize('kind', [inputs.SCALED, inputs.WHITENED])
def test_layers_compute_the_same_and_train_nothing(kind):
  x = table()
  found = inputs.all_of(x)[kind]
  model = compat.keras.Sequential([compat.keras.layers.Input([3]), *found.layers('public ones')])
  np.testing.assert_allclose(model(x).numpy(), found(x), atol=1e-3)
  assert not model.trainable_variables
