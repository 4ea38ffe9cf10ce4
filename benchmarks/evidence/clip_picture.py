# SPDX-License-Identifier: Apache-2.0
"""What the clip norm does to a rare class and to probabilities; the picture of a page.

    PYTHONPATH=. python benchmarks/evidence/clip_picture.py [--out docs/clip_norm.png]

Five classes, of which the rarest has 2% of the examples, are told apart by a linear model. DP-Adam
trains it at epsilon 3 with constant clip norms and with none (`Automatic`), and Adam trains it
without privacy. Means of three runs.
"""

import argparse
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import matplotlib
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

matplotlib.use('Agg')
from matplotlib import pyplot

FREQUENCIES = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
CLIP_NORMS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PEOPLE, STEPS, RUNS = 20_000, 200, 3


def make(count: int, seed: int):
  rng = np.random.default_rng(seed)
  centers = 1.7 * np.random.default_rng(0).normal(size=(5, 8))
  y = rng.choice(5, count, p=FREQUENCIES)
  x = centers[y] + rng.normal(size=(count, 8))
  return x.astype(np.float32), y


def measure(optimizer, train, test):
  """Returns the loss, the recall of the most frequent class and that of the rarest."""
  model = tf.keras.Sequential([
      tf.keras.layers.Input([8]),
      tf.keras.layers.Dense(5, activation='softmax', kernel_initializer='zeros')])
  plan = getattr(optimizer, 'plan', None)
  if plan is not None:
    model = tfdp.make_private(model)
  model.compile(optimizer, 'sparse_categorical_crossentropy')
  if plan is not None:
    model.fit(plan.batches(train), verbose=0)
  else:
    model.fit(*train, batch_size=1_000, epochs=STEPS // 20, verbose=0)
  x, y = test
  p = model.predict(x, batch_size=5_000, verbose=0)
  right = p.argmax(1) == y
  loss = -np.mean(np.log(np.maximum(p[np.arange(len(y)), y], 1e-9)))
  return loss, right[y == 0].mean(), right[y == 4].mean()


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', default='docs/clip_norm.png')
  out = parser.parse_args().out
  train, test = make(PEOPLE, 1), make(20_000, 2)
  fields = dict(population_size=PEOPLE, batch_size=1_000, steps=STEPS, target_epsilon=3.0,
                target_delta=1e-6)

  def private(**clip):
    return tfdp.DPAdam(0.05, plan=tfdp.PrivacyPlan.calibrate(**fields, **clip))

  rows = {str(clip): (lambda clip=clip: private(l2_norm_clip=clip)) for clip in CLIP_NORMS}
  rows.update(automatic=private, adam=lambda: tf.keras.optimizers.Adam(0.05))
  found = {}
  print(f'{"clip norm":12}{"log loss":>10}{"recall of the frequent class":>30}'
        f'{"of the rarest":>16}')
  for name, make_optimizer in rows.items():
    found[name] = np.mean([measure(make_optimizer(), train, test) for _ in range(RUNS)], 0)
    print(f'{name:12}{found[name][0]:10.3f}{found[name][1]:30.3f}{found[name][2]:16.3f}',
          flush=True)

  figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), constrained_layout=True)
  clips = np.array([found[str(clip)] for clip in CLIP_NORMS])
  axes[0].semilogx(CLIP_NORMS, clips[:, 1], 'o-', color='tab:blue', label='most frequent class')
  axes[0].semilogx(CLIP_NORMS, clips[:, 2], 'o-', color='tab:red', label='rarest class, 2%')
  axes[0].axhline(found['automatic'][2], color='tab:red', linestyle='--',
                  label='rarest, no clip norm given')
  axes[0].axhline(found['adam'][2], color='tab:red', linestyle=':', label='rarest, not private')
  axes[0].set(xlabel='clip norm', ylabel='recall', ylim=(0, 1.02))
  axes[1].semilogx(CLIP_NORMS, clips[:, 0], 'o-', color='black', label='constant clip norm')
  axes[1].axhline(found['automatic'][0], color='black', linestyle='--', label='no clip norm given')
  axes[1].axhline(found['adam'][0], color='black', linestyle=':', label='not private')
  axes[1].set(xlabel='clip norm', ylabel='log loss')
  for axis in axes:
    axis.legend(fontsize=8)
  figure.savefig(out, dpi=110)


if __name__ == '__main__':
  main()
