# SPDX-License-Identifier: Apache-2.0
"""Per-example losses equal what Keras computes on a batch of that example alone."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import losses

keras = compat.keras
N, T, K = 5, 3, 4
RNG = np.random.default_rng(0)
PROBABILITIES = RNG.dirichlet(np.ones(K), (N,)).astype('float32')
SEQUENCES = RNG.dirichlet(np.ones(K), (N, T)).astype('float32')
VALUES = RNG.normal(size=(N, K)).astype('float32')

CASES = {
    'mse': (VALUES, RNG.normal(size=(N, K)).astype('float32')),
    'huber': (VALUES, RNG.normal(size=(N, K)).astype('float32')),
    'hinge': (VALUES, np.sign(RNG.normal(size=(N, K))).astype('float32')),
    'kl_divergence': (PROBABILITIES, RNG.dirichlet(np.ones(K), N).astype('float32')),
    'binary_crossentropy': (PROBABILITIES[:, :1], RNG.integers(0, 2, (N, 1)).astype('float32')),
    'categorical_crossentropy': (PROBABILITIES, np.eye(K, dtype='float32')[RNG.integers(0, K, N)]),
    'sparse_categorical_crossentropy': (PROBABILITIES, RNG.integers(0, K, N)),
    'sequence': (SEQUENCES, RNG.integers(0, K, (N, T))),
}


def _keras_loss(name):
  name = 'sparse_categorical_crossentropy' if name == 'sequence' else name
  return keras.losses.get({'config': {}, 'class_name': {
      'mse': 'MeanSquaredError', 'huber': 'Huber', 'hinge': 'Hinge',
      'kl_divergence': 'KLDivergence', 'binary_crossentropy': 'BinaryCrossentropy',
      'categorical_crossentropy': 'CategoricalCrossentropy',
      'sparse_categorical_crossentropy': 'SparseCategoricalCrossentropy'}[name]})


@pytest.mark.parametrize('name', sorted(CASES))
@pytest.mark.parametrize('given_as', ['name', 'object', 'none', 'sum'])
def test_equals_the_batch_of_one(name, given_as):
  outputs, y = CASES[name]
  reference = _keras_loss(name)
  loss = {'name': 'sparse_categorical_crossentropy' if name == 'sequence' else name,
          'object': reference}.get(given_as)
  if loss is None:
    reduction = given_as
    if not compat.KERAS_3:
      reduction = getattr(keras.losses.Reduction, given_as.upper())
    loss = type(reference)(reduction=reduction)
    if given_as == 'sum':
      reference = loss
  weight = np.linspace(0, 2, N).astype('float32')
  values = losses.ExampleLoss(loss)(y, tf.constant(outputs), tf.constant(weight))
  expected = [float(reference(y[i:i + 1], outputs[i:i + 1], weight[i:i + 1])) for i in range(N)]
  np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


def test_targets_without_the_last_axis_are_matched_as_keras_does():
  outputs = RNG.normal(size=(N, 1)).astype('float32')
  y = RNG.normal(size=N).astype('float32')
  values = losses.ExampleLoss('mse')(y, tf.constant(outputs))
  np.testing.assert_allclose(values, (outputs[:, 0] - y)**2, rtol=1e-5)


@pytest.mark.skipif(not compat.KERAS_3, reason='a name of Keras 3')
@pytest.mark.parametrize('targets, size, name', [
    ([4, 1], 1, 'binary_crossentropy'), ([4], 1, 'binary_crossentropy'),
    ([4], 3, 'sparse_categorical_crossentropy'), ([4, 1], 3, 'sparse_categorical_crossentropy'),
    ([4, 3], 3, 'categorical_crossentropy')])
def test_shapes_choose_the_cross_entropy(targets, size, name):
  y = (np.arange(np.prod(targets)) % 2).reshape(targets).astype('float32')
  outputs = tf.nn.softmax(np.arange(4.0 * size).reshape(4, size).astype('float32') % 5
                          ) if size > 1 else tf.constant([[.1], [.3], [.4], [.9]])
  want = losses.ExampleLoss(name)(y, outputs)
  for given in ('crossentropy', 'CE'):
    np.testing.assert_array_equal(losses.ExampleLoss(given)(y, outputs), want)
  two = losses.ExampleLoss({'a': 'mse', 'b': 'ce'}, None, ['a', 'b'])
  np.testing.assert_allclose(two([outputs, y], [outputs, outputs]), want, rtol=1e-6)


def test_several_outputs_with_weights_by_list_and_by_name():
  outputs = {'a': tf.constant(VALUES), 'b': tf.constant(PROBABILITIES)}
  y = {'a': np.zeros_like(VALUES), 'b': RNG.integers(0, K, N)}
  expected = (0.5 * np.mean(VALUES**2, -1)
              - 2 * np.log(PROBABILITIES[np.arange(N), y['b']]))
  named = losses.ExampleLoss({'a': 'mse', 'b': 'sparse_categorical_crossentropy'},
                             {'a': 0.5, 'b': 2.0}, ['a', 'b'])
  np.testing.assert_allclose(named(y, outputs), expected, rtol=1e-5)
  listed = losses.ExampleLoss(['mse', 'sparse_categorical_crossentropy'], [0.5, 2.0], ['a', 'b'])
  np.testing.assert_allclose(
      listed([y['a'], y['b']], [outputs['a'], outputs['b']]), expected, rtol=1e-5)


def test_a_mask_counts_only_its_own_steps():
  output = tf.constant(SEQUENCES)
  mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]], bool)
  output._keras_mask = tf.constant(mask)
  y = CASES['sequence'][1]
  values = losses.ExampleLoss('sparse_categorical_crossentropy')(y, output).numpy()
  steps = -np.log(np.take_along_axis(SEQUENCES, y[..., None], -1)[..., 0])
  expected = [np.mean(s[m]) if m.any() else 0 for s, m in zip(steps, mask)]
  np.testing.assert_allclose(values, expected, rtol=1e-5)


def _all_losses():
  """Every loss of Keras, as a function and as an object."""
  for name in sorted(vars(keras.losses)):
    one = getattr(keras.losses, name)
    if name in ('Loss', 'Reduction', 'get', 'serialize', 'deserialize') or name.startswith('_'):
      continue
    if isinstance(one, type):
      yield name, one(axis=(1,)) if name in ('Dice', 'Tversky') else (
          one(q=0.5) if 'Generalized' in name else one())
    elif callable(one):
      yield name, one


def _target_of(name, outputs):
  """Labels of probabilities [n, K] or, for CTC, of steps [n, T, K]."""
  if 'parse' in name or 'enerali' in name or name.lower() == 'ctc':
    return RNG.integers(1, outputs.shape[-1], outputs.shape[:-1])
  y = RNG.integers(0, 2, outputs.shape).astype('float32')
  y[:, 0], y[:, -1] = 1, 0
  return y


@pytest.mark.thorough(rows=['squared_hinge'])
@pytest.mark.pitfall(
    "A loss normalises over the batch, for example by the mean of a mask.",
    severity='critical', stops='the loss is computed for each example separately')
@pytest.mark.parametrize('name', [name for name, _ in _all_losses()])
def test_no_loss_of_keras_lets_an_example_change_another(name):
  """Whatever the others are: labels that are no labels, outputs a thousand times as large."""
  loss = dict(_all_losses())[name]
  if name.lower() == 'circle':
    with pytest.raises(ValueError, match='compares the examples'):
      losses.ExampleLoss(loss)
    return
  if not isinstance(loss, keras.losses.Loss) and name in (
      'dice', 'tversky', 'categorical_generalized_cross_entropy'):
    return  # They have arguments that `compile` cannot give.
  outputs = SEQUENCES if name.lower() == 'ctc' else PROBABILITIES
  y = _target_of(name, outputs)
  others, odd = outputs.copy(), y.copy()
  others[1:] *= 1000
  odd[1:] = K - 1 if odd.dtype.kind == 'i' else 0.37
  example_loss = losses.ExampleLoss(loss)
  results = []
  for targets, values in ((y, outputs), (odd, others), (y[:1], outputs[:1])):
    values = tf.constant(values)
    with tf.GradientTape() as tape:
      tape.watch(values)
      example_losses = example_loss(targets, values)
      total = tf.reduce_sum(example_losses)
    gradient = tf.convert_to_tensor(tape.gradient(total, values))
    results.append((example_losses[0].numpy(), gradient[0].numpy()))
  assert np.isfinite(results[0][0]) and np.any(results[0][1])
  for value, gradient in results[1:]:
    np.testing.assert_allclose(value, results[0][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, results[0][1], rtol=1e-5, atol=1e-6)


def contrastive(y, outputs):
  """Each example against all of its batch."""
  return tf.nn.sparse_softmax_cross_entropy_with_logits(
      tf.range(tf.shape(outputs)[0]), tf.matmul(outputs, y, transpose_b=True))


@pytest.mark.thorough(rows=['contrastive-y0', '<lambda>-y1'])
@pytest.mark.parametrize('loss, y', [
    (contrastive, VALUES),
    (lambda y, p: tf.reduce_mean(tf.square(p - y), -1) / tf.reduce_max(p), VALUES),
    (keras.losses.CategoricalCrossentropy(axis=0), np.eye(N, dtype='float32')),
    (keras.losses.CategoricalCrossentropy(axis=-2), np.eye(N, dtype='float32')),
    ('mse', np.arange(N, dtype='float32')),  # Labels [n] along the outputs of an example.
])
def test_losses_that_compare_examples_get_them_one_at_a_time(loss, y):
  outputs = tf.constant(RNG.normal(size=(N, y.shape[-1])).astype('float32'))
  function = getattr(loss, 'call', keras.losses.get(loss) if loss == 'mse' else loss)
  for run in (losses.ExampleLoss(loss), tf.function(losses.ExampleLoss(loss)),
              tf.function(losses.ExampleLoss(loss), jit_compile=True)):
    try:
      values = run(tf.constant(y), outputs)
    except ValueError as error:  # Losses that mix axes have no batch of one.
      assert 'one value per example' in str(error)
      assert getattr(loss, '_fn_kwargs', {}).get('axis', -1) != -1
      continue
    alone = [np.mean(function(tf.constant(y[i:i + 1]), outputs[i:i + 1])) for i in range(N)]
    np.testing.assert_allclose(values, alone, rtol=1e-5)
    together = np.asarray(function(tf.constant(y), outputs))
    assert not np.allclose(together, alone, rtol=1e-2)  # Else nothing is shown.


@pytest.mark.parametrize('length', [T, None])
def test_a_loss_of_ones_own_in_a_function_of_unknown_sizes(length):
  own = losses.ExampleLoss(lambda y, p: tf.abs(p[..., 0] - y))
  signature = [tf.TensorSpec([None, length], tf.float32), tf.TensorSpec([None, length, K])]
  y = RNG.normal(size=(N, T)).astype('float32')
  values = tf.function(own, input_signature=signature)(y, SEQUENCES)
  np.testing.assert_allclose(values, np.mean(np.abs(SEQUENCES[..., 0] - y), 1), rtol=1e-5)


def test_a_loss_of_ones_own_that_squeezes():
  """A batch of one then loses its first axis, too."""
  outputs = RNG.normal(size=(N, 1)).astype('float32')
  y = RNG.normal(size=(N, 1)).astype('float32')
  own = losses.ExampleLoss(lambda y, p: tf.square(tf.squeeze(p) - tf.squeeze(y)))
  np.testing.assert_allclose(own(y, tf.constant(outputs)), (outputs - y)[:, 0]**2, rtol=1e-5)


@pytest.mark.pitfall(
    'A loss keeps statistics of the data in a variable.',
    severity='critical', stops='PrivacyError before the first step')
@pytest.mark.parametrize('n', [N, 1])
def test_losses_that_keep_something_of_the_data_are_refused(n):
  """Later steps would depend on it, around clipping and noise."""
  kept = tf.Variable(1.0, trainable=False)

  def own(y, p):
    values = tf.reduce_mean(tf.square(p - y), -1)
    return values / kept.assign(0.9 * kept + 0.1 * tf.reduce_mean(values))

  for run in (losses.ExampleLoss(own), tf.function(losses.ExampleLoss(own), autograph=False)):
    with pytest.raises(ValueError, match='must not write variables'):
      run(tf.constant(VALUES[:n]), tf.constant(VALUES[:n] + 1))
  assert float(kept) == 1.0
  fixed = losses.ExampleLoss(lambda y, p: tf.reduce_mean(tf.square(p - y), -1) / kept)
  np.testing.assert_allclose(fixed(VALUES[:n], tf.constant(VALUES[:n] + 1)), np.ones(n), rtol=1e-5)


class Scaled(keras.losses.Loss):
  """Reduces by code of its own, and calls its base."""

  def __call__(self, y, p, sample_weight=None):
    return 10.0 * super().__call__(y, p, sample_weight)

  def call(self, y, p):
    return tf.reduce_mean(tf.square(p - tf.cast(y, p.dtype)), -1)


class Whole(keras.losses.Loss):
  """Has no unreduced form at all."""

  def __call__(self, y, p, sample_weight=None):
    return tf.reduce_mean(tf.abs(p - tf.cast(y, p.dtype)))


class Weighted(keras.losses.Loss):
  """Leaves out a class of its own choice, by a mask on its values."""

  def call(self, y, p):
    y = tf.cast(y, tf.int32)
    values = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
    values._keras_mask = y != 1
    return values


def _ignoring():
  return keras.losses.SparseCategoricalCrossentropy(ignore_class=0)


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('make', [Scaled, Whole, Weighted, _ignoring])
def test_a_loss_object_is_what_keras_computes_of_one_example(make, weighted, masked):
  """Whatever it defines: `__call__`, `call`, or a mask on its values; and its gradient."""
  loss = make()
  labels = make in (Weighted, _ignoring)
  outputs = SEQUENCES if labels else RNG.normal(size=(N, T)).astype('float32')
  y = CASES['sequence'][1] if labels else RNG.normal(size=(N, T)).astype('float32')
  weight = np.linspace(0, 2, N).astype('float32') if weighted else None
  mask = np.arange(T) < np.array([[3], [1], [2], [3], [2]]) if masked else None

  def run(function):
    p = tf.constant(outputs)
    with tf.GradientTape() as tape:
      tape.watch(p)
      values = function(p)
    return np.array(values), np.array(tf.convert_to_tensor(tape.gradient(values, p)))

  def ours(p):
    p = tf.identity(p)
    if masked and labels:
      p._keras_mask = tf.constant(mask)
    return losses.ExampleLoss(loss)(tf.constant(y), p, () if weight is None else weight)

  def of_keras(p):
    values = []
    for i in range(N):
      one = tf.identity(p[i:i + 1])
      if masked and labels:
        one._keras_mask = tf.constant(mask[i:i + 1])
      values.append(loss(y[i:i + 1], one, **(
          {} if weight is None else {'sample_weight': weight[i:i + 1]})))
    return tf.stack(values)

  expected = run(of_keras)
  if make is Whole and weighted:
    expected[0][0], expected[1][0] = 0, 0  # A weight of zero is padding, whatever a loss reads.
  for got, want in zip(run(ours), expected):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_one_loss_in_a_list_is_the_loss_of_its_output():
  one = losses.ExampleLoss({'a': ['mse']}, output_names=['a'])
  np.testing.assert_allclose(one(0 * VALUES, tf.constant(VALUES)), np.mean(VALUES**2, 1), rtol=1e-5)


def test_scalar_losses_are_refused():
  with pytest.raises(ValueError, match='one value per example'):
    losses.ExampleLoss(lambda y, p: tf.reduce_mean(p - y))(VALUES, tf.constant(VALUES))


def test_missing_and_unknown_losses_are_refused():
  with pytest.raises(ValueError, match='loss=None'):
    losses.ExampleLoss(None)
  with pytest.raises(ValueError, match='must name model outputs'):
    losses.ExampleLoss({'c': 'mse'}, output_names=['a'])
  with pytest.raises(ValueError, match='one entry per model output'):
    losses.ExampleLoss(['mse', 'mse'])(VALUES, tf.constant(VALUES))


@pytest.mark.pitfall(
    'Sample weights are normalised by their sum over the batch.',
    severity='high', stops='PrivacyError before the first step')
@pytest.mark.skipif(not compat.KERAS_3, reason='a reduction of Keras 3')
def test_sample_weight_normalisation_is_refused():
  with pytest.raises(ValueError, match='sum of sample weights'):
    losses.ExampleLoss(keras.losses.MeanSquaredError(reduction='mean_with_sample_weight'))


def test_a_loss_of_ones_own_is_computed_once_per_example():
  """Not for the whole batch besides, though its size is not known when tracing."""
  calls = []

  def counted(x):
    calls.append(len(x))
    return x

  def loss(y, outputs):
    difference = tf.numpy_function(counted, [outputs - y], tf.float32, stateful=False)
    return tf.reduce_mean(tf.square(tf.ensure_shape(difference, outputs.shape)), -1)

  run = tf.function(losses.ExampleLoss(loss), autograph=False, input_signature=[
      tf.TensorSpec([None, 2]), tf.TensorSpec([None, 2])])
  np.testing.assert_allclose(run(tf.zeros([3, 2]), tf.ones([3, 2])), np.ones(3))
  assert calls == [1, 1, 1]


def test_a_gradient_of_a_loss_of_ones_own_writes_the_outputs_no_more_often_than_needed():
  """Making a batch of one of every record must be a reshape there and back."""
  entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
  own = losses.ExampleLoss(lambda y, logits: tf.reduce_mean(entropy(y, logits), 1))

  @tf.function(autograph=False, input_signature=[
      tf.TensorSpec([None, T], tf.int32), tf.TensorSpec([None, T, K])])
  def gradient(y, logits):
    with tf.GradientTape() as tape:
      tape.watch(logits)
      values = own(y, logits)
    return tape.gradient(values, logits)

  y = RNG.integers(0, K, (N, T))
  np.testing.assert_allclose(
      gradient(y, SEQUENCES), (tf.nn.softmax(SEQUENCES) - tf.one_hot(y, K)) / T, atol=1e-6)
  operations = compat.operations(gradient.get_concrete_function())
  assert 'SparseSoftmaxCrossEntropyWithLogits' in operations
  assert not [one for one in operations if 'SliceGrad' in one or 'Segment' in one]
