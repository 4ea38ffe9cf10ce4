# SPDX-License-Identifier: Apache-2.0
"""RuleQuery: the same numbers as float64 NumPy, bounded records, honest noise."""

import collections

import dp_accounting
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import noise as noise_lib
from tfdp_adaptive import privatizer
from tfdp_adaptive import queries
from tfdp_adaptive import rules
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.noise import keys

CLIP, SIGMA, BATCH, SEED = 0.5, 0.8, 4, 11
SPECS = collections.OrderedDict(
    kernel=tf.TensorSpec([3, 2], tf.float32), bias=tf.TensorSpec([2], tf.float32))
RULES = {
    'dp_sgd': lambda: rules.dp_sgd(momentum=0.9),
    'dp_adam': rules.dp_adam,
    'dp_adam_bc': rules.dp_adam_bc,
    'dp_adam_ime': rules.dp_adam_ime,
    'scale_then_privatize': lambda: rules.scale_then_privatize(scale_epsilon=0.1),
    'dp_soap': lambda: rules.dp_soap(refresh_every=1),
}
MORE_RULES = {
    'dp2': lambda: rules.dp2_rmsprop(2, 1, relative_adaptive_clip=0.5),
    'dp2_extra_query': lambda: rules.dp2_adagrad(2, 2, ablation='extra_query'),
    'dp_adam_jme': rules.dp_adam_jme,
    'pasan': rules.pasan,
    'pagan': rules.pagan,
    **RULES,
}


def make_query(rule, noise_multiplier=SIGMA, **kwargs):
  arguments = dict(l2_norm_clip=CLIP, noise_multiplier=noise_multiplier, batch_size=BATCH)
  arguments.update(kwargs)
  return queries.RuleQuery(rule, SPECS, **arguments)


def scaled_query(rule):
  """One whose scales differ from coordinate to coordinate after a few rounds."""
  return make_query(rule, 0.2, l2_norm_clip=8 * CLIP, seed=SEED)


def rounds_of_records(rounds=4, seed=0):
  """Cohorts of different sizes, an empty one included."""
  rng = np.random.default_rng(seed)
  return [[collections.OrderedDict(kernel=rng.normal(size=(3, 2)).astype(np.float32),
                                   bias=rng.normal(size=2).astype(np.float32))
           for _ in range(size)] for size in (5, 2, 0, 4)[:rounds]]


def flat(tree):
  return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in tf.nest.flatten(tree)])


def run(query, cohorts, wrap=lambda f: f):
  """Directions of the DPQuery protocol, and its last state."""
  state = query.initial_global_state()
  preprocess = wrap(query.preprocess_record)
  finish = wrap(lambda sums, state: query.get_noised_result(sums, state)[:2])
  directions = []
  for records in cohorts:
    params = query.derive_sample_params(state)
    sums = query.initial_sample_state(SPECS)
    for record in records:
      record = tf.nest.map_structure(tf.constant, record)
      sums = query.accumulate_preprocessed_record(sums, preprocess(params, record))
    direction, state = finish(sums, state)
    directions.append(flat(direction))
  return directions, state


def noise_rows(count, specs):
  stream = noise_lib.stream(toeplitz.IndependentGaussian(), lambda: keys.from_seed(SEED))
  state, rows = stream.init(specs), []
  for _ in range(count):
    row, _, state = stream.next(state, specs)
    rows.append(flat(row))
  return rows


def adam_oracle(cohorts, sigma, scale_epsilon=None):
  """DP-Adam, and scale-then-privatize over it, in float64 (algorithms 5 and 8)."""
  rows = noise_rows(len(cohorts), (((SPECS, ()),)))
  mu = nu = nu_hat = np.zeros(8)
  directions = []
  for t, (records, row) in enumerate(zip(cohorts, rows), 1):
    s = 1.0 if scale_epsilon is None else 1 / (np.sqrt(nu_hat) + scale_epsilon)
    total = np.zeros(8)
    for record in records:
      v = s * flat(record)
      total += v * min(1, CLIP / np.linalg.norm(v))
    g = (total + sigma * CLIP * row) / BATCH / s
    mu = 0.9 * mu + 0.1 * g
    nu = 0.999 * nu + 0.001 * g**2
    nu_hat = nu / (1 - 0.999**t)
    directions.append(mu / (1 - 0.9**t) / (np.sqrt(nu_hat) + 1e-8))
  return directions


