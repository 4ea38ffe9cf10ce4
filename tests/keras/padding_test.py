# SPDX-License-Identifier: Apache-2.0
"""`fit` trains on the records of a plan's batches, not on their padding."""

import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.batches import tags
from tfdp_adaptive.batches import users as users_lib
from tfdp_adaptive.independence import validation
from tfdp_adaptive.keras import fit as fit_lib
from tfdp_adaptive.keras import step as step_lib

keras = compat.keras
N, B = 60, 6
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def make_plan(**kwargs):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=N, batch_size=B, steps=12, l2_norm_clip=1.0, noise_multiplier=1e-6,
      target_delta=1e-6, sampling=tfdp.sampling.Poisson(), seed=3), **kwargs})


def make_model(plan, **kwargs):
  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer='ones')]))
  optimizer = tfdp.DPSGD(0.1, plan=plan)
  model.compile(optimizer, loss='mse', **kwargs)
  return model


def rows_of(batches):
  return [tf.nest.flatten(batch)[-1].shape[0] for batch in batches]


def test_nothing_but_the_empty_rows_at_the_end_is_left_out():
  plan = make_plan(steps=40)
  counts = [len(indices) for indices in plan.index_batches()]
  for data in ((X, Y), X, ({'a': X}, Y, np.full(N, 2.0, np.float32))):
    padded = plan.batches(data)
    found = list(plan.batches(data).resumed(0, tight=True))
    assert rows_of(found) == [max(1, count) for count in counts]
    for (*before, weight), after in zip(padded, found):
      both = (*before, tags.split(weight)), after  # The tags come in two ways.
      for whole, part in zip(*map(tf.nest.flatten, both)):
        if whole is not None:
          np.testing.assert_array_equal(whole[:part.shape[0]], part)
          assert not np.any(whole[part.shape[0]:])


@pytest.mark.parametrize('multiple', [1, 3, 4, 20])
def test_sizes_are_multiples_and_no_record_is_left_out(multiple):
  plan = make_plan(steps=60)
  for indices, (x, _, weight) in zip(plan.index_batches(), plan.batches((X, Y), pad_to=multiple)):
    rows = max(1, math.ceil(len(indices) / multiple)) * multiple
    assert x.shape[0] == weight.shape[0] == rows
    np.testing.assert_array_equal(x[:len(indices)], X[indices])
    np.testing.assert_array_equal(weight != 0, np.arange(rows) < len(indices))


def test_large_batches_have_few_sizes():
  plan = make_plan(population_size=4000, batch_size=400, steps=30)
  data = np.zeros((4000, 3), np.float32), np.zeros(4000, np.float32)
  counts = [len(indices) for indices in plan.index_batches()]
  sizes = rows_of(plan.batches(data).resumed(0, tight=True))
  assert sizes == [13 * math.ceil(count / 13) for count in counts]
  assert len(set(sizes)) < 16 < len(set(counts))


@pytest.mark.thorough
def test_fit_learns_without_padding_what_it_learns_with_it():
  plan = make_plan(steps=3)
  model, other = make_model(plan), make_model(plan)
  model.fit(plan.batches((X, Y)), verbose=0)
  for batch in plan.batches((X, Y), pad_to=20):
    other.train_on_batch(*batch)
  for left, right in zip(model.get_weights(), other.get_weights()):
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('scheme', [
    tfdp.sampling.Poisson(), tfdp.sampling.TruncatedPoisson(max_batch_size=20)], ids=repr)
def test_steps_of_any_size_are_one_trace(scheme, monkeypatch):
  plan = make_plan(sampling=scheme)
  model = make_model(plan)
  traces, rows, step = [], tf.Variable(0), step_lib.train_step

  def traced(model, data):
    weight = tf.nest.flatten(data)[-1]
    traces.append(weight.shape[0])
    rows.assign_add(tf.shape(weight)[0])
    return step(model, data)

  monkeypatch.setattr(step_lib, 'train_step', traced)
  model.fit(plan.batches((X, Y)), verbose=0)
  assert traces == [None]
  assert int(rows) == sum(max(1, len(indices)) for indices in plan.index_batches())


