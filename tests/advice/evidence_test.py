# SPDX-License-Identifier: Apache-2.0
"""The evidence was made by what it says: gradients, clipping and noise of the benchmark."""

import json
import pathlib
import sys

import numpy as np
import pytest
from scipy import linalg
import tensorflow as tf

import tfdp_adaptive as tfdp

sys.path.append(str(pathlib.Path(__file__).parents[2] / 'benchmarks' / 'evidence'))
import evidence as benchmark
import evidence_facts
import evidence_models as models
import evidence_tables
import evidence_tasks
import recommend
import studies


def make_task(loss='softmax', hidden=0, steps=4):
  rng = np.random.default_rng(0)
  outputs = 3 if loss == 'softmax' else 1
  x = rng.normal(size=[40, 5]).astype(np.float32)
  y = rng.integers(outputs, size=40) if loss == 'softmax' else (rng.random(40) < .5).astype('f')
  return evidence_tasks.Task('made up', (1.0,), 8, steps, loss, ((x, y),) * 3, outputs, hidden,
                             offset=.5)


def reference(task, weights, x, y):
  """[[n, in, out] gradient of every record] by TensorFlow."""
  variables = [tf.Variable(w[0]) for w in weights]
  with tf.GradientTape(persistent=True) as tape:
    a = tf.constant(x)
    for w in variables[:-1]:
      a = tf.tanh(a @ w)
    z = a @ variables[-1] + .5
    if task.loss == 'softmax':
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)
    elif task.loss == 'logistic':
      losses = tf.nn.sigmoid_cross_entropy_with_logits(y[:, None], z)[:, 0]
    else:
      losses = .5 * tf.square(z[:, 0] - y)
  jacobians = tape.jacobian(losses, variables, experimental_use_pfor=False)
  return losses.numpy(), [g.numpy() for g in jacobians]


@pytest.mark.parametrize('loss, hidden', [('softmax', 4), ('logistic', 0), ('squares', 0)])
def test_gradients_norms_and_sums_are_those_of_tensorflow(loss, hidden):
  task = make_task(loss, hidden)
  x, y = (part[:6] for part in task.parts[0])
  rng = np.random.default_rng(1)
  weights = [rng.normal(size=(1, *w.shape[1:])).astype(np.float32)
             for w in models.start(task, 1)]
  losses, gradients = reference(task, weights, x, y)
  layers = models.records(task, weights, x, y)
  for (inputs, delta), g in zip(layers, gradients):
    np.testing.assert_allclose(models.collected(inputs, delta)[0], g.sum(0), atol=1e-5)
  scales = [rng.random(size=w.shape).astype(np.float32) for w in weights]
  for used in (None, scales):
    expected = np.sqrt(sum(
        np.square(g * (1 if used is None else used[i])).sum((1, 2))
        for i, g in enumerate(gradients)))
    np.testing.assert_allclose(models.norms(layers, used)[0], expected, rtol=1e-4)
  task = task._replace(parts=((x, y),) * 3)
  assert models.evaluate(task, weights, 1)[0] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.parametrize('loss', ['softmax', 'logistic'])
def test_roots_of_mean_squares_and_accuracy_are_those_of_tensorflow(loss):
  task = make_task(loss, 4)
  x, y = (part[:6] for part in task.parts[0])
  weights = models.start(task, 1)
  gradients = reference(task, weights, x, y)[1]
  for found, g in zip(models.square_roots(task, x, y), gradients):
    np.testing.assert_allclose(found, np.sqrt(np.square(g).mean(0)), rtol=1e-3, atol=1e-6)
  # A second batch sees the weights after a step along the first.
  moved = [w - .5 * g.mean(0)[None] for w, g in zip(weights, gradients)]
  later = reference(task, moved, x, y)[1]
  twice = models.square_roots(task, np.tile(x, [2, 1]), np.tile(y, 2), rate=.5, batch_size=6)
  for found, g, h in zip(twice, gradients, later):
    expected = (np.square(g).mean(0) + np.square(h).mean(0)) / 2
    np.testing.assert_allclose(found, np.sqrt(expected), rtol=1e-3, atol=1e-6)
  z = np.tanh(x @ weights[0][0]) @ weights[1][0] + .5
  answers = z.argmax(1) if loss == 'softmax' else z[:, 0] > 0
  task = task._replace(parts=((x, y),) * 3)
  assert models.accuracy(task, weights, 2)[0] == pytest.approx((answers == y).mean())