@pytest.mark.parametrize('sigma', [0.0, SIGMA])
@pytest.mark.parametrize('scale_epsilon', [None, 0.1])
def test_equals_adam_in_numpy(sigma, scale_epsilon):
  rule = (rules.dp_adam() if scale_epsilon is None
          else rules.scale_then_privatize(scale_epsilon=scale_epsilon))
  cohorts = rounds_of_records()
  actual, _ = run(make_query(rule, sigma, seed=SEED), cohorts)
  np.testing.assert_allclose(
      actual, adam_oracle(cohorts, sigma, scale_epsilon), rtol=2e-4, atol=1e-6)
  if sigma:  # A record of the wrong sign is another result, once there is noise.
    negated = [[tf.nest.map_structure(np.negative, r) for r in records] for records in cohorts]
    assert np.abs(-flat(adam_oracle(negated, sigma, scale_epsilon)) - flat(actual)).max() > 0.1


@pytest.mark.parametrize('name', MORE_RULES)
def test_equals_the_contract_by_hand(name):
  """query, project_record, release and update, with every rule that a DPQuery can run."""
  rule, cohorts = MORE_RULES[name](), rounds_of_records()
  adjacency = 'replace' if name == 'dp_adam_jme' else 'zero_out'
  actual, _ = run(make_query(rule, seed=SEED, adjacency=adjacency), cohorts)
  noiser = privatizer.Privatizer(
      rule.asks, SPECS, l2_norm_clip=CLIP, noise_multiplier=SIGMA, batch_size=BATCH,
      adjacency=adjacency, seed=SEED)
  state, secret = rule.init(noiser.specs), noiser.init()
  for records, direction in zip(cohorts, actual):
    asked = rule.query(state, ())
    sums = [interface.zero_sums(ask, noiser.specs) for ask in rule.asks]
    for record in records:
      record = tf.nest.map_structure(tf.constant, record)
      sums = [interface.add_sums(total, projection.project_record(ask, query, clip, record))
              for total, ask, query, clip in zip(sums, rule.asks, asked, noiser.resolve(asked))]
    releases, secret = noiser.release(secret, asked, tuple(sums))
    expected, state = rule.update(state, releases, ())
    # Bias correction takes differences, which magnifies rounding.
    np.testing.assert_allclose(direction, flat(expected), rtol=1e-4, atol=1e-7)


@pytest.mark.thorough(but=[
    'True-dp_sgd', 'True-dp_soap', 'True-scale_then_privatize', 'False-dp_adam_ime'])
