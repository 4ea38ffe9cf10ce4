# SPDX-License-Identifier: Apache-2.0
"""What a private model trains on and reports is what Keras computes."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import bookkeeping

keras, L = compat.keras, compat.keras.layers
RNG = np.random.default_rng(0)
N = 8
X = RNG.normal(size=(N, 4)).astype('float32')
Y = RNG.normal(size=(N, 1)).astype('float32')
TOKENS = np.array([[3, 1, 0, 0], [2, 0, 0, 0], [1, 1, 2, 3], [1, 2, 3, 0]] * 2)


def still(**more):
  """An optimizer that moves nothing, so that every epoch reports the same."""
  return tfdp.DPSGD(0.0, l2_norm_clip=1e6, noise_multiplier=0.0, batch_size=N, **more)


def dense():
  return keras.Sequential([L.Input([4]), L.Dense(3, 'tanh', kernel_regularizer='l2'), L.Dense(1)])


def tokens():
  return keras.Sequential([L.Input([4], dtype='int32'), L.Embedding(4, 2, mask_zero=True),
                           L.Dense(2)])


def two_heads():
  i = keras.Input([4])
  return keras.Model(i, [L.Dense(1, name='a')(i), L.Dense(1, name='b')(i)])


def named_heads():
  i = keras.Input([4])
  return keras.Model(i, {'a': L.Dense(1, name='a')(i), 'b': L.Dense(1, name='b')(i)})


def mse(reduction):
  names = {'sum': 'sum', 'mean': 'sum_over_batch_size'}
  return keras.losses.MeanSquaredError(reduction=names[reduction])


def inner_heads():
  i = keras.Input([4])
  return keras.Model(i, [[L.Dense(1)(i), L.Dense(1)(i)], L.Dense(1)(i)])


ENTROPY = lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
WEIGHT = np.array([0, 0.5, 2, 0, 1, 1, 0.25, 3], 'float32')
CASES = {
    'penalty': (dense, (X, Y), dict(loss='mse', metrics=['mae'])),
    'sum': (dense, (X, Y), dict(loss=lambda: mse('sum'))),
    'masked': (tokens, (TOKENS, TOKENS % 2), dict(loss=ENTROPY, metrics=['accuracy'])),
    'weighted': (dense, (X, Y, WEIGHT), dict(
        loss='mse', metrics=['mae'], weighted_metrics=['mae', 'mse'])),
    'booleans': (dense, (X, Y, np.ones(N, bool)), dict(loss='mse')),
    'heads': (two_heads, (X, [Y, -Y]), dict(loss=['mse', 'mae'], loss_weights=[1.0, 3.0],
                                            metrics=[['mae'], ['mse']])),
    'weighted heads': (two_heads, (X, [Y, -Y], [WEIGHT, WEIGHT[::-1] * (X[:, 0] > 0)]), dict(
        loss=lambda: [mse('mean'), mse('sum')], metrics=[['mae'], ['mse']],
        weighted_metrics=[['mae'], ['mse']])),
    'one loss for two': (two_heads, (X, [Y, -Y]), dict(loss='mse')),
    'names': (named_heads, (X, {'a': Y, 'b': -Y}), dict(
        loss={'a': 'mse', 'b': 'mae'}, metrics={'b': ['mse']})),
    'a list of one': (two_heads, (X, [Y, -Y]), dict(
        loss=['mse', ['mae']], loss_weights=[0.5, 2.0])),
    'sums of heads': (two_heads, (X, [Y, -Y]), dict(loss=lambda: [mse('sum'), mse('mean')])),
}


def _arguments(arguments):
  return {name: value() if name == 'loss' and callable(value) else value
          for name, value in arguments.items()}


def _dataset(parts):
  return tf.data.Dataset.from_tensors(
      tuple(tuple(p) if isinstance(p, list) else p for p in parts))


@pytest.mark.thorough(but=['masked', 'heads'])
@pytest.mark.both_stacks
@pytest.mark.parametrize('name', list(CASES))
def test_fit_and_evaluate_report_what_keras_reports(name):
  make, parts, arguments = CASES[name]
  plain = make()
  private = tfdp.make_private(keras.models.clone_model(plain))
  private.set_weights(plain.get_weights())
  plain.compile(keras.optimizers.SGD(0.0), **_arguments(arguments))
  private.compile(still(), **_arguments(arguments))
  data = _dataset(parts)
  expected = plain.fit(data, validation_data=data, verbose=0).history
  got = private.fit(data, validation_data=data, verbose=0).history
  assert set(got) == set(expected)
  for key, value in expected.items():
    if key == 'loss' and name == 'masked':
      continue  # Keras divides by the tokens of the batch, a private loss by those of an example.
    np.testing.assert_allclose(got[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.skipif(not compat.KERAS_3, reason='losses of several outputs are of Keras 3')
@pytest.mark.parametrize('loss', [[['mse', 'mae'], 'mse'], [['mse', ['mae']], ['mse']]], ids=str)
def test_lists_of_losses_within_lists(loss):
  plain, y = inner_heads(), [[Y, -Y], 2 * Y]
  private = tfdp.make_private(keras.models.clone_model(plain))
  private.set_weights(plain.get_weights())
  plain.compile('sgd', loss)
  private.compile(still(), loss)
  want = plain.evaluate(X, y, verbose=0, return_dict=True)['loss']
  np.testing.assert_allclose(
      private.fit(X, y, batch_size=N, verbose=0).history['loss'], [want], rtol=1e-5)


def test_padding_of_a_plan_counts_in_no_metric():
  """Whatever a padding row holds: metrics are those of the rows of the batch."""
  plan = tfdp.PrivacyPlan(population_size=N, batch_size=4, steps=1, l2_norm_clip=1e6,
                          noise_multiplier=1.0, target_delta=1e-3, seed=1)
  for make, x, y, loss, weight in (  # Keras 3 multiplies weights and masks of tokens wrongly.
      (dense, X, Y, 'mse', WEIGHT), (tokens, TOKENS, TOKENS % 2, ENTROPY(), WEIGHT**0)):
    private = tfdp.make_private(make())
    metric = 'mae' if make is dense else 'accuracy'
    private.compile(tfdp.DPSGD(0.0, plan=plan), loss, metrics=[metric], weighted_metrics=[metric])
    (xs, ys, given), = list(plan.batches((x, y, weight), pad_to=N + 3))
    weights = np.asarray(given)
    there = ~np.signbit(weights)
    assert not there.all() and (make is tokens or (weights[there] == 0).any())
    logs = private.train_on_batch(xs, ys, sample_weight=given, return_dict=True)
    plain = keras.Sequential([L.Input(x.shape[1:], dtype=x.dtype), *private.layers])
    plain.compile('sgd', loss, metrics=[metric], weighted_metrics=[metric])
    xs, ys, weights = (np.asarray(a)[there] for a in (xs, ys, weights))
    want = plain.evaluate(xs, ys, sample_weight=weights, verbose=0, return_dict=True)
    assert set(logs) == set(want)
    for key in set(want) - ({'loss'} if make is tokens else set()):
      np.testing.assert_allclose(logs[key], want[key], rtol=1e-4, err_msg=key)


def test_a_weight_for_one_of_two_outputs():
  weight = (np.arange(N) % 2).astype('float32')
  private = tfdp.make_private(named_heads())
  private.compile(still(), {'a': 'mse', 'b': 'mse'}, compare_first_step=False)
  y = {'a': Y, 'b': -Y}
  before = [np.array(w) for w in private.get_weights()]
  logs = private.train_on_batch(X, y, sample_weight={'a': weight, 'b': np.ones(N, 'float32')},
                                return_dict=True)
  a, b = (X @ before[2 * i] + before[2 * i + 1] for i in range(2))
  want = np.mean(weight * ((a - Y)**2)[:, 0]) + np.mean((b + Y)**2)
  np.testing.assert_allclose(logs['loss'], want, rtol=1e-5)


class Critic(keras.Model):
  """Scores, and the squared norm of their gradient by the input."""

  def __init__(self):
    super().__init__()
    self.hidden, self.score = L.Dense(5, 'tanh'), L.Dense(1)

  def call(self, z, training=None):
    with tf.GradientTape() as tape:
      tape.watch(z)
      score = self.score(self.hidden(z))
    slope = tape.gradient(score, z)
    return tf.concat([score, tf.reduce_sum(slope**2, -1, keepdims=True)], -1)


def penalty_only(y, output):
  del y
  return output[:, 1]


@pytest.mark.thorough(but=['False'])
@pytest.mark.parametrize('jit', [False, True])
def test_a_gradient_inside_call_is_that_of_a_tape(jit):
  model = tfdp.make_private(Critic())
  model(X[:2])
  before = [np.array(v) for v in model.trainable_variables]
  with tf.GradientTape() as tape:
    value = tf.reduce_mean(penalty_only(None, model(tf.constant(X), training=True)))
  want = [0 * w if g is None else np.array(g) for g, w in zip(
      tape.gradient(value, [compat.raw_variable(v) for v in model.trainable_variables]), before)]
  model.compile(tfdp.DPSGD(1.0, l2_norm_clip=1e6, noise_multiplier=0.0, batch_size=N),
                penalty_only, jit_compile=jit)
  model.train_on_batch(X, Y)
  for old, new, gradient in zip(before, model.trainable_variables, want):
    np.testing.assert_allclose(old - np.array(new), gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.both_stacks
@pytest.mark.parametrize('activation, loss, y', [
    ('softmax', 'sparse_categorical_crossentropy', np.arange(N) % 3),
    ('sigmoid', 'binary_crossentropy', np.arange(3 * N).reshape(N, 3) % 2)])
def test_sure_predictions_are_no_reason_to_leave_book_keeping(activation, loss, y):
  """Keras takes a loss from logits where it knows them; probabilities would be 1e-7 at least."""
  model = tfdp.make_private(keras.Sequential([L.Input([4]), L.Dense(3, activation)]))
  model.set_weights([100 * RNG.normal(size=[4, 3]), np.zeros(3)])
  model.compile(still(), loss)
  model.train_on_batch(X, y)
  assert bookkeeping.supports(model) == (True, '')


def test_the_comparison_is_off_by_name_and_said():
  model = tfdp.make_private(dense())
  model.compile(still(), 'mse', compare_first_step=False)
  assert 'were not compared' in model.optimizer.statement()


class Centre(L.Layer):
  """Mixes examples once a Python attribute says so."""

  on = False

  def call(self, v, training=None):
    return v - tf.reduce_mean(v, 0, keepdims=True) if self.on and training else v


def test_a_layer_that_is_switched_is_validated_anew():
  centre = Centre()
  model = tfdp.make_private(keras.Sequential([L.Input([4]), centre, L.Dense(1)]))
  model.compile(still(), 'mse', run_eagerly=True)
  model.fit(X, Y, batch_size=N, verbose=0)
  centre.on = True
  with pytest.raises(tfdp.PrivacyError, match='mixes examples'):
    model.fit(X, Y, batch_size=N, verbose=0)


class Rate(keras.optimizers.schedules.LearningRateSchedule):

  def __call__(self, step):
    return 0.1 * tf.reduce_mean(tf.constant(Y))

  def get_config(self):
    return {}


def pull(weight):
  return tf.convert_to_tensor(weight) + tf.reduce_mean(tf.constant(Y))


def punish(weight):
  return tf.reduce_sum(pull(weight))


SET_LATER = {
    'penalty': lambda model, kernel: setattr(kernel, 'regularizer', punish),
    'constraint': lambda model, kernel: setattr(kernel, 'constraint', pull),
    'schedule': lambda model, kernel: setattr(model.optimizer, 'learning_rate', Rate()),
} if compat.KERAS_3 else {
    'penalty': lambda model, kernel: model.layers[0].add_loss(lambda: punish(kernel))}


@pytest.mark.parametrize('what', list(SET_LATER))
def test_a_function_that_is_set_later_is_searched(what):
  model = tfdp.make_private(keras.Sequential([L.Input([4]), L.Dense(1)]))
  model.compile(still(), 'mse', run_eagerly=True)
  model.fit(X, Y, batch_size=N, verbose=0)
  SET_LATER[what](model, model.layers[0].kernel)
  with pytest.raises(tfdp.PrivacyError, match='holds arrays of shapes'):
    model.fit(X, Y, batch_size=N, verbose=0)


def test_a_predict_of_ones_own_is_kept_and_others_are_named():
  class Mine(keras.Model):
    def __init__(self):
      super().__init__()
      self.dense = L.Dense(1)

    def call(self, x):
      return self.dense(x)

    def predict(self, *args, **kwargs):
      return 'mine'

  class Fits(Mine):
    def fit(self, *args, **kwargs):
      raise NotImplementedError

  assert tfdp.make_private(Mine()).predict(X) == 'mine'
  with pytest.warns(tfdp.Caution, match="not its .'fit'.") as seen:
    tfdp.make_private(Fits())
  assert seen[0].filename == __file__


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 2 compiles no copy')
def test_a_copy_of_a_compiled_model_is_compiled():
  model = tfdp.make_private(dense())
  model.compile(still(), 'mse', metrics=['mae'])
  copy = keras.models.clone_model(model)
  assert isinstance(copy, tfdp.DPModel) and copy.compiled
  assert len(copy.train_on_batch(X, Y)) == 2


def test_training_without_a_plan_is_named_once():
  model = tfdp.make_private(dense())
  model.compile(tfdp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=N), 'mse')
  with pytest.warns(tfdp.Caution, match='trains without a plan') as seen:
    model.fit(X, Y, batch_size=N, epochs=2, verbose=0)
  mine = [one for one in seen if 'without a plan' in str(one.message)]
  assert len(mine) == 1 and mine[0].filename == __file__


def test_models_without_weights_and_arguments_of_others_are_refused_in_words():
  frozen = dense()
  frozen.trainable = False
  model = tfdp.make_private(frozen)
  model.compile(still(), 'mse')
  with pytest.raises(ValueError, match='must have trainable weights'):
    model.fit(X, Y, batch_size=N, verbose=0)
  with pytest.raises(ValueError, match='`num_microbatches` cannot be used'):
    tfdp.DPAdam(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=N, num_microbatches=3)


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 2 has losses by order')
def test_labels_in_order_for_outputs_by_name():
  inputs = keras.Input([4])
  outputs = {name: keras.layers.Dense(1)(inputs) for name in ('a', 'b')}
  losses, histories = {'a': 'mse', 'b': 'mae'}, []
  for kind in (keras.Model, tfdp.make_private):
    model = keras.Model(inputs, outputs)
    plain = kind is keras.Model
    model = model if plain else tfdp.make_private(model)
    model.compile(keras.optimizers.SGD(0.0) if plain else still(), losses)
    histories.append(model.fit(X, (Y, Y + 1), batch_size=N, verbose=0).history)
  assert sorted(histories[0]) == sorted(histories[1]) == ['a_loss', 'b_loss', 'loss']
  for name, values in histories[0].items():
    np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 2 has no paths')
def test_variables_of_optimizers_have_paths_of_their_own():
  model = tfdp.make_private(dense())
  model.compile(tfdp.DPAdam(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=N), 'mse')
  model.optimizer.build(model.trainable_variables)
  paths = [v.path for v in model.optimizer.variables]
  assert len(set(paths)) == len(paths) > 3
