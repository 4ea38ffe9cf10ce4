# SPDX-License-Identifier: Apache-2.0
"""BatchNormalization replaced: the rest of the model is the same, and trains privately."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import fixes
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

keras = compat.keras
layers = keras.layers
RNG = np.random.default_rng(0)


def randomized(model):
  for v in model.weights:
    v.assign(RNG.uniform(0.5, 1.5, size=v.shape))
  return model


def nested():
  """Models inside, a shared layer, images, sequences and vectors, frozen and without gamma."""
  inside = keras.Sequential(
      [keras.Input([4, 6]), layers.Dense(6), layers.BatchNormalization(name='inner')], name='part')
  image = keras.Input([4, 4, 3])
  shared = layers.BatchNormalization(epsilon=0.01, name='shared')
  x = shared(layers.Conv2D(6, 1)(image))
  x = shared(layers.ReLU()(x))
  x = layers.BatchNormalization(scale=False, name='plain')(x)
  x = inside(layers.Reshape([4, 24])(x)[..., :6])
  x = layers.BatchNormalization(name='vector')(layers.Flatten()(x))
  x = layers.BatchNormalization(name='frozen', trainable=False)(x)
  return randomized(keras.Model(image, layers.Dense(2)(x)))


def by_name(model):
  return {layer.name: layer for layer in model._flatten_layers()
          if not isinstance(layer, layers.InputLayer)}


def test_everything_else_is_kept_and_every_change_is_listed():
  model = nested()
  before = model.get_weights()
  fixed = tfdp.fix_model(model)
  old, new = by_name(model), by_name(fixed)
  assert sorted(change.partition(':')[0] for change in fixed.tfdp_changes) == [
      'inner', 'plain', 'shared', 'vector']
  assert any('shared: BatchNormalization -> GroupNormalization of 6 channels in 3 groups' == one
             for one in fixed.tfdp_changes)
  for name in ('inner', 'plain', 'shared', 'vector'):  # The new ones are named after them.
    kind = 'layer' if name == 'vector' else 'group'
    new[name] = new.pop(f'{name}_{kind}_normalization')
  assert isinstance(new['vector'], layers.LayerNormalization)
  assert isinstance(new['frozen'], layers.BatchNormalization) and not new['frozen'].trainable
  assert new['plain'].gamma is None and new['shared'].epsilon == 0.01
  for name in ('inner', 'plain', 'shared', 'vector'):
    np.testing.assert_array_equal(new[name].beta.numpy(), old[name].beta.numpy())
  for name in set(old) - {model.name, 'part', 'inner', 'plain', 'shared', 'vector'}:
    assert type(new[name]) is type(old[name]) and new[name] is not old[name]
    for a, b in zip(new[name].get_weights(), old[name].get_weights()):
      np.testing.assert_array_equal(a, b)
  for a, b in zip(model.get_weights(), before):  # The model itself is left as it was.
    np.testing.assert_array_equal(a, b)
  with pytest.raises(tfdp.PrivacyError, match=r'tfdp.fix_model\(model\)'):
    tfdp.make_private(model)
  tfdp.validate_model(fixed)


def test_what_was_changed_is_printed(capsys):
  normalized = [layers.BatchNormalization(name=f'n{i}') for i in range(7)]
  model = keras.Sequential([keras.Input([4, 4, 6]), *normalized])
  fixed = tfdp.fix_model(model)
  printed = capsys.readouterr().out.splitlines()
  assert printed[0].startswith('Replaced 7 layers') and printed[-1].startswith('  and 2 more')
  assert [line.strip() for line in printed[1:-1]] == list(fixed.tfdp_changes[:5])
  assert tfdp.fix_model(model, verbose=False).tfdp_changes == fixed.tfdp_changes
  assert not capsys.readouterr().out


def test_a_model_without_batch_normalization_is_copied(capsys):
  model = randomized(keras.Sequential([keras.Input([3]), layers.Dense(2)]))
  fixed = tfdp.fix_model(model)
  assert 'Nothing to replace' in capsys.readouterr().out
  x = RNG.normal(size=(5, 3)).astype(np.float32)
  np.testing.assert_array_equal(fixed(x), model(x))
  assert fixed is not model and fixed.tfdp_changes == ()


@pytest.mark.parametrize('channels', [*range(1, 70), 97, 96, 320, 1280])
def test_no_group_is_a_single_channel(channels):
  groups = fixes.number_of_groups(channels)
  assert channels % groups == 0 and 1 <= groups <= 32
  assert channels // groups > 1 or channels == 1
  larger = [g for g in range(groups + 1, 33) if channels % g == 0]
  assert all(channels // g == 1 for g in larger)


class Own(keras.Model):

  def __init__(self):
    super().__init__()
    self.dense, self.normalization = layers.Dense(3), layers.BatchNormalization()

  def call(self, x):
    return self.normalization(self.dense(x))


def test_what_a_copy_does_not_reach_is_refused():
  own = Own()
  own(tf.zeros([2, 3]))
  with pytest.raises(tfdp.PrivacyError, match='BatchNormalization inside other layers'):
    tfdp.fix_model(own)
  wrapped = keras.Sequential([
      keras.Input([2, 3]), layers.TimeDistributed(layers.BatchNormalization(name='far'))])
  with pytest.raises(tfdp.PrivacyError, match="inside other layers: .'far'"):
    tfdp.fix_model(wrapped)
  with pytest.raises(tfdp.PrivacyError, match='a single number per example'):
    tfdp.fix_model(keras.Sequential([
        keras.Input([3]), layers.Dense(1), layers.BatchNormalization()]))
  with pytest.raises(ValueError, match='Keras model that is built'):
    tfdp.fix_model(keras.Sequential([layers.Dense(1)]))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['ResNet50', 'EfficientNetB0'])
def test_models_of_keras_applications_train(name):
  model = getattr(keras.applications, name)(
      weights=None, include_top=True, input_shape=(32, 32, 3), classes=3)
  fixed = tfdp.fix_model(model)
  assert len(fixed.tfdp_changes) == (53 if name == 'ResNet50' else 49)
  private = tfdp.DPFunctional(fixed.inputs, fixed.outputs[0])  # `fit` validates it, once.
  private.compile(tfdp.DPSGD(0.05, l2_norm_clip=1.0, noise_multiplier=1e-3, batch_size=4, seed=1),
                  loss='sparse_categorical_crossentropy')
  before = [v.numpy() for v in private.trainable_variables]
  losses = private.fit(RNG.normal(size=(4, 32, 32, 3)), np.array([0, 1, 2, 0]), batch_size=4,
                       epochs=5, verbose=0).history['loss']
  moved = [np.abs(v.numpy() - b).max() for v, b in zip(private.trainable_variables, before)]
  assert np.isfinite(moved).all() and min(moved) > 0
  assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize('private', [True, False])
def test_a_copy_of_trained_weights_has_their_ledger(private):
  model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(1)])
  plan = tfdp.PrivacyPlan(batch_size=8, steps=3, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-3, population_size=32)
  entry = ledger_lib.Entry(plan, 2, rule='dp_sgd', run='before')
  weight_ledger.Ledger.of(model).attach([entry])
  copy = tfdp.fix_model(tfdp.make_private(model) if private else model, verbose=False)
  assert weight_ledger.Ledger.of(copy).ledger().entries == (entry,)
