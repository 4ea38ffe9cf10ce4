# SPDX-License-Identifier: Apache-2.0
"""The private server of a round: one budget for everything that it releases."""

import dp_accounting
import numpy as np
import pytest
import regression
from scipy import stats
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive import trees
from tfdp_adaptive.federated import server as server_lib

SPECS = [tf.TensorSpec([3, 1]), tf.TensorSpec([1])]
METRICS = tfdp.federated.PrivateMetrics({'loss': (1.0, 5.0), 'accuracy': (0.0, 1.0)}, share=0.2)
CLIP = tfdp.federated.QuantileClip(quantile=0.3, learning_rate=0.5, share=0.1)


def make_server(rule=None, quantile_clip=None, private_metrics=None, learning_rate=0.5, **plan):
  return server_lib.Server(
      rule or rules.dp_sgd(), SPECS, regression.make_plan(**plan), learning_rate, quantile_clip,
      private_metrics, seed=regression.SEED)


def zero_weights():
  return server_lib.ModelWeights([tf.zeros([3, 1]), tf.zeros([1])], [])


def update_of(vector):
  vector = np.asarray(vector, np.float32)
  return [tf.constant(vector[:3, None]), tf.constant(vector[3:])]


def vector_of(weights):
  return np.concatenate([np.ravel(w) for w in weights.trainable])


def add(*answers):
  return tf.nest.map_structure(lambda *parts: tf.add_n(parts), *answers)


def test_the_clip_norm_follows_the_quantile_of_the_norms():
  server = make_server(quantile_clip=CLIP, noise_multiplier=0.0, steps=60)
  norms = np.exp(np.random.default_rng(0).normal(size=30))  # 30 users, 3 expected per round.
  state, clips = server.init(zero_weights()), []
  step = tf.function(server.step, autograph=False)
  for round_ in range(60):
    broadcast = server.broadcast(state)
    mine = norms[round_ * 3 % 30:][:3]
    total = add(*[server.record(broadcast, update_of([n, 0, 0, 0])) for n in mine])
    previous = float(broadcast.clips[0])
    np.testing.assert_allclose(total.sums[0].total[0][0, 0],
                               np.minimum(mine, previous).sum(), rtol=1e-5)
    state, released = step(state, total)
    fraction = np.mean(mine <= previous)
    assert float(released['fraction_within_clip']) == pytest.approx(fraction, abs=1e-6)
    assert float(released['l2_norm_clip']) == previous
    clips.append(float(server.broadcast(state).clips[0]))
    assert clips[-1] == pytest.approx(previous * np.exp(-0.5 * (fraction - 0.3)), rel=1e-5)
  # Not another quantile: the 20% and the 45% one are outside.
  low, high = np.quantile(norms, [0.2, 0.45])
  assert low < np.exp(np.mean(np.log(clips[30:]))) < high


def test_noise_follows_the_clip_norm_and_every_part_has_the_noise_of_its_share():
  sigma, batch = 0.5, 3
  server = make_server(  # An empty cohort: as many within the clip norm as not.
      quantile_clip=CLIP._replace(quantile=0.5), private_metrics=METRICS, steps=400)
  step = tf.function(server.step, autograph=False)
  state, zero = server.init(zero_weights()), server.zero()
  draws = {'update': [], 'within': [], 'clients': []}
  for _ in range(400):
    clip = float(server.broadcast(state).clips[0])
    state, released = step(state._replace(global_model_weights=zero_weights()), zero)
    draws['update'].extend(vector_of(state.global_model_weights) / -0.5 / clip)
    draws['clients'].append(float(released['clients']))
    draws['within'].append(float(released['fraction_within_clip']))
  for name, std in (('update', sigma / np.sqrt(0.7) / batch),
                    ('clients', sigma / np.sqrt(0.2) * np.sqrt(3))):
    for factor in (1, 2 / 3, 1.5):
      accepted = stats.kstest(draws[name], 'norm', (0, std * factor)).pvalue > 1e-3
      assert accepted == (factor == 1), (name, factor)
  within = np.asarray(draws['within'])  # A half, with noise, clipped to [0, 1].
  inside = within[(within > 0) & (within < 1)]
  std = sigma / np.sqrt(0.1) / batch / 2
  uniform = (stats.norm.cdf(inside, 0.5, std) - stats.norm.cdf(0, 0.5, std)) / (
      stats.norm.cdf(1, 0.5, std) - stats.norm.cdf(0, 0.5, std))
  assert stats.kstest(uniform, 'uniform').pvalue > 1e-3


@pytest.mark.pitfall(
    'Private metrics and the count for the clip norm are released outside the budget.',
    severity='critical', stops='one noisy release contains all of them')
