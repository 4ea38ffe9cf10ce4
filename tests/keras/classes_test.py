# SPDX-License-Identifier: Apache-2.0
"""One line per public class: it compiles, fits, resumes from a file and states its privacy."""

import dataclasses
import inspect

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import optimizers
from tfdp_adaptive.independence import validation
from tfdp_adaptive.keras import named_optimizers

keras = compat.keras
B = 8
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(B, 3)).astype('float32'), RNG.normal(size=(B, 1)).astype('float32')
PUBLIC = (X[:4] + 1, Y[:4])
DELAYED = dict(sgd_steps=2, adaptive_steps=1, relative_adaptive_clip=2.0,
               relative_adaptive_learning_rate=0.5)

CLASSES = {
    **{name: {**row.audit, **(dict(public_data=PUBLIC) if row.public else {})}
       for name, row in optimizers.OPTIMIZERS.items()},
    'DPSGD': dict(momentum=0.5), 'DPMuon': dict(edge=True), 'DPAdamJME': dict(adjacency='replace'),
    'DP2RMSprop': DELAYED, 'DP2AdaGrad': DELAYED, 'DP2Yogi': {**DELAYED, 'ablation': 'noise_first'},
    'PDPSGD': dict(dimension=2, public_data=PUBLIC), 'PASAN': dict(radius=5.0),
    'PAGAN': dict(ellipsoid=[np.full((3, 1), 4.0), np.ones(1)], box=(-3.0, 3.0)),
    'NoisyAdaGrad': dict(participations=10, dimension=2, mode='floor', public_data=PUBLIC),
}


VALIDATED = []


@pytest.fixture(autouse=True)
def validated_once(monkeypatch):
  """All models here are one `Dense(1)`, with many optimizers: what it does is looked at once."""
  validate = validation.validate_model

  def once(model, x=None):
    if not VALIDATED:
      validate(model, x)
      VALIDATED.append(True)
    assert [type(layer) for layer in model.layers] == [keras.layers.Dense]

  monkeypatch.setattr(validation, 'validate_model', once)


def _model(optimizer, **kwargs):
  keras.utils.set_random_seed(1)
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
  model.compile(optimizer=optimizer, loss='mse', **kwargs)
  return model


def _optimizer(name, **kwargs):
  return getattr(tfdp, name)(**{**dict(
      learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=0.5, batch_size=B, seed=7),
                                **CLASSES[name], **kwargs})


def test_the_table_is_complete():
  public = {name for name, value in vars(named_optimizers).items()
            if inspect.isclass(value) and getattr(value, 'factory', None) is not None}
  assert public == set(CLASSES)


@pytest.mark.thorough(but=['DPSGD', 'DPAdamIME', 'DP2Yogi', 'NoisyAdaGrad'])
@pytest.mark.parametrize('name', sorted(CLASSES))
def test_fits_and_resumes_mid_phase(name, tmp_path):
  model = _model(_optimizer(name))
  model.fit(X, Y, batch_size=B, epochs=3, verbose=0)  # DP2: in the adaptive phase now.
  path = str(tmp_path / 'model.keras')
  model.save(path)
  resumed = keras.models.load_model(path)
  assert type(resumed.optimizer) is getattr(tfdp, name)
  if 'public_data' in CLASSES[name]:
    with pytest.raises(ValueError, match='needs gradients of public data'):
      resumed.train_on_batch(X, Y)
    resumed.optimizer.public_data = PUBLIC
  start = model.get_weights()[0]
  for m in (model, resumed):
    m.fit(X, Y, batch_size=B, epochs=2, verbose=0)
  np.testing.assert_allclose(
      model.get_weights()[0], resumed.get_weights()[0], rtol=1e-5, atol=1e-6)
  assert np.abs(model.get_weights()[0] - start).max() > 1e-4
  assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize('name', sorted(CLASSES))
