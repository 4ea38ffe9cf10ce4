# SPDX-License-Identifier: Apache-2.0
"""Rounds of `build_private_fed_avg` for a model so small that whole cohorts train at once.

The task is the next word among the most frequent ones of WikiText-2 (public) from the one before
it, by a table of logits beside public frequencies. The private server is the library's; the
training of users is written out for all of a cohort, and `check` compares it with TFF's.
"""

import collections
import dataclasses
import itertools
import os
from typing import Any, Dict, List, NamedTuple, Tuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import next_word
from tfdp_adaptive.federated import rounds as rounds_lib
from tfdp_adaptive.federated import server as server_lib

WORDS, EPSILON, DELTA, ROUNDS, BANDS = 64, 8.0, 1e-5, 100, 4
BATCH, LOCAL_STEPS, CLIENT_RATE = 32, 3, 4.0  # A user has at most 3 batches in a round.
CLIENTS = 100  # Per round, expected.
FILES = dict(stackexchange='stackexchange/posts.jsonl.xz', shakespeare='shakespeare/roles.jsonl.xz')
Pairs = Tuple[np.ndarray, np.ndarray]  # Words and the words after them.


class Task(NamedTuple):
  """Users, and the public frequencies that the model starts from."""

  name: str
  users: Dict[str, Pairs]
  validation: Dict[str, Pairs]
  test: Dict[str, Pairs]
  frequencies: np.ndarray  # [WORDS] logarithms.


def load(name: str, data: str) -> Task:
  """Whole users are held out, by a fixed hash."""
  public = corpus.read(os.path.join(data, 'wikitext2', 'train.txt.xz')).sentences
  vocabulary = next_word.build_vocabulary(public, WORDS)
  parts = corpus.split(corpus.read(os.path.join(data, FILES[name]), need_client=True).sentences)

  def pairs(sentences: Any) -> Pairs:
    x, y = next_word.examples(sentences, vocabulary, context=1)
    known = y >= next_word.FIRST_WORD
    return x[..., 0][known], y[known] - next_word.FIRST_WORD

  def by_user(sentences: Any) -> Dict[str, Pairs]:
    made = {user: pairs(mine) for user, mine in corpus.by_client(sentences).items()}
    return {user: one for user, one in made.items() if len(one[0])}

  counts = np.bincount(pairs(public)[1], minlength=WORDS) + 1.0
  return Task(name, *map(by_user, (parts.train, parts.validation, parts.test)),
              np.log(counts / counts.sum()).astype(np.float32))


def make_plan(noise: str, task: Task, seed: int) -> tfdp.PrivacyPlan:
  """Seeds are for this study: its data are public."""
  more: Dict[str, Any] = dict(
      independent={},
      banded=dict(mechanism=tfdp.mechanisms.BandedToeplitz(BANDS, ROUNDS),
                  sampling=tfdp.sampling.CyclicPoisson(cycle=BANDS)),
      tree=dict(mechanism=tfdp.mechanisms.Tree(ROUNDS), sampling=tfdp.sampling.FixedOrder()),
      blt=dict(mechanism=tfdp.mechanisms.BLT(3, ROUNDS), sampling=tfdp.sampling.FixedOrder()))
  return tfdp.PrivacyPlan.calibrate(
      target_epsilon=EPSILON, target_delta=DELTA, population_size=len(task.users),
      batch_size=CLIENTS, steps=ROUNDS, l2_norm_clip=1.0, unit='user', seed=seed,
      **more[noise])


# A round.


def packed(cohort: List[Pairs], rng: np.random.Generator, size: int) -> np.ndarray:
  """[3, size, steps, batch]: words, words after them, and which are there; rows of none behind."""
  result = np.zeros([3, size, LOCAL_STEPS * BATCH], np.int32)
  for i, pairs in enumerate(cohort):
    at = np.arange(len(pairs[0]))
    if len(at) > LOCAL_STEPS * BATCH:
      at = rng.permutation(at)[:LOCAL_STEPS * BATCH]
    for row, values in zip(result, (*(one[at] for one in pairs), np.ones_like(at))):
      row[i, :len(at)] = values
  return result.reshape(3, size, LOCAL_STEPS, BATCH)


def updates(task: Task, weights: tf.Tensor, cohort: tf.Tensor) -> tf.Tensor:
  """[users, rows, words]: initial less final weights of each user's epoch of SGD."""
  size = tf.shape(cohort)[1]
  final = tf.tile(weights[None], [size, 1, 1])
  for step in range(LOCAL_STEPS):
    before, after, there = tf.unstack(cohort[:, :, step])
    logits = tf.gather(final, before, batch_dims=1) + task.frequencies
    share = tf.cast(there, tf.float32)
    share /= tf.maximum(tf.reduce_sum(share, 1, keepdims=True), 1)
    delta = (tf.nn.softmax(logits) - tf.one_hot(after, WORDS)) * share[..., None]
    rows = tf.stack([tf.broadcast_to(tf.range(size)[:, None], tf.shape(before)), before], -1)
    final = tf.tensor_scatter_nd_sub(final, rows, CLIENT_RATE * delta)
  return weights - final


