# SPDX-License-Identifier: Apache-2.0
"""`tfdp.explain_clipping`: engine, routes and reasons."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping import protocol

keras = compat.keras
layers = keras.layers


class Scale(layers.Layer):
  """A layer the engine does not know."""

  def build(self, shape):
    self.gain = self.add_weight(name='gain', shape=(shape[-1],), initializer='ones')

  def call(self, x):
    return x * self.gain


class Offset(keras.Model):
  """A weight out of the engine's sight."""

  def __init__(self):
    super().__init__()
    self.inner = layers.Dense(3)

  def build(self, shape):
    self.offset = self.add_weight(name='offset', shape=(3,), initializer='zeros')
    super().build(shape)

  def call(self, x):
    return self.inner(x) + self.offset


def sequential(*some):
  return keras.Sequential(list(some))


def one(model, **kwargs):
  return {layer.layer: layer for layer in tfdp.explain_clipping(model, **kwargs).layers}


def test_a_matrix():
  model = sequential(keras.Input((20,)), layers.Dense(30, use_bias=False, name='matrix'))
  plain = one(model)['matrix']
  assert plain.route == 'rank one' and plain.parameters == 20 * 30 and plain.kind == 'Dense'


def test_routes_follow_shapes_and_geometry():
  model = sequential(
      keras.Input((8,), dtype='int32'), layers.Embedding(50, 40, name='table'),
      layers.Dense(300, name='wide'), layers.Dense(2, use_bias=False, name='narrow'))
  by_name = one(model)
  assert [by_name[name].route for name in ('table', 'wide', 'narrow')] == [
      'gram', 'gram, explicit', 'gram']
  scaled = one(model, scaled=True)
  assert [scaled[name].route for name in ('table', 'wide', 'narrow')] == [
      'gram', 'blocks, explicit', 'blocks']


@pytest.mark.parametrize('rule', [tfdp.rules.dp_soap(), tfdp.rules.dp_kfc()], ids=lambda r: r.name)
def test_matrices_on_either_side(rule):
  """Inputs and errors are multiplied by them, and norms are plain again."""
  model = sequential(
      keras.Input((5, 20)), layers.Dense(30, name='matrix'), layers.Conv1D(4, 2, name='patches'),
      layers.GlobalAveragePooling1D(), layers.Dense(2, use_bias=False, name='last'))
  explained = tfdp.explain_clipping(model, rule=rule)
  assert explained.scaled
  isotropic = one(model)
  for layer in explained.layers:
    assert layer.route == isotropic[layer.layer].route


def test_every_kind_has_a_route():
  images = keras.Input((9, 9, 2))
  x = layers.SeparableConv2D(3, 2, name='separable')(images)
  x = layers.DepthwiseConv2D(2, name='depthwise')(x)
  x = layers.GroupNormalization(3, name='groups')(layers.Conv2D(3, 2, name='convolution')(x))
  x = layers.Conv2D(300, 6, name='filters')(x)
  x = layers.LSTM(3, name='recurrent')(layers.Reshape((1, 300))(x))
  model = keras.Model(images, layers.PReLU(name='slopes')(x))
  for scaled in (False, True):
    by_name = one(model, scaled=scaled)
    assert len(by_name) == 7
    for layer in by_name.values():
      assert layer.route and not layer.reason
    # One point: rows of the Gram matrix are worth it, where the geometry allows.
    assert by_name['filters'].route.startswith('blocks' if scaled else 'gram')


def test_shared_weights_are_counted_once():
  shared = layers.Dense(4, name='shared')
  inputs = keras.Input((4,))
  explanation = tfdp.explain_clipping(keras.Model(inputs, shared(shared(inputs))))
  (layer,) = explanation.layers
  assert layer.layer == 'shared' and layer.route != 'rank one'


