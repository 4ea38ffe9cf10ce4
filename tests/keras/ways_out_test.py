# SPDX-License-Identifier: Apache-2.0
"""Ways in which weights, secrets or data could leave without the ledger knowing."""

import copy
import os
import pickle
import stat

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import weight_digests

keras, layers = compat.keras, compat.keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 2)).astype('float32')
Y = X.sum(1, keepdims=True)
PLAN = tfdp.PrivacyPlan(
    batch_size=8, steps=4, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
    population_size=64)
TWICE = (PLAN + PLAN).epsilon(1e-3)


def base():
  return keras.Sequential([layers.Input([2]), layers.Dense(2), layers.Dense(1)])


def compiled(model, optimizer=None, **arguments):
  model = model if isinstance(model, tfdp.DPModel) else tfdp.make_private(model)
  model.compile(optimizer or tfdp.DPSGD(0.1, plan=PLAN), 'mse', **arguments)
  return model


def after(steps, model, *arguments):
  """A private model after steps on paper, which leave its weights as they are."""
  model = compiled(model, *arguments)
  model.optimizer.build(model.trainable_variables)
  for _ in range(steps):
    row = model.optimizer.run.state[1].noise.row
    row.assign_add(1)
    model.optimizer.run.step_counts.record(tf.convert_to_tensor(row))
  return model


def steps(model):
  return sorted(entry.steps for entry in weight_ledger.Ledger.of(model).ledger().entries)


@pytest.mark.pitfall(
    'A new head is trained on a frozen base from a private run, and the statement has the '
    'epsilon of the second run alone.',
    severity='critical', stops='epsilon comes from the ledger of all variables of the model')
def test_frozen_layers_are_counted():
  inner = base()
  after(4, inner)
  inner.layers[0].trainable = False
  for head in (tfdp.make_private(inner), tfdp.make_private(keras.Sequential(
      [layers.Input([2]), inner.layers[0], layers.Dense(1)]))):
    second = compiled(head)
    for _ in range(2):  # Before it is built, and then.
      optimizer = second.optimizer
      assert optimizer.epsilon() == pytest.approx(TWICE)
      assert 'THE WEIGHTS WERE TRAINED BEFORE' in optimizer.statement()
      assert optimizer.ledger_after(4).epsilon() == pytest.approx(TWICE)
      assert optimizer.ledger == second.ledger != tfdp.Ledger()
      budget = tfdp.callbacks.StopAtBudget(PLAN.epsilon() * 1.01)
      budget.set_model(second)
      assert budget._affordable() == 0
      optimizer.build(second.trainable_variables)


WAYS = {
    'plain reads': lambda model, path: loaded_weights(base(), model, path),
    'plain twin reads': lambda model, path: loaded_weights(base(), twin(model), path),
    'plain twin': lambda model, path: saved(twin(model), path),
    'part': lambda model, path: saved(
        keras.Sequential([layers.Input([2]), model.layers[0]]), path),
    'copy': lambda model, path: copy.deepcopy(twin(model)),
    'pickle': lambda model, path: pickle.loads(pickle.dumps(twin(model))),
    'private pickle': lambda model, path: pickle.loads(pickle.dumps(model)),
    'checkpoint': lambda model, path: checkpointed(twin(model), path),
    **({'shards': lambda model, path: sharded(base(), model, path)} if compat.KERAS_3 else {}),
    'checkpoint of variables': lambda model, path: checkpointed_variables(twin(model), path),
    'lambda': lambda model, path: inside_lambda(model),
    'lambda twin': lambda model, path: inside_lambda(twin(model)),
}


def twin(model):
  return keras.Sequential([layers.Input([2]), *model.layers])


def saved(model, path):
  model.save(f'{path}/m.keras')
  return keras.models.load_model(f'{path}/m.keras')


def loaded_weights(fresh, model, path):
  model.save_weights(f'{path}/m.weights.h5')
  fresh.load_weights(f'{path}/m.weights.h5')
  return fresh


def checkpointed(model, path):
  written, fresh = tf.train.Checkpoint(model=model).write(f'{path}/c'), base()
  tf.train.Checkpoint(model=fresh).read(written).expect_partial()
  return fresh


