# SPDX-License-Identifier: Apache-2.0
"""Equality, hashes and everything that is kept by them go by the numbers that run."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.privacy import plan as plan_lib

STEPS = 12
PATTERN = dict(min_sep=3, max_participations=4)
MECHANISMS = [
    mechanisms.BandedToeplitz(5, STEPS), mechanisms.Banded(4, STEPS),
    mechanisms.Banded(4, STEPS, method='optimal'), mechanisms.BLT(2, STEPS),
    mechanisms.BandedInverse(3, STEPS), mechanisms.SquareRoot(STEPS), mechanisms.Dense(STEPS),
    mechanisms.Tree(STEPS, 'full'), mechanisms.Tree(STEPS)]
ENTRIES = [  # By shape: numbers are designed within the tests, which do not use the user's cache.
    pytest.param(mechanism, name, index, id=f'{mechanism!r}-{name}-{index}')
    for mechanism in MECHANISMS for name, shape in mechanism.shapes().items()
    for index in sorted({0, math.prod(shape) // 2, math.prod(shape) - 1})]


def altered(mechanism, name, index, factor):
  """The mechanism with one number changed, and all scaled so that columns have norm one again."""
  arrays = {key: np.array(value) for key, value in mechanism.arrays.items()}
  arrays[name].flat[index] *= factor
  free = copy.copy(mechanism)  # To see the norm of numbers that no mechanism may have.
  free.__dict__.update(_given_arrays=arrays)
  for key in ('_arrays', '_matrix', '_node_variances', 'digest'):
    free.__dict__.pop(key, None)
  norm = free.sensitivity()
  inverse = ('inverse_rows', 'inverse_coefficients', 'node_scale')
  for key in arrays:
    if key in inverse:
      arrays[key] = arrays[key] * norm
    elif key in ('coefficients', 'rows', 'output_scale'):
      arrays[key] = arrays[key] / norm
  return mechanism.with_numbers(arrays)


@pytest.mark.parametrize('make, given', [
    (lambda c: mechanisms.BandedToeplitz(2, STEPS, coefficients=c), [1.0, 0.5]),
    (lambda c: mechanisms.BandedToeplitz(2, STEPS, coefficients=c), np.array([1.0, 0.5])),
    (lambda c: mechanisms.BLT(1, STEPS, weights=[0.5], decays=c), [0.9]),
    (lambda c: mechanisms.Dense(2, strategy=c), np.array([[1.0, 0.0], [0.5, 1.0]]))],
    ids=['list', 'array', 'decays', 'matrix'])
def test_what_was_given_may_change_afterwards(make, given):
  mechanism, same = make(given), make(copy.deepcopy(given))
  given[0] *= 2.0
  assert mechanism == same and mechanism.get_config() == same.get_config()
  assert mechanisms.from_json(mechanism.to_json()) == same


@pytest.mark.parametrize('mechanism, name, index', ENTRIES)
def test_any_changed_number_is_another_mechanism(mechanism, name, index):
  for factor in (1 + 1e-12, .97):
    other = altered(mechanism, name, index, factor)
    if all(np.array_equal(a, mechanism.arrays[key]) for key, a in other.arrays.items()):
      assert not np.ravel(mechanism.arrays[name])[index] or name.endswith('_scale')
      continue  # A zero, or the one number that the norm determines.
    for a, b in ((mechanism, other), (mechanism.rounded('float64'), other)):
      assert a != b and hash(a) != hash(b) and len({a, b}) == 2
    assert other.rounded('float32') != other
    assert repr(other) != repr(mechanism)


@pytest.mark.pitfall(
    'A mechanism loaded from a file with other numbers has the sensitivity of the original.',
    severity='critical', stops='the sensitivity is computed from the numbers that are used')
@pytest.mark.parametrize('mechanism, name, index', ENTRIES)
def test_loaded_numbers_have_their_own_sensitivity_everywhere(mechanism, name, index):
  expected = cost.sensitivity(mechanism, PATTERN['min_sep'], PATTERN['max_participations'])
  other = altered(mechanism, name, index, .9)
  restored = [mechanisms.from_json(other.to_json()), mechanisms.from_config(
      mechanisms.to_config(other)), copy.deepcopy(other), pickle.loads(pickle.dumps(other))]
  own = max(other.rounded(dtype).sensitivity(**PATTERN) for dtype in ('float64', 'float32'))
  for each in (other, *restored):
    assert each == other and hash(each) == hash(other) and each.loaded
    assert cost.sensitivity(each, *PATTERN.values()) == own
    for key, value in other.arrays.items():
      np.testing.assert_array_equal(each.arrays[key], value)
  assert cost.sensitivity(mechanism, *PATTERN.values()) == expected


def test_the_cache_of_sensitivities_does_not_mix_them_up():
  """The reported case: a file with other coefficients, equal to the original until now."""
  mechanism = mechanisms.BandedToeplitz(8, 40)
  coefficients = np.ones(8)
  other = mechanism.with_numbers({'coefficients': coefficients / np.linalg.norm(coefficients)})
  pattern = (2, 20)
  first = cost.sensitivity(mechanism, *pattern)
  second = cost.sensitivity(other, *pattern)
  assert second > 1.02 * first
  assert second == pytest.approx(other.sensitivity(min_sep=2, max_participations=20), rel=1e-6)
  assert first == pytest.approx(mechanism.sensitivity(min_sep=2, max_participations=20), rel=1e-6)


def make_plan(mechanism):
  return plan_lib.PrivacyPlan(
      batch_size=10, steps=STEPS, l2_norm_clip=1., noise_multiplier=2., target_delta=1e-6,
      population_size=30, sampling=sampling.FixedOrder(), mechanism=mechanism)


@pytest.mark.parametrize('mechanism', MECHANISMS, ids=repr)
def test_a_plan_keeps_loaded_numbers_and_their_precision(mechanism):
  name = max(mechanism.arrays, key=lambda key: mechanism.arrays[key].size)
  other = altered(mechanism, name, 0, .8)
  plans = [make_plan(m) for m in (mechanism, other, mechanism.rounded('float32'),
                                  other.rounded('float32'))]
  for plan in plans:
    restored = plan_lib.PrivacyPlan.from_json(plan.to_json())
    assert restored == plan and restored.to_json() == plan.to_json()
    assert restored.mechanism.dtype == plan.mechanism.dtype
    assert restored.epsilon() == plan.epsilon()
  assert len(set(plans)) == len({plan.to_json() for plan in plans}) == 4


def test_a_plan_with_a_designed_mechanism_is_its_description_only():
  assert 'arrays' not in mechanisms.to_config(mechanisms.BLT(2, STEPS))


@pytest.mark.pitfall(
    'The file of a plan was altered.',
    severity='critical', stops='ValueError')
def test_altered_numbers_in_a_plan_are_refused():
  other = altered(mechanisms.BLT(2, STEPS), 'decays', 0, .9)
  content = mechanisms.to_config(other)
  content['arrays']['decays'][0] *= .999
  with pytest.raises(ValueError, match='checksum'):
    mechanisms.from_config(content)
  content['checksum'] = registry.checksum(content['arrays'])
  with pytest.raises(ValueError, match='norm one'):
    mechanisms.from_config(content)


@pytest.mark.parametrize('content', [
    {}, {'kind': 'BLT'}, {'kind': 'BLT', 'config': {'depth': 3}}, {'kind': 'BLT', 'config': None},
    {'kind': 'Fourier', 'config': {}}, {'kind': 'IndependentGaussian', 'config': {}, 'arrays': {}},
    {'kind': 'BLT', 'config': {'buffers': 1, 'steps': 5}, 'dtype': 'int8'}, [], 'BLT'], ids=str)
def test_what_describes_no_mechanism_is_refused(content):
  with pytest.raises(ValueError, match='Received'):
    mechanisms.from_config(content)


@pytest.mark.parametrize('mechanism', MECHANISMS, ids=repr)
def test_a_mechanism_cannot_be_changed(mechanism):
  before = {key: np.array(value) for key, value in mechanism.arrays.items()}
  for name in ('reason', 'dtype', 'steps', 'bands', 'workload', 'unheard_of'):
    with pytest.raises(AttributeError, match='cannot be changed'):
      setattr(mechanism, name, 'float32')
    with pytest.raises(AttributeError, match='cannot be changed'):
      delattr(mechanism, name)
  mechanism.arrays.clear()
  for array in mechanism.arrays.values():
    with pytest.raises(ValueError):
      array[...] = 0
  for key, value in before.items():
    np.testing.assert_array_equal(mechanism.arrays[key], value)


def test_given_arrays_are_copied():
  coefficients = np.array([.8, .6])
  mechanism = mechanisms.BandedToeplitz(2, 5).with_numbers({'coefficients': coefficients})
  coefficients[:] = 7
  np.testing.assert_array_equal(mechanism.rounded('float32').rounded('float64').coefficients,
                                [.8, .6])


def test_a_reason_makes_a_copy_that_is_equal():
  mechanism = mechanisms.BLT(1, STEPS)
  other = mechanism.because('Of the weather.')
  assert not mechanism.reason and other.reason == 'Of the weather.' and other == mechanism
  assert other.rounded('float32').reason == 'Of the weather.'


def test_subclasses_may_set_attributes_before_and_after_their_parents_do():

  class Late(mechanisms.BandedToeplitz):

    def __init__(self):
      self.early = 1
      super().__init__(2, 5)
      self.late = 2

  mechanism = Late()
  assert (mechanism.early, mechanism.late) == (1, 2)
  with pytest.raises(AttributeError):
    mechanism.late = 3


def test_plans_of_equal_fields_with_other_numbers_differ():
  mechanism = mechanisms.BandedToeplitz(3, STEPS)
  other = mechanism.with_numbers({'coefficients': [.8, .6, 0.]})
  plan = make_plan(mechanism)
  assert dataclasses.replace(plan, mechanism=other) != plan
