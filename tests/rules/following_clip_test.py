# SPDX-License-Identifier: Apache-2.0
"""Clip norms that follow: proofs by brute force, explicit noise, every engine, both adapters."""

import loop
import numpy as np
import pytest
from scipy import signal
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.noise import keys

keras = compat.keras
QUANTILE = rules.quantile_clip(rules.dp_sgd()).asks[0]
NORMS = np.concatenate([
    [0.0, 1.0], np.geomspace(1e-38, 3e38, 200), np.linspace(0, 1.1, 2001)])


def slack(buckets, rule=None):
  return rules.slack_clip(rule or rules.dp_sgd(), buckets).asks[0]


def numbers(ask, norm, zeta, dtype=tf.float64):
  return ask.side_query.of_norm(tf.constant(norm, dtype), tf.constant(zeta, dtype)).numpy()


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
@pytest.mark.parametrize('zeta', [1e-20, 0.7, 1e20])
@pytest.mark.parametrize('sigma, batch', [(1.0, 256), (0.4, 5), (3.0, 64)])
def test_record_and_numbers_are_at_most_one_together(sigma, batch, zeta, dtype):
  """The claim of `contract.SideQuery` for every norm, and that it is attained."""
  norms = np.minimum(zeta * NORMS, 3e38)
  for ask in (QUANTILE, slack(1), slack(4), slack(13)):
    factor, std = ask.side_query.noise(sigma, batch)
    f = numbers(ask, norms, zeta, dtype).astype(np.float64)
    assert np.all(np.isfinite(f)) and f.shape == (len(norms), ask.side_query.size)
    joint = np.minimum(norms / zeta, 1)**2 / factor**2 + sigma**2 * np.sum(f**2, 1) / std**2
    assert joint.max() <= 1 + 1e-6 and joint.max() > 1 - 1e-5
    if ask is QUANTILE:
      assert joint[norms > zeta].min() > 1 - 1e-6  # At every clipped record.


def test_a_weight_above_one_takes_the_slack_twice():
  """Joint norms of 1.31 and 1.23, by which the noise would be too small: refused."""
  n = np.linspace(0, 1, 20_001)
  f = np.sum(numbers(slack(300), n, 1.0)**2, 1)
  for clipping, w, joint in ((tfdp.clipping.AutoS(), 1 / (n + 0.01), 1.31),
                             (tfdp.clipping.PSAC(0.01), 1 / (n + 0.01 / (n + 0.01)), 1.23)):
    assert np.sqrt(np.max((n * w)**2 + f)) == pytest.approx(joint, abs=0.01)
    with pytest.raises(ValueError, match='Slack is what'):
      rules.slack_clip(rules.with_clipping(rules.dp_sgd(), clipping), 1)
    late = rules.with_clipping(rules.slack_clip(rules.dp_sgd(), 4), clipping)
    with pytest.raises(ValueError, match='Slack is what'):
      privatizer.Privatizer(late.asks, loop.SPECS, l2_norm_clip=1.0, noise_multiplier=1.0,
                            batch_size=4)
  with pytest.raises(ValueError, match='second=True'):
    rules.slack_clip(rules.dp_adam_ime(), 4)


def test_reference_values():
  assert QUANTILE.side_query.noise(1.0, 256)[0] == pytest.approx(1.00076, abs=5e-6)
  assert [rules.slack_buckets(b, 1.0) for b in (128, 256, 512, 1024, 2048)] == [8, 13, 21, 34, 54]