def test_an_ellipsoid_of_public_gradients_is_what_records_are_clipped_in(monkeypatch):
  """No records: noise has the axes of the ellipsoid, and AdaGrad's first step has size one."""
  task = make_task(hidden=2, steps=1)
  task = task._replace(public=task.parts[0])
  plan = benchmark.make_plan(task, 1.0, 1)
  grid = studies.ellipsoids('PAGAN, large', task, 2.0, .1)
  monkeypatch.setattr(benchmark, 'batches', lambda *_: [np.arange(0)])
  rule = grid.rules[0][0]
  rates = np.array([1.0, .5])
  start = models.start(task, 2)
  for w, moved in zip(start, benchmark.train(
      task, rule, plan, grid.scaled, np.ones(2), rates, 1, 7)):
    np.testing.assert_allclose(np.abs(moved - w), np.ones_like(w) * rates[:, None, None], rtol=1e-5)
  (query,) = rule.query(rule.init(tuple(tf.TensorSpec(w.shape, tf.float32) for w in start)))
  roots = models.square_roots(task, *task.public)
  for scale, r in zip(query.scale, roots):
    ratio = scale.numpy()[1] * r**(2 / 3)  # The root of C = stddevs^(-4/3), over the bound.
    np.testing.assert_allclose(ratio, np.full_like(ratio, ratio[0, 0]), rtol=1e-4)


def test_an_unfinished_row_goes_on_where_it_was(tmp_path):
  path, asked = str(tmp_path / 'rows.part'), []
  make = lambda i: lambda: asked.append(i) or [float(i)]
  for _ in range(2):
    kept = studies.keeper(path, dict(method='DPSGD'))
    assert [kept(i, make(i)) for i in range(2)] == [[0.0], [1.0]]
  assert asked == [0, 1]
  assert studies.keeper(path, dict(method='DPAdam'))(0, make(5)) == [5.0]


def test_the_pilot_knows_the_gradients_of_public_records():
  task = make_task('logistic', 4)
  x, y = task.parts[1]
  gradients = np.concatenate(
      [g.reshape(len(x), -1) for g in reference(task, models.start(task, 1), x, y)[1]], 1)
  found = benchmark.pilot(task)
  assert found['norm'] == pytest.approx(np.median(np.linalg.norm(gradients, axis=1)), rel=1e-4)
  sizes = np.sqrt(np.square(gradients).mean(0))
  assert found['evenness'] == pytest.approx(
      sizes.sum()**2 / (len(sizes) * np.square(sizes).sum()), rel=1e-4)


def test_a_run_takes_the_steps_of_the_rule_with_noise_of_the_plan(monkeypatch):
  """One step without records: what moves the weights is the noise."""
  task = make_task(steps=3)
  plan = benchmark.make_plan(task, 1.0, 1)
  monkeypatch.setattr(benchmark, 'batches', lambda *_: [np.arange(0)] * 3)
  clips, rates = np.array([.5, 2.0]), np.array([1.0, .25])
  weights = benchmark.train(task, tfdp.rules.dp_sgd(), plan, False, clips, rates, 1, 7)[0]
  rng = np.random.default_rng(7)
  z = sum(rng.normal(size=[5, 3]) for _ in range(3))
  for copy, rate in zip(weights, rates):  # Gradients and rates are in units of the clip norm.
    np.testing.assert_allclose(copy, -rate * plan.noise_multiplier / 8 * z, rtol=1e-4)


def test_two_asks_clip_norms_that_change_and_decay(monkeypatch):
  """No records: DP2's noise has the size its rate undoes; half a budget is 1.4 times the noise."""
  task = make_task(steps=2)
  plan = benchmark.make_plan(task, 1.0, 1)
  monkeypatch.setattr(benchmark, 'batches', lambda *_: [np.arange(0)] * 2)
  run = lambda rule, decay=0.0: benchmark.train(
      task, rule, plan, False, np.full(1, 3.0), np.full(1, .5), 1, 7, np.full(1, decay))[0][0]
  make = lambda steps, **more: tfdp.rules.dp2_rmsprop(
      steps, steps, relative_adaptive_clip=4.0, relative_adaptive_learning_rate=.25, **more)
  z = np.random.default_rng(7).normal(size=[4, 5, 3]) * -.5 * plan.noise_multiplier / 8
  np.testing.assert_allclose(run(tfdp.rules.dp_sgd()), z[0] + z[1], rtol=1e-4)
  np.testing.assert_allclose(run(make(1)), z[0] + z[1], rtol=1e-4)
  np.testing.assert_allclose(run(tfdp.rules.dp_sgd(), .2), .9 * z[0] + z[1], rtol=1e-4)
  # The first step asks for the raw gradient alone, the second for both: its draw is the fourth.
  twice = run(make(2, ablation='extra_query'))
  np.testing.assert_allclose(twice - z[0], np.sqrt(2) * z[3], rtol=1e-4)


