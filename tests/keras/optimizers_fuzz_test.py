# SPDX-License-Identifier: Apache-2.0
"""Whatever a person passes to an optimizer, an audit or a rule works, or is refused."""

import inspect
import os

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.examples import white_box

EXAMPLES = int(os.environ.get('TFDP_FUZZ', 12))  # Examples per test; `TFDP_FUZZ=1000` runs more.
ODD = st.one_of(
    st.sampled_from([
        None, True, False, 0, -1, 1, 2, 1.5, 0.5, -0.5, 1e-30, 1e30, float('nan'), float('inf'),
        '', '1', 'replace', b'1', (), [], {}, [1], {'a': 1}, object(), 1j, np.int64(3),
        np.float32(.5), np.array([1., 2.]), np.float64('nan'), 2**70, 10**400, '\udcff']),
    st.integers(-3, 5), st.floats())
PLAN = tfdp.PrivacyPlan(batch_size=10, steps=20, l2_norm_clip=1.0, noise_multiplier=1.0,
                        target_delta=1e-5, population_size=100)
BASIC = dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=10)


def works_or_refuses(call):
  """Whether it worked; fails where it was refused in other words than ours."""
  try:
    call()
    return True
  except (ValueError, TypeError, tfdp.PrivacyError) as error:
    assert 'Received' in str(error), repr(error)
  return False


def fuzz(make, right, examples=EXAMPLES):
  """Calls `make` with one or two right arguments replaced by something odd."""
  @hypothesis.settings(max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(st.data())
  def run(data):
    names = data.draw(st.lists(st.sampled_from(sorted(right)), min_size=1, max_size=2))
    wrong = {name: data.draw(ODD) for name in names}
    works_or_refuses(lambda: make(**{**right, **wrong}))

  run()


def defaults(function):
  """The arguments that have one."""
  return {name: parameter.default for name, parameter in inspect.signature(
      function).parameters.items() if parameter.default is not inspect.Parameter.empty}


def _needed(name):
  """The arguments of a class without which it cannot be made."""
  more = dict(participations=2) if name == 'NoisyAdaGrad' else {}
  return {**white_box.METHODS[name], **more}


@pytest.mark.parametrize('name', sorted(white_box.METHODS))
def test_optimizers(name):
  kind = getattr(tfdp, name)
  right = {**BASIC, **defaults(kind.factory), **_needed(name), 'learning_rate': .1,
           'adjacency': 'zero_out', 'mechanism': None, 'plan': None, 'seed': None}
  kind(**right)
  fuzz(kind, right)


@pytest.mark.parametrize('name', sorted(
    name for name in white_box.METHODS if name != 'NonPrivateNoiselessAdam'))
def test_rules(name):
  factory = getattr(tfdp, name).factory
  right = {**defaults(factory), **{
      key: value for key, value in _needed(name).items()
      if key in inspect.signature(factory).parameters}}
  if right:
    fuzz(factory, right)


def test_bounds_of_audits():
  audit = tfdp.audit
  fuzz(audit.one_run_epsilon, dict(correct=5, guesses=6, canaries=10, delta=1e-5, confidence=.9))


def test_audits():
  fuzz(tfdp.audit.white_box, dict(
      subject=3, data=None, plan=PLAN, epsilon=None, delta=None, confidence=.9, canaries=64,
      batches=None, seed=None))


@pytest.mark.parametrize('name', ['DPAdam', 'DP2RMSprop'])
def test_configurations_that_were_edited(name):
  optimizer = getattr(tfdp, name)(plan=PLAN, learning_rate=.1, **white_box.METHODS[name])
  config = optimizer.get_config()
  again = type(optimizer).from_config(dict(config))
  assert again.plan == PLAN
  ours = {key: value for key, value in config.items()
          if key not in defaults(compat.keras.optimizers.SGD)}
  assert 'plan' in ours
  fuzz(lambda **given: type(optimizer).from_config({**config, **given}), ours, 4 * EXAMPLES)
