# SPDX-License-Identifier: Apache-2.0
"""Private adaptation of preprocessing layers, and layers that were adapted exactly."""

import warnings

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.estimates import adaptation as adapt_lib
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

keras, layers = compat.keras, compat.keras.layers
RNG = np.random.default_rng(0)
PLAN = tfdp.PrivacyPlan(
    batch_size=16, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
    population_size=64)


@pytest.mark.parametrize('features', [1, 3])
def test_no_record_moves_the_sums_by_more_than_what_is_noised(features):
  """The noise is a function of the seed alone, so that it cancels in differences."""
  records, bound = RNG.normal(size=[20, features]), np.linspace(1.0, 2.0, features)

  def sums(data):
    std = 2.0 * np.sqrt(2 * features)
    rng = np.random.default_rng(1)
    clipped = np.clip(data / bound, -1, 1)
    return np.concatenate([(f(clipped).sum(0) + std * rng.standard_normal(features)) / std * 2
                           for f in (np.array, np.square)])

  for one in (np.full(features, 1e9), np.full(features, -1e9), np.full(features, .5)):
    other = records.copy()
    other[3] = one
    empty = records.copy()
    empty[3] = 0  # An empty record.
    distance = np.linalg.norm(sums(other) - sums(empty))
    assert distance <= 1 + 1e-9  # Noise of standard deviation 2 is on both.
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # With few records the variances are noise.
      mean, _ = adapt_lib._moments(other, bound, 2.0, len(other), np.random.default_rng(1))
    first = sums(other)[:features] * np.sqrt(2 * features) / 20
    np.testing.assert_allclose(mean, np.clip(first, -1, 1) * bound)
  assert np.linalg.norm(sums(np.full([1, features], 1e9)) - sums(
      np.zeros([1, features]))) == pytest.approx(1)  # The bound is reached.


def test_a_private_normalization():
  data = RNG.normal([1.0, -2.0], [1.0, .5], size=[20_000, 2])
  layer = layers.Normalization()
  cost = tfdp.estimates.adapt(layer, data, noise_multiplier=5.0, bound=5.0, seed=0)
  normal = np.asarray(layer(data.astype('float32')))
  np.testing.assert_allclose(normal.mean(0), 0, atol=.05)
  np.testing.assert_allclose(normal.std(0), 1, atol=.05)
  oracle = dp_accounting.pld.PLDAccountant()
  oracle.compose(dp_accounting.GaussianDpEvent(5.0))
  assert cost.epsilon(1e-6) == pytest.approx(oracle.get_epsilon(1e-6), rel=1e-3)
  assert not np.array_equal(  # Another time, other noise.
      [np.asarray(tfdp.estimates.adapt(one, data, noise_multiplier=5.0, bound=5.0)
                  and one.adapt_mean) for one in (layers.Normalization(),)][0],
      np.asarray(layer.adapt_mean))


def test_the_cost_is_in_the_ledger_of_the_model(tmp_path):
  layer, data = layers.Normalization(), 2 * RNG.normal(size=[64, 2])
  cost = tfdp.estimates.adapt(layer, data, noise_multiplier=0.7, bound=4.0)
  model = tfdp.make_private(keras.Sequential([layers.Input([2]), layer, layers.Dense(1)]))
  model.compile(tfdp.DPSGD(0.1, plan=PLAN), 'mse')
  model.fit(PLAN.batches((data.astype('float32'), data[:, :1])), verbose=0)  # No warning.
  rules = [entry.rule for entry in model.ledger.entries]
  assert rules[0].startswith(f'estimates.adapt({layer.name}, ') and rules[1:] == ['dp_sgd']
  assert model.optimizer.epsilon() == pytest.approx((cost + PLAN).epsilon(1e-3))
  assert model.optimizer.epsilon() > PLAN.epsilon()
  model.save(str(tmp_path / 'm.keras'))
  again = keras.models.load_model(str(tmp_path / 'm.keras'))
  assert again.ledger == model.ledger


def test_a_private_vocabulary():
  texts = ['the cat sat'] * 400 + ['a dog ran'] * 300 + ['secret']
  for layer, data, wanted in (
      (layers.TextVectorization(), texts, {'the', 'cat', 'sat', 'a', 'dog', 'ran'}),
      (layers.StringLookup(), np.array(['yes'] * 300 + ['no'] * 300 + ['secret']), {'yes', 'no'})):
    cost = tfdp.estimates.adapt(layer, data, noise_multiplier=4.0, size=20, seed=0)
    assert set(layer.get_vocabulary()) - {'', '[UNK]'} == wanted
    alone = tfdp.Ledger(tuple(e.__class__(e.plan, 1) for e in cost.entries))
    assert cost.epsilon(1e-6) == pytest.approx(alone.epsilon(1e-6 - 1e-9))
    assert cost.epsilon(1e-9) == float('inf')  # No delta is left.
    assert cost.delta(1.0) == pytest.approx(alone.delta(1.0) + 1e-9)
    assert weight_ledger.Ledger([layer]).runs()