def test_the_error_of_a_clip_norm_that_follows():
  """Root mean square of log zeta's noise over 2000 steps, in units of learning_rate * stddev / B.

  With nothing to forget it is a prefix sum of counts: 31.6 with independent noise, 4.25 with 128
  bands, the default of the library, and 3.32 with the square root, which has no bands.
  Where the count answers to zeta (d b / d log zeta = .4) the loop forgets: 2.55 with
  independent noise, 2.34 with these 128 bands and 1.88 with the square root cut off at 128.
  """
  steps = 2000
  bands = mechanisms.BandedToeplitz(128, steps)
  assert mechanisms.IndependentGaussian().rmse(steps) == pytest.approx(31.6, abs=0.05)
  assert bands.rmse() == pytest.approx(4.25, abs=0.005)
  assert mechanisms.SquareRoot(steps).rmse() == pytest.approx(3.32, abs=0.005)
  memory = (1 - 0.2 * 0.4)**np.arange(steps)
  root = np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, 128)]))
  inverse = signal.lfilter([1.0], root, np.eye(1, steps)[0])
  for noising, sensitivity, error in (
      (np.eye(1, steps)[0], 1.0, 2.55), (bands.noising(steps), bands.sensitivity(), 2.34),
      (inverse, np.linalg.norm(root), 1.88)):
    row = np.convolve(memory, noising)[:steps]
    assert sensitivity * np.sqrt(np.mean(np.cumsum(row**2))) == pytest.approx(error, abs=0.006)


def test_slack_brackets_the_distribution_of_norms():
  rng = np.random.default_rng(0)
  n, zeta, k = rng.lognormal(size=4000), 1.3, 5
  s = np.sqrt(k) * numbers(slack(k), n, zeta).mean(0)
  for i in range(k):
    assert np.mean(n <= zeta * (1 - (i + 1) / k)) - 1e-5 <= s[i] <= np.mean(n < zeta * (1 - i / k))


REFUSED = [
    (lambda: rules.quantile_clip(rules.dp2_rmsprop(2, 1)), 'one query'),
    (lambda: rules.quantile_clip(rules.dp2_rmsprop(2, 2, ablation='extra_query')), 'one query'),
    (lambda: rules.quantile_clip(rules.noisy_adagrad(2, diagonal=True)), 'one step'),
    (lambda: rules.slack_clip(rules.quantile_clip(rules.dp_sgd()), 4), 'fixed clip norm'),
    (lambda: rules.quantile_clip(rules.dp_sgd(), 1.0), 'quantile'),
    (lambda: rules.quantile_clip(rules.dp_sgd(), bounds=(2.0, 3.0)), 'bounds'),
    (lambda: rules.quantile_clip(rules.dp_sgd(), stddev=.5).asks[0].side_query.noise(1.0, 10),
     'more than half'),
    (lambda: tfdp.clipping.Quantile(1.0), 'quantile'),
    (lambda: tfdp.clipping.Slack(0.5, tfdp.clipping.AutoS()), 'brought up|follow'),
    (lambda: tfdp.clipping.Quantile(0.5, tfdp.clipping.Slack()), 'inside it')]


@pytest.mark.parametrize('make, match', REFUSED)
def test_refusals(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def test_sampling_under_replace_is_for_one_sum_only():
  try:
    plan = tfdp.PrivacyPlan(batch_size=4, steps=10, l2_norm_clip=1.0, noise_multiplier=0.2,
                            target_delta=1e-5, population_size=40, adjacency='replace')
  except ValueError as error:  # dp_accounting of the federated stack.
    pytest.skip(str(error))
  tfdp.DPSGD(plan=plan)
  with pytest.raises(ValueError, match='one clipped sum per step'):
    tfdp.DPSGD(plan=plan, clipping=tfdp.clipping.Slack())


def test_the_statement_says_it():
  plan = tfdp.PrivacyPlan(batch_size=4, steps=10, l2_norm_clip=1.0, noise_multiplier=0.2,
                          target_delta=1e-5, population_size=40)
  text = tfdp.DPSGD(plan=plan, clipping=tfdp.clipping.Quantile()).statement()
  assert 'The clip norm given is the first' in text
  assert tfdp.DPSGD(plan=plan, clipping=tfdp.clipping.Slack()).epsilon() == plan.epsilon()


def model_and_batch():
  model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, activation='tanh'),
                            keras.layers.Dense(1)])
  rng = np.random.default_rng(0)
  model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  x, y = rng.normal(size=(6, 3)), 3 * rng.normal(size=(6, 1))
  x[4] = np.nan  # Padding, and a record that is none.
  mask = tf.constant([True, False, True, True, True, True])
  return model, interface.Batch(
      tf.constant(x, tf.float32), tf.constant(y, tf.float32), (), mask)


@pytest.mark.parametrize('engines', [
    (bookkeeping.engine, chunks.chunked(bookkeeping.engine, 4)),
    pytest.param((materialized.layered, materialized.looped), marks=pytest.mark.slow)])