def sharded(fresh, model, path):
  model.save_weights(f'{path}/m.weights.json', max_shard_size=1)
  fresh.load_weights(f'{path}/m.weights.json')
  return fresh


def checkpointed_variables(model, path):
  written, fresh = tf.train.Checkpoint(v=model.weights).write(f'{path}/c'), base()
  tf.train.Checkpoint(v=fresh.weights).read(written)
  return fresh


def inside_lambda(model):
  return keras.Sequential(
      [layers.Input([2]), layers.Lambda(lambda x: model(x), output_shape=(1,)), layers.Dense(1)])


@pytest.mark.pitfall(
    'Weights of a private run are read, copied or wrapped by a plain model, and trained again.',
    severity='critical', stops='the ledger goes with the weights into files and models of Keras')
@pytest.mark.parametrize('way', list(WAYS))
def test_the_ledger_goes_where_weights_go(way, tmp_path):
  model = after(4, base())
  got = WAYS[way](model, str(tmp_path))
  assert steps(compiled(got)) == [4]
  assert compiled(got).optimizer.epsilon() == pytest.approx(TWICE)


def test_a_run_that_was_stopped_stays_so_in_a_file(tmp_path):
  model = after(2, base())
  model.optimizer.run.stopped = 4
  assert steps(model) == [4] and steps(saved(model, str(tmp_path))) == [4]


def test_an_optimizer_that_is_assigned_knows_the_model():
  inner = base()
  after(4, inner)
  inner.layers[0].trainable = False
  model = compiled(inner)
  model.optimizer = tfdp.DPSGD(0.1, plan=PLAN)
  model.make_train_function()
  assert model.optimizer.epsilon() == pytest.approx(TWICE)


def test_what_a_loss_reads_is_counted():
  teacher = after(4, base())
  model = tfdp.make_private(base())
  model.compile(tfdp.DPSGD(0.1, plan=PLAN),
                lambda y, output: tf.reduce_mean((teacher(0 * y + [[1., 2.]]) - output) ** 2, -1))
  looked_at(model)
  assert model.optimizer.epsilon() == pytest.approx(TWICE)


def test_what_makes_public_data_is_counted():
  generator = after(2, base())
  synthetic = lambda: (np.ones([4, 2], np.float32), np.asarray(generator(np.ones([4, 2]))))
  model = compiled(base(), tfdp.DPKFC(0.1, plan=PLAN, public_data=synthetic))
  assert [one.steps for one in model.optimizer.ledger.entries] == [2]
  after(1, generator)  # Another run, which the next steps read.
  assert sorted(one.steps for one in model.optimizer.ledger.entries) == [1, 2]


def test_a_layer_whose_variables_are_replaced_keeps_its_history():
  model = after(4, base())
  layer = model.layers[0]
  assert steps(copy.deepcopy(model)) == [4]
  assert [entry.steps for entry in weight_ledger.Ledger([layer]).entries()] == [4]
  assert [entry.steps for entry in weight_ledger.Ledger([copy.deepcopy(layer)]).entries()] in (
      [4], [])  # Keras 3 makes a new layer, without weights, of a layer's config.


def test_reading_in_parts_keeps_both_histories(tmp_path):
  first, second, path = after(4, base()), after(2, base()), str(tmp_path / 'first.weights.h5')
  first.save_weights(path)
  fresh = loaded_weights(base(), second, str(tmp_path))
  fresh.load_weights(path)
  assert steps(fresh) == [4]  # All other values.
  other = loaded_weights(base(), second, str(tmp_path))
  other.load_weights(path, skip_mismatch=True)
  assert steps(other) == [2, 4]


def test_one_run_is_counted_once_wherever_it_comes_from(tmp_path):
  model = after(2, base())
  loaded = loaded_weights(base(), model, str(tmp_path))
  both = keras.Sequential([layers.Input([2]), model.layers[0], loaded.layers[1]])
  assert steps(both) == [2]
  resumed = saved(model, str(tmp_path))
  assert resumed.optimizer.steps_done == 2
  resumed.optimizer.run.state[1].noise.row.assign(4)
  assert steps(resumed) == [4]
  assert steps(keras.Sequential([layers.Input([2]), model.layers[0], resumed.layers[1]])) == [4]
  model.optimizer.run.state[1].noise.row.assign(3)  # Both went on.
  assert steps(keras.Sequential(
      [layers.Input([2]), model.layers[0], resumed.layers[1]])) == [3, 4]


