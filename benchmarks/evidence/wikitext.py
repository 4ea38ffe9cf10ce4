# SPDX-License-Identifier: Apache-2.0
"""Table 1 of PAGAN (Asi et al., ICML 2021): next words of WikiText-2 by an LSTM.

    PYTHONPATH=. python benchmarks/evidence/wikitext.py --data FOLDER --steps 100 [--methods DPSGD
        PAGAN]

The model has an embedding, two LSTM layers of 120 units and 8,000 words. An example is a row of 35
words of `train`; each of its words but the first is predicted from those before it in the row. The
vocabulary, and the ellipsoid of PAGAN, come from `valid`, which is public here. Every run is
complete: its noise is that of epsilon after --steps steps. The program prints what part of --epochs
epochs these are. Rates and clip norms are arguments and are not tuned here.

--on valid trains on public rows instead, half of them for the test, with the same noise over batch
size: a trial of settings that costs no privacy.
"""

import argparse
import collections
import importlib.util
import os
import time
from typing import Any, List, Tuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

WORDS, WIDTH, LENGTH, DELTA = 8000, 120, 35, 1e-5
PUBLISHED = {3.0: dict(DPSGD=240.32, PAGAN=228.72), 1.0: dict(DPSGD=287.81, PAGAN=251.01)}


def rows(tokens: List[str], ids: Any) -> np.ndarray:
  numbers = np.array([ids.get(token, 0) for token in tokens], np.int32)  # 0: any other word.
  return numbers[:len(numbers) // LENGTH * LENGTH].reshape(-1, LENGTH)


def parts(of: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
  return of[:, :-1], of[:, 1:]


def build() -> Any:
  layers = tf.keras.layers
  tf.keras.utils.set_random_seed(0)
  return tf.keras.Sequential([
      layers.Input([LENGTH - 1], dtype='int32'), layers.Embedding(WORDS, WIDTH),
      layers.LSTM(WIDTH, return_sequences=True), layers.LSTM(WIDTH, return_sequences=True),
      layers.Dense(WORDS)])


def loss_of() -> Any:
  return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def roots(public: np.ndarray, rate: float = 1.0, batch: int = 16) -> List[np.ndarray]:
  """Root mean squares of the gradients of public rows, over steps of SGD without privacy."""
  model, loss = build(), loss_of()

  @tf.function
  def gradients(row: tf.Tensor) -> List[tf.Tensor]:
    with tf.GradientTape() as tape:
      value = loss(row[:, 1:], model(row[:, :-1]))
    return [tf.convert_to_tensor(g) for g in tape.gradient(value, model.trainable_variables)]

  totals: List[Any] = [0.0] * len(model.trainable_variables)
  for first in range(0, len(public), batch):
    sums: List[Any] = [0.0] * len(totals)
    for row in public[first:first + batch]:
      for i, g in enumerate(gradients(tf.constant(row[np.newaxis]))):
        totals[i], sums[i] = totals[i] + np.square(g), sums[i] + g.numpy()
    for variable, total in zip(model.trainable_variables, sums):
      variable.assign_sub(rate / batch * total)
  return [np.sqrt(total / len(public)) for total in totals]


def optimizer(method: str, plan: Any, rate: float, public: np.ndarray, least: float) -> Any:
  if method == 'DPSGD':
    return tfdp.DPSGD(rate, momentum=.9, plan=plan)
  if method != 'PAGAN':
    return getattr(tfdp, method)(rate, plan=plan)
  found = roots(public)
  typical = np.sqrt(np.mean(np.concatenate([np.square(r).ravel() for r in found])))
  ellipsoid = tfdp.rules.pagan_ellipsoid([np.maximum(r, least * typical) for r in found])
  return tfdp.PAGAN(rate, plan=plan, ellipsoid=ellipsoid, projection='rescale')


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--methods', nargs='+', default=['DPSGD', 'PAGAN'])
  parser.add_argument('--epsilon', type=float, default=3.0)
  parser.add_argument('--batch', type=int, default=250)
  parser.add_argument('--steps', type=int, default=100)
  parser.add_argument('--epochs', type=int, default=60, help='of a whole run, to compare with')
  parser.add_argument('--rates', type=float, nargs='+', default=[2.0, .01], help='of each method')
  parser.add_argument('--clips', type=float, nargs='+', default=[.3, 1.0], help='of each method')
  parser.add_argument('--least', type=float, default=.1,
                      help='least root mean square of a coordinate, over the typical one')
  parser.add_argument('--public', type=int, default=160, help='rows behind the ellipsoid')
  parser.add_argument('--on', choices=['train', 'valid'], default='train')
  options = parser.parse_args()
  spec: Any = importlib.util.spec_from_file_location(
      'load', os.path.join(options.data, 'load.py'))
  load = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(load)
  valid = load.wikitext2('valid')
  common = collections.Counter(valid).most_common(WORDS - 1)
  ids = {word: i + 1 for i, (word, _) in enumerate(common)}
  public = rows(valid, ids)
  train, test = rows(load.wikitext2('train'), ids), rows(load.wikitext2('test'), ids)
  whole = options.epochs * len(train) // options.batch
  print(f'epsilon {options.epsilon:g}, delta {DELTA:g}; {len(train)} rows, batches of '
        f'{options.batch}; {options.steps} steps, {options.steps / whole:.2%} of {options.epochs} '
        f'epochs; on {options.on}')
  counts = np.bincount(public.ravel(), minlength=WORDS) + 1.0
  surprise = -np.log(counts / counts.sum())[parts(test)[1]].mean()
  print(f'{"method":8}{"rate":>8}{"clip":>7}{"perplexity":>12}{"published":>11}{"CPU s":>7}')
  print(f'{"words":8}{"":15}{np.exp(surprise):12.1f}', flush=True)
  for method, rate, clip in zip(options.methods, options.rates, options.clips):
    plan = tfdp.PrivacyPlan.calibrate(
        target_epsilon=options.epsilon, target_delta=DELTA, population_size=len(train),
        batch_size=options.batch, steps=options.steps, l2_norm_clip=clip)
    data, held = train, test
    if options.on == 'valid':
      batch = options.batch // 4
      data, held = public[::2], public[1::2]
      plan = tfdp.PrivacyPlan(
          population_size=len(data), batch_size=batch, steps=options.steps, l2_norm_clip=clip,
          noise_multiplier=plan.noise_multiplier * batch / options.batch, target_delta=DELTA)
    begun = time.process_time()
    model = tfdp.make_private(build())
    model.compile(optimizer(method, plan, rate, public[1:2 * options.public:2], options.least),
                  loss_of())
    model.fit(plan.batches(parts(data)), verbose=0)
    found = model.evaluate(*parts(held), batch_size=128, verbose=0)
    published = PUBLISHED.get(options.epsilon, {}).get(method, '')
    print(f'{method:8}{rate:8g}{clip:7g}{np.exp(found):12.1f}{published:>11}'
          f'{time.process_time() - begun:7.0f}', flush=True)


if __name__ == '__main__':
  main()
