# SPDX-License-Identifier: Apache-2.0
"""Whatever a person passes to a constructor or a reader works, or is refused in our own words."""

import json
import os

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import mechanisms
from tfdp_adaptive import rules
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.advice import choice

EXAMPLES = int(os.environ.get('TFDP_FUZZ', 120))  # Examples per test; `TFDP_FUZZ=1000` runs more.
ODD = st.one_of(
    st.sampled_from([
        None, True, False, 0, -1, 1, 2, 1.5, 0.5, -0.5, 1e-30, 1e30, float('nan'), float('inf'),
        -float('inf'), '', '1', 'user', b'1', (), [], {}, set(), [1], (1, 2), {'a': 1}, object(),
        object, len, 1j, np.int64(3), np.float32(.5), np.array(2), np.array([1., 2.]),
        np.array('text'), np.float64('nan'), 2**70, -2**70, 10**400, range(3), '\udcff']),
    st.integers(-5, 5), st.floats())
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3),
                            st.dictionaries(st.text(max_size=4), inner, max_size=3)), max_leaves=5)

PLAN = dict(batch_size=10, steps=20, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-5,
            population_size=100, population_is_public=True, unit='example', adjacency='zero_out',
            sampling=sampling.Poisson(), min_sep=None, max_participations=None,
            mechanism=mechanisms.IndependentGaussian(), extra_releases=(), seed=None, search=None)
# Constructors with valid arguments. Tests replace any of these by odd values.
CONSTRUCTORS = {
    'PrivacyPlan': (tfdp.PrivacyPlan, PLAN),
    'Poisson': (sampling.Poisson, dict(sampling_probability=.1)),
    'TruncatedPoisson': (sampling.TruncatedPoisson, dict(max_batch_size=20)),
    'CyclicPoisson': (sampling.CyclicPoisson, dict(cycle=4)),
    'BallsInBins': (sampling.BallsInBins, dict(cycle=4, draws=0)),
    'RandomAllocation': (sampling.RandomAllocation, dict(cycle=4)),
    'MinSeparation': (sampling.MinSeparation, dict(min_sep=4, draws=9)),
    'FixedOrder': (sampling.FixedOrder, {}),
    'Epochs': (sampling.Epochs, dict(epochs=2.5)),
    'Search': (tfdp.privacy.Search, dict(runs=10, shape=.5, score_noise=None)),
    'Workload': (mechanisms.Workload, dict(momentum=.5)),
    'IndependentGaussian': (mechanisms.IndependentGaussian, dict(workload=None)),
    'BandedToeplitz': (mechanisms.BandedToeplitz, dict(bands=2, steps=8, workload=None,
                                                       objective='mean')),
    'Banded': (mechanisms.Banded, dict(bands=2, steps=8, method='normalized', workload=None)),
    'BandedInverse': (mechanisms.BandedInverse, dict(inverse_bands=2, steps=8)),
    'BLT': (mechanisms.BLT, dict(buffers=2, steps=8, min_sep=2, max_participations=2)),
    'Tree': (mechanisms.Tree, dict(steps=8)),
    'SquareRoot': (mechanisms.SquareRoot, dict(steps=8)),
    'Dense': (mechanisms.Dense, dict(steps=6)),
    'Ledger': (tfdp.Ledger, dict(entries=())),
    'dp_sgd': (rules.dp_sgd, dict(momentum=.9)),
    'dp_adam': (rules.dp_adam, dict(beta_1=.9, beta_2=.99, epsilon=1e-8)),
    'dp_adam_bc': (rules.dp_adam_bc, dict(beta_1=.9, beta_2=.99, epsilon=1e-4)),
    'scale_then_privatize': (
        rules.scale_then_privatize, dict(beta_1=.9, beta_2=.99, epsilon=0., scale_epsilon=1e-3)),
    'dp_adam_ime': (rules.dp_adam_ime, dict(beta_1=.9, beta_2=.99, epsilon=1e-4)),
    'choose': (tfdp.advice.choose, dict(plan=tfdp.PrivacyPlan(**PLAN), memory=4, workload=None,
                                         objective='mean')),
    'dp_yogi': (rules.dp_yogi, dict(beta_1=.9, beta_2=.99, epsilon=1e-4)),
}


