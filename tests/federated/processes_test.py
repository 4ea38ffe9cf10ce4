# SPDX-License-Identifier: Apache-2.0
"""Every engine equals float64 NumPy over per-user deltas, and refuses the rest."""

import numpy as np
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules

COHORTS = [[0, 1, 2], [3, 4, 5, 0, 2], [], [1], [5, 3]]
RULES = {
    'dp_sgd': lambda: rules.dp_sgd(momentum=0.9),
    'dp_adam': rules.dp_adam,
    'scale_then_privatize': lambda: rules.scale_then_privatize(scale_epsilon=0.2),
    'dp2': lambda: rules.dp2_rmsprop(sgd_steps=2, adaptive_steps=1, epsilon=0.2),
}


class Oracle:
  """Server optimizers over clipped user deltas, in float64."""

  def __init__(self, name, plan, sign=1.0):
    self.name, self.plan, self.sign = name, plan, sign
    self.rows = iter(regression.noise_rows(len(COHORTS), plan.mechanism))
    self.weights = np.zeros(4)
    self.momentum = self.mu = self.nu = self.nu_hat = np.zeros(4)
    self.step = 0

  def next(self, cohort):
    scale = self.scale()
    total = np.zeros(4)
    for examples in cohort:
      v = scale * self.sign * regression.delta(self.weights, examples)
      norm = np.linalg.norm(v)
      total += v * min(1, self.plan.l2_norm_clip / norm) if norm else v
    noised = total + self.plan.noise_multiplier * self.plan.l2_norm_clip * next(self.rows)
    self.step += 1
    self.weights = self.weights - self.sign * 0.5 * self.direction(
        noised / self.plan.batch_size, scale)
    return self.weights

  def scale(self):
    if self.name == 'scale_then_privatize':
      return 1 / (np.sqrt(self.nu_hat) + 0.2)
    if self.name == 'dp2' and self.step % 3 == 2:
      return 1 / (np.sqrt(self.nu) + 0.2)
    return 1.0

  def direction(self, scaled, scale):
    g = scaled / scale
    if self.name == 'dp_sgd':
      self.momentum = 0.9 * self.momentum + g
      return self.momentum
    if self.name == 'dp2':  # Two rounds of SGD, then one that is preconditioned.
      if self.step % 3:
        self.mu = self.mu + g / 2
      if self.step % 3 == 2:
        self.nu, self.mu = 0.9 * self.nu + 0.1 * self.mu**2, np.zeros(4)
      return scaled
    self.mu = 0.9 * self.mu + 0.1 * g
    self.nu = 0.999 * self.nu + 0.001 * g**2
    self.nu_hat = self.nu / (1 - 0.999**self.step)
    return self.mu / (1 - 0.9**self.step) / (np.sqrt(self.nu_hat) + 1e-8)


def run(process, examples):
  state = process.initialize()
  trajectory = []
  users = tfdp.federated.Users(examples, batch_size=4)
  for cohort in COHORTS:
    state, _ = process.next(
        state, [users.create_tf_dataset_for_client(f'user{i}') for i in cohort])
    trajectory.append(regression.flat(process.get_model_weights(state)))
  return np.asarray(trajectory)


@pytest.mark.thorough(but=['in_process-dp_adam', 'in_process-dp2'])
@pytest.mark.parametrize('name', RULES)
def test_equals_numpy_over_user_deltas(name, engine):
  examples = regression.make_users()
  for sigma in (0.0, 0.5):
    plan = regression.make_plan(noise_multiplier=sigma)
    actual = run(regression.build(RULES[name](), plan, engine), examples)
    expected, flipped = (
        np.asarray([oracle.next([examples[f'user{i}'] for i in cohort]) for cohort in COHORTS])
        for oracle in (Oracle(name, plan), Oracle(name, plan, sign=-1.0)))
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)
    # Records of the wrong sign, ascended, are the same thing only without noise.
    assert (np.abs(flipped - actual).max() < 1e-3) == (sigma == 0)


@pytest.mark.parametrize('mechanism', [
    tfdp.mechanisms.BandedToeplitz(bands=3, steps=10), tfdp.mechanisms.BLT(buffers=2, steps=10)])
def test_correlated_noise_equals_numpy_too(mechanism, engine):
  examples = regression.make_users()
  plan = regression.make_plan(mechanism=mechanism, sampling=tfdp.sampling.FixedOrder())
  oracle = Oracle('dp_sgd', plan)
  np.testing.assert_allclose(
      run(regression.build(RULES['dp_sgd'](), plan, engine), examples),
      [oracle.next([examples[f'user{i}'] for i in cohort]) for cohort in COHORTS],
      rtol=2e-4, atol=1e-5)


@pytest.mark.thorough(but=['in_process-*', 'tff-two releases'])
@pytest.mark.parametrize('make', [
    rules.dp_adam_ime, lambda: rules.dp_soap(refresh_every=2),
    lambda: rules.dp_shampoo(refresh_every=2), rules.dp_muon],
                         ids=['two releases', 'soap', 'shampoo', 'singular values'])