@pytest.mark.parametrize('name', RULES)
@pytest.mark.parametrize('jit_compile', [False, True])
def test_graph_and_xla_equal_eager_without_noise(name, jit_compile):
  # With noise only the graph can: XLA has random streams of its own.
  sigma = 0.0 if jit_compile else SIGMA
  wrap = lambda function: tf.function(
      function, jit_compile=jit_compile, autograph=not jit_compile)
  eager, _ = run(make_query(RULES[name](), sigma, seed=SEED), rounds_of_records())
  graph, _ = run(make_query(RULES[name](), sigma, seed=SEED), rounds_of_records(), wrap)
  np.testing.assert_allclose(graph, eager, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('jit_compile', [False, True])
def test_noise_has_its_standard_deviation_and_no_other(jit_compile):
  specs = tf.TensorSpec([1500], tf.float32)
  query = queries.RuleQuery(rules.dp_sgd(), specs, l2_norm_clip=CLIP, noise_multiplier=SIGMA,
                            batch_size=BATCH, seed=SEED)
  result = tf.function(lambda state: query.get_noised_result(
      query.initial_sample_state(specs), state)[:2], jit_compile=jit_compile)
  state = query.initial_global_state()
  samples = []
  for _ in range(2):
    direction, state = result(state)
    samples.append(direction.numpy())
  assert not np.any(samples[0] == samples[1])
  std = SIGMA * CLIP / BATCH
  for factor in (1, 2 / 3, 1.5):
    accepted = stats.kstest(np.concatenate(samples), 'norm', (0, std * factor)).pvalue > 1e-3
    assert accepted == (factor == 1)


def test_replace_adjacency_doubles_the_noise():
  cohorts = [[], []]
  single, _ = run(make_query(rules.dp_sgd(), seed=SEED), cohorts)
  double, _ = run(make_query(rules.dp_sgd(), seed=SEED, adjacency='replace'), cohorts)
  np.testing.assert_allclose(double, 2 * np.asarray(single), rtol=1e-6)


@pytest.mark.parametrize('name', RULES)
def test_a_record_moves_the_sums_by_at_most_the_clip_norm(name):
  """Users with nothing, NaN, infinite and huge updates, in the geometry of a later round."""
  query = scaled_query(RULES[name]())
  _, state = run(query, rounds_of_records())
  params = query.derive_sample_params(state)
  clip = 8 * CLIP
  scale = flat(params.scales[0]) if name == 'scale_then_privatize' else np.ones(8)
  assert name != 'scale_then_privatize' or scale.max() > 1.5 * scale.min()
  base_record = rounds_of_records(1, seed=5)[0][0]
  for factor in (0.0, 1e-3, 1.0, 1e6, 1e30, np.inf, np.nan):
    with np.errstate(invalid='ignore'):
      record = tf.nest.map_structure(lambda x: x * np.float32(factor), base_record)
    (sums,) = query.preprocess_record(params, record)
    norm = np.linalg.norm(flat(sums.total))
    assert norm <= clip * (1 + 1e-6)
    if not np.isfinite(factor):
      assert norm == 0
    elif factor > 1:
      assert norm == pytest.approx(clip, rel=1e-5)
      v = scale * flat(base_record)
      if name == 'dp_soap':
        v = flat(geometry.rescale(base_record, geometry.unpacked(params.scales[0], base_record)))
        assert np.abs(v / flat(base_record) - 1).max() > .05
      np.testing.assert_allclose(flat(sums.total), v / np.linalg.norm(v) * clip, rtol=1e-4)


def test_every_init_draws_a_key_of_its_own():
  query = make_query(rules.dp_adam())
  graph_init = tf.function(query.initial_global_state)
  drawn = {tuple(init().privatizer.noise.key.numpy())
           for init in (query.initial_global_state, graph_init) for _ in range(3)}
  assert len(drawn) == 6


def test_a_plan_gives_the_numbers():
  plan = tfdp.PrivacyPlan(
      batch_size=BATCH, steps=2, l2_norm_clip=CLIP, noise_multiplier=SIGMA, target_delta=1e-5,
      population_size=8, unit='user', adjacency='replace', sampling=tfdp.sampling.FixedOrder())
  planned = queries.RuleQuery(rules.dp_sgd(), SPECS, plan=plan, seed=SEED)
  direct = make_query(rules.dp_sgd(), adjacency='replace', seed=SEED)
  np.testing.assert_array_equal(run(planned, [[], []])[0], run(direct, [[], []])[0])
  with pytest.raises(tf.errors.InvalidArgumentError, match='cover 2 steps'):
    run(planned, [[], [], []])


def test_events():
  assert make_query(rules.dp_adam_ime()).event == dp_accounting.GaussianDpEvent(SIGMA)
  assert make_query(rules.dp_sgd(), 0.0).event == dp_accounting.NonPrivateDpEvent()
  *_, event = make_query(rules.dp_sgd()).get_noised_result(
      make_query(rules.dp_sgd()).initial_sample_state(),
      make_query(rules.dp_sgd()).initial_global_state())
  assert event == dp_accounting.GaussianDpEvent(SIGMA)


@pytest.mark.pitfall(
    'A rule that releases statistics of past rounds is charged as one plain Gaussian per round.',
    severity='critical',
    stops='the rule gives no cost per round; the plan accounts for the whole run')
def test_a_rule_that_releases_the_past_has_no_event_of_one_round():
  for relative_noise in (1.0, 5.0):
    rule = rules.noisy_adagrad(participations=1, diagonal=True, relative_noise=relative_noise)
    event = make_query(rule, max_participations=1).event
    assert event == dp_accounting.UnsupportedDpEvent()
    assert not dp_accounting.pld.PLDAccountant().supports(event)


@pytest.mark.pitfall(
    'The rule of a query was made for fewer participations than records have in the plan.',
    severity='critical', stops='ValueError, unless a plan or the caller says how many there are')
@pytest.mark.parametrize('most', [None, 3])
def test_participations_must_be_known(most):
  rule = rules.noisy_adagrad(participations=2, diagonal=True)
  with pytest.raises(ValueError, match=f'of at most 2.*max_participations={most}'):
    make_query(rule, max_participations=most)
  make_query(rule, max_participations=2)


def test_rules_that_need_the_parameters_are_refused():
  rule = rules.dp_sgd()
  with pytest.raises(ValueError, match='public gradients at the current parameters'):
    make_query(rule._replace(public='mean'))
  with pytest.raises(ValueError, match='project the parameters'):
    make_query(rule._replace(project=lambda state, params: params))
  with pytest.raises(ValueError, match='with independent noise'):
    make_query(rule._replace(independent_noise=True),
               mechanism=tfdp.mechanisms.BandedToeplitz(bands=2, steps=4))


def test_missing_or_doubled_numbers_are_refused():
  with pytest.raises(ValueError, match=r"Missing \['noise_multiplier'\]"):
    queries.RuleQuery(rules.dp_sgd(), SPECS, l2_norm_clip=1.0, batch_size=2)
  plan = tfdp.PrivacyPlan(
      population_size=20, batch_size=2, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3, unit='user')
  with pytest.raises(ValueError, match='must not be given again'):
    queries.RuleQuery(rules.dp_sgd(), SPECS, plan=plan, batch_size=2)
  with pytest.raises(ValueError, match="not be given again. Received: .'adjacency'"):
    queries.RuleQuery(rules.dp_sgd(), SPECS, plan=plan, adjacency='replace')
  with pytest.raises(ValueError, match='must be a `tfdp.PrivacyPlan`'):
    queries.RuleQuery(rules.dp_sgd(), SPECS, plan=object())



def test_records_of_low_precision_are_noised_in_float32():
  specs = tf.TensorSpec([4], tf.bfloat16)
  query = queries.RuleQuery(rules.dp_adam(), specs, l2_norm_clip=CLIP, noise_multiplier=SIGMA,
                            batch_size=BATCH)
  state = query.initial_global_state()
  (sums,) = query.preprocess_record(query.derive_sample_params(state), tf.ones([4], tf.bfloat16))
  direction, state, _ = query.get_noised_result((sums,), state)
  assert sums.total.dtype == tf.float32 and direction.dtype == tf.bfloat16
  assert all(leaf.dtype != tf.bfloat16 for leaf in tf.nest.flatten(state))


def test_euclidean_projection_reaches_the_record():
  rule = RULES['scale_then_privatize']()._replace(
      asks=(contract.Ask(projection='euclidean'),))
  query = scaled_query(rule)
  _, state = run(query, rounds_of_records())
  params = query.derive_sample_params(state)
  record = rounds_of_records(1, seed=5)[0][0]
  (sums,) = query.preprocess_record(params, record)
  (rescaled,) = scaled_query(RULES['scale_then_privatize']()).preprocess_record(params, record)
  scale, x = flat(params.scales[0]), flat(record)
  assert np.linalg.norm(flat(sums.total)) == pytest.approx(8 * CLIP, rel=1e-5)
  nearest = np.linalg.norm(x - flat(sums.total) / scale)
  assert nearest < np.linalg.norm(x - flat(rescaled.total) / scale) - 1e-3


@pytest.mark.parametrize('clip_norm', [CLIP, 1e-20, 1e30])
@pytest.mark.parametrize('size', [0.0, 1e-38, 1e-22, 1e-8, 0.1, 1.0, 1e15, 1e19, 3e37])
def test_two_passes_clip_like_the_definition(size, clip_norm):
  """Whatever the magnitude, and with a spoilt coordinate."""
  query = make_query(rules.dp_sgd(), 0.0, l2_norm_clip=clip_norm)
  params = query.derive_sample_params(query.initial_global_state())
  for spoilt in (None, np.nan, np.inf, -np.inf):
    kernel = size * np.array([[1, -2], [0.5, 3], [0, 1]], np.float32)
    if spoilt is not None:
      kernel[1, 0] = spoilt
    record = collections.OrderedDict(kernel=kernel, bias=size * np.array([2, -1], np.float32))
    (actual,) = query.preprocess_record(params, tf.nest.map_structure(tf.constant, record))
    v = flat(record)
    norm = np.sqrt(np.sum(v**2))
    expected = np.zeros(8) if spoilt is not None else (
        v if norm <= clip_norm else v * (clip_norm / norm))
    np.testing.assert_allclose(flat(actual.total), expected, rtol=2e-6, atol=2e-38)


def test_a_long_record_is_clipped_to_its_norm_in_single_precision():
  specs = tf.TensorSpec([2_000_000])
  query = queries.RuleQuery(rules.dp_sgd(), specs, l2_norm_clip=CLIP, noise_multiplier=0.0,
                            batch_size=1)
  params = query.derive_sample_params(query.initial_global_state())
  record = np.random.default_rng(0).uniform(0.9, 1.1, 2_000_000).astype(np.float32)
  (actual,) = query.preprocess_record(params, tf.constant(record))
  assert np.linalg.norm(actual.total.numpy().astype(np.float64)) == pytest.approx(CLIP, rel=1e-5)
