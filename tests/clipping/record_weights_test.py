# SPDX-License-Identifier: Apache-2.0
"""Weights per record: formulas and limits, bounded at any size, in every engine and adapter."""

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import weights
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.rules import wrapping

keras = compat.keras
FORMULAS = {  # w(n) at clip norm zeta.
    weights.Hard(): lambda n, zeta: min(1, zeta / n),
    weights.AutoV(): lambda n, zeta: zeta / n if n > 1e-12 else 0,
    weights.AutoS(0.05): lambda n, zeta: zeta / (n + 0.05),
    weights.PSAC(): lambda n, zeta: zeta / (n + 0.1 / (n + 0.1)),
    weights.Tanh(): lambda n, zeta: zeta * np.tanh(n / zeta) / n,
    weights.PNorm(3.0): lambda n, zeta: zeta / (n**3 + zeta**3)**(1 / 3)}
KINDS = tuple(FORMULAS)
SIZES = (1e-45, 1e-38, 1e-30, 1e-20, 1e-12, 1e-6, 0.1, 1.0, 1e6, 1e12, 1e19, 3e38)


def length(weight, n, zeta=1.0):
  return weight.norm(tf.constant(n, tf.float64), zeta).numpy()


@pytest.mark.parametrize('clipping', FORMULAS, ids=str)
def test_the_weight_is_the_formula(clipping):
  formula = FORMULAS[clipping]
  for n in (1e-9, 1e-3, 0.3, 1.0, 7.0, 1e9):
    for zeta in (0.02, 1.0, 30.0):
      np.testing.assert_allclose(length(clipping, n, zeta), n * formula(n, zeta), rtol=1e-9)
      factor = clipping.factor(tf.constant(n, tf.float64), zeta)
      np.testing.assert_allclose(factor, formula(n, zeta), rtol=1e-9)
      assert formula(n, zeta) <= 1 + 1e-9 or clipping.may_grow


def test_limits():
  n = np.array([0.01, 0.4, 3.0])
  np.testing.assert_allclose(length(weights.AutoS(), 1e4 * n), 1, rtol=1e-3)  # n >> gamma: auto_v.
  np.testing.assert_allclose(length(weights.AutoS(1e-12), n), length(weights.AutoV(), n), rtol=1e-9)
  # gamma -> infinity at zeta = gamma is the sum that nothing clips.
  np.testing.assert_allclose(length(weights.AutoS(1e9), n, 1e9), n, rtol=1e-8)
  np.testing.assert_allclose(length(weights.PNorm(1.0), n, 0.3), length(weights.AutoS(0.3), n, 0.3))
  np.testing.assert_allclose(length(weights.PNorm(400.0), n), length(weights.Hard(), n), rtol=1e-2)


@pytest.mark.parametrize('r, largest', [(0.01, 5.263), (0.1, 1.878)])
def test_the_largest_weight_of_psac(r, largest):
  n = np.geomspace(1e-6, 1e3, 200_001)
  w = length(weights.PSAC(r), n, 2.0) / n
  assert w.max() / 2.0 == pytest.approx(largest, abs=1e-3)
  assert n[w.argmax()] == pytest.approx(np.sqrt(r) - r, rel=1e-3)
  assert w[0] == pytest.approx(2.0, rel=1e-3) and np.all(np.diff(n * w) > 0)


@pytest.mark.thorough
@pytest.mark.parametrize('dtype', [
    tf.float32, pytest.param(tf.float64, marks=pytest.mark.slow)])
def test_never_above_the_clip_norm(dtype):
  """Brute force over every size, in every way that a record goes; nothing stays nothing."""
  rng = np.random.default_rng(0)
  direction = rng.normal(size=9)
  sizes = np.array(SIZES) / np.linalg.norm(direction)
  records = tf.constant(np.concatenate([
      np.outer(sizes, direction), np.zeros((1, 9)), np.full((1, 9), np.nan),
      np.where(np.arange(9) == 3, np.inf, direction)[np.newaxis]]), dtype)

  @tf.function(autograph=False)
  def run(records, zeta):
    return [(tf.vectorized_map(lambda r: projection.clip(r, zeta, weight), records),
             tf.map_fn(lambda r: projection.clip(r, zeta, weight), records))
            for weight in KINDS]

  for zeta in (1e-13, 0.7, 1e6):
    of_weights = run(records, tf.constant(zeta, dtype))
    for weight, formula, results in zip(KINDS, FORMULAS.values(), of_weights):
      for result in results:
        result = result.numpy().astype(np.float64)
        assert np.linalg.norm(result, axis=1).max() <= zeta * (1 + 1e-5)
        assert not result[len(SIZES):].any()
        for size, one in zip(SIZES, result):
          if 1e-12 < size < 1e18:
            np.testing.assert_allclose(
                one, formula(size, zeta) * size * direction / np.linalg.norm(direction),
                rtol=2e-5 if dtype == tf.float32 else 1e-9, atol=1e-30, err_msg=str(weight))


