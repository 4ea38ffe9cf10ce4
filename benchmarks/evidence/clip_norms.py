# SPDX-License-Identifier: Apache-2.0
"""Weights per record, filters and clip norms that follow: what they cost, and whether they help.

    python benchmarks/evidence/clip_norms.py cost
    python benchmarks/evidence/clip_norms.py mnist FOLDER [CASE ...]

FOLDER holds x_train.npy[.xz], y_train, x_test and y_test; cases are titles of `RUNS`, by
default all of them.

`cost`: processor time (all threads) of one training step of a 784-512-512-10 network at
batch 256, and of a small language model whose steps share matrices, relative to DP-Adam
with hard clipping; the median of rounds in which all cases take turns.

`mnist`: test accuracy of a 784-64-10 network after 200 steps of batch 256 at epsilon 2,
delta 1e-5, for each learning rate of a grid, so that nothing is hidden by the choice of
one. One seed each: differences below a percent mean nothing.
"""

import argparse
import lzma
import os
import pathlib
import time
import warnings

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

tfdp.experimental('dp_muon')

keras = compat.keras
ROUNDS, BATCH = 15, 256
CLIPPING = {
    'auto_v': tfdp.clipping.AutoV(), 'auto_s': tfdp.clipping.AutoS(), 'psac': tfdp.clipping.PSAC(),
    'tanh': tfdp.clipping.Tanh(), 'quantile_clip': tfdp.clipping.Quantile(),
    'slack_clip': tfdp.clipping.Slack(), 'groups': tfdp.clipping.PerLayer()}
VARIANTS = {
    'hard': {}, **{name: dict(clipping=value) for name, value in CLIPPING.items()},
    'partition': dict(rule='partition'),
    'DPAdamW': dict(name='DPAdamW'), 'DPMuon': dict(name='DPMuon', exclude=['last']),
    'DPMuon edge': dict(name='DPMuon', exclude=['last'], edge=True)}


def network(width):
  return tfdp.DPSequential([
      keras.layers.Input((784,)), *[keras.layers.Dense(w, activation='relu') for w in width],
      keras.layers.Dense(10, name='last')])


def language_model():
  return tfdp.DPSequential([
      keras.layers.Input((32,), dtype='int32'), keras.layers.Embedding(1000, 64),
      keras.layers.Dense(256, activation='relu'), keras.layers.Dense(64),
      keras.layers.LayerNormalization(), keras.layers.Dense(1000)])


def optimizer(rate, rule=None, name='DPAdam', **kwargs):
  if rule is not None:
    factory = {'DPAdam': tfdp.rules.dp_adam, 'DPSGD': tfdp.rules.dp_sgd}[name]
    if rule == 'partition':
      made = tfdp.rules.partition([(lambda spec: len(spec.shape) == 2, factory()),
                                   (lambda spec: True, factory())])
    return tfdp.DPOptimizer(made, rate, **kwargs)
  return getattr(tfdp, name)(rate, **kwargs)


def cost():
  rng = np.random.default_rng(0)
  for title, build, batch, x, y in (
      ('784-512-512-10, batch 256', lambda: network((512, 512)), BATCH,
       rng.normal(size=(BATCH, 784)).astype('float32'), rng.integers(0, 10, BATCH)),
      ('language model, batch 32 of length 32', language_model, 32,
       rng.integers(0, 1000, (32, 32)), rng.integers(0, 1000, (32, 32)))):
    steps = {}
    for name, kwargs in VARIANTS.items():
      model = build()
      model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    optimizer=optimizer(1e-3, l2_norm_clip=1.0, noise_multiplier=1.0,
                                        batch_size=batch, **kwargs))
      steps[name] = lambda model=model, x=x, y=y: model.train_on_batch(x, y)
    seconds = {name: [] for name in steps}
    for i in range(ROUNDS + 1):
      for name, step in steps.items():
        start = time.process_time()
        step()
        if i:
          seconds[name].append(time.process_time() - start)
    print(f'\n{title}, TensorFlow {tf.__version__}, {os.cpu_count()} CPUs\n')
    print('case             CPU ms  of hard')
    hard = np.median(seconds['hard'])
    for name, times in seconds.items():
      print(f'{name:15} {1e3 * np.median(times):7.1f} {np.median(times) / hard:8.2f}', flush=True)


