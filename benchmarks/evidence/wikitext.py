# SPDX-License-Identifier: Apache-2.0
"""Table 1 of PAGAN (Asi et al., ICML 2021): next words of WikiText-2 by an LSTM.

    PYTHONPATH=. python benchmarks/evidence/wikitext.py --data FOLDER --steps 100 [--methods public
        DPSGD PAGAN] [--start public] [--out FILE]

The model has an embedding, two LSTM layers of 120 units and 8,000 words. An example is a row of 35
words of `train`; each of its words but the first is predicted from those before it in the row. The
vocabulary, and the ellipsoid of PAGAN, come from `valid`, which is public here. Every private run
is complete: its noise is that of epsilon after --steps steps. The program prints what part of
--epochs epochs these are. Each line is written as soon as its run has ended.

--start says where the runs begin: `random` weights, as in the table; `words`, where the biases of
the last layer are the log frequencies of the public words; `public`, the weights of the method
`public`, which is Adam on nine tenths of the public rows, from `words`, stopped by the rest. These
weights are kept in --weights. `Adam` is the same model without privacy, on batches of that size.

--on valid is a trial of settings that costs no privacy: the first half of the public rows is public
there, and the second half is trained on but for its last 1,000 rows, which are the test. Batches
are --smaller times smaller, with the same noise over batch size.
"""

import argparse
import collections
import importlib.util
import os
import sys
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


def build(start: Any = None) -> Any:
  """Returns the model, with `start` as its weights, or as its last biases if it is a vector."""
  layers = tf.keras.layers
  tf.keras.utils.set_random_seed(0)
  model = tf.keras.Sequential([
      layers.Input([LENGTH - 1], dtype='int32'), layers.Embedding(WORDS, WIDTH),
      layers.LSTM(WIDTH, return_sequences=True), layers.LSTM(WIDTH, return_sequences=True),
      layers.Dense(WORDS)])
  if isinstance(start, np.ndarray):
    start = [*model.get_weights()[:-1], start]
  if start is not None:
    model.set_weights(start)
  return model


def loss_of() -> Any:
  return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def roots(
    model: Any, public: np.ndarray, rate: float = 1.0, batch: int = 16) -> List[np.ndarray]:
  """Root mean squares of the gradients of public rows, over steps of SGD without privacy."""
  loss = loss_of()

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


def optimizer(
    method: str, plan: Any, rate: float, model: Any, public: np.ndarray, least: float) -> Any:
  if method == 'Adam':
    return tf.keras.optimizers.Adam(rate)
  if method == 'DPSGD':
    return tfdp.DPSGD(rate, momentum=.9, plan=plan)
  if method != 'PAGAN':
    return getattr(tfdp, method)(rate, plan=plan)
  found = roots(model, public)
  typical = np.sqrt(np.mean(np.concatenate([np.square(r).ravel() for r in found])))
  ellipsoid = tfdp.rules.pagan_ellipsoid([np.maximum(r, least * typical) for r in found])
  return tfdp.PAGAN(rate, plan=plan, ellipsoid=ellipsoid, projection='rescale')