def initial() -> Any:
  return tff.learning.models.ModelWeights([tf.zeros([WORDS + next_word.FIRST_WORD, WORDS])], [])


def answers(task: Task, server: server_lib.Server, state: Any, cohort: tf.Tensor) -> Any:
  """The sum of a cohort's clipped answers."""
  broadcast = server.broadcast(state)
  each = tf.vectorized_map(lambda update: server.record(broadcast, [update]), updates(
      task, state.global_model_weights.trainable[0], cohort))
  return tf.nest.map_structure(lambda one: tf.reduce_sum(one, 0), each)


def make_server(rule: Any, plan: tfdp.PrivacyPlan, clip: float, rate: Any,
                seed: int) -> server_lib.Server:
  specs = [tf.TensorSpec(w.shape, w.dtype) for w in initial().trainable]
  plan = dataclasses.replace(plan, l2_norm_clip=clip)
  return server_lib.Server(rule, specs, plan, rate, seed=seed)


class Run:
  """All rounds of one rule, traced once for all server learning rates and draws."""

  def __init__(self, task: Task, rule: Any, plan: tfdp.PrivacyPlan, clip: float) -> None:
    self._rate = tf.Variable(0.0)
    self._server = lambda seed: make_server(
        rule, plan, clip, lambda round_: self._rate.read_value(), seed)
    server = self._server(0)

    def rounds(state: Any, cohorts: tf.Tensor) -> Any:
      for cohort in cohorts:
        state, _ = server.step(state, answers(task, server, state, cohort))
      return state.global_model_weights.trainable[0]

    self._rounds = tf.function(rounds)

  def __call__(self, cohorts: tf.Tensor, rate: float, seed: int) -> np.ndarray:
    """The weights after the last round."""
    self._rate.assign(rate)
    return self._rounds(self._server(seed).init(initial()), cohorts).numpy()


def loss_of(task: Task, weights: np.ndarray, users: Dict[str, Pairs]) -> float:
  """Per word of all users."""
  before, after = map(np.concatenate, zip(*users.values()))
  logits = tf.nn.log_softmax(weights + task.frequencies).numpy()
  value = -float(logits[before, after].mean(dtype=np.float64))
  return value if np.isfinite(value) else np.inf


def check(task: Task) -> float:
  """The largest difference between rounds here and TFF's, as a part of the largest step."""
  few = dict(itertools.islice(((user, pairs) for user, pairs in task.users.items()
                               if len(pairs[0]) <= LOCAL_STEPS * BATCH), 24))
  plan = tfdp.PrivacyPlan(population_size=len(few), batch_size=len(few), steps=9, unit='user',
                          noise_multiplier=1.0, l2_norm_clip=.2, target_delta=DELTA)
  users = tfdp.federated.Users(
      {user: collections.OrderedDict(zip('xy', pairs)) for user, pairs in few.items()},
      batch_size=BATCH)
  layers = tf.keras.layers
  rule = rules.dp_adam(epsilon=.01)
  process = tfdp.federated.build_private_fed_avg(
      lambda: tff.learning.models.from_keras_model(
          tf.keras.Sequential([
              layers.InputLayer([], dtype='int32'),
              layers.Embedding(WORDS + next_word.FIRST_WORD, WORDS, 'zeros'),
              layers.Rescaling(1.0, [float(value) for value in task.frequencies])]),
          loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
          input_spec=users.element_type_structure),
      server_rule=rule, plan=plan, server_learning_rate=.1, seed=3,
      client_optimizer_fn=tff.learning.optimizers.build_sgdm(CLIENT_RATE))
  server = make_server(rule, plan, .2, .1, 3)
  cohort = tf.constant(packed(list(few.values()), np.random.default_rng(0), len(few)))
  mine = server.init(initial())
  with process.reach(1, users) as engine:
    theirs = tf.nest.map_structure(tf.constant, process.initialize())
    for _ in range(2):
      theirs, _ = process.server.step(
          theirs, rounds_lib.run(process, engine, theirs, users.client_ids).answers)
      mine, _ = server.step(mine, answers(task, server, mine, cohort))
  one, other = (np.asarray(state.global_model_weights.trainable[0]) for state in (mine, theirs))
  return float(np.abs(one - other).max() / np.abs(other).max())
