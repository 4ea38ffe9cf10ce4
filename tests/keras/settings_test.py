# SPDX-License-Identifier: Apache-2.0
"""Settings of an optimizer that is made: they stay, and whoever would change one is told."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import arguments
from tfdp_adaptive.keras import named_optimizers

keras = compat.keras
CHANGEABLE = {'learning_rate', 'name', 'public_data', 'weight_decay'}
NAMED = [one for one in vars(named_optimizers).values()
         if inspect.isclass(one) and getattr(one, 'factory', None) is not None]


def _made(optimizer_class=tfdp.DPAdam, **kwargs):
  return optimizer_class(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4, **kwargs)


@pytest.mark.pitfall(
    'A setting of the optimizer is assigned after it was made, and training continues with '
    'the old value.',
    severity='high', stops='AttributeError that says what to do')
@pytest.mark.parametrize('optimizer_class, given', [
    (tfdp.DPAdam, {}), (tfdp.DPAdamSTP, {'scale_epsilon': 0.1}), (tfdp.DPAdamW, {}),
    (tfdp.DPKFC, {})], ids=lambda one: getattr(one, '__name__', ''))
def test_no_setting_changes_by_assignment(optimizer_class, given):
  optimizer = _made(optimizer_class, **given)
  names = set(inspect.signature(optimizer_class).parameters) - CHANGEABLE - {'kwargs'}
  assert {'clipping', 'noise_multiplier', 'plan', 'own_sampler', 'seed'} <= names
  before = optimizer.get_config()
  for name in names | {'clipnorm', 'global_clipnorm', 'gradient_accumulation_steps'}:
    with pytest.raises(AttributeError, match=f"`{name}` of .* cannot be changed.*Received: {name}"):
      setattr(optimizer, name, 0.5)
  assert optimizer.get_config() == before


def test_every_class_knows_its_settings():
  assert len(NAMED) > 20
  for one in NAMED:
    settings = {name for name, parameter in inspect.signature(one).parameters.items()
                if parameter.kind != parameter.VAR_KEYWORD}
    assert settings - CHANGEABLE <= arguments.fixed(one), one.__name__


def test_learning_rates_change_and_other_attributes_are_free():
  optimizer = _made()
  optimizer.learning_rate = 0.25
  assert float(optimizer.learning_rate) == 0.25
  optimizer.remark = 'mine'
  if hasattr(type(optimizer), 'lr'):  # Keras 2 knows the old name.
    optimizer.lr = 0.5
    assert float(optimizer.learning_rate) == 0.5
  else:
    with pytest.raises(AttributeError, match='`lr` .* set `learning_rate`'):
      optimizer.lr = 0.5


class _Mine(tfdp.DPAdam):
  """A user's subclass, with an argument of its own."""

  def __init__(self, tau=1.0, beta_2=0.9, **kwargs):
    super().__init__(beta_2=beta_2, **kwargs)
    self.tau, self.beta_2 = tau, beta_2


def test_subclasses_keep_arguments_of_their_own():
  optimizer = _made(_Mine, tau=2.0)
  optimizer.tau = 3.0
  assert optimizer.tau == 3.0 and optimizer.beta_2 == 0.9
  with pytest.raises(AttributeError, match='`beta_1` of'):
    optimizer.beta_1 = 0.5


def test_training_and_copies_need_no_assignment():
  x = np.ones([4, 3], 'float32')
  model = tfdp.make_private(keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)]))
  model.compile(_made(), 'mse')
  model.fit(x, x[:, :1], batch_size=4, verbose=0)
  again = tfdp.DPAdam.from_config(model.optimizer.get_config())
  with pytest.raises(AttributeError, match='`performance` of'):
    again.performance = tfdp.Performance('loop')
  assert tf.math.is_finite(tf.reduce_sum(model.get_weights()[0]))
