# SPDX-License-Identifier: Apache-2.0
"""Clipping in groups: the split of the noise, its limits, every engine, both adapters."""

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
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.noise import keys
from tfdp_adaptive.rules import groups as groups_lib

keras = compat.keras


def query_of(rule, specs=loop.SPECS):
  return rule.query(rule.init(specs))[0]


@pytest.mark.parametrize('split', groups_lib.SPLITS)
def test_the_noise_that_a_split_adds(split):
  """Of C and d by brute force; the optimal one is the least of all."""
  rng = np.random.default_rng(0)
  sizes, norms, sigma = np.array([3, 700, 20]), np.array([0.2, 1.0, 5.0]), 0.7
  p = groups_lib.fractions(sizes, norms, split)
  stds = sigma * norms / np.sqrt(p)
  expected = {'global': sizes.sum() * np.sum(norms**2), 'equal': 3 * np.sum(sizes * norms**2),
              'optimal': np.sum(norms * np.sqrt(sizes))**2}
  total = lambda p: np.sum(sizes * (sigma * norms)**2 / p)
  assert total(p) == pytest.approx(sigma**2 * expected[split])
  assert sigma**-2 == pytest.approx(np.sum((norms / stds)**2))
  others = rng.dirichlet(np.ones(3), size=2000)
  least = total(groups_lib.fractions(sizes, norms, 'optimal'))
  assert min(total(one) for one in others) >= least - 1e-9


@pytest.mark.parametrize('split', groups_lib.SPLITS)
def test_records_are_clipped_group_by_group(split):
  """In raw units at C_k; in scaled space by at most the clip norm, in all together."""
  norms, zeta = np.array([3.0, 0.5]), 0.8
  rule = rules.grouped(rules.dp_sgd(), (1, 0), split, norms)
  query, ask = query_of(rule), rule.asks[0]
  raw = zeta * norms / np.linalg.norm(norms)
  for size in (1e-3, 0.3, 1.0, 1e5, 1e150):
    g = size * np.random.default_rng(1).normal(size=loop.SIZE)
    total = projection.project_record(
        ask, query, tf.constant(zeta, tf.float64), loop.split(g)).total
    clipped = loop.join(total)
    assert np.linalg.norm(clipped) <= zeta * (1 + 1e-12)
    assert size < 1e5 or np.linalg.norm(clipped) > zeta * (1 - 1e-12)
    scale = query.groups.scale.numpy()
    for part, k, s in ((slice(0, 2), 1, scale[1]), (slice(2, 5), 0, scale[0])):
      expected = g[part] * min(1, raw[k] / np.linalg.norm(g[part]))
      np.testing.assert_allclose(clipped[part] / s, expected, rtol=1e-9)
  for bad in (np.nan, np.inf):  # One group that is not finite leaves no record at all.
    g[4] = bad
    assert not loop.join(projection.project_record(
        ask, query, tf.constant(zeta, tf.float64), loop.split(g)).total).any()


def test_whatever_a_rule_asks_for_the_record_stays_within_the_clip_norm():
  greedy = contract.Groups(tf.constant([1.0, 1.0]), tf.constant([3.0, 4.0]))
  total = projection.project_record(
      contract.Ask(groups=(0, 1)), contract.Query(groups=greedy), 0.5,
      loop.split(1e6 * np.ones(5), tf.float32)).total
  assert np.linalg.norm(loop.join(total)) == pytest.approx(0.5)


def descend(rule, gradients, clip=0.8, sigma=0.5, steps=4):
  """Directions in float64, of clipped records and explicit noise of the scaled space."""
  state, rng, directions = rule.init(loop.SPECS), np.random.default_rng(5), []
  for t in range(steps):
    query, = rule.query(state)
    totals = [loop.join(projection.project_record(
        rule.asks[0], query, tf.constant(clip, tf.float64), loop.split((1 + t) * g)).total)
              for g in gradients]
    mean = (np.sum(totals, 0) + sigma * clip * rng.normal(size=loop.SIZE)) / 4
    variance = tf.constant((sigma * clip / 4)**2, tf.float64)
    direction, state = rule.update(state, (contract.Release(loop.split(mean), variance),))
    directions.append(loop.join(direction))
  return np.array(directions)


RECORDS = np.random.default_rng(2).normal(size=(4, loop.SIZE))


@pytest.mark.parametrize('rule', [
    rules.dp_sgd(0.5), rules.dp_adam_bc(epsilon=0.05), rules.scale_then_privatize(
        scale_epsilon=0.3)], ids=lambda r: r.name)
