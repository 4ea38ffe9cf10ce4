# SPDX-License-Identifier: Apache-2.0
"""`tfdp.tune`: what runs is what `cost.private_search` accounts for."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import runfolder
from tfdp_adaptive import tuning
from tfdp_adaptive.accounting import cost

pytestmark = pytest.mark.skipif(
    not cost._HAS_TRUNCATED, reason='needs a current dp-accounting')
layers = compat.keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 3)).astype('float32')
Y = (X[:, 0] > 0).astype('int32')
SPACE = {'bias': [0.0, 1.0, 2.0]}


def make_plan(**changes):
  fields = dict(population_size=32, batch_size=8, steps=1, l2_norm_clip=1.0, noise_multiplier=2.0,
                target_delta=1e-3, search=tfdp.privacy.Search(3, 1, score_noise=None))
  return tfdp.PrivacyPlan(**{**fields, **changes})


class Builder:
  """Counts; the settings are found again in the bias, which a rate of 0 does not move."""

  def __init__(self, trains=False):
    self.built, self._trains = [], trains

  def __call__(self, settings, plan):
    self.built.append(settings['bias'])
    model = tfdp.make_private(compat.keras.Sequential([
        layers.Input([3]), layers.Dense(2, bias_initializer=compat.keras.initializers.Constant(
            settings['bias']))]))
    model.compile(tfdp.DPSGD(0.0, plan=plan),
                  compat.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  run_eagerly=True)
    if not self._trains:  # It takes seconds.
      model.fit = lambda batches, verbose: None
    return model


def score(model, x, y):
  """Best at a bias of 1."""
  del y
  bias = float(np.asarray(model.trainable_variables[1])[0])
  return np.full(len(x), 1 - abs(bias - 1.0) / 4)


def fixed(monkeypatch, candidates):
  monkeypatch.setattr(tfdp.privacy.Search, 'draw', lambda self: len(candidates))
  coins = iter(candidates)
  monkeypatch.setattr(tuning.secrets, 'randbelow', lambda most: next(coins))


def run(build, plan, **kwargs):
  kwargs = dict(dict(validation=(X[:8], Y[:8]), score=score), **kwargs)
  return tfdp.tune(build, SPACE, (X, Y), plan, **kwargs)


@pytest.mark.thorough
def test_the_best_of_the_drawn_runs_is_returned_with_the_cost_of_all(monkeypatch):
  fixed(monkeypatch, [2, 1])
  build, plan = Builder(trains=True), make_plan()
  best = run(build, plan)
  assert build.built == [2.0, 1.0]
  assert best.settings == {'bias': 1.0} and best.score == 1.0
  assert best.model.ledger.epsilon() == plan.epsilon() > make_plan(search=None).epsilon()
  assert 'Selection' in best.statement()


def test_a_search_that_is_interrupted_goes_on_and_forgets_its_losers(monkeypatch, tmp_path):
  fixed(monkeypatch, [0, 1, 2])
  build, plan = Builder(), make_plan()

  def interrupted(settings, plan):
    if len(build.built) == 2:
      raise KeyboardInterrupt
    return build(settings, plan)

  with pytest.raises(KeyboardInterrupt):
    run(interrupted, plan, directory=tmp_path)
  assert build.built == [0.0, 1.0]
  saved = runfolder.load(tmp_path / 'search.npz')[1]['best']
  assert (saved['setting'], saved['score']) == (1, 1.0)
  best = run(build, plan, directory=tmp_path)
  assert build.built == [0.0, 1.0, 2.0, 1.0]  # The third, and the best one for its weights.
  assert best.settings == {'bias': 1.0}
  np.testing.assert_array_equal(best.model.trainable_variables[1], [1.0, 1.0])
  assert best.model.ledger.epsilon() == plan.epsilon()
  left = runfolder.load(tmp_path / 'search.npz')[1]
  assert left['candidates'] == [1] and left['done'] == 1
  assert [path.name for path in tmp_path.iterdir()] == ['search.npz']
  again = run(build, plan, directory=tmp_path)
  assert again.settings == best.settings and len(build.built) == 5
  with pytest.raises(ValueError, match='must hold the same search'):
    run(build, make_plan(noise_multiplier=3.0), directory=tmp_path)


def test_the_result_of_another_process_has_the_ledger_of_its_run_and_trains_on(
    monkeypatch, tmp_path):
  """What was trained is counted beside what a model that was built again does."""
  base = tfdp.make_private(compat.keras.Sequential([layers.Input([3]), layers.Dense(3)]))
  before = make_plan(search=None)
  base.compile(tfdp.DPSGD(0.1, plan=before), 'mse', run_eagerly=True)
  base.fit(before.batches((X, X)), verbose=0)
  base.trainable = False
  fixed(monkeypatch, [1, 1])
  build, plan = Builder(trains=True), make_plan()
  data = tfdp.features(base, (X, Y))
  kwargs = dict(validation=(X[:8], Y[:8]), score=score, directory=tmp_path)
  first, again = (tfdp.tune(build, SPACE, data, plan, **kwargs) for _ in range(2))
  assert build.built == [1.0, 1.0, 1.0]
  assert again.model.ledger == first.model.ledger and len(again.model.ledger.entries) == 2
  assert again.model.ledger.entries[-1].engines
  assert again.statement() == first.statement()
  again.model.fit(again.model.optimizer.plan.batches((X, Y)), verbose=0)
  assert [entry.steps for entry in again.model.ledger.entries] == [1, 1, 1]
  assert again.model.ledger.epsilon() > first.model.ledger.epsilon()


def test_what_is_secret_is_read_by_nobody_else(monkeypatch, tmp_path):
  fixed(monkeypatch, [1])
  run(Builder(), make_plan(), directory=tmp_path / 'new')
  assert all(path.stat().st_mode & 0o077 == 0 for path in pathlib.Path(tmp_path / 'new').iterdir())


def test_no_run_releases_nothing(monkeypatch, tmp_path):
  plan = make_plan(search=tfdp.privacy.Search(1, float('inf'), None))
  fixed(monkeypatch, [])
  build = Builder()
  for _ in range(2):
    assert run(build, plan, directory=tmp_path) == (None, None, None, plan)
  assert not build.built


def test_what_would_not_be_accounted_for_is_refused():
  build, plan = Builder(), make_plan()
  with pytest.raises(ValueError, match='`plan` must be a `tfdp.PrivacyPlan` with `search='):
    run(build, make_plan(search=None))
  with pytest.raises(tfdp.PrivacyError, match='the plan that it is given'):
    run(lambda settings, _: build(settings, make_plan(steps=2)), plan)
  shared = Builder(trains=True)({'bias': 0.0}, plan)
  shared.fit(plan.batches((X, Y)), verbose=0)
  with pytest.raises(tfdp.PrivacyError, match='a new model at every call'):
    run(lambda settings, plan: shared, plan)
  with pytest.raises(ValueError, match='one number, from 0 to 1, for each'):
    run(build, plan, score=lambda model, x, y: 0.5)
  with pytest.raises(ValueError, match='`space` must give a list'):
    tfdp.tune(build, {'bias': 1.0}, (X, Y), plan, validation=(X, Y))


def test_accuracy_is_the_default_score():
  build, plan = Builder(), make_plan()
  model = build({'bias': 0.0}, plan)
  values = tuning._scores(None, model, X, Y, len(X))
  expected = np.asarray(tf.argmax(model(X), -1)) == Y
  np.testing.assert_array_equal(values, expected)
  np.testing.assert_array_equal(tuning._scores(None, model, X, np.eye(2)[Y], len(X)), expected)
  with pytest.raises(ValueError, match='`score` must be given'):
    tuning._accuracy(model, X, np.zeros([32, 3]))