def noise_state(model):
  """Every SECRET array of the optimizer that does not look like nothing."""
  return [np.asarray(v) for v in tf.nest.flatten(model.optimizer.run.state[1])
          if np.asarray(v).dtype.kind == 'f' and np.any(np.asarray(v))]


@pytest.mark.pitfall(
    'A published file of weights holds the state of the noise, so a reader can subtract noise '
    'from the weights.',
    severity='critical',
    stops='files of weights hold weights and the ledger; files that resume are for their owner '
          'alone')
def test_secrets_are_only_in_files_that_resume(tmp_path):
  plan = tfdp.PrivacyPlan(
      batch_size=8, steps=4, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
      population_size=64, mechanism=tfdp.mechanisms.BLT(buffers=2, steps=4),
      sampling=tfdp.sampling.FixedOrder())
  model = after(2, base(), tfdp.DPSGD(0.1, plan=plan))
  for v in tf.nest.flatten(model.optimizer.run.state[1]):
    if tf.as_dtype(v.dtype).is_floating:
      v.assign(RNG.normal(size=v.shape))
  secrets = noise_state(model)
  assert secrets
  trackers = [metric for metric in model.metrics if metric.name == 'loss']
  for tracker in trackers:  # Keras 2 has it from the first step on.
    tracker.update_state([0.123456])  # Exact, of private data.
    secrets.append(np.asarray(tracker.variables[0]))

  def told(path):
    content = b''.join(file.read_bytes() for file in [*path.rglob('*')] if file.is_file()
                       ) if path.is_dir() else path.read_bytes()
    return sum(secret.tobytes() in content for secret in secrets)

  model.save_weights(str(tmp_path / 'w.weights.h5'))
  checkpoint = keras.callbacks.ModelCheckpoint(
      str(tmp_path / 'c.weights.h5'), save_weights_only=True)
  checkpoint.set_model(model)
  checkpoint.on_epoch_end(0, {})
  assert all(float(t.result()) == pytest.approx(0.123456) for t in trackers)  # They go on.
  tf.saved_model.save(model, str(tmp_path / 'folder'))
  model.export(str(tmp_path / 'export'))
  assert weight_digests.of_file(tmp_path / 'export').weights == weight_digests.of(
      model.get_weights())
  (tmp_path / 'pickle').write_bytes(pickle.dumps(model))
  for name in ('w.weights.h5', 'c.weights.h5', 'folder', 'export', 'pickle'):
    assert told(tmp_path / name) == 0, name
  path = tmp_path / 'm.keras'
  model.save(str(path))
  assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
  resumed = keras.models.load_model(str(path))
  assert resumed.optimizer.steps_done == 2
  np.testing.assert_array_equal(noise_state(resumed)[0], secrets[0])
  backup = tfdp.callbacks.BackupAndRestore(tmp_path / 'backup')
  backup.set_model(model)
  backup.on_train_begin()
  backup.on_epoch_end(0)
  assert stat.S_IMODE(os.stat(tmp_path / 'backup').st_mode) == 0o700
  again = compiled(base(), tfdp.DPSGD(0.1, plan=plan))
  other = tfdp.callbacks.BackupAndRestore(tmp_path / 'backup')
  other.set_model(again)
  other.on_train_begin()
  assert again.optimizer.steps_done == 2 and steps(again) == [2]


class MixesUp(tfdp.DPModel, keras.Sequential):
  """Blends examples before the private step."""

  def train_step(self, data):
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    return super().train_step((x + x[::-1], y, weight))


class Doubles(tfdp.DPModel, keras.Sequential):
  """A step of its own that does nothing wrong."""

  def train_step(self, data):
    return super().train_step(data)


class Writes(tfdp.DPModel, keras.Sequential):
  """Metrics that write data into the weights."""

  def compute_metrics(self, x, y, y_pred, sample_weight=None, **kwargs):
    self.weights[-1].assign(tf.reduce_mean(y, 0))
    return super().compute_metrics(x, y, y_pred, sample_weight, **kwargs)