def test_grids_of_a_study_have_one_size():
  task = make_task(steps=30)
  for study, methods in studies.METHODS.items():
    sizes = {}
    for method in methods:
      grid = getattr(studies, study)(method, task, 2.0, .1)
      made = {repr(more) for _, more in grid.rules}
      assert len(made) == len(grid.rules)
      sizes[method] = len(grid.rules) * len(grid.clips) * len(grid.rates) * len(grid.decays)
    assert len(set(sizes.values())) == 1, sizes


def test_banded_noise_is_that_of_the_mechanism(monkeypatch):
  task = make_task(steps=3)
  plan = benchmark.make_plan(task, 1.0, 2)
  monkeypatch.setattr(benchmark, 'batches', lambda *_: [np.arange(0)] * 3)
  weights = benchmark.train(
      task, tfdp.rules.dp_sgd(), plan, False, np.ones(1), np.ones(1), 2, 7)[0]
  rng = np.random.default_rng(7)
  z = np.stack([rng.normal(size=[5, 3]) for _ in range(3)])
  inverse = np.linalg.inv(linalg.toeplitz(plan.mechanism.strategy(3), np.zeros(3)))
  total = plan.noise_multiplier / 8 * np.tensordot(np.ones(3) @ inverse, z, 1)
  np.testing.assert_allclose(weights[0], -total, rtol=1e-4, atol=1e-6)


def test_the_table_is_that_of_the_results():
  results = pathlib.Path(benchmark.__file__).parents[1] / 'results'
  rows = json.loads((results / 'evidence.json').read_text(encoding='utf-8'))
  text = (results / 'evidence.txt').read_text(encoding='utf-8')
  assert text.endswith('\n\n' + evidence_tables.table(rows) + '\n')


def test_the_page_has_the_rows_of_recommend():
  root = pathlib.Path(benchmark.__file__).parents[2]
  results = root / 'benchmarks' / 'results'
  rows = json.loads((results / 'recommend.json').read_text(encoding='utf-8'))
  beside = recommend.peers_by_task(str(results / 'recommend_peers.json'))
  lines = recommend.page(rows, beside)
  assert lines in (root / 'docs' / 'evidence.md').read_text(encoding='utf-8')
  seeds = [(one['task'], one['epsilon'], one['seed']) for one in rows]
  assert len(set(seeds)) == len(rows) and lines.count('\n') == 2 + len({one[:2] for one in seeds})
  assert (results / 'recommend.txt').read_text(encoding='utf-8') == recommend.table(rows, beside)


@pytest.mark.parametrize('scale', [1e-6, 1.0, 1e6])
def test_facts_of_made_up_gradients(scale):
  rng = np.random.default_rng(0)
  noise = rng.normal(size=[50_000, 4])
  facts = evidence_facts.facts_of(scale * noise * [2, 1, 1, 0])
  assert facts['evenness'] == pytest.approx(16 / (4 * 6), rel=.02)
  assert facts['agreement'] == pytest.approx(0, abs=1e-3)
  facts = evidence_facts.facts_of(scale * (noise + 1)[:100])
  assert facts['agreement'] == pytest.approx(.5, abs=.05)
  assert evidence_facts.facts_of(np.ones([3, 2])) == dict(evenness=1.0, agreement=1.0)


def test_agreement_has_no_bias_of_few_records():
  rng = np.random.default_rng(1)
  assert np.mean([evidence_facts.facts_of(rng.normal(size=[4, 50]))['agreement']
                  for _ in range(300)]) < .05


def test_noise_to_signal_is_that_of_a_step():
  rng = np.random.default_rng(2)
  size, batch, sigma = 40, 8, .7
  sizes = np.geomspace(1, .01, size)
  records = lambda count: (rng.normal(size=[count, size]) + .2) * sizes
  known = evidence_facts.facts_of(records(50_000))
  facts = evidence_facts.Facts(sigma * np.sqrt(size) / batch, 1.0, **known, batch_size=batch)
  norm = np.sqrt(1.04 * np.square(sizes).sum())
  signal = np.mean([np.square(records(batch).mean(0)).sum() for _ in range(4000)])
  # Noise that is proportional to the roots of the sizes, scaled to cost as much as a ball's.
  shape = np.sqrt(sizes * sizes.sum() / np.square(sizes).sum())
  noise = np.square(sigma * norm / batch * shape).sum()
  assert facts.noise_to_signal == pytest.approx(np.sqrt(noise / signal), rel=.03)
