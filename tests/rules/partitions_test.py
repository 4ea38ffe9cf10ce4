# SPDX-License-Identifier: Apache-2.0
"""A rule for every variable under one clip norm and one noise: limits, geometry, both adapters."""

import loop
import numpy as np
import oracle_parts as parts
import oracles_moments as moments
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise
from tfdp_adaptive import rules
from tfdp_adaptive import weights
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.noise import keys

keras = compat.keras


def first(spec):
  return spec.shape == [2]


def rest(spec):
  del spec
  return True


@pytest.mark.parametrize('make', [
    lambda: rules.scale_then_privatize(0.8, 0.9, scale_epsilon=0.2),
    lambda: rules.dp_adam_ime(0.8, 0.9, 0.05), lambda: rules.pagan(box=(-0.4, 0.5)),
    lambda: rules.adadps(epsilon=0.1), lambda: rules.dp_adam_bc(epsilon=0.05),
    lambda: rules.with_clipping(rules.dp_adam(), weights.AutoS()),
    lambda: rules.partition([(rest, rules.dp_rmsprop(0.8))])], ids=lambda make: make().name)
def test_the_partition_of_a_rule_with_itself_is_the_rule(make):
  rule, problem = make(), loop.Problem(clip=2.0)
  parted = rules.partition([(first, rule), (rest, rule)])
  assert (parted.public, parted.asks, parted.elementwise, bool(parted.project)) == (
      rule.public, rule.asks, rule.elementwise, bool(rule.project))
  expected, _ = loop.run(rule, problem)
  actual, state = loop.run(parted, problem)
  np.testing.assert_allclose(actual, expected, rtol=1e-9)
  assert int(state.step) == len(problem.sizes)


def test_scaled_and_raw_variables_share_one_clip_norm_and_one_noise():
  """Scale-then-privatize of two coordinates, DP-SGD of three, in float64 NumPy."""
  p = loop.Problem(clip=1.5)
  rule = rules.partition([(first, rules.scale_then_privatize(0.0, 0.9, 0.1, scale_epsilon=0.2)),
                          (rest, rules.dp_sgd())])
  theta, v, path = p.theta, np.zeros(2), [p.theta]
  for t in range(len(p.sizes)):
    s = np.concatenate([1 / (np.sqrt(v / (1 - 0.9**t) if t else v) + 0.2), np.ones(3)])
    g = (parts.clipped_sum(p.gradients(theta, t) * s, p.clip) / p.divisor + p.std * p.z[t]) / s
    v = 0.9 * v + 0.1 * g[:2]**2
    direction = g / np.concatenate([np.sqrt(v / (1 - 0.9**(t + 1))) + 0.1, np.ones(3)])
    theta = theta - p.rate * direction
    path.append(theta)
  actual, state = loop.run(rule, p)
  np.testing.assert_allclose(actual, path, rtol=1e-9)
  # However long the parts of a record are, together they are at most the clip norm.
  query, = rule.query(state)
  for sizes in ((1e9, 1e-3), (1e-3, 1e9), (1e9, 1e9)):
    record = loop.split(np.repeat(sizes, (2, 3)))
    total = projection.project_record(
        rule.asks[0], query, tf.constant(1.5, tf.float64), record).total
    assert np.linalg.norm(loop.join(total)) == pytest.approx(1.5)


def test_a_rule_without_variables_is_left_out():
  p = loop.Problem()
  rule = rules.partition([(lambda spec: False, rules.muon()), (rest, rules.dp_sgd(0.5))])
  np.testing.assert_allclose(loop.run(rule, p)[0], moments.sgd(0.5)(p), rtol=1e-9)


REFUSED = [
    (lambda: rules.partition([]), 'one or more pairs'),
    (lambda: rules.partition([(rules.dp_sgd(), rest)]), 'one or more pairs'),
    (lambda: rules.partition(rules.dp_sgd()), 'one or more pairs'),
    (lambda: rules.partition([(rest, rules.dp2_rmsprop(2, 1))]), 'in one unit'),
    (lambda: rules.partition([(rest, rules.quantile_clip(rules.dp_sgd()))]), 'around the part'),
    (lambda: rules.partition([(rest, rules.grouped(rules.dp_sgd(), (0, 1)))]), 'around the part'),
    (lambda: rules.partition([(first, rules.dp_sgd()), (rest, rules.dp_adam_ime())]), 'same'),
    (lambda: rules.partition([(first, rules.dp_sgd()), (rest, rules.pagan())]), 'same'),
    (lambda: rules.partition([(first, rules.dp_sgd()), (rest, rules.with_clipping(
        rules.dp_sgd(), weights.AutoS()))]), 'Apply `with_clipping` to the partition'),
    (lambda: rules.partition([(rest, rules.noisy_adagrad(2, diagonal=True))]), 'of one step'),
    (lambda: rules.partition([(first, rules.adadps()), (rest, rules.pdp_sgd(2))]), 'public'),
    (lambda: rules.partition([(first, rules.dp_sgd())]).init(loop.SPECS), 'for every variable'),
    (lambda: rules.partition([(first, rules.muon()), (rest, rules.dp_sgd())]).init(loop.SPECS),
     'for matrices')]