def sequences(steps=3, width=5):
  """A model of a table, steps that share a matrix, and a gain."""
  model = keras.Sequential([
      keras.layers.Input((steps,), dtype='int32'), keras.layers.Embedding(7, width),
      keras.layers.Dense(4, activation='tanh'), keras.layers.LayerNormalization(),
      keras.layers.Flatten(), keras.layers.Dense(2)])
  x = tf.constant(np.random.default_rng(0).integers(0, 7, size=(5, steps)), tf.int32)
  model(x)
  return oracle.randomized(model), x


@pytest.mark.parametrize('engine', [
    bookkeeping.engine, pytest.param(materialized.layered, marks=pytest.mark.slow)])
def test_every_engine_every_weight_any_geometry(engine):
  model, x = sequences()
  batch = oracle.batch_of(x, model(x), [True, False, True, True, True])
  asks = tuple(contract.Ask(weight=weight) for weight in KINDS)
  scale = oracle.geometry(model)
  records = oracle.gradients(model, oracle.squared_error, batch)
  isotropic = contract.Query(), oracle.median_norm(records)
  scaled = contract.Query(scale=scale), oracle.median_norm(records, scale)
  queries, clips = zip(*[(isotropic, scaled)[i % 2] for i in range(len(asks))])
  request = interface.Request(asks, queries, clips)
  expected = oracle.by_definition(model, records, batch.mask, request)
  oracle.assert_close(engine(model, oracle.squared_error, batch, request).sums, expected, 2e-5)


