# SPDX-License-Identifier: Apache-2.0
"""Every rule, several steps with explicit noise, against NumPy (batches of 3, 4, 5, 0; B = 4)."""

import dataclasses

import loop
import numpy as np
import pytest
import table


@pytest.mark.parametrize('case', table.RULES, ids=lambda case: case.name)
def test_equals_the_formulas(case):
  problem = loop.Problem(**case.setting)
  actual, _ = loop.run(case.rule(), problem)
  expected = case.oracle(problem)
  assert np.abs(np.diff(expected, axis=0)).max() > 1e-3  # It moves.
  np.testing.assert_allclose(actual, expected, rtol=case.tolerance, atol=0.01 * case.tolerance)


@pytest.mark.parametrize('case', table.RULES, ids=lambda case: case.name)
def test_the_noise_matters(case):
  """The comparison above would notice so much more noise, 1% wherever nothing jumps."""
  problem = loop.Problem(**case.setting)
  expected = case.oracle(problem)
  other = case.oracle(dataclasses.replace(problem, sigma=(1 + case.noticed) * problem.sigma))
  assert np.abs(other - expected).max() > 1e-5


def test_every_factory_has_a_line():
  from tfdp_adaptive import rules  # pylint: disable=g-import-not-at-top
  helpers = {'negative_fraction', 'pagan_ellipsoid', 'pasan_ellipsoid',
             'dp2', 'slack_buckets'}
  elsewhere = {'quantile_clip', 'slack_clip', 'with_clipping'}  # Wrappers that leave updates alone.
  factories = {name for name in vars(rules)
               if callable(getattr(rules, name)) and name[0].islower()} - helpers - elsewhere
  assert factories == {case.name.partition('-')[0] for case in table.RULES}
  assert len(factories) >= 25
