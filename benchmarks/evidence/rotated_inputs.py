# SPDX-License-Identifier: Apache-2.0
"""Does a matrix on either side help where a scale per coordinate cannot?

    python benchmarks/evidence/rotated_inputs.py [--seeds 6] [--parts rotated] [--methods DPSGD
        DPSOAP ...]

Inputs of 31 units from 3 to .003 that all have the same say in a yes or no, as in `tfdp demo`;
once as they are, and once rotated, so that no coordinate has a unit of its own. A linear
model, epsilon 1, delta 1e-5, 300 steps, 256 of 20,000 records a step. Every method has twelve
settings, of which the best on validation examples is shown on others: wrong answers, mean and
standard error of runs that were not used to choose.
"""

import argparse
import itertools
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract
from tfdp_adaptive import rules
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.examples import showcases

tfdp.experimental('dp_shampoo')

INPUTS, STEPS, BATCH, RECORDS, ROOM = 31, 300, 256, 20_000, 336
KRONECKER = dict(beta_2=.99, epsilon=1e-3, refresh_every=10)
# Name -> (rule, learning rates, clip norms).
METHODS = {
    'DPSGD': (lambda: rules.dp_sgd(.9), (.3, 1., 3., 10.), (1., 3., 10.)),
    'DPAdam': (lambda: rules.dp_adam(), (.3, 1., 3., 6.), (.1, .3, 1.)),
    'DPAdamBC': (lambda: rules.dp_adam_bc(epsilon=2e-4), (.03, .1, .3, 1.), (.1, .3, 1.)),
    'DPAdamSTP': (lambda: rules.scale_then_privatize(scale_epsilon=1e-3),
                  (.3, 1., 3., 6.), (30., 60., 120.)),
    'DPShampoo': (lambda: rules.dp_shampoo(**KRONECKER), (.1, .3, 1., 3.), (.1, .3, 1.)),
    'DPSOAP': (lambda: rules.dp_soap(**KRONECKER), (.03, .1, .3, 1.), (.1, .3, 1.)),
    # Its matrices are of records that are nobody's: of noise, or of 256 public ones.
    'KFC of noise': (lambda: rules.dp_kfc(.9), (.3, 1., 3., 10.), (.3, 1., 3.)),
    'KFC, public x': (lambda: rules.dp_kfc(.9), (.3, 1., 3., 10.), (.3, 1., 3.)),
    # All but its geometry: where eigenvalues hardly count, A and G are about a half.
    'its update': (lambda: rules.dp_soap(scale_epsilon=10., **KRONECKER),
                   (.03, .1, .3, 1.), (.05, .15, .5)),
}


def rotation():
  return np.linalg.qr(np.random.default_rng(9).normal(size=(INPUTS, INPUTS)))[0]


def public_factors(name, turn):
  """Of a linear model with random labels: errors are a half in size, whatever the weights."""
  if name == 'KFC, public x':
    x = showcases.make_scales(256, 4)[0] @ turn
  else:
    x = np.random.default_rng(4).normal(size=(256, INPUTS))
  one = tf.ones([1, 1]) / 4
  return (tf.constant(x.T @ x / 256, tf.float32), one), (one[0],)


def runner(rule, noise_multiplier, x, y, public=()):
  """`(rate, clip, seed) -> weights` of one private training run."""
  specs = [tf.TensorSpec([INPUTS, 1], tf.float32), tf.TensorSpec([1], tf.float32)]
  x, y = tf.constant(x), tf.constant(y[:, 0])

  @tf.function(autograph=False)
  def train(rate, clip, seed):
    def step(t, state, weights):
      chosen = tf.random.stateless_uniform([RECORDS], [seed, 3 * t]) < BATCH / RECORDS
      indices = tf.where(chosen)[:ROOM, 0]
      indices = tf.pad(indices, [[0, ROOM - tf.shape(indices)[0]]])
      mask = tf.range(ROOM) < tf.reduce_sum(tf.cast(chosen, tf.int32))
      inputs = tf.gather(x, indices)
      logits = tf.linalg.matvec(inputs, weights[0][:, 0]) + weights[1]
      errors = (tf.sigmoid(logits) - tf.gather(y, indices))[:, tf.newaxis]
      request = interface.Request(rule.asks, rule.query(state, public), (clip,))
      (sums,), _ = materialized.sum_records(
          request, [(inputs * errors)[..., tf.newaxis], errors], mask)
      std = noise_multiplier * clip
      mean = [(total + std * tf.random.stateless_normal(total.shape, [seed, 3 * t + i])) / BATCH
              for i, total in enumerate(sums.total, 1)]
      direction, state = rule.update(state, (contract.Release(mean, (std / BATCH)**2),), public)
      return t + 1, state, [w - rate * d for w, d in zip(weights, direction)]

    start = [tf.zeros(spec.shape) for spec in specs]
    return tf.while_loop(lambda t, *_: t < STEPS, step, (0, rule.init(specs), start))[2]

  return train


def wrong(weights, x, y):
  guesses = x @ weights[0].numpy() + weights[1].numpy() > 0
  return float(np.mean(guesses != (y > .5)))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seeds', type=int, default=6)
  parser.add_argument('--parts', nargs='*', default=['rotated', 'as they are'])
  parser.add_argument('--methods', nargs='*', default=list(METHODS))
  arguments = parser.parse_args()
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=1.0, target_delta=1e-5, population_size=RECORDS, batch_size=BATCH,
      steps=STEPS, l2_norm_clip=1.0)
  for part in arguments.parts:
    turn = rotation() if part == 'rotated' else np.eye(INPUTS)
    train, validation, test = [
        ((x @ turn).astype(np.float32), y) for x, y in (
            showcases.make_scales(count, seed)
            for seed, count in ((1, RECORDS), (2, 5000), (3, 5000)))]
    for name in arguments.methods:
      make, rates, clips = METHODS[name]
      public = public_factors(name, turn) if name.startswith('KFC') else ()
      run = runner(make(), plan.noise_multiplier, *train, public)
      results = {}
      for rate, clip in itertools.product(rates, clips):
        results[rate, clip] = wrong(
            run(tf.constant(rate), tf.constant(clip), tf.constant(0)), *validation)
      rate, clip = min(results, key=results.get)
      errors = [wrong(run(tf.constant(rate), tf.constant(clip), tf.constant(100 + seed)), *test)
                for seed in range(arguments.seeds)]
      print(f'{part:12}{name:14}{np.mean(errors):8.3f} +- '
            f'{np.std(errors, ddof=1) / np.sqrt(len(errors)):.3f}   learning_rate={rate:g}, '
            f'l2_norm_clip={clip:g}', flush=True)


if __name__ == '__main__':
  main()