@pytest.mark.parametrize('scaled', [False, True])
def test_steps_that_cancel_are_not_brought_up(scaled):
  """What rounding leaves of a gradient of zero is no record; unbounded weights would make it one.

  The norm comes from one order of adding up, the sum from another.
  """
  steps, d, p = 8, 40, 30
  layer = keras.layers.Dense(p, use_bias=False)
  model = keras.Sequential([keras.layers.Input((steps, d)), layer])
  rng = np.random.default_rng(0)
  half = rng.normal(size=(3, steps // 2, d)) * 10.0**rng.uniform(-2, 3, size=(3, steps // 2, 1))
  x = tf.constant(np.concatenate([half, half], 1), tf.float32)
  cotangents = rng.normal(size=(3, steps // 2, p))
  errors = tf.constant(np.concatenate([cotangents, -cotangents], 1), tf.float32)
  loss = lambda y, outputs, sample_weight: tf.reduce_sum(outputs * y, [1, 2])
  batch = interface.Batch(x, errors, (), tf.constant([True, False, False]))
  scale = [tf.fill([d, p], 3.0)] if scaled else ()
  asks = tuple(contract.Ask(weight=weight) for weight in (
      weights.AutoV(), weights.AutoS(1e-12), weights.PSAC(1e-12)))
  request = interface.Request(asks, (contract.Query(scale=scale),) * 3, (1.0,) * 3)
  for one in bookkeeping.engine(model, loss, batch, request).sums:
    assert np.linalg.norm(one.total[0]) <= 1.05


@pytest.mark.parametrize('make', [
    lambda: weights.AutoS(0.0), lambda: weights.PNorm(0.5), lambda: weights.PSAC(float('nan')),
    *(lambda clipping=clipping: tfdp.DPSGD(
        l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4, clipping=clipping)
      for clipping in ('hard', ('auto_s', 0.05), (), {'auto_s': 1.0}, 2.0)),
    lambda: wrapping.with_clipping(tfdp.rules.dp_sgd(), 'auto_s')])
def test_what_is_no_weight_is_refused(make):
  with pytest.raises(ValueError, match='clipping|gamma|`r`|`p`'):
    make()


def test_projections_have_no_weight():
  with pytest.raises(ValueError, match=r"must be Hard\(\) for pagan"):
    tfdp.PAGAN(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4,
               clipping=tfdp.clipping.Tanh())
  assert wrapping.with_clipping(
      tfdp.rules.pagan(projection='rescale'), weights.Tanh()).asks[0].weight == weights.Tanh()


def trained(optimizer, path):
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False)])
  model.set_weights([np.full((3, 1), 0.3, 'float32')])
  model.compile(optimizer=optimizer, loss='mse')
  rng = np.random.default_rng(1)
  batches = [rng.normal(size=(4, 4)).astype('float32') for _ in range(3)]
  for batch in batches:
    model.train_on_batch(batch[:, :3], batch[:, 3:])
    if batch is batches[0]:
      model.save(path)
      model = keras.models.load_model(path)
  return model, batches


def test_training_is_the_formula_and_is_saved(tmp_path):
  """Without noise, in float64 NumPy; saved and loaded after the first step."""
  kwargs = dict(l2_norm_clip=0.6, noise_multiplier=1e-12, batch_size=4,
                clipping=tfdp.clipping.AutoS(0.5))
  model, batches = trained(tfdp.DPSGD(0.2, **kwargs), str(tmp_path / 'm.keras'))
  w = np.full(3, 0.3)
  for batch in batches:
    x, y = batch[:, :3].astype(np.float64), batch[:, 3]
    records = 2 * (x @ w - y)[:, np.newaxis] * x
    norms = np.linalg.norm(records, axis=1, keepdims=True)
    w = w - 0.2 * np.sum(0.6 / (norms + 0.5) * records, 0) / 4
  np.testing.assert_allclose(model.get_weights()[0][:, 0], w, rtol=1e-5)
  assert model.optimizer.rule.asks[0].weight == weights.AutoS(0.5)
  assert list(model.optimizer.get_config()['clipping']) == ['kind', 'gamma']


def test_queries_weight_their_records():
  queries = pytest.importorskip('tfdp_adaptive.queries')
  spec, record = tf.TensorSpec([3]), tf.constant([3.0, 0.0, 4.0])
  expected = np.array([0.6, 0.0, 0.8]) * 2 / (1 + 0.5 / 5)
  arguments = dict(noise_multiplier=1.0, clipping=tfdp.clipping.AutoS(0.5))
  rule = queries.RuleQuery(
      tfdp.rules.dp_adam(), spec, l2_norm_clip=2.0, batch_size=4, **arguments)
  sums = rule.preprocess_record(rule.derive_sample_params(rule.initial_global_state()), record)
  np.testing.assert_allclose(sums[0].total, expected, rtol=1e-6)
  total = queries.MechanismSumQuery(
      spec, tfdp.mechanisms.Tree(4), 2.0, **arguments)
  np.testing.assert_allclose(total.preprocess_record(2.0, record), expected, rtol=1e-6)


def test_the_statement_says_how_records_are_weighted():
  plan = tfdp.PrivacyPlan(batch_size=4, steps=10, l2_norm_clip=1.0, noise_multiplier=2.0,
                          target_delta=1e-5, population_size=40)
  weighted, hard = (tfdp.DPSGD(plan=plan, clipping=kind)
                    for kind in (tfdp.clipping.PSAC(), tfdp.clipping.Hard()))
  assert weighted.epsilon() == hard.epsilon()
  assert 'PSAC(r=0.1)' in weighted.statement() and 'weighted by' not in hard.statement()


STP = dict(scale_epsilon=0.1)
_C = tfdp.clipping
AUDITED = [('DPAdamSTP', _C.AutoS(), STP)] + [
    pytest.param(*case, marks=pytest.mark.slow) for case in (
        ('DPSGD', _C.AutoV(), {}), ('DPAdamIME', _C.PSAC(), {}), ('DPAdamSTP', _C.AutoV(), STP),
        ('DPAdamSTP', _C.Tanh(), STP), ('DPSGD', _C.PNorm(), {}), ('DPAdamIME', _C.AutoS(), {}),
        ('DPAdam', _C.PSAC(), {}))]


@pytest.mark.parametrize('name, clipping, kwargs', AUDITED)
def test_the_audit_finds_no_record_that_moves_a_release_too_far(name, clipping, kwargs):
  optimizer = getattr(tfdp, name)(
      l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4, adjacency='add_remove',
      clipping=clipping, **kwargs)
  change = changes.largest(subjects.of(optimizer, 16), 1, history=(0,) if name == 'DPSGD' else (1,))
  assert not change.violated and 0.999 < change.size < 1.001
