# SPDX-License-Identifier: Apache-2.0
"""CPU time of the private steps that README teaches, over plain ones.

Usage: python benchmarks/speed/plans.py [task or task:loss ...]

Both train by `fit`, the private ones on the batches of a plan, whose drawing, padding and
marking are measured with them; with a loss of Keras and with one of one's own; where a record
is a user, with batches of as many examples; and by a loop of one's own over `train_on_batch`.
All cases of a loss train at the same time, in turns of a few steps, so that what else the
machine does meets each of them. The first turn, in which steps are traced, does not count.
"""

import os
import pathlib
import statistics
import sys
import threading
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from clipping import models
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.examples import language_model

keras = compat.keras
TURN, TURNS, BATCHES = 6, 8, 20
EXAMPLES_PER_USER = 4
KERAS_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Turns:
  """One after the other, some threads take turns."""

  def __init__(self, players):
    self._condition = threading.Condition()
    self._waiting = list(range(players))

  def wait(self, player):
    with self._condition:
      self._condition.wait_for(lambda: self._waiting[0] == player)

  def end(self, player, last):
    with self._condition:
      self._waiting.remove(player)
      if not last:
        self._waiting.append(player)
      self._condition.notify_all()


class Clock(keras.callbacks.Callback):
  """CPU seconds per step of each turn, an epoch of `fit`, without the first, which traces."""

  def __init__(self, turns, player):
    super().__init__()
    self._turns, self._player, self.seconds = turns, player, []

  def on_epoch_begin(self, epoch, logs=None):
    if epoch:
      self._turns.wait(self._player)
    self._start = time.process_time()

  def on_epoch_end(self, epoch, logs=None):
    if epoch:
      self.seconds.append((time.process_time() - self._start) / TURN)
    self._turns.end(self._player, epoch == TURNS)


def demo():
  """The model of `tfdp demo`: sentences of 1,002 words."""
  rng = np.random.default_rng(0)
  length, context, batch = language_model.next_word.LENGTH, language_model.next_word.CONTEXT, 256
  x = rng.integers(0, 1002, (batch, length, context), dtype=np.int32)
  y = rng.integers(0, 1002, (batch, length), dtype=np.int32)
  return models.Task(lambda unused: language_model.build(1002), x, y)


def own_loss(labels, logits):
  """Cross-entropy, as one would write it: [n], over the steps of a sequence their mean."""
  loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)
  return tf.reduce_mean(tf.reshape(loss, [tf.shape(loss)[0], -1]), axis=1)


def plain(task, train, loss):
  model = task.build(keras)
  model.compile(keras.optimizers.Adam(1e-3), loss=loss)
  return model, tf.data.Dataset.from_tensor_slices(train).repeat().batch(
      len(task.x), drop_remainder=True)


def private(task, train, loss, sampling, examples_per_user=None):
  """With users, a user has `examples_per_user` examples, and a batch as many as without."""
  each = examples_per_user or 1
  plan = tfdp.PrivacyPlan(
      population_size=len(train[0]) // each, batch_size=len(task.x) // each,
      steps=TURN * (TURNS + 1), l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-6,
      sampling=sampling, unit='user' if examples_per_user else 'example')
  model = tfdp.make_private(task.build(keras))
  model.compile(tfdp.DPAdam(1e-3, plan=plan), loss=loss)
  users = {} if not examples_per_user else {
      'users': np.arange(len(train[0])) // each, 'examples_per_user': each}
  return model, plan.batches(train, **users)


class Loop:
  """A loop of one's own, for what `measure` asks of `fit`."""

  def __init__(self, model):
    self._model = model

  def fit(self, batches, steps_per_epoch, epochs, callbacks, verbose):
    del verbose
    batches = iter(batches)
    for epoch in range(epochs):
      for callback in callbacks:
        callback.on_epoch_begin(epoch)
      for _ in range(steps_per_epoch):
        self._model.train_on_batch(*next(batches))
      for callback in callbacks:
        callback.on_epoch_end(epoch)


def cases(task, kind):
  """Model and batches of every case of a kind of loss; the first is the plain one."""
  train = tuple(np.concatenate([part] * BATCHES) for part in (task.x, task.y))
  loss, poisson, fixed = LOSSES[kind], tfdp.sampling.Poisson(), tfdp.sampling.FixedOrder()
  every = {'plain': plain(task, train, loss),
           'Poisson plan': private(task, train, loss, poisson)}
  if kind == 'Keras':
    every['fixed order'] = private(task, train, loss, fixed)
    every['Poisson plan of users'] = private(task, train, loss, poisson, EXAMPLES_PER_USER)
    model, batches = private(task, train, loss, poisson)
    every['Poisson plan, train_on_batch'] = Loop(model), batches
  return every


def measure(several):
  """CPU seconds of a step, [turns] for every case."""
  turns = Turns(len(several))
  clocks, threads = [], []
  for player, (model, batches) in enumerate(several.values()):
    clocks.append(Clock(turns, player))

    def train(model=model, batches=batches, player=player):
      turns.wait(player)
      model.fit(batches, steps_per_epoch=TURN, epochs=TURNS + 1, callbacks=[clocks[player]],
                verbose=0)

    threads.append(threading.Thread(target=train))
    threads[-1].start()
  for thread in threads:
    thread.join()
  return {name: clock.seconds for name, clock in zip(several, clocks)}


REMARKS = pathlib.Path(__file__).parents[1] / 'remarks' / 'plans.txt'
LOSSES = {'Keras': KERAS_LOSS, 'own': own_loss}
TASKS = {'demo': demo, 'mlp': models.mlp, 'cnn': models.cnn, 'lstm': models.lstm,
         'transformer': models.transformer}


def main():
  print(REMARKS.read_text(encoding='utf-8'))
  print(f'TensorFlow {tf.__version__}; CPU ms per step of `fit`, median of {TURNS} turns')
  for asked in sys.argv[1:] or TASKS:
    name, _, kinds = asked.partition(':')
    task = TASKS[name]()
    print(f'\n{name}, batch {len(task.x)}', flush=True)
    for kind in [kinds] if kinds else LOSSES:
      seconds = measure(cases(task, kind))
      for case, values in seconds.items():
        ratio = statistics.median(value / one for value, one in zip(values, seconds['plain']))
        print(f'  {f"{case}, {kind} loss":43} {1e3 * statistics.median(values):8.1f} {ratio:6.2f} '
              'x plain', flush=True)


if __name__ == '__main__':
  main()