@pytest.mark.thorough
def test_why_a_layer_goes_another_way():
  model = sequential(keras.Input((5, 4)), Scale(name='mine'),
                     layers.LSTM(3, stateful=False, name='known'), layers.Dense(2))
  by_name = one(model)
  assert by_name['mine'].route == 'one example at a time'
  assert 'Scale is not registered' in by_name['mine'].reason and not by_name['known'].reason
  cells = sequential(keras.Input((5, 4)), layers.RNN(
      layers.StackedRNNCells([layers.GRUCell(2)]), name='cells'))
  assert 'not known for RNN: an unknown cell' in one(cells)['cells'].reason


def test_engines_and_what_the_optimizer_does():
  model = tfdp.make_private(sequential(keras.Input((4,)), layers.Dense(3)))
  settings = dict(learning_rate=.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=48)
  model.compile(tfdp.DPAdamSTP(scale_epsilon=1e-3, **settings), 'mse')
  explanation = tfdp.explain_clipping(model)
  assert explanation[:5] == ('bookkeeping', '', 48, True, protocol.BLOCK_BYTES)
  assert tfdp.explain_clipping(model, rule=tfdp.rules.dp_sgd(), batch_size=7)[:4] == (
      'bookkeeping', '', 7, False)
  model.compile(tfdp.DPAdam(performance=tfdp.Performance('materialized'), **settings), 'mse')
  explanation = tfdp.explain_clipping(model)
  assert explanation.engine == 'materialized' and explanation.budget == 4 * 15 * 48
  assert explanation.layers[0].route == 'whole model'


def test_projections_that_need_records():
  model = sequential(keras.Input((4,)), layers.Dense(3))
  rule = tfdp.rules.dp_sgd()._replace(asks=(contract.Ask('euclidean'),))
  explanation = tfdp.explain_clipping(model, rule=rule)
  assert explanation.engine == 'layered' and 'euclidean' in explanation.reason
  assert explanation.layers[0].route == 'records'
  assert explanation.budget == materialized.RECORD_BYTES and 'Why: ' in str(explanation)


def test_a_model_the_engine_cannot_see():
  model, x = Offset(), tf.ones([6, 4])
  model(x)
  explanation = tfdp.explain_clipping(model, x)
  assert explanation.engine == 'materialized' and 'offset' in explanation.reason
  assert explanation.batch_size == 6 and 'whole model' in str(explanation)


def test_table_and_json():
  model = sequential(keras.Input((5, 4)), Scale(name='mine'), layers.Dense(2, name='last'))
  explanation = tfdp.explain_clipping(model, batch_size=8)
  lines = str(explanation).splitlines()
  assert lines[0].startswith('Engine: book-keeping') and '4 MiB' in lines[1]
  mine, = (line for line in lines if line.startswith('mine'))
  assert mine.split()[:3] == ['mine', 'Scale', '4']
  held = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
  assert held['batch_size'] == 8 and held['layers'][1]['layer'] == 'last'


@pytest.mark.parametrize('shape, layer, held, formed', [
    # Inputs, output gradients and the bias's gradients; squares of the first two.
    ((20,), lambda: layers.Dense(30), 20 + 30 + 30, 20 + 30),
    # Per example a gradient of 20 * 30, with its squares.
    ((100, 20), lambda: layers.Dense(30, use_bias=False), 100 * 50 + 600, 600),
    # Two Gram matrices and their product.
    ((5, 200), lambda: layers.Dense(300, use_bias=False), 5 * 500, 3 * 25),
    # Five rows each, with their squares.
    ((1,), lambda: layers.Embedding(50, 40), 1 + 40, 40),
    ((5,), lambda: layers.Embedding(50, 40), 5 + 5 * 40, 3 * 25),
    ((100,), lambda: layers.Embedding(50, 40), 100 + 100 * 40, 3 * 100 * 40),
    # One window is of rank one: copies of the window and of its output gradients, with squares.
    ((6, 6, 3), lambda: layers.Conv2D(300, 6, use_bias=False), 108 + 300, 108 + 300)],
    ids=['rank one', 'explicit', 'gram', 'once', 'equal ids', 'merge', 'window'])