def from_public(public: np.ndarray, start: Any, rate: float, path: str) -> List[np.ndarray]:
  """Returns the weights that Adam finds on public rows, and keeps them in the file `path`."""
  if path and os.path.exists(path):
    with np.load(path) as kept:
      return [kept[f'arr_{i}'] for i in range(len(kept.files))]
  mixed = np.random.default_rng(0).permutation(public)
  held = len(mixed) // 10
  model = build(start)
  model.compile(tf.keras.optimizers.Adam(rate), loss_of())
  log = model.fit(
      *parts(mixed[held:]), batch_size=32, epochs=20, verbose=0,
      validation_data=parts(mixed[:held]), callbacks=[
          tf.keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)])
  print('public, perplexity on the held tenth after each epoch: ' + ' '.join(
      f'{np.exp(loss):.1f}' for loss in log.history['val_loss']), file=sys.stderr, flush=True)
  if path:
    np.savez(path, *model.get_weights())
  return model.get_weights()


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
  parser.add_argument('--start', choices=['random', 'words', 'public'], default='random')
  parser.add_argument('--public_rate', type=float, default=2e-3, help='of Adam on public rows')
  parser.add_argument('--weights', default='', help='file of the weights of public rows, .npz')
  parser.add_argument('--test', type=int, default=None, help='how many rows of `test`')
  parser.add_argument('--on', choices=['train', 'valid'], default='train')
  parser.add_argument('--smaller', type=int, default=8, help='batches of a trial, so many times')
  parser.add_argument('--out', default='', help='file that the lines are added to')
  options = parser.parse_args()

  def say(line: str) -> None:
    print(line, flush=True)
    if options.out:
      with open(options.out, 'a', encoding='utf8') as out:
        out.write(line.rstrip() + '\n')

  spec: Any = importlib.util.spec_from_file_location(
      'load', os.path.join(options.data, 'load.py'))
  load = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(load)
  valid = load.wikitext2('valid')
  common = collections.Counter(valid).most_common(WORDS - 1)
  ids = {word: i + 1 for i, (word, _) in enumerate(common)}
  public = rows(valid, ids)
  train = rows(load.wikitext2('train'), ids)
  data, held = train, rows(load.wikitext2('test'), ids)[:options.test]
  if options.on == 'valid':
    public, data = np.array_split(public, 2)
    data, held = data[:-1000], data[-1000:]
  whole = options.epochs * len(train) // options.batch
  say(f'epsilon {options.epsilon:g}, delta {DELTA:g}; {len(train)} rows, batches of '
      f'{options.batch}; {options.steps} steps, {options.steps / whole:.2%} of {options.epochs} '
      f'epochs; {len(public)} public rows, {len(held)} test rows; on {options.on}, from '
      f'{options.start}')
  counts = np.bincount(public.ravel(), minlength=WORDS) + 1.0
  logs = np.log(counts / counts.sum()).astype(np.float32)
  say(f'{"method":8}{"rate":>8}{"clip":>7}{"perplexity":>12}{"published":>11}{"CPU s":>7}')
  say(f'{"words":8}{"":15}{np.exp(-logs[parts(held)[1]].mean()):12.1f}')
  begun = time.process_time()
  start = None if options.start == 'random' else logs
  if options.start == 'public':
    start = from_public(public, logs, options.public_rate, options.weights)
  for method, rate, clip in zip(options.methods, options.rates, options.clips):
    plan = tfdp.PrivacyPlan.calibrate(
        target_epsilon=options.epsilon, target_delta=DELTA, population_size=len(train),
        batch_size=options.batch, steps=options.steps, l2_norm_clip=clip)
    if options.on == 'valid':
      batch = options.batch // options.smaller
      plan = tfdp.PrivacyPlan(
          population_size=len(data), batch_size=batch, steps=options.steps, l2_norm_clip=clip,
          noise_multiplier=plan.noise_multiplier * batch / options.batch, target_delta=DELTA)
    model = build(start)
    if method not in ('public', 'Adam'):
      model = tfdp.make_private(model)
    if method == 'public':
      model.compile(loss=loss_of())
    else:
      model.compile(optimizer(
          method, plan, rate, build(start), public[:options.public], options.least), loss_of())
    if method == 'Adam':
      order = np.random.default_rng(0).permutation(len(data))
      order = np.resize(order, options.steps * plan.batch_size)
      model.fit(*parts(data[order]), batch_size=plan.batch_size, shuffle=False, verbose=0)
    elif method != 'public':
      model.fit(plan.batches(parts(data)), verbose=0)
    trained = time.process_time() - begun
    found = model.evaluate(*parts(held), batch_size=128, verbose=0)
    published = PUBLISHED.get(options.epsilon, {}).get(method, '')
    say(f'{method:8}{rate:8g}{clip:7g}{np.exp(found):12.1f}{published:>11}{trained:7.0f}')
    begun = time.process_time()


if __name__ == '__main__':
  main()
