# SPDX-License-Identifier: Apache-2.0
"""Do the methods of docs/frontier.md help on MNIST? Each beside what it is built on, tuned alike.

    PYTHONPATH=. python benchmarks/evidence/frontier_tasks.py [--data FOLDER] [STUDY ...]

One hidden layer of 32 on images of 14 x 14, epsilon 1, delta 1e-5, 300 batches of 256 of 20,000
records. Rules, clipping of factored gradients, noise, mechanisms and accounting are the
library's. Every method has twelve settings, of which one run on validation records chooses;
losses and accuracies are of six other runs on test records, with the standard error of the mean.
Studies: *refresh* (how often DP-KFC looks), *follow* (groups and clip norms that follow),
*filter* (momentum and correlated noise).
"""

import argparse
import functools
import itertools
import os
import sys
from typing import Any, Dict, NamedTuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import evidence
import evidence_tasks
import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import privatizer as privatizer_lib
from tfdp_adaptive import rules
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.examples import synthetic
from tfdp_adaptive.rules import following_clip

HIDDEN, CLASSES, BANDS, ROOM, PUBLIC, SEEDS = 32, 10, 16, 360, 256, 6
SGD_STEPS, ADAM_STEPS = (.1, .3, 1.0, 3.0), (.01, .03, .1, .3)
CLIPS = (.3, 1.0, 3.0)  # Times the median norm of a gradient at the start, scaled as it is asked.
SPECS = [tf.TensorSpec(shape, tf.float32) for shape in ((197, HIDDEN), (HIDDEN, CLASSES))]
GROUPS = (0, 1)


class Method(NamedTuple):
  """Makes a rule of (noise multiplier, noise floor in clip norms, quantile)."""

  make: Any
  rates: Any = SGD_STEPS
  bands: int = 1
  public: str = ''  # Inputs of the factors: 'noise' or 'images'.
  quantiles: Any = (0.0,)  # Instead of clip norms: one in the middle, and these.


def adam(sigma: float, floor: float, _: float) -> contract.Rule:
  del sigma
  return rules.dp_adam(epsilon=floor)


def sgd(*_: float) -> contract.Rule:
  return rules.dp_sgd(.9)


def kfc(*_: float, every: int = 10, decay: float = .9) -> contract.Rule:
  return rules.dp_kfc(.9, refresh_every=every, decay=decay)


def followed(make: Any, kind: str, grouped: bool, sigma: float, floor: float, q: float) -> Any:
  rule = make(sigma, floor, q)
  if kind == 'quantile':
    rule = rules.quantile_clip(rule, q, stddev=256 / 20 * (2**.5 if grouped else 1))
  elif kind == 'slack':
    rule = rules.slack_clip(rule, following_clip.slack_buckets(256, sigma), q)
  return rules.grouped(rule, GROUPS) if grouped else rule


STUDIES: Dict[str, Dict[str, Method]] = {
    'refresh': {
        'DPSGD': Method(sgd),
        'DPAdamBC': Method(lambda s, f, q: rules.dp_adam_bc(epsilon=f), ADAM_STEPS),
        **{f'KFC of pink noise, every {n}': Method(functools.partial(kfc, every=n), public='noise')
           for n in (1, 10, 50, 200)},
        'the same, every 10, decay 0': Method(functools.partial(kfc, decay=0.0), public='noise'),
        'KFC of 256 held-out images': Method(kfc, public='images')},
    'follow': {
        f'{kind}{", layers apart" if grouped else ""}': Method(
            functools.partial(followed, adam, kind, grouped), ADAM_STEPS,
            quantiles=(.2, .5, .8) if kind != 'fixed' else (0.0,))
        for kind in ('fixed', 'quantile', 'slack') for grouped in (False, True)},
    'filter': {
        f'{name}, {"banded" if bands > 1 else "independent"} noise': Method(make, bands=bands)
        for bands in (1, BANDS) for name, make in (
            ('DPSGD', lambda *_: rules.dp_sgd(0.0)), ('momentum .9', sgd))}}


def passed(weights: Any, x: tf.Tensor, y: tf.Tensor) -> Any:
  """`(losses, logits, [factors of both layers])`."""
  hidden = tf.tanh(x @ weights[0])
  logits = hidden @ weights[1]
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
  errors = tf.nn.softmax(logits) - tf.one_hot(y, CLASSES)
  behind = tf.matmul(errors, weights[1], transpose_b=True) * (1 - hidden**2)
  outer = lambda a, e, spec: factors.Outer(
      a[:, tf.newaxis], e[:, tf.newaxis], tuple(spec.shape.as_list()))
  return losses, logits, [outer(a, e, spec) for a, e, spec in zip(
      (x, hidden), (behind, errors), SPECS)]


def clipped(
    rule: contract.Rule, queries: Any, clips: Any, unit: Any, found: Any, mask: Any) -> Any:
  """Sums of records in units of the clip norm that is tried, and norms before clipping, by ask."""
  losses, _, of_layers = found
  of_layers = [one.times(tf.fill(tf.shape(losses), 1 / unit)) for one in of_layers]
  answers = []
  for ask, query, clip in zip(rule.asks, queries, clips):
    scales = list(query.scale) or [()] * len(SPECS)
    inside = [one.transformed(scale) if isinstance(scale, contract.Kronecker) else one
              for one, scale in zip(of_layers, scales)]
    answers.append(bookkeeping.clip_factors(SPECS, inside, mask, ask, query, clip))
  return zip(*answers)