def test_one_group_is_the_rule(rule):
  for split in groups_lib.SPLITS:
    np.testing.assert_allclose(descend(rules.grouped(rule, (0, 0), split), RECORDS),
                               descend(rule, RECORDS), rtol=1e-6)


def test_groups_are_a_box_and_scales_an_ellipsoid():
  """Equal splits of two groups against one norm in the geometry s = 1 / C, at zeta = sqrt(2).

  They agree where nobody is clipped, or where all scaled parts are equally long.
  """
  norms = np.array([0.6, 0.8])  # Length one, so s_k = 1 / C_k at an l2_norm_clip of one.
  rule = rules.grouped(rules.dp_sgd(), (0, 1), 'equal', norms)
  query = query_of(rule)
  np.testing.assert_allclose(query.groups.scale, np.sqrt(0.5) / norms)
  ellipsoid = contract.Query(loop.split(np.repeat(np.sqrt(0.5) / norms, (2, 3))))
  unit = loop.join(loop.split(np.array([0.6, 0, 0.8, 0, 0])))

  def both(g):
    one = tf.constant(1.0, tf.float64)
    box = projection.project_record(rule.asks[0], query, one, loop.split(g)).total
    return loop.join(box), loop.join(projection.project_record(
        contract.Ask(), ellipsoid, one, loop.split(g)).total)

  for g in (0.9 * unit, 7.0 * unit, 0.1 * RECORDS[0]):
    np.testing.assert_allclose(*both(g), rtol=1e-12)
  assert np.abs(np.subtract(*both(np.array([9.0, 0, 0.1, 0, 0])))).max() > 0.05


def test_bias_correction_knows_the_noise_of_each_group():
  """Of nothing but noise: what is subtracted is the variance of the group, in raw units."""
  norms = np.array([1.0, 4.0])
  rule = rules.grouped(rules.dp_adam_bc(0.0, 0.9, 1e-3), (0, 1), norms=norms)
  state = rule.init(loop.SPECS)
  release = contract.Release(loop.split(np.zeros(5)), tf.constant(0.01, tf.float64))
  _, state = rule.update(state, (release,))
  biases = [float(one.bias) for one in state.rule]
  np.testing.assert_allclose(biases, 0.1 * 0.01 / query_of(rule).groups.scale.numpy()**2)
  assert biases[1] > 2 * biases[0]


@pytest.mark.thorough(but=['groups2-names2'])
@pytest.mark.parametrize('groups, names', [
    ('layer', (0, 0, 1, 1)), ('variable', (0, 1, 2, 3)), ((0, 1, 1, 1), (0, 1, 1, 1))])