def test_equals_the_query_and_the_rule_by_hand(make, engine):
  """rule loop = DPQuery loop = rounds of clients."""
  pytest.importorskip('tensorflow_privacy')
  from tfdp_adaptive import queries  # pylint: disable=g-import-not-at-top
  examples = regression.make_users()
  plan = regression.make_plan()
  rule = make()
  process = regression.build(rule, plan, engine)
  query = queries.RuleQuery(rule, [tf.TensorSpec([3, 1]), tf.TensorSpec([1])], plan=plan,
                            seed=regression.SEED)
  state, weights, trajectory = query.initial_global_state(), np.zeros(4), []
  for cohort in COHORTS:
    params, sums = query.derive_sample_params(state), query.initial_sample_state()
    for i in cohort:
      d = regression.delta(weights, examples[f'user{i}']).astype(np.float32)
      record = [tf.constant(d[:3, None]), tf.constant(d[3:])]
      sums = query.accumulate_record(params, sums, record)
    direction, state, _ = query.get_noised_result(sums, state)
    weights = weights - 0.5 * np.concatenate([np.ravel(x) for x in direction])
    trajectory.append(weights)
  np.testing.assert_allclose(run(process, examples), trajectory, rtol=2e-3, atol=1e-4)


@pytest.mark.thorough(rows=['tff'])
def test_federated_sgd_answers_with_the_gradient(engine):
  examples = regression.make_users()
  plan = regression.make_plan(noise_multiplier=0.0, l2_norm_clip=100.0)
  metrics = tfdp.federated.PrivateMetrics({'loss': (0.0, 50.0)})
  process = tfdp.federated.build_private_fed_sgd(
      server_rule=rules.dp_sgd(), plan=plan, server_learning_rate=0.5, private_metrics=metrics,
      **regression.of_engine(engine))
  users = tfdp.federated.Users(examples, batch_size=2)
  total, losses = np.zeros(4), []
  for i in (1, 2, 5):
    x, y = examples[f'user{i}']['x'], examples[f'user{i}']['y'][:, 0]
    if len(x):
      total += 2 * np.append(x.T @ -y, -y.sum()) / len(x)
    losses.append(np.mean(y**2) if len(x) else 0.0)
  state, metrics = process.next(
      process.initialize(), [users.create_tf_dataset_for_client(f'user{i}') for i in (1, 2, 5)])
  np.testing.assert_allclose(
      regression.flat(process.get_model_weights(state)), -0.5 * total / 3, rtol=1e-4)
  assert float(metrics['released']['clients']) == pytest.approx(3, rel=1e-5)
  assert float(metrics['released']['loss']) == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_neighbouring_population_moves_the_mean_by_the_clip_norm_at_most(engine):
  """One user gone, without data, with non-finite data and with a huge update."""
  plan = regression.make_plan(noise_multiplier=0.0)
  process = regression.build(rules.dp_sgd(), plan, engine)
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  cohort = [users.create_tf_dataset_for_client(f'user{i}') for i in (0, 2, 3)]
  batch = next(iter(users.create_tf_dataset_for_client('user4')))
  neighbours = {'gone': []}
  for name, factor in (('empty', None), ('nan', np.nan), ('huge', 1e18), ('negated', -1.0)):
    dataset = tf.data.Dataset.from_tensors(
        {k: tf.cast(v if factor is None else factor * v, tf.float32) for k, v in batch.items()})
    neighbours[name] = [dataset.take(0) if factor is None else dataset]

  def mean(cohort):
    state, _ = process.next(process.initialize(), cohort)
    return regression.flat(process.get_model_weights(state)) / -0.5

  without = mean(cohort)
  bound = plan.l2_norm_clip / plan.batch_size
  distances = {name: np.linalg.norm(mean(cohort + extra) - without)
               for name, extra in neighbours.items()}
  assert distances['gone'] == distances['empty'] == distances['nan'] == 0
  assert distances['huge'] <= bound * (1 + 1e-5)
  assert distances['negated'] == pytest.approx(bound, rel=1e-4)  # The bound is met.


@pytest.mark.thorough(rows=['tff'])
@pytest.mark.pitfall(
    "Exact sums or counts of clients are in a round's result.",
    severity='critical', stops='they are left out')
def test_nothing_exact_about_the_clients_comes_out(engine):
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  cohort = [users.create_tf_dataset_for_client('user3')]
  process = regression.build(rules.dp_sgd(), regression.make_plan(), engine)
  _, metrics = process.next(process.initialize(), cohort)
  assert list(metrics) == ['released'] and not metrics['released']


def test_refusals(engine):
  rule, plan = rules.dp_sgd(), regression.make_plan()
  with pytest.raises(ValueError, match="unit='user'"):
    regression.build(rule, regression.make_plan(unit='example'), engine)
  with pytest.raises(ValueError, match='taken at the server'):
    regression.build(rule._replace(public='mean'), plan, engine)
  with pytest.raises(ValueError, match='dp_kfc does: they would have to be taken at the server'):
    regression.build(rules.dp_kfc(), plan, engine)
