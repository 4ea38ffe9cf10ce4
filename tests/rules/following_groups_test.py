# SPDX-License-Identifier: Apache-2.0
"""A clip norm for every group, each of which follows: sensitivity, explicit noise, every engine."""

import loop
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise
from tfdp_adaptive import rules
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.noise import keys

keras = compat.keras
FOLLOWING = {'quantile': lambda rule: rules.quantile_clip(rule, 0.6, 0.5, 3.0),
             'slack': lambda rule: rules.slack_clip(rule, 3)}


def test_reference_values():
  """Of 100 counts at sigma 1, B = 256: 1.086 if each had B / 20, and 1.00076 as it is."""
  one = rules.quantile_clip(rules.dp_sgd()).asks[0].side_query
  hundred = rules.grouped(rules.quantile_clip(rules.dp_sgd()), range(100)).asks[0].side_query
  factor, std = hundred.noise(1.0, 256)
  assert factor == pytest.approx(1.00076, abs=5e-6) and factor == one.noise(1.0, 256)[0]
  assert std == pytest.approx(10 * 256 / 20)
  exact = lambda std: (1 - 100 / (2 * std)**2)**-0.5
  assert exact(256 / 20) == pytest.approx(1.086, abs=5e-4) and factor == pytest.approx(exact(std))


@pytest.mark.parametrize('inside', [True, False])
@pytest.mark.parametrize('name', sorted(FOLLOWING))
def test_record_and_numbers_are_at_most_one_together(name, inside):
  """Checks and attains the claim of `contract.SideQuery`, for any lengths in each group."""
  zeta, sigma, norms = 0.7, 0.9, (1.0, 5.0)
  follow = FOLLOWING[name]
  rule = (rules.grouped(follow(rules.dp_sgd()), (0, 1), norms=norms) if inside
          else follow(rules.grouped(rules.dp_sgd(), (0, 1), norms=norms)))
  query, ask = rule.query(rule.init(loop.SPECS))[0], rule.asks[0]
  factor, std = ask.side_query.noise(sigma, 16)
  rng, sizes, joint = np.random.default_rng(0), (0.0, 0.05, 0.3, 1.0, 30.0, 1e30), []
  for a in sizes:
    for b in sizes:
      g = rng.normal(size=loop.SIZE)
      g = np.concatenate([a * g[:2] / np.linalg.norm(g[:2]), b * g[2:] / np.linalg.norm(g[2:])])
      sums = projection.project_record(ask, query, tf.constant(zeta, tf.float64), loop.split(g))
      f = sums.side_sum.numpy()
      assert f.shape == (ask.side_query.size,) and np.all(np.isfinite(f))
      joint.append(np.sum(loop.join(sums.total)**2) / (factor * zeta)**2
                   + (sigma * np.linalg.norm(f) / std)**2)
  assert max(joint) <= 1 + 1e-5 and max(joint) > 1 - 1e-4
  g[3] = np.inf
  sums = projection.project_record(ask, query, tf.constant(zeta, tf.float64), loop.split(g))
  assert not np.any(sums.side_sum) and not np.any(loop.join(sums.total))