def test_states_its_privacy(name):
  optimizer = _optimizer(name)
  assert 'no epsilon' in optimizer.statement()  # Without a plan nothing is accounted for.
  with pytest.raises(ValueError, match='no epsilon'):
    optimizer.epsilon()
  fixed = {k: v for k, v in CLASSES[name].items() if k != 'adjacency'}
  plan = tfdp.PrivacyPlan(
      batch_size=B, steps=10, l2_norm_clip=1.0, noise_multiplier=2.0, target_delta=1e-5,
      population_size=B, sampling=tfdp.sampling.FixedOrder(),
      adjacency=CLASSES[name].get('adjacency', 'zero_out'),
      extra_releases=(1.0,) if name == 'NoisyAdaGrad' else ())
  planned = getattr(tfdp, name)(learning_rate=0.1, plan=plan, **fixed)
  statement = planned.statement()
  if name.startswith('NonPrivate'):
    assert planned.epsilon() == float('inf') and statement.startswith('NO PRIVACY GUARANTEE')
    return
  assert planned.epsilon() == plan.epsilon()
  assert '1e-05)-differential privacy' in statement and 'Not covered' in statement
  if name == 'NoisyAdaGrad':  # Ten releases of the root on top of ten of the mean.
    assert plan.epsilon() > 1.2 * dataclasses.replace(plan, extra_releases=()).epsilon()


@pytest.mark.thorough
def test_public_data_as_function_and_data_set():
  results = []
  data_set = tf.data.Dataset.from_tensors(PUBLIC)
  for data in (PUBLIC, lambda: base_tensors(PUBLIC), data_set):
    model = _model(_optimizer('AdaDPS', public_data=data))
    model.fit(X, Y, batch_size=B, epochs=2, verbose=0)
    results.append(model.get_weights()[0])
  np.testing.assert_allclose(results[0], results[1], rtol=1e-5)
  np.testing.assert_allclose(results[0], results[2], rtol=1e-5)
  with pytest.raises(ValueError, match='uses no public data'):
    _optimizer('DPAdam', public_data=PUBLIC)


def _batches(x, y):
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)


@pytest.mark.parametrize('wrap', [lambda x, y: (x, y), lambda x, y: (tf.constant(x), y), _batches],
                         ids=['arrays', 'tensors', 'data'])
def test_public_data_without_records_are_refused(wrap):
  x, y = PUBLIC
  with pytest.raises(ValueError, match='`public_data` must have at least one record'):
    _optimizer('AdaDPS', public_data=wrap(x[:0], y[:0]))
  optimizer = _optimizer('AdaDPS', public_data=lambda: (x[:0], y[:0]))
  with pytest.raises(ValueError, match='at least one record.*shapes'):
    optimizer.public_batch()



def base_tensors(tree):
  return tf.nest.map_structure(tf.convert_to_tensor, tree)


def test_constraint_sets_hold():
  model = _model(_optimizer('PAGAN', learning_rate=100.0))
  model.fit(X, Y, batch_size=B, epochs=3, verbose=0)
  assert all(np.abs(w).max() <= 3.0 + 1e-6 for w in model.get_weights())
  with pytest.raises(ValueError, match='use_ema'):
    _optimizer('PAGAN', use_ema=True)


@pytest.mark.parametrize('name', ['NoisyAdaGrad', 'NonPrivateNoiselessAdam'])
def test_what_is_not_amplified_or_not_private_is_refused(name):
  plan = tfdp.PrivacyPlan(
      batch_size=B, steps=10, l2_norm_clip=1.0, noise_multiplier=2.0, target_delta=1e-5,
      population_size=80, sampling=tfdp.sampling.Poisson())
  kwargs = dict(CLASSES[name], **({'allow_non_private': False} if name != 'NoisyAdaGrad' else {}))
  with pytest.raises((ValueError, tfdp.PrivacyError)):
    getattr(tfdp, name)(plan=plan, **kwargs)
