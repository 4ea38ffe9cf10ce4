# SPDX-License-Identifier: Apache-2.0
"""What users of Keras expect of a model and an optimizer, privately."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.batches import padding
from tfdp_adaptive.keras import step

keras = compat.keras
layers = keras.layers
B = 8
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(4 * B, 3)).astype('float32'), RNG.normal(size=(4 * B, 1)).astype('float32')
pytestmark = pytest.mark.filterwarnings('ignore:.*noise_multiplier=0')


def _exact(cls=tfdp.DPSGD, **kwargs):
  """No noise, no clipping: the non-private optimizer."""
  return cls(**{**dict(learning_rate=0.1, l2_norm_clip=1e6, noise_multiplier=0.0, batch_size=B),
                **kwargs})


def _linear(private, **kwargs):
  keras.utils.set_random_seed(4)
  kind = tfdp.DPSequential if private else keras.Sequential
  return kind([layers.Input((3,)), layers.Dense(1, **kwargs)])


def _trained(model, optimizer, x=X, y=Y, **kwargs):
  model.compile(optimizer=optimizer, loss='mse')
  model.fit(x, y, batch_size=B, epochs=2, shuffle=False, verbose=0, **kwargs)
  return model.get_weights()


def _same(left, right, **tolerance):
  for a, b in zip(left, right):
    np.testing.assert_allclose(a, b, **{**dict(rtol=1e-5, atol=1e-6), **tolerance})


@pytest.mark.thorough
def test_regularizers_are_added_after_the_noise_and_not_clipped():
  regularizer = lambda: dict(kernel_regularizer=keras.regularizers.L2(0.5))
  _same(_trained(_linear(True, **regularizer()), _exact()),
        _trained(_linear(False, **regularizer()), keras.optimizers.SGD(0.1)))
  # With a tiny clip norm only the regularizer moves the weights: it is no private gradient.
  model = _linear(True, **regularizer())
  start = model.get_weights()[0]
  weights = _trained(model, _exact(l2_norm_clip=1e-9))
  np.testing.assert_allclose(weights[0], start * 0.9**8, rtol=1e-4)


def test_regularizers_reach_the_scaled_space():
  _same(_trained(_linear(True, kernel_regularizer='l2'), _exact(
      tfdp.DPAdamSTP, scale_epsilon=0.3, learning_rate=0.01)),
        _trained(_linear(True, kernel_regularizer='l2'), _exact(
            tfdp.DPAdam, learning_rate=0.01)), rtol=1e-4)


@pytest.mark.thorough
def test_learning_rate_schedule_weight_decay_and_constraints():
  schedule = lambda: keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01])
  _same(_trained(_linear(True), _exact(learning_rate=schedule(), weight_decay=0.1)),
        _trained(_linear(False), keras.optimizers.SGD(schedule(), weight_decay=0.1)))
  constrained = lambda: dict(kernel_constraint=keras.constraints.NonNeg())
  weights = _trained(_linear(True, **constrained()), _exact())
  assert (weights[0] >= 0).all()


def test_without_weight_decay_weights_are_written_once_a_step():
  model, optimizer = _linear(True), _exact()
  _trained(model, optimizer)
  direction = [tf.ones_like(v) for v in model.trainable_variables]

  def written():
    move = tf.function(lambda: optimizer.move(
        model.trainable_variables, direction, optimizer.read_state()), autograph=False)
    operations = move.get_concrete_function().graph.get_operations()
    writes = 'AssignSubVariableOp', 'ResourceApplyGradientDescent'
    return [op.type for op in operations if op.type in writes]

  assert optimizer.weight_decay is None and len(written()) == len(direction)
  optimizer.weight_decay = 0.1
  assert len(written()) == 2 * len(direction)


@pytest.mark.thorough
@pytest.mark.pitfall(
    'If the length of the data is unknown, each epoch ends with one extra row of noise and '
    'one extra weight decay.',
    severity='medium', stops='a step writes nothing before it has its batch')
def test_nothing_is_written_where_data_end():
  """Keras begins a step more there; its own optimizers then decay the weights once too often."""
  batches = lambda: ((X[i:i + B], Y[i:i + B]) for i in range(0, len(X), B))
  specs = tf.TensorSpec([B, 3]), tf.TensorSpec([B, 1])
  endless = tf.data.Dataset.from_generator(batches, output_signature=specs)
  found = []
  for x in (endless.apply(tf.data.experimental.assert_cardinality(4)), endless):
    model = _linear(True)
    optimizer = _exact(weight_decay=0.1, mechanism=tfdp.mechanisms.BandedToeplitz(2, 8))
    model.compile(optimizer=optimizer, loss='mse')
    model.fit(x, epochs=2, verbose=0)
    assert int(optimizer.read_state()[1].noise.row) == int(optimizer.iterations) == 8
    found.append(model.get_weights())
  _same(*found)


@pytest.mark.thorough
def test_moving_average_of_keras():
  model = _linear(True)
  weights = _trained(model, _exact(use_ema=True, ema_momentum=0.5))
  reference = _linear(False)
  _same(weights, _trained(reference, keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)))


@pytest.mark.thorough
def test_sample_weights_scale_the_loss_before_clipping():
  weight = np.tile([0.5, 2.0], 2 * B).astype('float32')
  _same(_trained(_linear(True), _exact(), sample_weight=weight),
        _trained(_linear(False), keras.optimizers.SGD(0.1), sample_weight=weight))
  # However large, one example moves the sum by the clip norm at most.
  model = _linear(True)
  start = np.concatenate([w.ravel() for w in model.get_weights()])
  model.compile(optimizer=_exact(l2_norm_clip=0.1, learning_rate=1.0), loss='mse')
  huge = np.zeros(B, 'float32')
  huge[0] = 1e15
  model.train_on_batch(X[:B], Y[:B], sample_weight=huge)
  moved = np.linalg.norm(np.concatenate([w.ravel() for w in model.get_weights()]) - start)
  np.testing.assert_allclose(moved, 0.1 / B, rtol=1e-4)


@pytest.mark.thorough(but=['auto-mixed_float16'])
@pytest.mark.parametrize('dtype', ['mixed_bfloat16', 'mixed_float16'])
@pytest.mark.parametrize('engine', ['auto', 'materialized'])
def test_mixed_precision_clips_and_adds_noise_in_float32(dtype, engine):
  keras.utils.set_random_seed(4)
  model = tfdp.DPSequential([
      layers.Input((3,)), layers.Dense(4, 'relu', dtype=keras.mixed_precision.Policy(dtype)
                                       if not compat.KERAS_3 else dtype),
      layers.Dense(1)])
  start = np.concatenate([w.ravel() for w in model.get_weights()])
  model.compile(optimizer=tfdp.DPSGD(1.0, l2_norm_clip=1e-3, noise_multiplier=1e-3, batch_size=B,
                                     performance=tfdp.Performance(engine)), loss='mse')
  model.train_on_batch(X[:B], Y[:B])
  moved = np.concatenate([w.ravel() for w in model.get_weights()]) - start
  assert all(w.dtype == np.float32 for w in model.get_weights())
  # Moves far below half precision's resolution of the weights arrive, and are bounded.
  assert 1e-5 < np.linalg.norm(moved) <= 1e-3 * 1.01
  assert len(np.unique(np.abs(moved[moved != 0]))) > 5


def test_an_optimizer_that_keras_scales_losses_for_trains_as_it_is():
  """Losses of clipped gradients are not scaled: the wrapper is taken off."""
  found = [_trained(_linear(True), wrap(_exact())) for wrap in (
      keras.mixed_precision.LossScaleOptimizer, lambda optimizer: optimizer)]
  _same(*found, rtol=1e-6)


@pytest.mark.thorough
def test_several_inputs_and_outputs_with_loss_weights():
  def build():
    keras.utils.set_random_seed(6)
    a, b = keras.Input((3,), name='a'), keras.Input((2,), name='b')
    h = layers.Dense(4, 'tanh')(layers.Concatenate()([a, b]))
    return keras.Model({'a': a, 'b': b}, {
        'left': layers.Dense(1, name='left')(h), 'right': layers.Dense(1, name='right')(h)})

  x = {'a': X, 'b': X[:, :2]}
  y = {'left': Y, 'right': 2 * Y}
  weights = []
  for private in (True, False):
    model = tfdp.make_private(build()) if private else build()
    model.compile(optimizer=_exact() if private else keras.optimizers.SGD(0.1),
                  loss={'left': 'mse', 'right': 'mae'}, loss_weights={'left': 1.0, 'right': 0.5})
    model.fit(x, y, batch_size=B, epochs=2, shuffle=False, verbose=0)
    weights.append(model.get_weights())
  _same(*weights)


@pytest.mark.thorough
def test_subclassed_models_callbacks_metrics_and_validation(tmp_path):
  class Net(tfdp.DPModel, keras.Model):
    def __init__(self):
      super().__init__()
      self.hidden, self.out = layers.Dense(4, 'relu'), layers.Dense(1)

    def call(self, inputs, training=None):
      return self.out(self.hidden(inputs))

  model = Net()
  model.compile(optimizer=_exact(tfdp.DPAdam), loss='mse', metrics=['mae'])
  log = str(tmp_path / 'log.csv')
  with pytest.warns(tfdp.Caution, match='EarlyStopping decides'):
    history = model.fit(X, Y, batch_size=B, epochs=3, verbose=0, validation_data=(X, Y),
                        callbacks=[keras.callbacks.CSVLogger(log),
                                   keras.callbacks.EarlyStopping(patience=5)]).history
  assert len(history['loss']) == 3 and history['loss'][-1] < history['loss'][0]
  assert set(history) == {'loss', 'mae', 'val_loss', 'val_mae'}
  assert len(open(log).readlines()) == 4
  predictions = model.predict(X, verbose=0)
  evaluated = model.evaluate(X, Y, verbose=0, return_dict=True)
  np.testing.assert_allclose(evaluated['mae'], np.mean(np.abs(predictions - Y)), rtol=1e-4)


@pytest.mark.parametrize('records', [[0, 1, 2], [1, 4, 7]])  # The empty end is cut off before.
def test_padding_counts_neither_in_losses_nor_in_metrics(records):
  model = _linear(True)
  model.compile(optimizer=_exact(learning_rate=0.0), loss='mse', metrics=['mae'])
  weight = np.full(B, padding.EMPTY)
  weight[records] = 1
  padded = np.where(weight[:, np.newaxis], X[:B], np.nan).astype('float32')
  values = model.train_on_batch(padded, Y[:B], sample_weight=weight, return_dict=True)
  error = model.predict(X[records], verbose=0) - Y[records]
  np.testing.assert_allclose(values['loss'], np.mean(error**2), rtol=1e-4)
  np.testing.assert_allclose(values['mae'], np.mean(np.abs(error)), rtol=1e-4)


@pytest.mark.thorough
def test_make_private_shares_weights_and_takes_every_kind_of_model():
  inputs = keras.Input((3,))
  functional = keras.Model(inputs, layers.Dense(1)(inputs))

  class Sub(keras.Model):
    def __init__(self):
      super().__init__()
      self.dense = layers.Dense(1)

    def call(self, x):
      return self.dense(x)

  subclassed = Sub()
  subclassed(X[:1])
  for plain in (functional, subclassed, keras.Sequential([layers.Input((3,)), layers.Dense(1)])):
    private = tfdp.make_private(plain)
    assert isinstance(private, tfdp.DPModel) and not isinstance(plain, tfdp.DPModel)
    before = plain.get_weights()
    _trained(private, _exact())
    assert not np.allclose(plain.get_weights()[0], before[0])
    _same(private.get_weights(), plain.get_weights())
    np.testing.assert_allclose(private.predict(X, verbose=0), plain.predict(X, verbose=0))


def test_frozen_layers_stay():
  model = tfdp.DPSequential([layers.Input((3,)), layers.Dense(4), layers.Dense(1)])
  model.layers[0].trainable = False
  before = model.layers[0].get_weights()
  _trained(model, tfdp.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=B))
  _same(model.layers[0].get_weights(), before)


@pytest.mark.thorough
def test_weights_that_are_not_trained_may_come_first_also_in_a_saved_model(tmp_path):
  model = tfdp.DPSequential([
      layers.Input((3,)), layers.Dense(4, trainable=False), layers.Dropout(0.5), layers.Dense(1)])
  _trained(model, tfdp.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=B))
  model.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras')
  _same(loaded.get_weights(), model.get_weights(), rtol=0, atol=0)
  frozen, before = loaded.layers[0].get_weights(), loaded.layers[-1].get_weights()
  loaded.fit(X, Y, batch_size=B, verbose=0)
  assert loaded.optimizer.steps_done == 12
  _same(loaded.layers[0].get_weights(), frozen, rtol=0, atol=0)
  assert np.abs(loaded.layers[-1].get_weights()[0] - before[0]).max() > 0


@pytest.mark.thorough(rows=['True'])
@pytest.mark.parametrize('jit', [False, True])
def test_one_trace_serves_all_steps(jit, monkeypatch):
  traces, train_step = [], step.train_step
  monkeypatch.setattr(step, 'train_step', lambda *args: traces.append(1) or train_step(*args))
  model = _linear(True)
  model.compile(optimizer=_exact(tfdp.DPAdam), loss='mse', jit_compile=jit)
  for _ in range(3):
    model.train_on_batch(X[:B], Y[:B])
  assert model.optimizer.steps_done == 3 and len(traces) == 1


@pytest.mark.thorough
def test_weights_only_and_checkpoint_files_resume(tmp_path):
  models = []
  for _ in range(2):
    model = _linear(True)
    model.compile(optimizer=_exact(tfdp.DPAdam, seed=1, noise_multiplier=1.0, l2_norm_clip=1.0),
                  loss='mse')
    models.append(model)
  first, second = models
  first.fit(X, Y, batch_size=B, shuffle=False, verbose=0)
  path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(str(tmp_path / 'c'))
  # Restored before the optimizer's variables exist, as a new run of the program does.
  tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path)
  for model in (first, second):
    model.fit(X, Y, batch_size=B, shuffle=False, verbose=0)
  assert second.optimizer.steps_done == 8
  _same(first.get_weights(), second.get_weights())


@pytest.mark.parametrize('jit_compile', [False, True])
def test_a_users_train_step_around_the_private_one(jit_compile, caplog):
  class Own(tfdp.DPModel, keras.Sequential):

    def train_step(self, data):
      logs = dict(super().train_step(data))
      return dict(logs, doubled=2 * logs['loss'])

  model = Own([layers.Input([3]), layers.Dense(1)])
  model.compile(_exact(), loss='mse', jit_compile=jit_compile)
  subjects.passed(model)  # As by `tfdp.audit.white_box`.
  history = model.fit(X[:B], Y[:B], batch_size=B, verbose=0).history
  np.testing.assert_allclose(history['doubled'][0], 2 * history['loss'][0], rtol=1e-6)
  assert 'AutoGraph could not transform' not in caplog.text