@pytest.mark.thorough(rows=['slack'])
@pytest.mark.parametrize('name', sorted(FOLLOWING))
def test_every_engine_adds_up_the_same_numbers(name):
  model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, activation='tanh'),
                            keras.layers.Dense(1)])
  rng = np.random.default_rng(0)
  model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  x, y = rng.normal(size=(6, 3)), 3 * rng.normal(size=(6, 1))
  x[4] = np.nan  # Padding, and a record that is none.
  batch = interface.Batch(tf.constant(x, tf.float32), tf.constant(y, tf.float32), (),
                          tf.constant([True, False, True, True, True, True]))
  loss = lambda y, outputs, sample_weight: tf.reduce_sum(tf.square(y - outputs), 1)
  specs = [tf.TensorSpec(v.shape) for v in model.trainable_variables]
  base, groups = FOLLOWING[name], (0, 0, 1, 1)
  made = (rules.grouped(base(rules.dp_sgd()), groups, norms=(1.0, 3.0)),
          base(rules.grouped(rules.dp_sgd(), groups, norms=(1.0, 3.0))))
  asks = tuple(rule.asks[0] for rule in made)
  queries = tuple(rule.query(rule.init(specs))[0] for rule in made)
  clips = (4.0, 4.0)
  gradients = materialized.record_gradients(model, loss, batch.x, batch.y, vectorize=False)
  expected = [sum(projection.project_record(
      ask, query, 4.0, [g[i] for g in gradients]).side_sum for i in (0, 2, 3, 5))
              for ask, query in zip(asks, queries)]
  for engine in (bookkeeping.engine, materialized.layered):
    clipped = engine(model, loss, batch, interface.Request(asks, queries, clips))
    for sums, want in zip(clipped.sums, expected):
      np.testing.assert_allclose(sums.side_sum, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(clipped.norms[0], clipped.norms[1], rtol=1e-5)


def formula(rows, x, y, sigma, batch, rate):
  """DP-SGD of a kernel and a bias, float64: weights, and both clip norms, after every step."""
  size = x.shape[1]
  w, raw, std, path = np.full(size + 1, 0.3), 0.8 * np.array([1.0, 2.0]) / np.sqrt(5), 3.0, []
  factor = (1 - (sigma / (2 * std))**2)**-0.5
  count_std = std * np.sqrt(2)
  for z in rows:
    error = x @ w[:size] + w[size] - y
    parts = 2 * error[:, np.newaxis] * x, 2 * error[:, np.newaxis]
    share = raw * np.sqrt([size, 1]) / np.sum(raw * np.sqrt([size, 1]))
    total = []
    for k, (g, drawn) in enumerate(zip(parts, (z[:size], z[size:size + 1]))):
      norms = np.linalg.norm(g, axis=1)
      clipped = np.sum(g * np.minimum(1, raw[k] / norms)[:, np.newaxis], 0)
      total.append(clipped + factor * sigma * raw[k] / np.sqrt(share[k]) * drawn)
    within = np.array([np.sum(np.where(np.linalg.norm(g, axis=1) <= c, 0.5, -0.5))
                       for g, c in zip(parts, raw)])
    w = w - rate * np.concatenate(total) / batch
    raw = raw * np.exp(-0.5 * (0.5 + (within + count_std * z[size + 1:]) / batch - 0.6))
    path.append(np.concatenate([w, raw]))
  return np.array(path)


@pytest.mark.thorough
def test_keras_and_query_are_the_formula_with_explicit_noise(tmp_path):
  """Under correlated noise, saved in the middle; the split of the noise follows as well."""
  size, batch, sigma, rate, steps = 3, 8, 0.4, 0.1, 5
  mechanism = mechanisms.BLT(2, 6)
  specs = [tf.TensorSpec([size, 1]), tf.TensorSpec([1])]
  drawn = ((specs, (), tf.TensorSpec([2])),)
  stream = noise.stream(mechanism, lambda: keys.from_seed(9))
  state, rows = stream.init(drawn), []
  for _ in range(steps):
    row, _, state = stream.next(state, drawn)
    rows.append(np.concatenate([np.ravel(t) for t in tf.nest.flatten(row)]).astype(np.float64))
  rng = np.random.default_rng(3)
  x, y = rng.normal(size=(batch, size)).astype('float32'), rng.normal(size=batch).astype('float32')
  path = formula(rows, x, y, sigma, batch, rate)
  assert abs(np.log(path[-1, -2] / path[-1, -1] * 2)) > 0.02  # They went apart.
  private = dict(l2_norm_clip=0.8, noise_multiplier=sigma, batch_size=batch, seed=9,
                 mechanism=mechanism, adjacency='add_remove')
  follow = tfdp.clipping.Quantile(0.6, learning_rate=0.5, stddev=3.0)
  model = tfdp.DPSequential([keras.layers.Input((size,)), keras.layers.Dense(1)])
  model.set_weights([np.full((size, 1), 0.3), np.full(1, 0.3)])
  model.compile(optimizer=tfdp.DPSGD(
      rate, clipping=tfdp.clipping.PerVariable(follow, norms=[1.0, 2.0]), **private),
                loss='mse')
  for t in range(steps):
    model.train_on_batch(x, y[:, np.newaxis])
    if t == 2:
      model.save(str(tmp_path / 'm.keras'))
      model = keras.models.load_model(str(tmp_path / 'm.keras'))
    factors = np.exp([one.log_factor for one in model.optimizer.rule_state.rule])
    reached = np.concatenate([*map(np.ravel, model.get_weights()),
                              0.8 * np.array([1.0, 2.0]) / np.sqrt(5) * factors])
    np.testing.assert_allclose(reached, path[t], rtol=1e-4, atol=1e-5)

  queries = pytest.importorskip('tfdp_adaptive.queries')
  rule = rules.grouped(follow.rule(rules.dp_sgd()), (0, 1), norms=(1.0, 2.0))
  query = queries.RuleQuery(rule, specs, **private)
  state, w = query.initial_global_state(), [np.full((size, 1), 0.3), np.full(1, 0.3)]
  for expected in path:
    params, total = query.derive_sample_params(state), query.initial_sample_state()
    for one, target in zip(x, y):
      e = 2 * (one @ w[0] + w[1] - target)
      total = query.accumulate_record(params, total, [
          tf.constant(e * one[:, np.newaxis], tf.float32), tf.constant(e, tf.float32)])
    direction, state, _ = query.get_noised_result(total, state)
    w = [a - rate * d.numpy() for a, d in zip(w, direction)]
    np.testing.assert_allclose(np.concatenate([*map(np.ravel, w)]), expected[:size + 1],
                               rtol=1e-4, atol=1e-5)


def test_every_group_finds_its_quantile():
  """Nearly without noise, of norms that do not change and differ by a factor of a hundred."""
  rng = np.random.default_rng(0)
  norms = np.stack([rng.lognormal(size=400), 100 * rng.lognormal(size=400)], 1)
  for rule, quantile in (
      (rules.quantile_clip(rules.dp_sgd(), 0.7, bounds=(1e-6, 1e6)), 0.7),
      (rules.slack_clip(rules.dp_sgd(), 40, 0.3, 1.0, bounds=(1e-6, 1e6)), 0.3)):
    rule = rules.grouped(rule, (0, 1), 'equal')
    state = rule.init(loop.SPECS)
    for _ in range(200):
      query, = rule.query(state)
      clips = query.groups.clip * query.relative_clip
      scaled = tf.constant(norms) * query.groups.scale
      values = tf.reduce_mean(rule.asks[0].side_query.of_norm(scaled, clips), 0)
      _, state = rule.update(state, (contract.Release(
          loop.split(np.zeros(5)), tf.zeros([], tf.float64), side_mean=values),))
    within = np.mean(scaled.numpy() <= clips.numpy(), 0)
    np.testing.assert_allclose(within, [quantile] * 2, atol=0.03)