def plain_optimizer():
  return tfdp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8)


@pytest.mark.thorough
@pytest.mark.pitfall(
    'A private model has a `train_step` of its own, which mixes examples before the private one.',
    severity='critical', stops='PrivacyError, unless `tfdp.audit.white_box` has passed the model')
def test_a_step_of_ones_own_needs_an_audit():
  make = lambda kind: compiled(kind([layers.Input([2]), layers.Dense(1)]), plain_optimizer())
  for kind, passes in ((MixesUp, False), (Doubles, True)):
    model = make(kind)
    with pytest.raises(tfdp.PrivacyError, match=f'{kind.__name__} replaces.*train_step'):
      model.train_on_batch(X[:8], Y[:8])
    model = make(kind)
    report = tfdp.audit.white_box(model, data=(X[:24], Y[:24]), seed=0)
    assert report.violated != passes
  model.train_on_batch(X[:8], Y[:8])  # The one that passed.
  model.compile(plain_optimizer(), 'mse')  # Another loss is another step.
  with pytest.raises(tfdp.PrivacyError, match='replaces'):
    model.train_on_batch(X[:8], Y[:8])


@pytest.mark.pitfall(
    'A `compute_metrics` of the model writes data into its weights.',
    severity='critical', stops='the library restores the weights afterwards')
@pytest.mark.parametrize('eager', [False, True])
def test_metrics_leave_no_weight_changed(eager):
  model = compiled(Writes([layers.Input([2]), layers.Dense(1)]), plain_optimizer(),
                   run_eagerly=eager)
  model.train_on_batch(X[:8], 1000 + Y[:8])
  assert abs(float(np.asarray(model.weights[-1])[0])) < 100


def holder(held):
  """Everything that a step calls, made of what a closure holds, by kind."""
  factor = lambda: tf.reduce_sum(tf.cast(held, tf.float32) ** 2)
  return {
      'loss': lambda y, output: factor() * tf.reduce_mean((y - output) ** 2, -1),
      'kernel_regularizer': lambda w: factor() * tf.reduce_sum(w**2),
      'bias_regularizer': lambda w: factor() * tf.reduce_sum(w**2),
      'kernel_constraint': lambda w: w + 0 * factor(),
      'learning_rate': schedule(held),
  }


def schedule(held):
  class Schedule(keras.optimizers.schedules.LearningRateSchedule):

    def __call__(self, step):
      return 0.1 + 0 * tf.reduce_sum(tf.cast(held, tf.float32))

  return Schedule()


def built_with(kind, what, **arguments):
  in_layer = {kind: what} if kind.startswith(('kernel', 'bias')) else {}
  model = tfdp.make_private(keras.Sequential([
      layers.Input([2]), layers.Dense(2, **in_layer), layers.Dense(1)]))
  model.compile(
      tfdp.DPSGD(what if kind == 'learning_rate' else 0.1, plan=PLAN),
      what if kind == 'loss' else 'mse', **arguments)
  return model


KINDS = list(holder(0.0))


def looked_at(model):
  """What a step does before it is traced."""
  model._validate_eagerly(None)
  return model.optimizer.statement()


class Table(layers.Layer):
  """Holds the training set."""

  def call(self, x):
    return x + 0 * tf.reduce_sum(tf.constant(X) ** 3)


@pytest.mark.thorough(rows=['bias_regularizer', 'kernel_constraint', 'kernel_regularizer'])
@pytest.mark.pitfall(
    'A loss, regularizer, constraint, learning-rate schedule or layer holds the training data, '
    'which reach the weights unclipped.',
    severity='critical', stops='PrivacyError before the first step, unless its arrays are called '
                               'public')
@pytest.mark.parametrize('kind', KINDS)
def test_data_inside_what_a_step_calls(kind):
  for held in (X[:2], tf.constant(X[:2]), tf.Variable(X[:2]), X.mean(), tf.reduce_mean(X)):
    with pytest.raises(tfdp.PrivacyError, match='holds arrays of shapes .* and variables'):
      looked_at(built_with(kind, holder(held)[kind]))
  named = built_with(kind, holder(X[:2])[kind], public_penalty='weights of a public model')
  assert 'weights of a public model' in looked_at(named)
  assert 'hold the numbers [0.25]' in looked_at(built_with(kind, holder(0.25)[kind]))


