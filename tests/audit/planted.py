# SPDX-License-Identifier: Apache-2.0
"""Bugs to be caught, planted into the real code, each switched on and off as it runs."""

import contextlib
import functools
import importlib.util

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import privatizer
from tfdp_adaptive import trees
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import noise_rows
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.keras import step as step_lib
from tfdp_adaptive.noise import keys
from tfdp_adaptive.rules import statistics

# Bug -> what finds it. Switched inside one traced step.
SWITCHED = {
    'no clipping': 'changes',
    'half the noise': 'noise',
    'the same noise at each step': 'noise',
    'the drawn batch as divisor': 'changes',
    'clipping before scaling': 'changes',
    'a square not projected': 'changes',
}
SCALED = ('DPAdamSTP', 'DPAdaGradSTP', 'DPRMSpropSTP', 'DP2RMSprop', 'DP2AdaGrad', 'DP2Yogi',
          'AdaDPS', 'PAGAN', 'DPShampoo', 'DPSOAP', 'DPKFC')
SQUARED_MEAN = ('DPAdamIME', 'DPAdaGradIME')


def applying(name):
  """The switched bugs that concern a class."""
  return [bug for bug in SWITCHED
          if not (bug == 'clipping before scaling' and name not in SCALED
                  or bug == 'a square not projected' and name not in SQUARED_MEAN)]


def caught(subject, by, allowed=5e-5):
  """Whether one look finds what is planted in `subject`."""
  if by == 'noise':
    return noise_rows.measure(subject, 3, steps=4).p_value < allowed
  return changes.largest(subject, 3, history=(0, 2)).violated


class Bugs:
  """Variables that say which bugs are on; all off at first."""

  def __init__(self, batch_size):
    self.batch_size = batch_size
    self._on = {bug: tf.Variable(False, trainable=False) for bug in SWITCHED}

  def only(self, wanted=None):
    for bug, variable in self._on.items():
      variable.assign(bug == wanted)

  def where(self, bug, wrong, right):
    return tf.nest.map_structure(
        lambda w, r: tf.where(self._on[bug], tf.cast(w, r.dtype), r), wrong, right)


@contextlib.contextmanager
def switched(batch_size=16):
  """`Bugs` for what is built and traced inside; the code is as it was afterwards."""
  bugs = Bugs(batch_size)
  with pytest.MonkeyPatch.context() as patch:
    _plant_in_engines(patch, bugs)
    if importlib.util.find_spec('tensorflow_privacy') is not None:
      _plant_in_queries(patch, bugs)
    _plant_in_noise(patch, bugs)
    measure = statistics._measure_square_of_mean

    def unprojected(mean, square, clip_norm, secret):
      value, secret = measure(mean, square, clip_norm, secret)
      plain = trees.map(tf.square, mean)
      return bugs.where('a square not projected', plain, value), secret

    patch.setattr(statistics, '_measure_square_of_mean', unprojected)
    yield bugs


def _plant_in_engines(patch, bugs):
  choose = engines.choose

  def chosen(*arguments):
    engine = choose(*arguments)

    @functools.wraps(engine)
    def faulty(model, loss, batch, request):
      clips = tuple(bugs.where('no clipping', 1e3 * clip, clip) for clip in request.clips)
      clipped = engine(model, loss, batch, request._replace(clips=clips))
      scaled = any(tf.nest.flatten(query.scale) for query in request.queries)
      raw = engine(model, loss, batch, request._replace(queries=tuple(
          query._replace(scale=()) for query in request.queries))) if scaled else clipped
      sums = tuple(
          ours._replace(total=bugs.where('clipping before scaling', _scaled(query, other.total),
                                         ours.total))
          for query, ours, other in zip(request.queries, clipped.sums, raw.sums))
      count = tf.maximum(tf.reduce_sum(tf.cast(batch.mask, tf.float32)), 1)
      divided = lambda t: bugs.where(
          'the drawn batch as divisor', t * bugs.batch_size / tf.cast(count, t.dtype), t)
      return clipped._replace(sums=tuple(trees.map(divided, one) for one in sums))

    return faulty

  patch.setattr(engines, 'choose', chosen)