# A second reader of the same plan, whose sampling has other fields.
SEPARATED = tfdp.PrivacyPlan(**{**PLAN, 'sampling': sampling.MinSeparation(2, draws=9)})


def works_or_refuses(call):
  """Whether it worked; fails where it was refused in other words than ours."""
  try:
    call()
    return True
  except (ValueError, TypeError, tfdp.PrivacyError) as error:
    assert 'Received' in str(error), repr(error)
  return False


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
  monkeypatch.setenv('TFDP_MECHANISM_CACHE', 'off')


@pytest.mark.parametrize('name', sorted(CONSTRUCTORS))
def test_constructors(name):
  constructor, right = CONSTRUCTORS[name]
  constructor(**right)

  @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(st.data())
  def run(data):
    wrong = {key: data.draw(ODD) for key in data.draw(
        st.lists(st.sampled_from(sorted(right)), min_size=1, max_size=2))} if right else {}
    works_or_refuses(lambda: constructor(**{**right, **wrong}))

  run()


def test_recommendations(monkeypatch):
  """Up to the plans, which are fuzzed above."""
  class ReachedError(Exception):
    pass

  def reach(*_, **__):
    raise ReachedError

  def recommend(**arguments):
    try:
      return tfdp.recommend(None, **arguments)
    except ReachedError:
      return None

  monkeypatch.setattr(choice, 'candidates', reach)
  right = dict(population_size=100, batch_size=10, steps=20, target_epsilon=1.0, seconds=1.0,
               target_delta=None, public=None, loss='mse', gradient_norm=1.0, seed=0)

  @hypothesis.settings(max_examples=EXAMPLES)
  @hypothesis.given(st.dictionaries(st.sampled_from(sorted(right)), ODD, min_size=1, max_size=2))
  def run(wrong):
    works_or_refuses(lambda: recommend(**{**right, **wrong}))

  run()


PLAN_TEXT = tfdp.PrivacyPlan(**PLAN).to_json()
MECHANISM_TEXT = mechanisms.registry.to_json(mechanisms.BandedToeplitz(2, 8))
LEDGER_TEXT = tfdp.Ledger().begin(tfdp.PrivacyPlan(**PLAN)).done(3).to_json()
READERS = {'plan': (tfdp.PrivacyPlan.from_json, PLAN_TEXT),
           'separated plan': (tfdp.PrivacyPlan.from_json, SEPARATED.to_json()),
           'mechanism': (mechanisms.from_json, MECHANISM_TEXT),
           'ledger': (tfdp.Ledger.from_json, LEDGER_TEXT)}


def paths(content, here=()):
  """All places in nested JSON."""
  items = (content.items() if isinstance(content, dict) else enumerate(content)
           if isinstance(content, list) else ())
  for key, value in items:
    yield here + (key,)
    yield from paths(value, here + (key,))


def put(content, path, value):
  if not path:
    return value
  copy = content.copy()
  copy[path[0]] = put(content[path[0]], path[1:], value)
  return copy


@pytest.mark.parametrize('name', sorted(READERS))
def test_readers(name):
  read, text = READERS[name]
  content = json.loads(text)
  places = sorted(paths(content), key=str)
  assert len(places) > 5
  read(text)

  @hypothesis.settings(max_examples=250, suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(st.data())
  def edited(data):
    changed = put(content, data.draw(st.sampled_from(places)), data.draw(JSON))
    works_or_refuses(lambda: read(json.dumps(changed)))

  @hypothesis.settings(max_examples=100, suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(st.data())
  def foreign(data):
    works_or_refuses(lambda: read(data.draw(st.one_of(JSON.map(json.dumps), st.text()))))

  edited()
  foreign()
  for i in range(0, len(text), 7):
    assert not works_or_refuses(lambda i=i: read(text[:i]))
  for odd in (None, 3, b'', [], '[' * 100_000):
    assert not works_or_refuses(lambda odd=odd: read(odd))
