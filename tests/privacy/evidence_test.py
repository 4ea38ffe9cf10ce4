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

sys.path.append(str(pathlib.Path(__file__).parents[2] / 'benchmarks'))
import evidence as benchmark
import evidence_models as models
import evidence_tables
import evidence_tasks
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


def test_the_module_is_what_the_results_say():
  results = pathlib.Path(benchmark.__file__).parent / 'results' / 'evidence.json'
  rows = json.loads(results.read_text(encoding='utf-8'))
  written = pathlib.Path(tfdp.privacy.recommendation.evidence.__file__)
  expected = evidence_tables.module(evidence_tables.extract(rows))
  assert written.read_text(encoding='utf-8') == expected