def load(folder, name):
  path = folder / f'{name}.npy.xz'
  if path.exists():
    with lzma.open(path) as file:
      return np.load(file)
  return np.load(folder / f'{name}.npy')


RUNS = [  # title, class, arguments, clip norms, learning rates times the clip norm.
    ('hard', 'DPSGD', {}, (0.1, 1.0, 10.0), (1.0, 4.0)),
    ('auto_s', 'DPSGD', VARIANTS['auto_s'], (1.0,), (1.0, 4.0)),
    ('auto_v', 'DPSGD', VARIANTS['auto_v'], (1.0,), (1.0, 4.0)),
    ('psac', 'DPSGD', VARIANTS['psac'], (1.0,), (1.0, 4.0)),
    ('tanh', 'DPSGD', VARIANTS['tanh'], (1.0,), (1.0, 4.0)),
    ('groups', 'DPSGD', VARIANTS['groups'], (0.1, 1.0), (1.0, 4.0)),
    ('hard', 'DPAdam', {}, (0.1, 10.0), (None,)),
    ('quantile_clip', 'DPAdam', VARIANTS['quantile_clip'], (0.1, 10.0), (None,)),
    ('slack_clip', 'DPAdam', VARIANTS['slack_clip'], (0.1, 10.0), (None,)),
    ('momentum .9', 'DPSGD', dict(momentum=0.9), (1.0,), (0.1, 0.4)),
    ('adam', 'DPAdam', {}, (1.0,), (1e-3, 3e-3, 1e-2)),
    ('adamw', 'DPAdamW', {}, (1.0,), (1e-3, 3e-3, 1e-2)),
    ('muon', 'DPMuon', dict(exclude=['last']), (1.0,), (1e-3, 3e-3, 1e-2)),
    ('muon edge', 'DPMuon', dict(exclude=['last'], edge=True), (1.0,), (1e-3, 3e-3, 1e-2))]


def mnist(folder, only):
  x, y, xt, yt = (load(folder, name) for name in ('x_train', 'y_train', 'x_test', 'y_test'))
  flat = lambda images: (images.reshape(len(images), 784) / 255).astype('float32')
  x, xt = flat(x), flat(xt)
  steps = 200
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=2.0, target_delta=1e-5, population_size=len(x), batch_size=BATCH,
      steps=steps, l2_norm_clip=1.0)
  print(f'784-64-10 on MNIST, epsilon 2, {steps} steps of batch {BATCH}, noise multiplier '
        f'{plan.noise_multiplier:.3f}\n\nrule    case            clip norm  rate     accuracy')
  for title, name, kwargs, clips, rates in [run for run in RUNS if not only or run[0] in only]:
    for clip in clips:
      for relative in rates:
        rate = 3e-3 if relative is None else relative / clip
        keras.utils.set_random_seed(1)
        model = network((64,))
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      optimizer=optimizer(rate, name=name, plan=plan, l2_norm_clip=clip, **kwargs))
        model.fit(plan.batches((x, y)), verbose=0)
        accuracy = np.mean(np.argmax(model.predict(xt, verbose=0, batch_size=1000), 1) == yt)
        print(f'{name:7} {title:15} {clip:9g}  {rate:<7g} {accuracy:9.4f}', flush=True)


def main():
  warnings.simplefilter('ignore')
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('what', choices=('cost', 'mnist'))
  parser.add_argument('folder', nargs='?', type=pathlib.Path)
  parser.add_argument('case', nargs='*')
  arguments = parser.parse_args()
  if arguments.what == 'cost':
    cost()
  elif arguments.folder is None:
    parser.error('mnist needs the folder with the data')
  else:
    mnist(arguments.folder, arguments.case)


if __name__ == '__main__':
  main()