def test_keras_is_the_formula_with_explicit_noise_and_query_is_keras(groups, names, tmp_path):
  """DP-SGD in float64 NumPy; one hidden layer, linear, so that gradients are products."""
  size, hidden, batch, clip, sigma, rate = 3, 2, 4, 0.7, 0.5, 0.1
  rng = np.random.default_rng(3)
  x = rng.normal(size=(batch, size)).astype('float32')
  y = rng.normal(size=(batch, 1)).astype('float32')
  start = [rng.normal(size=shape).astype('float32') for shape in (
      (size, hidden), (hidden,), (hidden, 1), (1,))]
  specs = [tf.TensorSpec(w.shape) for w in start]
  stream = noise.stream(mechanisms.IndependentGaussian(), lambda: keys.from_seed(9))
  kwargs = dict(clipping=tfdp.clipping.PerLayer(norms=(1.0, 2.0)) if groups == 'layer' else
                tfdp.clipping.PerVariable() if groups == 'variable' else
                tfdp.clipping.Groups(groups))
  raw = np.ones(max(names) + 1) if groups != 'layer' else np.array([1.0, 2.0])
  sizes = [sum(w.size for w, name in zip(start, names) if name == k) for k in range(len(raw))]
  raw = clip * raw / np.linalg.norm(raw)
  stds = sigma * raw / np.sqrt(groups_lib.fractions(sizes, raw, 'optimal'))

  state, path, weights = stream.init(((specs, ()),)), [], [w.astype(np.float64) for w in start]
  gradient = lambda w, a, t: [
      np.outer(a, e * w[2][:, 0]) for e in [2 * ((a @ w[0] + w[1]) @ w[2] + w[3] - t)[0]]] + [
          e * f for e in [2 * ((a @ w[0] + w[1]) @ w[2] + w[3] - t)[0]]
          for f in (w[2][:, 0], (a @ w[0] + w[1])[:, np.newaxis], np.ones(1))]
  records_of = lambda w: [gradient(w, a, t) for a, t in zip(x.astype(np.float64), y[:, 0])]
  for _ in range(3):
    row, _, state = stream.next(state, ((specs, ()),))
    total = [stds[name] * np.asarray(z, np.float64) for name, z in zip(names, row[0][0])]
    for record in records_of(weights):
      for k, bound in enumerate(raw):
        mine = [i for i, name in enumerate(names) if name == k]
        norm = np.sqrt(sum(np.sum(record[i]**2) for i in mine))
        for i in mine:
          total[i] = total[i] + record[i] * min(1, bound / norm)
    weights = [w - rate * t / batch for w, t in zip(weights, total)]
    path.append(weights)

  model = tfdp.DPSequential([keras.layers.Input((size,)), keras.layers.Dense(hidden),
                             keras.layers.Dense(1)])
  model.set_weights(start)
  private = dict(l2_norm_clip=clip, noise_multiplier=sigma, batch_size=batch, seed=9)
  model.compile(optimizer=tfdp.DPSGD(rate, **private, **kwargs), loss='mse')
  for t in range(3):
    model.train_on_batch(x, y)
    if t == 0 and groups == 'layer':
      model.save(str(tmp_path / 'm.keras'))
      model = keras.models.load_model(str(tmp_path / 'm.keras'))
    for value, expected in zip(model.get_weights(), path[t]):
      np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
  assert model.optimizer.rule.asks[0].groups == names

  queries = pytest.importorskip('tfdp_adaptive.queries')
  query = queries.RuleQuery(model.optimizer.rule, specs, **private)
  state, w = query.initial_global_state(), list(start)
  for expected in path:
    params, sums = query.derive_sample_params(state), query.initial_sample_state()
    for record in records_of(w):
      sums = query.accumulate_record(params, sums, [tf.constant(r, tf.float32) for r in record])
    direction, state, _ = query.get_noised_result(sums, state)
    w = [one - rate * d.numpy() for one, d in zip(w, direction)]
    for value, want in zip(w, expected):
      np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('make, match', [
    (lambda: rules.grouped(rules.dp_sgd(), (0, 2)), 'without a gap'),
    (lambda: rules.grouped(rules.dp_sgd(), ()), 'without a gap'),
    (lambda: rules.grouped(rules.dp_sgd(), (0, 1), norms=(1.0, 0.0)), 'one positive number'),
    (lambda: rules.grouped(rules.dp_sgd(), (0, 1), 'best'), '`split`'),
    (lambda: rules.grouped(rules.dp_sgd(), (0, 1, 1)).init(loop.SPECS), 'for every variable'),
    (lambda: rules.grouped(rules.pagan(), (0, 1)), 'one norm'),
    (lambda: rules.grouped(rules.dp2_rmsprop(2, 1), (0, 1)), 'one query'),
    (lambda: rules.grouped(rules.noisy_adagrad(2, diagonal=True), (0, 1)), 'one noise'),
    (lambda: rules.grouped(rules.quantile_clip(rules.dp_adam_ime()), (0, 1)), 'every coordinate'),
    (lambda: rules.quantile_clip(rules.grouped(rules.slack_clip(rules.dp_sgd(), 2), (0, 1))),
     'one unit'),
    (lambda: tfdp.clipping.Groups('layers'), '`groups` must be'),
    (lambda: tfdp.clipping.PerLayer(split='half'), 'split'),
    (lambda: tfdp.DPAdamIME(
        l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=64,
        clipping=tfdp.clipping.PerLayer(tfdp.clipping.Quantile())), 'every coordinate')])
def test_refusals(make, match):
  with pytest.raises(ValueError, match=match):
    make()


@pytest.mark.slow
@pytest.mark.parametrize('name, kwargs', [('DPSGD', {}), ('DPAdamSTP', dict(scale_epsilon=0.1))])
def test_the_audit_finds_no_record_that_moves_a_release_too_far(name, kwargs):
  optimizer = getattr(tfdp, name)(
      l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4, adjacency='add_remove',
      clipping=tfdp.clipping.PerLayer(), **kwargs)
  change = changes.largest(subjects.of(optimizer, 16), 1, history=(1,))
  assert not change.violated and 0.999 < change.size < 1.001
