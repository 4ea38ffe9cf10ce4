# SPDX-License-Identifier: Apache-2.0
"""Everything that would train without the privacy it claims raises first."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers
X = np.random.default_rng(0).normal(size=(16, 3)).astype('float32')
Y = X.sum(1, keepdims=True)


def _optimizer(**kwargs):
  return tfdp.DPAdam(**{**dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8), **kwargs})


def _model(*hidden, kind=keras.Sequential):
  return kind([layers.Input((3,)), *hidden, layers.Dense(1)])


def _compiled(*hidden, optimizer=None, **kwargs):
  model = _model(*hidden, kind=tfdp.DPSequential)
  model.compile(optimizer=optimizer or _optimizer(), loss='mse', **kwargs)
  return model


def _plan(**kwargs):
  return tfdp.PrivacyPlan(**{**dict(
      batch_size=8, steps=4, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-5,
      population_size=16, sampling=tfdp.sampling.Poisson()), **kwargs})


@pytest.mark.pitfall(
    "Noise or batch size is missing, a number is not finite, or Keras' own clipping is asked for.",
    severity='high', stops='ValueError, because no such argument has a default')
@pytest.mark.parametrize('change,message', [
    (dict(noise_multiplier=None), r"Missing \['noise_multiplier'\]: there is no safe default"),
    (dict(batch_size=None), 'Missing'),
    (dict(l2_norm_clip=0.0), '`l2_norm_clip` must be positive and finite. Received'),
    (dict(l2_norm_clip=float('nan')), '`l2_norm_clip` must be positive'),
    (dict(noise_multiplier=-1.0), '`noise_multiplier` must be finite and >= 0'),
    (dict(noise_multiplier=float('inf')), '`noise_multiplier` must be finite'),
    (dict(batch_size=0), '`batch_size` must be positive'),
    (dict(adjacency='swap'), '`adjacency` must be one of'),
    (dict(performance={'engine': 'fast'}), '`engine` must be one of'),
    (dict(performance={'accumulation_steps': 0}),
     '`accumulation_steps` must be a positive integer'),
    (dict(clipnorm=1.0), '`clipnorm` cannot be used.*`l2_norm_clip`'),
    (dict(clipvalue=1.0), '`clipvalue` cannot be used'),
    (dict(global_clipnorm=1.0), '`global_clipnorm` cannot be used'),
    (dict(gradient_accumulation_steps=2), r'accumulation_steps=...\)`: one noise draw'),
    (dict(beta_1=1.5), r'`beta_1` must be in \[0, 1\)'),
])
def test_bad_arguments(change, message):
  with pytest.raises(ValueError, match=message):
    _optimizer(**change)


@pytest.mark.pitfall(
    'Noise is given twice, in the plan and beside it, and the two differ.',
    severity='critical', stops='ValueError, because only the plan may set the noise')
def test_plan_and_noise_multiplier_together_are_refused():
  with pytest.raises(ValueError, match='come from the plan'):
    tfdp.DPAdam(plan=_plan(), noise_multiplier=0.1)


@pytest.mark.pitfall(
    'A noise multiplier of zero is left over from an experiment.',
    severity='critical', stops='warning; epsilon is infinite, and the statement says so')
def test_zero_noise_is_said():
  with pytest.warns(UserWarning, match='NOT private'):
    _optimizer(noise_multiplier=0.0)


@pytest.mark.pitfall(
    'Gradients computed elsewhere, of whole batches, are handed to the private optimizer.',
    severity='critical', stops='PrivacyError by every method that takes or gives gradients; '
                               'no weight moves')
@pytest.mark.parametrize('call', [
    lambda o, v: o.apply_gradients([(tf.ones_like(v), v)]),
    lambda o, v: o.apply([tf.ones_like(v)], [v]),
    lambda o, v: o.compute_gradients(lambda: tf.reduce_sum(v), [v]),
    lambda o, v: o.minimize(lambda: tf.reduce_sum(v), [v]),
])
def test_ready_made_gradients_are_refused(call):
  variable = _model().trainable_variables[0]
  before = np.array(variable)
  with pytest.raises(tfdp.PrivacyError, match='make_private'):
    call(_optimizer(), variable)
  np.testing.assert_array_equal(variable, before)


@pytest.mark.pitfall(
    'The private optimizer is compiled into a plain Keras model.',
    severity='critical', stops='PrivacyError that names `make_private`')
@pytest.mark.parametrize('loss', ['mse', keras.losses.MeanSquaredError(reduction='none')])
def test_a_plain_model_names_the_fix(loss):
  model = _model()
  before = model.get_weights()
  model.compile(optimizer=_optimizer(), loss=loss)
  with pytest.raises(tfdp.PrivacyError, match='make_private'):
    model.fit(X, Y, batch_size=8, verbose=0)
  for weight, value in zip(model.get_weights(), before):
    np.testing.assert_array_equal(weight, value)



@pytest.mark.pitfall(
    'Batches have another size than the sum is divided by.',
    severity='high', stops='PrivacyError before the first step')
def test_wrong_batch_size_raises_before_any_step():
  model = _compiled()
  before = model.get_weights()[0]
  with pytest.raises(tfdp.PrivacyError, match=r'batch_size=8.*Received: fit\(batch_size=4\)'):
    model.fit(X, Y, batch_size=4, verbose=0)
  with pytest.raises(tfdp.PrivacyError, match='last batch of an epoch would have 7 of 8'):
    model.fit(X[:15], Y[:15], batch_size=8, verbose=0)
  with pytest.raises(tfdp.PrivacyError, match='exactly batch_size=8'):
    model.train_on_batch(X[:4], Y[:4])
  np.testing.assert_array_equal(model.get_weights()[0], before)


@pytest.mark.pitfall(
    "With batch normalization or an activity regularizer, an example's gradient depends on "
    'other examples.',
    severity='critical', stops='PrivacyError before the first step; it names what to use instead')
@pytest.mark.parametrize('hidden,message', [
    (lambda: layers.BatchNormalization(), 'normalises over the batch; use LayerNormalization'),
    (lambda: layers.Dense(4, activity_regularizer='l2'), 'activity_regularizer'),
])
def test_layers_that_break_per_example_gradients(hidden, message):
  with pytest.raises(tfdp.PrivacyError, match=message):
    tfdp.make_private(_model(hidden()))
  with pytest.raises(tfdp.PrivacyError, match=message):
    _compiled(hidden()).fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.pitfall(
    'A stateful recurrent layer carries data from batch to batch.',
    severity='critical', stops='PrivacyError before the first step')
def test_states_that_outlive_a_batch_are_refused():
  inputs = keras.Input(batch_shape=(8, 4, 2))
  model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(3, stateful=True)(inputs)))
  with pytest.raises(tfdp.PrivacyError, match='stateful: it carries data from batch to batch'):
    tfdp.make_private(model)


class _Centre(layers.Layer):
  """Looks across the batch, always or in training only."""

  def __init__(self, only_training=False):
    super().__init__()
    self.only_training = only_training

  def call(self, x, training=None):
    return x - tf.reduce_mean(x, 0, keepdims=True) if training or not self.only_training else x


class _Anchor(layers.Layer):
  """Has all examples depend on the first one, which depends on none."""

  def __init__(self, in_inference):
    super().__init__()
    self.in_inference = in_inference

  def call(self, x, training=None):
    return x + (1.0 if training else self.in_inference) * x[:1]


class _Swap(layers.Layer):
  """Gives each example the features of one that is drawn, itself perhaps, in training."""

  def call(self, x, training=None):
    return tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))) if training else x


class _Track(layers.Layer):
  """Writes the data into a weight that is not trained."""

  def build(self, shape):
    self.mean = self.add_weight(
        name='mean', shape=(shape[-1],), initializer='zeros', trainable=False)

  def call(self, x, training=None):
    if training:
      self.mean.assign(tf.reduce_mean(x, 0))
    return x


class _Count(layers.Layer):
  """Counts what it sees in a weight of integers."""

  def build(self, shape):
    self.total = self.add_weight(
        name='total', shape=(), dtype='int32', initializer='zeros', trainable=False)

  def call(self, x, training=None):
    if training:
      self.total.assign_add(tf.reduce_sum(tf.cast(x > 0, tf.int32)))
    return x


class _Root(layers.Layer):
  """Its derivative is infinite for the zeros of all examples."""

  def call(self, x):
    return tf.concat([x, tf.sqrt(tf.nn.relu(-tf.square(x)))], -1)


@pytest.mark.parametrize('hidden,message', [
    ([_Root, lambda: layers.Dense(4), lambda: _Centre(True)], 'mixes examples: an example'),
    ([_Count], 'write statistics of the data'),
    ([_Centre], 'mixes examples: the output'),
    ([lambda: layers.Dense(8), lambda: layers.Dropout(0.5), lambda: _Centre(True)],
     'mixes examples: an example'),
    ([lambda: _Centre(True)], 'mixes examples: an example'),  # Before all weights.
    ([lambda: _Anchor(1.0)], 'mixes examples: the output'),
    ([lambda: _Anchor(0.0)], 'mixes examples: an example'),
    ([lambda: layers.Dense(4), lambda: _Anchor(0.0)], 'mixes examples: an example'),
    ([_Swap], 'mixes examples: an example'),
    ([_Track], 'write statistics of the data')])
def test_the_numeric_probes_find_what_structure_does_not_tell(hidden, message):
  with pytest.raises(tfdp.PrivacyError, match=message):
    tfdp.validate_model(_model(*[layer() for layer in hidden]))
  with pytest.raises(tfdp.PrivacyError, match=message):
    _compiled(*[layer() for layer in hidden]).fit(X, Y, batch_size=8, verbose=0)
  tfdp.validate_model(_model(layers.Dense(4), layers.LayerNormalization(), layers.Dropout(0.5)))


def test_a_weight_that_counts_steps_is_no_statistic():
  class Steps(_Count):
    def call(self, x, training=None):
      self.total.assign_add(1)
      return x

  tfdp.validate_model(_model(Steps(), layers.Dense(4)))


@pytest.mark.pitfall(
    'Integers of one example, such as token ids, affect another example.',
    severity='critical', stops='PrivacyError before the first step')
def test_words_of_the_first_example_that_all_get():
  """No gradient tells of integers: the examples made up must differ, however short they are."""
  class First(layers.Layer):
    def call(self, ids):
      return ids * 0 + ids[:1]

  with pytest.raises(tfdp.PrivacyError, match='mixes examples: the output'):
    tfdp.validate_model(keras.Sequential([
        layers.Input((1,), dtype='int32'), First(), layers.Embedding(2, 3), layers.Dense(1)]))


def test_an_operation_without_a_gradient_before_the_weights():
  contrast = lambda x: tf.image.adjust_contrast(x, 2.0)
  tfdp.validate_model(keras.Sequential([
      layers.Input((4, 4, 3)), layers.Lambda(contrast), layers.Flatten(), layers.Dense(1)]))


@pytest.mark.pitfall(
    'MixUp and CutMix blend examples, also while frozen.',
    severity='critical', stops='PrivacyError before the first step')
@pytest.mark.skipif(not compat.KERAS_3, reason='layers of Keras 3')
@pytest.mark.parametrize('kind', ['MixUp', 'CutMix'])
@pytest.mark.parametrize('trainable', [False, True])
def test_layers_that_blend_examples(kind, trainable):
  blend = getattr(layers, kind)()
  blend.trainable = trainable
  model = keras.Sequential([
      layers.Input((4, 4, 3)), blend, layers.Flatten(), layers.Dense(1)])
  with pytest.raises(tfdp.PrivacyError, match='blends the examples of a batch'):
    tfdp.make_private(model)


@pytest.mark.pitfall(
    'A model with its own `train_step` or `compute_loss`, such as one of KerasHub, is made '
    'private and its method is ignored.',
    severity='critical', stops='PrivacyError before the first step, whatever the package is called')
@pytest.mark.parametrize('method', ['compute_loss', 'train_step', 'make_train_function'])
@pytest.mark.parametrize('module', ['mine', 'keras_hub.src.models', 'keras_mine', 'keras'])
def test_models_with_a_step_of_their_own(method, module):
  """What they compute would be ignored, silently, whatever the name of who made them."""
  function = lambda self, *args, **kwargs: 0.0
  function.__module__ = module
  own = {method: function, 'call': lambda self, x: tf.reduce_sum(x, -1, keepdims=True)}
  with pytest.raises(tfdp.PrivacyError, match=f'a `{method}` of its own, Own'):
    tfdp.make_private(type('Own', (keras.Model,), own)())
  if method == 'compute_loss':
    with pytest.raises(tfdp.PrivacyError, match='Put what it computes into `call`'):
      type('Own', (tfdp.DPModel, keras.Model), own)().compile(optimizer=_optimizer(), loss='mse')


@pytest.mark.pitfall(
    'A training step is assigned to one model object instead of its class.',
    severity='critical', stops='PrivacyError before the first step')
def test_a_step_put_on_one_model():
  model = _model()
  model.train_step = lambda data: {}
  with pytest.raises(tfdp.PrivacyError, match='a `train_step` of its own'):
    tfdp.make_private(model)


def test_methods_that_a_private_model_leaves_behind_are_named():
  own = {'test_step': lambda self, data: {}, 'call': lambda self, x: x}
  with pytest.warns(UserWarning, match=r"not its \['test_step'\]"):
    tfdp.make_private(type('Own', (keras.Model,), own)())


@pytest.mark.thorough
@pytest.mark.parametrize('kind', [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_time_is_not_taken_for_the_batch_by_the_probes(kind):
  tfdp.validate_model(_model(layers.Reshape((3, 1)), kind(4, return_sequences=True), kind(2)))
  with pytest.raises(tfdp.PrivacyError, match='mixes examples: an example'):
    tfdp.validate_model(_model(layers.Reshape((3, 1)), kind(2), _Centre(True)))


@pytest.mark.pitfall(
    '`add_loss` adds a term that depends on the data and is not clipped.',
    severity='critical', stops='PrivacyError before the first step')
@pytest.mark.parametrize('always', [True, False])
def test_losses_added_in_call_are_found(always):
  class Penalty(layers.Layer):
    def call(self, x, training=None):
      if always or training:
        self.add_loss(tf.reduce_sum(x**2))
      return x

  for hidden in ([Penalty()], [layers.Dense(4), Penalty(), layers.Dropout(0.5)]):
    with pytest.raises(tfdp.PrivacyError, match='add_loss'):
      tfdp.validate_model(_model(*hidden))
    with pytest.raises(tfdp.PrivacyError, match='add_loss'):
      _compiled(*hidden).fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.skipif(compat.KERAS_3, reason='Keras 3 has no losses of functional models')
def test_no_loss_of_a_functional_model_is_dropped():
  inputs = layers.Input((3,))
  model = keras.Model(inputs, layers.Dense(1)(inputs))
  model.add_loss(tf.reduce_sum(inputs))
  with pytest.raises(tfdp.PrivacyError, match='add_loss'):
    tfdp.make_private(model)
  for kind in (keras.Sequential, keras.Model):
    weights = []
    for private in (False, True):
      dense = layers.Dense(1, kernel_initializer='ones')
      inputs = layers.Input((3,))
      model = (keras.Sequential([inputs, dense]) if kind is keras.Sequential
               else keras.Model(inputs, dense(inputs)))
      model.add_loss(lambda: tf.reduce_sum(tf.square(dense.kernel)))
      model = tfdp.make_private(model) if private else model
      model.compile(_optimizer(l2_norm_clip=1e6, noise_multiplier=0.0, learning_rate=0.1)
                    if private else keras.optimizers.Adam(0.1), 'mse')
      history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
      weights.append([*model.get_weights(), *history['loss']])
    for ours, plain in zip(*weights):
      np.testing.assert_allclose(ours, plain, rtol=1e-4)


@pytest.mark.pitfall(
    'A private model is compiled with an ordinary optimizer.',
    severity='critical', stops='ValueError at `compile`')
def test_a_private_model_wants_a_private_optimizer():
  with pytest.raises(ValueError, match='needs a private optimizer'):
    _model(kind=tfdp.DPSequential).compile(optimizer='adam', loss='mse')
  model = _model(kind=tfdp.DPSequential)
  for train in (model.fit, model.train_on_batch):  # Never compiled, and assigned.
    with pytest.raises((tfdp.PrivacyError, RuntimeError, ValueError), match='(?i)compile'):
      train(X, Y)
  model.compile(optimizer=_optimizer(), loss='mse')
  model.optimizer = keras.optimizers.Adam()
  for train in (model.fit, model.train_on_batch):
    with pytest.raises(tfdp.PrivacyError, match='by a private optimizer only.*Adam'):
      train(X, Y)
  with pytest.raises(ValueError, match='loss=None'):
    model = _model(kind=tfdp.DPSequential)
    model.compile(optimizer=_optimizer())
    model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.pitfall(
    'You pass shuffled batches to an optimizer whose plan has Poisson sampling.',
    severity='critical', stops='PrivacyError before the first step')
def test_a_plan_wants_its_own_batches():
  model = _compiled(optimizer=tfdp.DPAdam(plan=_plan()))
  shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(16).batch(8)
  for data in ((X, Y), (shuffled, None)):
    with pytest.raises(tfdp.PrivacyError, match=r'plan\.batches'):
      model.fit(*data, verbose=0)
  with pytest.raises(tfdp.PrivacyError, match='Received: batches of another plan'):
    model.fit(_plan(noise_multiplier=2.0).batches((X, Y)), verbose=0)
  with pytest.raises(tfdp.PrivacyError, match='covers 4 steps'):
    model.fit(_plan().batches((X, Y)), epochs=2, verbose=0)


@pytest.mark.thorough(rows=['2'])
@pytest.mark.pitfall(
    'Training goes on after the steps that were accounted for.',
    severity='critical', stops='`fit`, the step and the noise stream each refuse further steps')
@pytest.mark.parametrize('chunks', [1, 2])
def test_more_steps_than_planned_are_refused(chunks):
  """Steps are counted, not the chunks they are worked through in."""
  speed = tfdp.Performance(accumulation_steps=chunks)
  model = _compiled(optimizer=tfdp.DPAdam(plan=_plan(), performance=speed))
  model.fit(_plan().batches((X, Y)), verbose=0)
  assert model.optimizer.steps_done == 4
  with pytest.raises(tfdp.PrivacyError, match='4 are done'):
    model.fit(_plan().batches((X, Y)), verbose=0)
  model = _compiled(optimizer=tfdp.DPAdam(
      plan=_plan(), performance=speed, own_sampler='the same batch, to count steps'))
  for _ in range(4):
    model.train_on_batch(X[:8], Y[:8])
  before = model.get_weights()[0]
  with pytest.raises(tf.errors.InvalidArgumentError, match='used up'):
    model.train_on_batch(X[:8], Y[:8])
  np.testing.assert_array_equal(model.get_weights()[0], before)


def test_a_bare_rule_cannot_be_saved_with_a_model():
  with pytest.raises(NotImplementedError, match='named class'):
    tfdp.DPOptimizer(tfdp.rules.dp_adam(), l2_norm_clip=1.0, noise_multiplier=1.0,
                     batch_size=8).get_config()
  with pytest.raises(ValueError, match='`rule` must be'):
    tfdp.DPOptimizer('adam', l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8)


def test_a_refusal_of_many_layers_is_short():
  """ResNet-50 has 53 batch normalizations: the advice is given once, and three are named."""
  model = keras.Sequential([layers.Input([4])] + [layers.BatchNormalization() for _ in range(53)])
  with pytest.raises(tfdp.PrivacyError) as caught:
    tfdp.make_private(model)
  text = str(caught.value)
  assert len(text) < 600 and 'and 50 more' in text and text.count('use LayerNormalization') == 1


@pytest.mark.parametrize('data', [X, (X,)])
def test_batches_without_targets_are_named_as_such(data):
  plan = _plan()
  model = _compiled(optimizer=tfdp.DPAdam(plan=plan))
  with pytest.raises(tfdp.PrivacyError, match='inputs and targets.*without targets'):
    model.fit(plan.batches(data), verbose=0)
