# SPDX-License-Identifier: Apache-2.0
"""What a private step costs whose examples have several views, over a plain private step.

Usage: python benchmarks/speed/views.py [MODEL ...] >> benchmarks/results/views.txt

CPU ms per step with `tfdp.DPAdam` of 64 examples: one view; K views that the step repeats on the
device (`compile(views=K)`); K views that a function draws (`plan.batches(augment=f, views=K)`).
Medians of several rounds, in turns. `frozen base` is a network of convolutions with dropout before
a head that alone trains; `its features` is that head on features which were computed once.

With `--fixed_part`: 8 views with the frozen base, which the step computes once for all views of an
example, and the same where it is computed for each, as if the model had no fixed part.
"""

import os
import sys
import time
from unittest import mock

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import tensorflow as tf
import user_records

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import fixed_part

keras = compat.keras
EXAMPLES, STEPS, ROUNDS, VIEWS = user_records.EXAMPLES, 4, 5, (4, 16)


def frozen_base():
  network, x = user_records.convolutions()
  base = keras.Sequential(network.layers[:-1])
  base.trainable = False
  return keras.Sequential([
      keras.Input([28, 28, 1]), base, keras.layers.Dropout(.5), keras.layers.Dense(10)]), x


def its_features():
  model, x = frozen_base()
  features = tfdp.features(model.layers[0], x).x
  head = [keras.layers.Dropout(.5), keras.layers.Dense(10)]
  return keras.Sequential([keras.Input(features.shape[1:]), *head]), features


MODELS = {
    'perceptron': user_records.perceptron, 'convolutions': user_records.convolutions,
    'transformer': user_records.transformer, 'frozen base': frozen_base,
    'its features': its_features}


def run(make, repeated=1, drawn=0, part_of=fixed_part.of):
  """Yields CPU seconds of a step, round after round. `part_of` finds the model's fixed part."""
  model, x = make()
  plan = tfdp.PrivacyPlan(
      population_size=EXAMPLES, batch_size=EXAMPLES, steps=STEPS * (1 + ROUNDS), l2_norm_clip=1.0,
      noise_multiplier=1.0, target_delta=1e-3, sampling=tfdp.sampling.FixedOrder())
  private = tfdp.make_private(model)
  private.compile(tfdp.DPAdam(1e-3, plan=plan), views=repeated,
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  batches = plan.batches((x, np.arange(EXAMPLES) % 10), **(
      dict(augment=lambda x, y: (x, y), views=drawn) if drawn else {}))
  batches = iter(batches)
  for i in range(1 + ROUNDS):
    start = time.process_time()
    with mock.patch.object(fixed_part, 'of', part_of):
      for _ in range(STEPS):
        private.train_on_batch(*next(batches))
    if i:  # The first round traces.
      yield (time.process_time() - start) / STEPS


def with_fixed_part(views=8):
  runs = [run(frozen_base), run(frozen_base, views),
          run(frozen_base, views, part_of=lambda model: None)]
  plain, once, each = 1000 * np.median(list(zip(*runs)), 0)
  print(f'frozen base, {views} views: one view {plain:.1f}; base once for all views {once:.1f} '
        f'({once / plain / views:.2f}); base for each view {each:.1f} '
        f'({each / plain / views:.2f})', flush=True)


def main():
  print(f'TensorFlow {tf.__version__}, Keras {keras.__version__}; {EXAMPLES} examples a step; CPU '
        'ms, and over as many plain steps as there are views')
  if sys.argv[1:] == ['--fixed_part']:
    with_fixed_part()
    return
  print('model         one view' + ''.join(
      f'  {how} {k:2}        ' for k in VIEWS for how in ('repeated', '   drawn')))
  for name in sys.argv[1:] or MODELS:
    make = MODELS[name]
    runs = [run(make)] + [run(make, *how) for k in VIEWS for how in ((k,), (1, k))]
    times = 1000 * np.median(list(zip(*runs)), 0)
    cells = [f'  {t:7.1f} ({t / times[0] / k:.2f})    '
             for t, k in zip(times[1:], np.repeat(VIEWS, 2))]
    print(f'{name:13} {times[0]:8.1f}' + ''.join(cells), flush=True)


if __name__ == '__main__':
  main()