@pytest.mark.parametrize('how', ['weights', 'checkpoint', 'skip'])
def test_a_vocabulary_keeps_its_cost_where_other_weights_are_read(how, tmp_path):
  """The words stay: they are in no file of weights."""
  def build(layer):
    return keras.Sequential([
        keras.Input([1], dtype='string'), layer, layers.Embedding(9, 2), layers.Flatten(),
        layers.Dense(1)])

  words = np.array(['yes'] * 300 + ['no'] * 300)[:, np.newaxis]
  layer, other = layers.StringLookup(), build(layers.StringLookup(vocabulary=['yes', 'no']))
  earlier = ledger_lib.Entry(PLAN, 2, rule='dp_sgd', run='of other weights')
  weight_ledger.Ledger.of(other).attach([earlier])
  cost = tfdp.estimates.adapt(layer, words, noise_multiplier=4.0, size=20)
  model, path = build(layer), str(tmp_path / 'other.weights.h5')
  for _ in range(2):
    if how == 'checkpoint':
      weight_ledger.track(model)
      tf.train.Checkpoint(model).restore(tf.train.Checkpoint(other).save(str(tmp_path / 'c')))
    else:
      other.save_weights(path)
      model.load_weights(path, **({'skip_mismatch': True} if how == 'skip' else {}))
    assert {'yes', 'no'} <= set(layer.get_vocabulary())
    assert {entry.rule for entry in weight_ledger.Ledger.of(model).ledger().entries} == {
        cost.entries[0].rule, 'dp_sgd'}


@pytest.mark.thorough
@pytest.mark.pitfall(
    'A layer is adapted to the private data, so it holds their exact mean or vocabulary.',
    severity='critical',
    stops='a warning and a sentence in the statement; `tfdp.estimates.adapt` is the private '
          'form')
def test_adapted_layers_are_named():
  data = RNG.normal(size=[64, 2]).astype('float32')

  def fitted(layer):
    model = tfdp.make_private(keras.Sequential([layers.Input([2]), layer, layers.Dense(1)]))
    model.compile(tfdp.DPSGD(0.1, plan=PLAN), 'mse')
    model.fit(PLAN.batches((data, data[:, :1])), steps_per_epoch=1, verbose=0)
    return model.optimizer.statement()

  exact, public = layers.Normalization(), layers.Normalization()
  exact.adapt(data)
  with pytest.warns(tfdp.Caution, match=f'{exact.name}.*exact statistics'):
    assert 'NOT COVERED IF PRIVATE: layers' in fitted(exact)
  tfdp.estimates.adapt(public, data, public='the census')
  assert "'the census'" in fitted(public)
  given = layers.Normalization(mean=[0.0, 1.0], variance=[1.0, 2.0])
  assert 'adapted' not in fitted(given)
  # Adapted again by Keras, exactly: what was said of the first time holds no longer.
  private = layers.Normalization()
  with warnings.catch_warnings():
    warnings.simplefilter('error', tfdp.Caution)
    tfdp.estimates.adapt(private, data, noise_multiplier=0.1, bound=9.0)
    assert 'NOT COVERED IF PRIVATE: layers' not in fitted(private)
  for layer in (private, public):
    layer.adapt(data[:40])
    with pytest.warns(tfdp.Caution, match=f'{layer.name}.*exact statistics'):
      text = fitted(layer)
    assert 'NOT COVERED IF PRIVATE: layers' in text and "'the census'" not in text


def test_what_is_said_of_a_layer_ends_where_keras_adapts_it_again():
  layer = layers.Normalization()
  tfdp.estimates.adapt(layer, np.ones([9, 2]), public='the census')
  said = lambda: list(disclosures._adapted([layer], lambda one: False))
  assert len(said()) == 1 and "'the census'" in said()[0]
  layer.adapt(np.arange(18.0).reshape(9, 2))
  with pytest.warns(tfdp.Caution, match='exact statistics'):
    sentence, = said()
  assert 'NOT COVERED IF PRIVATE' in sentence


@pytest.mark.parametrize('arguments, message', [
    (dict(bound=1.0), '`noise_multiplier` must be given'),
    (dict(noise_multiplier=1.0), '`bound` must be given'),
    (dict(noise_multiplier=0, bound=1.0), 'noise_multiplier'),
    (dict(noise_multiplier=1.0, bound=-1.0), 'bound'),
    (dict(noise_multiplier=1.0, bound=1.0, adjacency='replace'), 'adjacency'),
    (dict(noise_multiplier=1.0, bound=1.0, adjacency='add_remove'), 'number of records is private'),
    (dict(noise_multiplier=1.0, bound=1.0, population_size=8), 'another number of records')])
def test_bad_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    tfdp.estimates.adapt(layers.Normalization(), np.ones([9, 2]), **arguments)