def _scaled(query, tree):
  return geometry.rescale(tree, query.scale) if tf.nest.flatten(query.scale) else tree


def _plant_in_queries(patch, bugs):
  from tfdp_adaptive.queries import rule_query  # pylint: disable=g-import-not-at-top
  derive = rule_query.RuleQuery.derive_sample_params
  preprocess = rule_query.RuleQuery.preprocess_record

  def unclipped(self, state):
    params = derive(self, state)
    return params._replace(clips=tuple(
        bugs.where('no clipping', 1e3 * clip, clip) for clip in params.clips))

  def unscaled(self, params, record):
    right = preprocess(self, params, record)
    raw = preprocess(self, params._replace(scales=tuple(() for _ in params.scales)), record)
    return tuple(
        ours._replace(total=bugs.where(
            'clipping before scaling',
            _scaled(contract.Query(geometry.unpacked(scale, other.total)), other.total),
            ours.total))
        for scale, ours, other in zip(params.scales, right, raw))

  patch.setattr(rule_query.RuleQuery, 'derive_sample_params', unclipped)
  patch.setattr(rule_query.RuleQuery, 'preprocess_record', unscaled)


def _plant_in_noise(patch, bugs):
  add, split = privatizer._sum, keys.split

  def halved(value, row, std, asked):
    return add(value, row, bugs.where('half the noise', std / 2, std), asked)

  def repeated(key):
    used, rest = split(key)
    return used, bugs.where('the same noise at each step', key, rest)

  patch.setattr(privatizer, '_sum', halved)
  patch.setattr(keys, 'split', repeated)


@contextlib.contextmanager
def b_for_2b_minus_1():
  """The sensitivity of the squared mean, taken for that of the mean."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(statistics, 'square_sensitivity', lambda distance: distance)
    yield


@contextlib.contextmanager
def examples_as_records():
  """Every example of a user is clipped by itself, where users are what is protected."""
  clip = step_lib.clip

  def split(model, loss, batch, request):
    alone = interface.joined(batch)[0]._replace(
        mask=tf.reshape(batch.examples, [-1]), examples=())
    clipped = clip(model, loss, alone, request)
    return clipped._replace(
        outputs=interface.divided(clipped.outputs, batch), norms=(),
        losses=tf.reduce_sum(interface.divided(clipped.losses, batch), 1))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(step_lib, 'clip', split)
    yield


@contextlib.contextmanager
def half_the_noise_announced():
  """Whoever adds the noise was given half the noise multiplier."""
  start = privatizer.Privatizer.__init__

  def init(self, *args, noise_multiplier, **kwargs):
    start(self, *args, noise_multiplier=noise_multiplier / 2, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(privatizer.Privatizer, '__init__', init)
    yield


def _batches(draw):
  @contextlib.contextmanager
  def planted():
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sampling.Poisson, 'index_batches', draw)
      yield
  return planted


def _cyclic(self, plan, size, start_step=0, coins=None):
  order, whole = np.random.default_rng(0).permutation(size), int(plan.batch_size)
  for step in range(start_step, plan.steps):
    yield np.take(order, range(step * whole, (step + 1) * whole), mode='wrap')


def _shuffled(self, plan, size, start_step=0, coins=None):
  rng, whole = np.random.default_rng(0), int(plan.batch_size)
  steps = plan.steps - start_step
  epochs = np.stack([rng.permutation(size) for _ in range(-(-steps * whole // size))])
  yield from epochs.reshape(-1)[:steps * whole].reshape(steps, whole)


def _same(self, plan, size, start_step=0, coins=None):
  batch = np.random.default_rng(0).permutation(size)[:int(plan.batch_size)]
  for _ in range(start_step, plan.steps):
    yield batch


BATCHES = {'cyclic batches': _batches(_cyclic), 'shuffled epochs': _batches(_shuffled),
           'the same batch always': _batches(_same)}