def test_memory_is_what_is_held_and_formed(shape, layer, held, formed):
  model = sequential(keras.Input(shape), layer())
  first, = tfdp.explain_clipping(model, batch_size=8).layers
  at_work = first.memory / (4 * 8) - held
  assert formed / 2 <= at_work <= 2.5 * formed


def test_memory_of_blocks_is_bounded():
  """Few gradients of 600,000 numbers, however many examples there are, and squares of factors."""
  model = sequential(keras.Input((20, 1000)), layers.Dense(600, use_bias=False))
  for n in (8, 800):
    (layer,) = tfdp.explain_clipping(model, scaled=True, batch_size=n).layers
    assert layer.route == 'blocks'
    assert 600_000 <= layer.memory / 4 - n * 20 * 1600 <= n * 20 * 1600 + 5 * 600_000


def test_memory_of_whole_models_and_of_open_sizes():
  model = sequential(keras.Input((4,)), layers.Dense(3, name='only'))
  assert one(model, engine='materialized', batch_size=7)['only'].memory == 4 * 15 * 7
  assert one(model, engine='loop', batch_size=7)['only'].memory == 4 * 15
  lines = sequential(keras.Input((None, 4)), layers.Dense(3, name='steps'))
  assert one(lines)['steps'].memory is None
  assert ' ? ' in str(tfdp.explain_clipping(lines)).splitlines()[-1]


@pytest.mark.parametrize('make, arguments, message', [
    (lambda: layers.Dense(3), {}, '`model` must be a Keras model'),
    (lambda: sequential(layers.Dense(3)), {}, 'is not built'),
    (Offset, {'x': tf.ones([2, 4])}, 'is not built'),
    (lambda: sequential(keras.Input((4,)), layers.Dense(3)), {'batch_size': 0}, 'batch_size=0'),
    (lambda: sequential(keras.Input((4,)), layers.Dense(3)), {'rule': 'adam'}, "rule='adam'"),
    (lambda: sequential(keras.Input((4,)), layers.Dense(3)), {'engine': 'x'}, "engine='x'")])
def test_refused(make, arguments, message):
  with pytest.raises(ValueError, match=message):
    tfdp.explain_clipping(make(), **arguments)


def open_images():
  return tfdp.make_private(sequential(
      keras.Input((None, None, 3)), layers.Conv2D(4, 3, name='patches'),
      layers.GlobalAveragePooling2D(), layers.Dense(2)))


def test_open_axes_are_named_and_no_size_is_made_up():
  explained = tfdp.explain_clipping(open_images())
  assert explained.open_inputs == '(32, None, None, 3)'
  assert 'have open axes' in str(explained) and '1009' not in str(explained)
  given = tfdp.explain_clipping(open_images(), tf.TensorSpec([8, 6, 6, 3]))
  assert given.engine == 'bookkeeping' and not given.open_inputs and 'open' not in str(given)


@pytest.mark.thorough
def test_after_training_open_axes_are_those_that_were_trained_on():
  model = open_images()
  model.compile(tfdp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4), 'mse')
  model.fit(np.zeros([4, 6, 6, 3], np.float32), np.zeros([4, 2], np.float32), batch_size=4,
            verbose=0)
  explained = tfdp.explain_clipping(model)
  fixed = sequential(
      keras.Input((6, 6, 3)), layers.Conv2D(4, 3, name='patches'),
      layers.GlobalAveragePooling2D(), layers.Dense(2))
  same = tfdp.explain_clipping(fixed, batch_size=4)
  assert explained.engine == same.engine == 'bookkeeping'
  assert [layer.route for layer in explained.layers] == [layer.route for layer in same.layers]


def test_a_subclassed_model_needs_inputs():
  model = Offset()
  model(tf.ones([2, 4]))
  with pytest.raises(ValueError, match='`x` given'):
    tfdp.explain_clipping(model)