@pytest.mark.parametrize('make, match', REFUSED)
def test_refusals(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def made():
  return rules.quantile_clip(rules.partition([
      (lambda spec: 'bias' in spec.name, rules.dp_sgd(0.5)),
      (rest, rules.dp_adam(0.6, 0.9, 0.05))]), stddev=1.0)


@pytest.mark.thorough
def test_keras_and_query_are_the_formula_with_explicit_noise(tmp_path):
  """Chosen by names, under a clip norm that follows and correlated noise, and resumed."""
  size, batch, zeta, sigma, rate, steps = 3, 4, 0.7, 0.5, 0.1, 4
  rng = np.random.default_rng(3)
  x = rng.normal(size=(batch, size)).astype('float32')
  y = rng.normal(size=(batch, 2)).astype('float32')
  mechanism = mechanisms.BandedToeplitz(bands=2, steps=steps)
  stream = noise.stream(mechanism, lambda: keys.from_seed(9))
  named = (('kernel', (size, 2)), ('bias', (2,)))
  specs = [tf.TensorSpec(shape, name=name) for name, shape in named]
  drawn = ((specs, (), tf.TensorSpec([1])),)
  state, w = stream.init(drawn), [np.full(s, 0.3) for _, s in named]
  m, first, v, path = 0, 0, 0, []
  clip, factor = zeta, (1 - (sigma / 2)**2)**-0.5

  def gradients(w):
    for a, target in zip(x.astype(np.float64), y):
      e = 2 * (a @ w[0] + w[1] - target) / 2
      yield [np.outer(a, e), e]

  for t in range(steps):
    (row,), _, state = stream.next(state, drawn)
    (kernel, bias), _, count = tf.nest.map_structure(lambda z: np.asarray(z, np.float64), row)
    records = [np.concatenate([g[0].ravel(), g[1]]) for g in gradients(w)]
    total = sum(parts.clip(g, clip) for g in records) + factor * sigma * clip * np.concatenate(
        [kernel.ravel(), bias])
    g, within = total / batch, sum(np.linalg.norm(g) <= clip for g in records)
    first = 0.6 * first + 0.4 * g[:6]
    fed = first / (1 - 0.6**(t + 1))
    v, m = 0.9 * v + 0.1 * g[:6]**2, 0.5 * m + g[6:]
    w = [w[0] - rate * (fed / (np.sqrt(v / (1 - 0.9**(t + 1))) + 0.05)).reshape(size, 2),
         w[1] - rate * m]
    clip = clip * np.exp(-0.2 * ((within + count[0]) / batch - 0.5))
    path.append(w)

  private = dict(l2_norm_clip=zeta, noise_multiplier=sigma, batch_size=batch, mechanism=mechanism,
                 seed=9)
  model = tfdp.DPSequential([keras.layers.Input((size,)), keras.layers.Dense(2)])
  model.set_weights([np.full(shape, 0.3) for _, shape in named])
  model.compile(optimizer=tfdp.DPOptimizer(made(), rate, **private), loss='mse')
  for t, expected in enumerate(path):
    model.train_on_batch(x, y)
    for value, want in zip(model.get_weights(), expected):
      np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)
    if t == 1:  # Its state is one of tensors, so a checkpoint holds it.
      checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
      saved = checkpoint.save(str(tmp_path / 'c'))
      model.train_on_batch(x, y)
      checkpoint.restore(saved)
  assert 'partition(dp_sgd, dp_adam)' in model.optimizer.rule.name

  queries = pytest.importorskip('tfdp_adaptive.queries')
  query = queries.RuleQuery(made(), specs, **private)
  state, w = query.initial_global_state(), [np.full(s, 0.3, 'float32') for _, s in named]
  for expected in path:
    params, sums = query.derive_sample_params(state), query.initial_sample_state()
    for g in gradients(w):
      sums = query.accumulate_record(params, sums, [tf.constant(one, tf.float32) for one in g])
    direction, state, _ = query.get_noised_result(sums, state)
    w = [one - rate * d.numpy() for one, d in zip(w, direction)]
    for value, want in zip(w, expected):
      np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)


def test_groups_of_a_partition_have_the_noise_of_their_group():
  """Of nothing but noise: bias correction subtracts the variance of the group, in raw units."""
  parted = rules.partition([(first, rules.dp_adam_bc(0.0, 0.9, 1e-3)),
                            (rest, rules.dp_adam_bc(0.0, 0.8, 1e-3))])
  rule = rules.grouped(parted, (0, 1), norms=(1.0, 4.0))
  state = rule.init(loop.SPECS)
  release = contract.Release(loop.split(np.zeros(5)), tf.constant(0.01, tf.float64))
  _, after = rule.update(state, (release,))
  biases = [float(after.rule[0].rules[0].bias), float(after.rule[1].rules[1].bias)]
  scale = rule.query(state)[0].groups.scale.numpy()
  np.testing.assert_allclose(biases, [0.1, 0.2] * (0.01 / scale**2))