def test_one_client_moves_the_joint_release_by_one_at_most():
  """In units of the noise of each part times sigma: squares of clip norms, times the shares."""
  server = make_server(rules.scale_then_privatize(scale_epsilon=0.1), private_metrics=METRICS,
                       quantile_clip=CLIP, noise_multiplier=0.1)
  state = server.init(zero_weights())
  for seed in range(3):  # Some geometry.
    update = update_of(np.random.default_rng(seed).normal(size=4))
    metrics = server.bounded_metrics({'loss': 2.0, 'accuracy': 0.5})
    state, _ = server.step(state, server.record(server.broadcast(state), update, metrics))
  broadcast = server.broadcast(state)
  moves = []
  for loss, accuracy in ((np.nan, np.inf), (1e30, 7.0), (-4.0, -1.0), (3.0, 1.0)):
    metrics = server.bounded_metrics({'loss': loss, 'accuracy': accuracy})
    for size in (0.0, 1e-3, 1e3, 1e30, np.inf, np.nan):
      answer = server.record(broadcast, update_of(size * np.arange(1.0, 5.0)), metrics)
      total = np.concatenate([np.ravel(x) for x in tf.nest.flatten(answer.sums[0].total)])
      moves.append(0.7 * np.sum((total / float(broadcast.clips[0]))**2)
                   + 0.1 * np.sum((2 * answer.sums[0].side_sum.numpy())**2)
                   + 0.2 * np.sum(answer.metrics.numpy()**2))
  assert max(moves) <= 1 + 1e-5
  assert max(moves) > 0.99  # The bound is met.


def test_a_step_whose_parts_are_compiled(monkeypatch):
  """As they are for many parameters: the same noise, the same update."""
  weights = []
  for least in (2**16, 0):
    monkeypatch.setattr(trees, 'WORTH_COMPILING', least)
    server = make_server(rules.scale_then_privatize(scale_epsilon=0.1), private_metrics=METRICS)
    step, state = tf.function(server.step), server.init(zero_weights())
    for _ in range(3):
      state, _ = step(state, server.record(
          server.broadcast(state), update_of([3, -1, 0.5, 2]),
          server.bounded_metrics({'loss': 2.0, 'accuracy': 0.5})))
    weights.append(vector_of(state.global_model_weights))
  np.testing.assert_allclose(*weights, rtol=1e-5)
  assert np.all(weights[0] != 0)


def test_private_metrics_are_means_over_clients_in_their_range():
  server = make_server(private_metrics=METRICS, noise_multiplier=0.0)
  state = server.init(zero_weights())
  values = [(2.0, 0.25), (9.0, 0.75), (np.nan, 0.5)]  # 9 counts as 5, NaN as 1.
  answers = [server.record(server.broadcast(state), update_of([0, 0, 0, 0]),
                           server.bounded_metrics({'loss': a, 'accuracy': b}))
             for a, b in values]
  _, released = server.step(state, add(*answers))
  np.testing.assert_allclose(
      [released[k] for k in ('clients', 'loss', 'accuracy')], [3, (2 + 5 + 1) / 3, 0.5], rtol=1e-5)
  _, released = server.step(state, server.zero())
  assert [float(released[k]) for k in ('clients', 'loss', 'accuracy')] == [0, 1, 0]


def test_a_learning_rate_may_depend_on_the_round_and_a_rule_may_project():
  rule = rules.dp_sgd()._replace(
      project=lambda state, params: tf.nest.map_structure(
          lambda p: tf.clip_by_value(p, -0.02, 1.0), params))
  server = make_server(rule, noise_multiplier=0.0, l2_norm_clip=10.0,
                       learning_rate=tf.keras.optimizers.schedules.PiecewiseConstantDecay(
                           [0], [0.3, 0.6]))
  state = server.init(zero_weights())
  for expected in ([-0.02, 0.1, 0.0, 0.0], [-0.02, 0.3, 0.0, 0.0]):
    answer = server.record(server.broadcast(state), update_of([1, -1, 0, 0]))
    state, _ = server.step(state, answer)
    np.testing.assert_allclose(vector_of(state.global_model_weights), expected, rtol=1e-5)


def test_refusals():
  with pytest.raises(ValueError, match='taken at the server'):
    make_server(rules.dp_sgd()._replace(public='mean'))
  with pytest.raises(ValueError, match='below one together'):
    make_server(quantile_clip=CLIP._replace(share=0.5), private_metrics=METRICS._replace(share=0.5))
  old = not hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent')  # No such plan there.
  with pytest.raises(
      ValueError, match='needs dp-accounting 0.6.0' if old else 'one clipped sum per round'):
    make_server(quantile_clip=CLIP, adjacency='replace')
  with pytest.raises(ValueError, match='one query per step'):
    make_server(rules.dp_sgd()._replace(asks=(rules.Ask(), rules.Ask())), quantile_clip=CLIP)
  with pytest.raises(ValueError, match='fixed clip norm'):  # Both would move it.
    make_server(rules.quantile_clip(rules.dp_sgd()), quantile_clip=CLIP)
  for name in server_lib.RELEASED_NAMES:
    with pytest.raises(ValueError, match='must leave the names'):
      make_server(private_metrics=tfdp.federated.PrivateMetrics({name: (0.0, 1.0)}))
  with pytest.raises(ValueError, match='must name metrics of the model'):
    make_server(private_metrics=METRICS).bounded_metrics({'loss': 1.0})