def test_arrays_that_only_the_graph_shows():
  hidden = type('Hidden', (), {'__call__': staticmethod(
      lambda w: tf.reduce_sum((w - np.frombuffer(X[:2].tobytes(), 'f4').reshape(2, 2)) ** 2))})
  with pytest.raises(tfdp.PrivacyError, match=r'arrays of shapes \[\(2, 2\)'):
    looked_at(built_with('kernel_regularizer', hidden()))


def test_settings_of_keras_are_none_of_data():
  model = tfdp.make_private(keras.Sequential([layers.Input([2]), layers.Dense(
      2, kernel_regularizer='l2', bias_regularizer=keras.regularizers.L1L2(.1, .1),
      kernel_constraint='max_norm'), layers.Dense(1)]))
  model.compile(tfdp.DPSGD(keras.optimizers.schedules.ExponentialDecay(.1, 2, .9), plan=PLAN),
                keras.losses.Huber(2.0))
  text = looked_at(model)
  assert 'hold the numbers' not in text and 'public in the words' not in text
  model.fit(PLAN.batches((X, Y)), steps_per_epoch=1, verbose=0)


def test_data_inside_layers_and_initializers():
  holds = keras.Sequential([layers.Input([2]), Table(), layers.Dense(1)])
  with pytest.raises(tfdp.PrivacyError, match='a row for each of the 64 records'):
    compiled(holds).fit(PLAN.batches((X, Y)), verbose=0)
  table = lambda rows: compiled(keras.Sequential([
      layers.Input([1], dtype='int32'),
      layers.Embedding(rows, 2, embeddings_initializer=keras.initializers.Constant(X[:rows])),
      layers.Flatten(), layers.Dense(1)]))
  with pytest.raises(tfdp.PrivacyError, match='a row for each of the 64 records'):
    looked_at(table(64))
  assert 'arrays of shapes [(50, 2)]' in looked_at(table(50))
  mean, scale = X.mean(0), X.std()
  standardized = compiled(keras.Sequential([
      layers.Input([2]), layers.Lambda(lambda x: (x - mean) / scale), layers.Dense(1)]))
  text = looked_at(standardized)
  assert 'arrays of shapes [(2,)]' in text and f'hold the numbers [{float(scale)}]' in text


class WritesWeights(keras.metrics.Mean):
  """A metric that writes data into a weight."""

  def update_state(self, y, output, sample_weight=None):
    self.weight.assign(tf.reduce_mean(y, 0))
    return super().update_state(output)


@pytest.mark.pitfall(
    'A metric writes data into the weights of the model.',
    severity='critical', stops='the library restores the weights afterwards')
@pytest.mark.parametrize('as_function', [False, True])
def test_metrics_of_ones_own_leave_no_weight_changed(as_function):
  model = tfdp.make_private(base())

  def function(y, output):
    model.weights[-1].assign(tf.reduce_mean(y, 0))
    return output

  metric = WritesWeights()
  object.__setattr__(metric, 'weight', model.weights[-1])
  model.compile(plain_optimizer(), 'mse', metrics=[function if as_function else metric],
                run_eagerly=True)
  model.train_on_batch(X[:8], 1000 + Y[:8])
  assert abs(float(np.asarray(model.weights[-1])[0])) < 100


@pytest.mark.pitfall(
    'A custom callback changes weights or settings by numbers that are not private.',
    severity='high', stops='the statement names the callback as not covered')
def test_callbacks_of_ones_own_are_named():
  from tfdp_adaptive.keras import callbacks
  mine = type('Mine', (keras.callbacks.Callback,), {})
  held = X.mean()
  for callback, name in (
      (mine(), 'Mine'), (keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: None),
                         'LambdaCallback'),
      (keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * held), 'LearningRateScheduler')):
    model = compiled(base())
    callbacks.before_fit(model, [callback])
    assert f'Callbacks of its own ran between the steps, {[name]}' in model.optimizer.statement()
  model = compiled(base())
  callbacks.before_fit(model, [tfdp.callbacks.PrivacyReport(), keras.callbacks.TerminateOnNaN()])
  assert 'Callbacks of its own' not in model.optimizer.statement()