def test_padding_stays_where_sizes_cost_a_compilation_or_are_fixed():
  plan = make_plan()
  check = lambda model, plan: fit_lib.check_fit(
      model.optimizer, plan.batches((X, Y)), None, {}, tight=True)
  assert set(rows_of(check(make_model(plan), plan))) > {6, 7}
  fixed = make_plan(sampling=tfdp.sampling.FixedOrder())
  assert set(rows_of(check(make_model(fixed), fixed))) == {6}
  for arguments, tight in ((dict(jit_compile=True), False), (dict(run_eagerly=True), False),
                           ({}, True)):
    model = make_model(plan, **arguments)
    with mock.patch.object(fit_lib, 'check_fit', side_effect=ValueError) as called:
      with pytest.raises(ValueError):
        model.fit(plan.batches((X, Y)))
    assert called.call_args.kwargs == dict(tight=tight)


def test_a_start_that_is_known_when_training_begins(tmp_path):
  """A callback of one's own restores a run after `fit` was called."""
  plan = make_plan()
  first, second = make_model(plan), make_model(plan)
  first.fit(plan.batches((X, Y)), steps_per_epoch=5, verbose=0)
  path = tf.train.Checkpoint(model=first).save(str(tmp_path / 'five'))
  restore = keras.callbacks.LambdaCallback(
      on_train_begin=lambda *_: tf.train.Checkpoint(model=second).restore(path))
  batches = plan.batches((X, Y), start_step=lambda: second.optimizer.steps_done)
  second.fit(batches, steps_per_epoch=7, verbose=0, callbacks=[restore])
  first.fit(plan.batches((X, Y), start_step=5), verbose=0)
  assert first.optimizer.steps_done == second.optimizer.steps_done == 12
  for left, right in zip(first.get_weights(), second.get_weights()):
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def test_users_are_sorted_once(monkeypatch):
  made, users = [], users_lib.Users
  monkeypatch.setattr(users_lib, 'Users', lambda *args, **more: (
      made.append(args) or users(*args, **more)))
  plan = make_plan(unit='user', population_size=20, batch_size=4)
  make_model(plan).fit(
      plan.batches((X, Y), users=np.arange(N) % 20, examples_per_user=2), verbose=0)
  assert len(made) == 1


def test_an_eager_run_examines_the_model_once_per_size(monkeypatch):
  seen, validate = [], validation.validate_model
  monkeypatch.setattr(
      validation, 'validate_model', lambda *args: seen.append(args[1:]) or validate(*args))
  plan = make_plan()
  model = make_model(plan, run_eagerly=True)
  seen.clear()  # `make_private` filled it.
  model.fit(plan.batches((X, Y)), verbose=0)
  sizes = {tf.nest.flatten(batch)[-1].shape[0] for batch in plan.batches((X, Y))}
  assert len(seen) == len(sizes) < plan.steps / 2


@pytest.mark.thorough
def test_nothing_is_traced_after_the_first_epoch():
  """Sizes differ from step to step; metrics, validation and callbacks come every epoch."""
  plan = make_plan(sampling=tfdp.sampling.Poisson(), steps=20)
  traces = []

  class Layer(keras.layers.Layer):

    def call(self, x, training=False):
      traces.append(training)
      return x

  def own_loss(y, outputs):
    traces.append('loss')
    return tf.reduce_mean(tf.square(y - outputs), 1)

  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input((3,)), Layer(), keras.layers.Dense(1)]))
  model.compile(tfdp.DPAdam(0.1, plan=plan), loss=own_loss, metrics=['mae'])
  counts = []
  watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: counts.append(len(traces)))
  batches = plan.batches((X, Y))
  model.fit(batches, steps_per_epoch=2, epochs=10, verbose=0, callbacks=[watch],
            validation_data=(X[:7], Y[:7]), validation_batch_size=4)
  assert len({max(1, len(indices)) for indices in plan.index_batches()}) > 5
  assert len(counts) == 10 and len(set(counts)) == 1, counts