def test_every_engine_adds_up_the_same_numbers(engines):
  model, batch = model_and_batch()
  loss = lambda y, outputs, sample_weight: tf.reduce_sum(tf.square(y - outputs), 1)
  asks = QUANTILE, slack(3)
  gradients = materialized.record_gradients(model, loss, batch.x, batch.y, vectorize=False)
  norms = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64), tuple(range(1, g.ndim)))
                      for g in map(np.asarray, gradients)))[[0, 2, 3, 5]]
  clips = (float(np.median(norms)), 1.1 * float(np.median(norms)))
  request = interface.Request(asks, (contract.Query(),) * 2, clips)
  expected = [numbers(ask, norms, clip).sum(0) for ask, clip in zip(asks, clips)]
  for engine in engines:
    for sums, want in zip(engine(model, loss, batch, request).sums, expected):
      np.testing.assert_allclose(sums.side_sum, want, rtol=1e-5)
  for ask, clip in zip(asks, clips):
    specs = [tf.TensorSpec(v.shape) for v in model.trainable_variables]
    empty = interface.zero_sums(ask, specs)
    assert not np.any(empty.side_sum)
    total = projection.project_record(
        ask, contract.Query(), clip, [g[2] for g in gradients])
    np.testing.assert_allclose(total.side_sum, numbers(ask, norms[1], clip), rtol=1e-5)


STEPS, SIZE, SIGMA, BATCH, RATE = 5, 3, 0.4, 8, 0.1
FOLLOWED = {
    'quantile': (dict(clipping=tfdp.clipping.Quantile(0.6, learning_rate=0.5)), 1),
    'slack': (dict(clipping=tfdp.clipping.Slack(0.6, buckets=3)), 3)}


def drawn_rows(mechanism, size):
  """[STEPS, SIZE + size] of the stream that both adapters draw from the same seed."""
  specs = (([tf.TensorSpec([SIZE, 1])], (), tf.TensorSpec([size])),)
  stream = noise.stream(mechanism, lambda: keys.from_seed(9))
  state, rows = stream.init(specs), []
  for _ in range(STEPS):
    row, _, state = stream.next(state, specs)
    rows.append(np.concatenate([np.ravel(t) for t in tf.nest.flatten(row)]).astype(np.float64))
  return np.array(rows)


def formula(name, rows, x, y, present):
  """Weights and clip norms after every step, in float64 NumPy, by DP-SGD."""
  w, zeta, path = np.full(SIZE, 0.3), 0.8, []
  for z in rows:
    records = (2 * (x @ w - y) * x.T).T[present]
    norms = np.linalg.norm(records, axis=1)
    std = max(BATCH / 20, 2 * SIGMA)
    factor = (1 - (SIGMA / (2 * std))**2)**-0.5
    if name == 'quantile':
      count = np.sum(np.where(norms <= zeta, 0.5, -0.5)) + std * z[SIZE]
      move = -0.5 * (0.5 + count / BATCH - 0.6)
    else:
      f = np.clip(np.sqrt(3) * np.maximum(zeta - norms, 0)[:, np.newaxis]
                  - np.arange(3) * zeta / np.sqrt(3), 0, zeta / np.sqrt(3))
      s = (f.sum(0) + SIGMA * zeta * z[SIZE:]) / (zeta / np.sqrt(3) * BATCH)
      factor, move = 1.0, 0.5 * (0.6 - s[0])
    total = np.sum(records * np.minimum(1, zeta / norms)[:, np.newaxis], 0)
    w = w - RATE * (total + factor * SIGMA * zeta * z[:SIZE]) / BATCH
    zeta = zeta * np.exp(move)
    path.append(np.append(w, zeta))
  return np.array(path)


@pytest.mark.thorough(but=['slack-None'])
@pytest.mark.parametrize('name, mechanism', [
    ('quantile', mechanisms.BLT(2, 6)), ('slack', None),
    pytest.param('quantile', None, marks=pytest.mark.slow),
    pytest.param('slack', mechanisms.BLT(2, 6), marks=pytest.mark.slow)])