def test_class_weights_are_named():
  model = compiled(base())
  model.fit(PLAN.batches((X, Y)), steps_per_epoch=1, verbose=0, class_weight={
      label: 0.5 for label in range(-9, 10)})
  assert '`class_weight`' in model.optimizer.statement()


@pytest.mark.pitfall(
    'Early stopping by a private loss decides the number of steps, and only these steps are '
    'stated.',
    severity='high',
    stops='a warning names the callback, and the statement names it and counts all planned '
          'steps')
def test_decisions_by_private_numbers():
  model = compiled(base())
  stops = keras.callbacks.EarlyStopping(monitor='loss', patience=0, min_delta=1e9)
  with pytest.warns(tfdp.Caution, match='EarlyStopping decides when training stops by `loss`'):
    model.fit(PLAN.batches((X, Y)), epochs=4, steps_per_epoch=1, verbose=0, callbacks=[stops])
  assert model.optimizer.steps_done < 4
  assert model.ledger.epsilon() == model.optimizer.ledger.epsilon() == PLAN.epsilon()
  for statement in (model.optimizer.statement(), model.ledger.statement()):
    assert 'EarlyStopping decides when training stops' in statement
    assert 'all 4 steps that it could have taken are counted' in statement


def test_a_callback_that_stops_nothing_costs_the_steps_that_were_fixed_beforehand():
  from tfdp_adaptive.keras import callbacks
  model = after(2, base())
  stops = keras.callbacks.EarlyStopping(monitor='loss')
  for stopped, counted in ((False, 2), (True, 4)):
    model.stop_training = stopped
    callbacks.after_fit(model, [stops])
    assert model.ledger.epsilon() == pytest.approx(PLAN.epsilon(counted))


def test_which_callbacks_decide(tmp_path):
  from tfdp_adaptive.keras import callbacks
  model = compiled(base())
  for callback, named in (
      (keras.callbacks.ReduceLROnPlateau(monitor='val_loss'), 'learning rate by `val_loss`'),
      (keras.callbacks.ModelCheckpoint(str(tmp_path / 'a.keras'), save_best_only=True),
       'which weights are saved')):
    with pytest.warns(tfdp.Caution, match=named):
      callbacks.before_fit(model, [callback])
    assert named in model.optimizer.statement()
  callbacks.before_fit(model, [keras.callbacks.ModelCheckpoint(str(tmp_path / 'a.keras'))])


class Draws:
  """A source that draws from five records."""

  def __init__(self, seed):
    self._rng = np.random.default_rng(seed)

  def __len__(self):
    return 64

  def __getitem__(self, number):
    row = self._rng.integers(5)
    return X[row], Y[row]


@pytest.mark.pitfall(
    'A few records are repeated until there are as many as the plan says, or drawn at random '
    'by the source.',
    severity='critical',
    stops='a warning and a sentence in the statement for exact copies; a source that gives another '
          'example for a number is refused')
def test_copies_of_records():
  several = lambda a: np.repeat(a[:16], 4, 0)
  with pytest.warns(tfdp.Caution, match='exact copies'):
    batches = PLAN.batches((several(X), several(Y)))
  assert 'exact copies' in batches.notes()[0]
  repeated = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).repeat(4)
  with pytest.warns(tfdp.Caution, match='exact copies'):
    PLAN.batches(repeated)
  with pytest.raises(tf.errors.OpError, match='the same record for a number'):
    batches = PLAN.batches(Draws(0))
    for _ in range(20):  # No more is read than batches need: it shows once one is read again.
      list(batches)
  batches = PLAN.batches(Draws(0), changing='noise is added to each image')
  assert 'noise is added to each image' in batches.notes()[0]
  assert PLAN.batches((X, Y)).notes() == []
  model = compiled(base())
  with pytest.warns(tfdp.Caution, match='exact copies'):
    batches = PLAN.batches((several(X), several(Y)))
  model.fit(batches, steps_per_epoch=1, verbose=0)
  assert 'exact copies' in model.ledger.statement()