def runner(method: Method, plan: Any, task: Any, quantile: float) -> Any:
  """`(rate, clip norm, seed) -> weights` and the median norm at the start in its geometry."""
  floor = plan.noise_multiplier / plan.batch_size
  rule = method.make(plan.noise_multiplier, floor, quantile)
  arguments = dict(
      l2_norm_clip=1.0, noise_multiplier=plan.noise_multiplier, batch_size=plan.batch_size,
      mechanism=plan.mechanism, steps=plan.steps)
  privatizer = privatizer_lib.Privatizer(rule.asks, SPECS, **arguments)
  x, y = (tf.constant(part) for part in task.parts[0])
  y = tf.cast(y, tf.int32)
  labels = tf.constant(np.random.default_rng(3).integers(0, CLASSES, PUBLIC), tf.int32)
  if method.public == 'images':
    inputs = tf.constant(task.parts[1][0][-PUBLIC:])
  else:
    noise = synthetic.pink_noise(PUBLIC, (14, 14, 1), exponent=2.0).reshape(PUBLIC, -1)
    inputs = tf.constant(np.concatenate([noise, np.ones([PUBLIC, 1])], 1), tf.float32)

  def public_of(state: Any, weights: Any) -> Any:
    if not method.public:
      return ()
    looked = lambda: tuple(one.second_moments((1, *one.shape), 512)
                           for one in passed(weights, inputs, labels)[2])
    return tf.cond(rule.public_due(state), looked, lambda: tf.nest.map_structure(
        tf.zeros_like, looked()))

  @tf.function(autograph=False)
  def train(rate: tf.Tensor, clip: tf.Tensor, seed: tf.Tensor, weights: Any, private: Any) -> Any:
    group = tf.random.stateless_uniform([len(x)], [seed, -1], maxval=method.bands, dtype=tf.int32)

    def step(t: tf.Tensor, state: Any, private: Any, weights: Any) -> Any:
      coins = tf.random.stateless_uniform([len(x)], [seed, t])
      taken = (coins < method.bands * plan.batch_size / len(x)) & (group == t % method.bands)
      indices = tf.where(taken)[:ROOM, 0]
      indices = tf.pad(indices, [[0, ROOM - tf.shape(indices)[0]]])
      mask = tf.range(ROOM) < tf.reduce_sum(tf.cast(taken, tf.int32))
      public = public_of(state, weights)
      queries = rule.query(state, public)
      found = passed(weights, tf.gather(x, indices), tf.gather(y, indices))
      sums, _ = clipped(rule, queries, privatizer.resolve(queries), clip, found, mask)
      releases, private = privatizer.release(private, queries, sums)
      direction, state = rule.update(state, releases, public)
      return t + 1, state, private, [w - rate * d for w, d in zip(weights, direction)]

    return tf.while_loop(lambda t, *_: t < plan.steps, step,
                         (0, rule.init(SPECS), private, weights))[3]

  rng = np.random.default_rng(5)
  start = [tf.constant(rng.normal(size=s.shape) / np.sqrt(s.shape[0]), tf.float32)
           for s in SPECS]
  state = rule.init(SPECS)
  pilot = passed(start, *(tf.constant(part[:512]) for part in task.parts[1]))
  queries = rule.query(state, public_of(state, start))
  _, norms = clipped(
      rule, queries, privatizer.resolve(queries), 1.0, pilot, tf.ones([512], tf.bool))
  median = float(np.median(norms[0]))

  def run(rate: float, clip: float, seed: int) -> Any:
    private = privatizer_lib.Privatizer(rule.asks, SPECS, **arguments, seed=seed).init()
    return train(tf.constant(rate, tf.float32), tf.constant(clip, tf.float32), tf.constant(seed),
                 start, private)

  return run, median


def measured(weights: Any, part: Any) -> Any:
  x, y = part
  losses, logits, _ = passed(weights, tf.constant(x), tf.constant(y, tf.int32))
  loss = float(tf.reduce_mean(losses))
  return (loss if np.isfinite(loss) else np.inf), float(np.mean(np.argmax(logits, 1) == y))


def line(name: str, method: Method, task: Any) -> str:
  plan = evidence.make_plan(task, 1.0, method.bands)
  tried = []
  for quantile in method.quantiles:
    run, median = runner(method, plan, task, quantile)
    clips = CLIPS if len(method.quantiles) == 1 else CLIPS[1:2]
    for rate, clip in itertools.product(method.rates, clips):
      loss, _ = measured(run(rate, clip * median, 1), task.parts[1])
      tried.append((loss, rate, clip, quantile, functools.partial(run, rate, clip * median)))
  _, rate, clip, quantile, best = min(tried, key=lambda one: one[:4])
  found = np.array([measured(best(100 + seed), task.parts[2]) for seed in range(SEEDS)])
  error = found.std(0, ddof=1) / np.sqrt(SEEDS)
  chosen = f'{rate:g}, {clip:g}' + (f', quantile {quantile:g}' if quantile else '')
  return (f'{name:34}{found[:, 0].mean():7.4f} +- {error[0]:.4f}{found[:, 1].mean():8.4f} +- '
          f'{error[1]:.4f}   {chosen}')


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('studies', nargs='*', metavar='STUDY', default=list(STUDIES))
  parser.add_argument('--data', default='shared/data', help='folder of the real data')
  parser.add_argument('--methods', nargs='*', help='of one study')
  options = parser.parse_args()
  task = evidence_tasks.all_tasks(options.data)['mnist']()
  task = task._replace(parts=tuple((x, y.astype(np.int32)) for x, y in task.parts))
  for study in options.studies:
    print(f'{study:34}{"loss":>7}{"accuracy":>19}{"rate, clip norm":>28}')
    for name, method in STUDIES[study].items():
      if not options.methods or name in options.methods:
        print(line(name, method, task), flush=True)


if __name__ == '__main__':
  main()