def test_keras_and_query_are_the_formula_with_explicit_noise(name, mechanism, tmp_path):
  kwargs, size = FOLLOWED[name]
  rng = np.random.default_rng(3)
  x, y = rng.normal(size=(BATCH, SIZE)).astype('float32'), rng.normal(size=BATCH).astype('float32')
  present = np.arange(BATCH) != 2
  independent = mechanisms.IndependentGaussian()
  path = formula(name, drawn_rows(mechanism or independent, size), x, y, present)
  assert path[-1, -1] != pytest.approx(0.8, rel=0.05)
  private = dict(l2_norm_clip=0.8, noise_multiplier=SIGMA, batch_size=BATCH, seed=9,
                 mechanism=mechanism, adjacency='add_remove')
  model = tfdp.DPSequential([keras.layers.Input((SIZE,)), keras.layers.Dense(1, use_bias=False)])
  model.set_weights([np.full((SIZE, 1), 0.3, 'float32')])
  model.compile(optimizer=tfdp.DPSGD(RATE, **private, **kwargs), loss='mse')
  for t in range(STEPS):
    model.train_on_batch(x, y[:, np.newaxis], sample_weight=present.astype('float32'))
    if t == 2 and name == 'quantile':
      model.save(str(tmp_path / 'm.keras'))
      model = keras.models.load_model(str(tmp_path / 'm.keras'))
    reached = np.append(model.get_weights()[0][:, 0],
                        0.8 * np.exp(model.optimizer.rule_state.log_factor))
    np.testing.assert_allclose(reached, path[t], rtol=1e-4, atol=1e-5)

  queries = pytest.importorskip('tfdp_adaptive.queries')
  specs = [tf.TensorSpec([SIZE, 1])]
  query = queries.RuleQuery(rules.dp_sgd(), specs, **private, **kwargs)
  state, w = query.initial_global_state(), np.full((SIZE, 1), 0.3, 'float32')
  for expected in path:
    params, total = query.derive_sample_params(state), query.initial_sample_state()
    for one, target in zip(x[present], y[present]):
      total = query.accumulate_record(
          params, total, [tf.constant(2 * (one @ w - target) * one)[:, tf.newaxis]])
    direction, state, _ = query.get_noised_result(total, state)
    w = w - RATE * direction[0].numpy()
    np.testing.assert_allclose(w[:, 0], expected[:SIZE], rtol=1e-4, atol=1e-5)


def test_it_finds_the_quantile():
  """Nearly without noise, of norms that do not change."""
  norms = np.random.default_rng(0).lognormal(1.0, 1.0, size=400)
  for rule, quantile in ((rules.quantile_clip(rules.dp_sgd(), 0.7), 0.7),
                         (rules.slack_clip(rules.dp_sgd(), 40, 0.3, 1.0), 0.3)):
    state = rule.init(tf.TensorSpec([1]))
    for _ in range(150):
      zeta = float(rule.query(state)[0].relative_clip)
      values = numbers(rule.asks[0], norms, zeta, tf.float32).mean(0)
      release = contract.Release(tf.zeros([1]), tf.zeros([]), side_mean=values)
      _, state = rule.update(state, (release,))
    assert float(np.mean(norms <= zeta)) == pytest.approx(quantile, abs=0.03)


@pytest.mark.parametrize('name, kwargs', [
    ('DPSGD', dict(clipping=tfdp.clipping.Slack(buckets=3))),
    pytest.param('DPAdamSTP', dict(clipping=tfdp.clipping.Slack(), scale_epsilon=0.1),
                 marks=pytest.mark.slow),
    pytest.param('DPAdamIME', dict(clipping=tfdp.clipping.Quantile()), marks=pytest.mark.slow),
    pytest.param('DPAdamSTP', dict(clipping=tfdp.clipping.Quantile(), scale_epsilon=0.1),
                 marks=pytest.mark.slow)])
def test_the_audit_finds_no_record_that_moves_a_release_too_far(name, kwargs):
  optimizer = getattr(tfdp, name)(
      l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=16, adjacency='add_remove', **kwargs)
  change = changes.largest(subjects.of(optimizer, 16), 1, history=(1,))
  assert not change.violated and 0.999 < change.size < 1.001
