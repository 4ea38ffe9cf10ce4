# SPDX-License-Identifier: Apache-2.0
"""A plan is kept at the step: whoever calls it, with whatever batch, in whatever order."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.batches import tags

keras = compat.keras
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype('float32')
Y = X.sum(1, keepdims=True)
REFUSED = (tfdp.PrivacyError, tf.errors.InvalidArgumentError)


def make_plan(**changes):
  return tfdp.PrivacyPlan(**dict(dict(
      batch_size=8, steps=6, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
      population_size=64), **changes))


def make_model(plan=None, optimizer=None, **arguments):
  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input([3]), keras.layers.Dense(1)]))
  if optimizer is None:
    optimizer = tfdp.DPAdam(0.1, plan=plan or make_plan(), **arguments)
  model.compile(optimizer, loss='mse')
  return model


def weights_of(model):
  return np.concatenate([np.ravel(v) for v in model.get_weights()])


def refused(model, call):
  """It raises, takes no step and moves no weight."""
  done, before = model.optimizer.steps_done, weights_of(model)
  with pytest.raises(REFUSED):
    call()
  assert model.optimizer.steps_done == done
  np.testing.assert_array_equal(weights_of(model), before)


SCHEMES = pytest.mark.parametrize('plan', [
    make_plan(), make_plan(sampling=tfdp.sampling.FixedOrder()),
    make_plan(sampling=tfdp.sampling.CyclicPoisson(cycle=2)),
    make_plan(sampling=tfdp.sampling.BallsInBins(cycle=8)),
    make_plan(adjacency='add_remove', population_is_public=True)],
    ids=lambda plan: type(plan.sampling).__name__ + '-' + plan.adjacency)


@pytest.mark.thorough
@pytest.mark.pitfall(
    '`train_on_batch` gets the same batch twice, or batches in another order.',
    severity='critical',
    stops='PrivacyError, because batches are tagged for their step; under XLA the batch counts as '
          'empty')
@SCHEMES
def test_batches_are_taken_once_and_in_their_order(plan):
  model = make_model(plan)
  drawn = list(plan.batches((X, Y)))
  assert len(drawn) == 6
  refused(model, lambda: model.train_on_batch(*drawn[1]))  # Ahead of its turn.
  model.train_on_batch(*drawn[0])
  refused(model, lambda: model.train_on_batch(*drawn[0]))  # Again.
  refused(model, lambda: model.train_on_batch(X[:8], Y[:8]))  # One's own.
  refused(model, lambda: model.train_on_batch(X[:8], Y[:8], np.ones(8)))
  refused(model, lambda: model.train_on_batch(X[:8], Y[:8], np.ones(8, 'float32')))
  step = tf.function(model.train_step)
  step(drawn[1])
  assert model.optimizer.steps_done == 2


@pytest.mark.thorough
@pytest.mark.pitfall(
    'Batches of another plan are used.',
    severity='critical', stops='an error, because batches are tagged with their plan')
def test_a_batch_of_another_plan_is_refused():
  model = make_model()
  for changes in (dict(batch_size=9), dict(steps=7), dict(sampling=tfdp.sampling.FixedOrder()),
                  dict(adjacency='replace', sampling=tfdp.sampling.FixedOrder())):
    other = next(iter(make_plan(**changes).batches((X, Y))))
    refused(model, lambda other=other: model.train_on_batch(*other))


def changed(batch):
  """Batches whose rows are not those that were drawn, each once and in its place."""
  batch = [np.asarray(part) for part in batch]
  every = lambda change: tuple(change(part) for part in batch)
  yield every(lambda part: np.concatenate([part, part]))
  yield every(lambda part: np.repeat(part, 2, axis=0))
  yield every(lambda part: part[::-1])
  yield every(lambda part: part[1:])
  yield every(lambda part: np.concatenate([part[:1], part]))
  yield (*batch[:2], np.where(batch[2] == 0, 0, batch[2][0]))


@pytest.mark.thorough
@pytest.mark.pitfall(
    'Augmentation by concatenation repeats examples within a batch.',
    severity='critical', stops='an error, because every row is tagged with its place')
@pytest.mark.parametrize('user', [False, True])
def test_rows_of_a_batch_are_taken_once_and_in_their_place(user):
  if user:
    plan = make_plan(unit='user', population_size=16, batch_size=4)
    drawn = plan.batches((X, Y), users=np.arange(64) % 16, examples_per_user=3)
  else:
    plan = make_plan()
    drawn = plan.batches((X, Y, RNG.uniform(1, 2, size=64).astype('float32')))
  model, batches = make_model(plan), iter(drawn)
  batch = next(batches)
  while np.count_nonzero(np.asarray(batch[2]).reshape(len(batch[2]), -1)[:, 0]) < 2:
    model.train_on_batch(*batch)  # Too few rows to be out of place.
    batch = next(batches)
  for other in changed(batch):
    refused(model, lambda other=other: model.train_on_batch(*other))
  x, *rest = batch
  model.train_on_batch(x + 1, *rest)  # The caller may change the content of rows.


def hlo(model, batches):
  step = tf.function(model.train_step, jit_compile=True)
  return step.experimental_get_compiler_ir(next(iter(batches)))(stage='hlo')


def lacking_on_a_tpu(text):
  """Returns what of a step a TPU has not: bits of float64, complex128, strings, host calls."""
  bits = [line for line in text.splitlines() if 'bitcast-convert' in line and 'f64' in line]
  return [word for word in ('c128', 'custom-call', 'string') if word in text] + bits


def test_the_tags_of_fit_need_nothing_that_a_tpu_lacks():
  model = make_model()
  model.fit(make_plan().batches((X, Y)), steps_per_epoch=1, verbose=0)
  own, beside = make_plan().batches((X, Y)), make_plan().batches((X, Y)).resumed(0)
  assert not lacking_on_a_tpu(hlo(model, beside))
  assert lacking_on_a_tpu(hlo(model, own))  # Tags in the digits of float64 weights.


@pytest.mark.parametrize('device', ['CPU', 'TPU'])
def test_the_noise_of_many_weights_needs_nothing_that_a_tpu_lacks(monkeypatch, device):
  monkeypatch.setattr(tf.config, 'list_physical_devices',
                      lambda kind=device: [kind] if kind == device else [])
  plan = make_plan()
  model = tfdp.DPSequential([
      compat.keras.layers.Input([3]), compat.keras.layers.Dense(trees.WORTH_COMPILING),
      compat.keras.layers.Dense(1)])
  model.compile(tfdp.DPAdam(0.1, plan=plan), loss='mse', jit_compile=False)
  model.optimizer.build(model.trainable_variables)
  text = hlo(model, plan.batches((X, Y)).resumed(0))
  assert (not lacking_on_a_tpu(text)) == (device == 'TPU')


@pytest.mark.pitfall(
    'XLA drops the assertions that would refuse a batch.',
    severity='critical', stops='a refused batch counts as empty')
def test_under_xla_nothing_of_a_refused_batch_gets_out():
  """Assertions vanish there: the step must not depend on the data."""
  results = []
  for scale in (1.0, -1.0):
    model = make_model(make_plan(), seed=1)
    model.set_weights([np.zeros([3, 1]), np.zeros([1])])
    x, y, weight = next(iter(make_plan(batch_size=9).batches((scale * X, Y))))
    tf.function(model.train_step, jit_compile=True)((x, y, weight))
    results.append(weights_of(model))
  np.testing.assert_array_equal(*results)
  assert np.abs(results[0]).max() > 0


def test_weights_are_what_they_seem():
  """The tag is in digits that float32 does not hold; every weight carries it."""
  plan, w = make_plan(), RNG.uniform(0.1, 7, size=64).astype('float32')
  for step, (_, y, weight) in enumerate(plan.batches((X, np.arange(64.), w))):
    real = np.asarray(weight) != 0
    expected = w[np.asarray(y, int)[real]]
    np.testing.assert_array_equal(np.asarray(weight, 'float32')[real], expected)
    read = tags.read(np.asarray(weight).view(np.int64)[real])
    assert np.all(read == tags.tag(plan, step, np.arange(len(real))[real]))
    assert np.all(read == tags.split(weight).tag[real])
  numbers = [tags.tag(plan, step) for step in range(10000)]
  assert len(set(numbers)) == len(numbers) and min(numbers) > 0 and max(numbers) < 2**28


@pytest.mark.thorough(rows=['False'])
@pytest.mark.parametrize('run_eagerly', [False, True])
def test_after_a_refusal_the_same_model_trains(run_eagerly):
  """Also where the first batch of all is refused while the step is traced."""
  plan = make_plan()
  model = make_model(plan)
  model.compile(tfdp.DPAdam(0.1, plan=plan), loss='mse', metrics=['mae'], run_eagerly=run_eagerly)
  for _ in range(2):
    refused(model, lambda: model.train_on_batch(X[:8], Y[:8]))
    with pytest.raises((ValueError, *REFUSED)):  # Keras' own error: two columns for three.
      model.train_on_batch(X[:8, :2], Y[:8], np.ones(8))
  model.fit(plan.batches((X, Y)), verbose=0)
  assert model.optimizer.steps_done == 6


@pytest.mark.pitfall(
    'A second `fit` starts from the beginning of the order, so examples take part too soon.',
    severity='critical', stops='the data set continues with the next step, or is refused')
def test_fit_goes_on_where_it_was_and_after_an_exception():
  plan = make_plan()
  model = make_model(plan)
  model.fit(plan.batches((X, Y)), steps_per_epoch=2, epochs=1, verbose=0)

  class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    model.fit(plan.batches((X, Y)), steps_per_epoch=2, verbose=0, callbacks=[Stop()])
  assert model.optimizer.steps_done == 3
  model.fit(plan.batches((X, Y)), steps_per_epoch=3, verbose=0)
  assert model.optimizer.steps_done == 6


@pytest.mark.thorough
def test_two_models_and_a_second_optimizer_on_one_plan_each_keep_it():
  plan = make_plan()
  drawn = list(plan.batches((X, Y)))
  for model in (make_model(plan), make_model(plan)):
    model.train_on_batch(*drawn[0])
    refused(model, lambda model=model: model.train_on_batch(*drawn[0]))
    model.compile(tfdp.DPAdam(0.1, plan=plan), loss='mse')  # Starts the plan again, and counts it.
    model.train_on_batch(*drawn[0])
    assert [entry.steps for entry in model.ledger.entries] == [1, 1]


@pytest.mark.pitfall(
    'You sample batches yourself, and the reader of the statement does not know it.',
    severity='high',
    stops='the argument `own_sampler` must describe the sampling, and the statement repeats it as '
          'your word')
def test_own_sampling_is_said_in_the_statement():
  with pytest.raises(ValueError, match='without a plan'):
    tfdp.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8, own_sampler='mine')
  with pytest.raises(ValueError, match='in words'):
    tfdp.DPAdam(0.1, plan=make_plan(), own_sampler=' ')
  model = make_model(own_sampler='Poisson, drawn by our data service')
  model.train_on_batch(X[:11], Y[:11])  # Any size is accepted.
  assert model.optimizer.steps_done == 1
  text = model.optimizer.statement()
  assert 'NOT DRAWN BY THE PLAN' in text and "'Poisson, drawn by our data service'" in text
  assert 'NOT DRAWN' not in make_model().optimizer.statement()
  assert 'NOT DRAWN BY THE PLAN' in model.ledger.statement()
  again = tfdp.DPAdam.from_config(model.optimizer.get_config())
  assert again.own_sampler == model.optimizer.own_sampler


@pytest.mark.pitfall(
    'A `sample_weight` hides that the batch has the wrong size.',
    severity='high', stops='PrivacyError')
def test_fixed_sizes_are_kept_with_weights_too():
  fixed = dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8)
  model = make_model(optimizer=tfdp.DPAdam(0.1, **fixed))
  refused(model, lambda: model.train_on_batch(X[:16], Y[:16], np.ones(16, 'float32')))
  model.train_on_batch(X[:16], Y[:16], np.repeat(np.float32([1, 0]), 8))


@pytest.mark.pitfall(
    'Several steps per execution run more steps than `fit` counted.',
    severity='critical', stops='the step counts itself and checks the tag of every batch')
@pytest.mark.parametrize('several', [2, 4])  # 2 divides the six steps, 4 does not.
def test_several_steps_per_execution(several):
  plan = make_plan(sampling=tfdp.sampling.FixedOrder())
  model = make_model(plan)
  model.compile(model.optimizer, loss='mse', steps_per_execution=several)
  with pytest.raises(tfdp.PrivacyError, match='covers 6 steps'):
    model.fit(plan.batches((X, Y)), epochs=2, verbose=0)
  model.fit(plan.batches((X, Y)), verbose=0)
  done = model.optimizer.steps_done
  assert done == 6 if several == 2 else 4 <= done <= 6
  model = make_model(plan)
  model.compile(model.optimizer, loss='mse', steps_per_execution=several)
  before = weights_of(model)
  with pytest.raises(REFUSED):
    model.fit(plan.batches((X, Y)), steps_per_epoch=1, epochs=7, verbose=0)
  np.testing.assert_array_equal(weights_of(model), before)


@pytest.mark.pitfall(
    'Your own loop calls a lower method of the optimizer (`update_step`).',
    severity='critical', stops='PrivacyError; no weight moves')
def test_gradients_of_ones_own_never_reach_the_weights():
  model = make_model()
  model.optimizer.build(model.trainable_variables)
  gradients = [tf.ones(v.shape) for v in model.trainable_variables]
  raw = [compat.raw_variable(v) for v in model.trainable_variables]
  optimizer = model.optimizer
  refused(model, lambda: optimizer.apply_gradients(zip(gradients, model.trainable_variables)))
  if compat.KERAS_3:
    refused(model, lambda: optimizer.apply(gradients, model.trainable_variables))
    refused(model, lambda: optimizer.update_step(gradients[0], raw[0], 0.1))
  else:
    refused(model, lambda: optimizer.update_step(gradients[0], raw[0]))
