# SPDX-License-Identifier: Apache-2.0
"""Writes docs/layers.md: how every layer of Keras with weights is clipped.

    python tests/clipping/layers_table.py
"""

import inspect
import pathlib
import re

import keras

import tfdp_adaptive as tfdp
from tfdp_adaptive.clipping.layers import registry
from tfdp_adaptive.independence import validation

L = keras.layers
PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'layers.md'
VECTOR, SEQUENCE, WORDS = (64,), (32, 64), (32,)
LINE, IMAGE, VOLUME = (64, 8), (16, 16, 8), (8, 8, 8, 4)
LINES, IMAGES, VOLUMES = (4, *LINE), (4, *IMAGE), (4, *VOLUME)


def of_itself(layer):
  """A layer that is called with a query and a value."""
  return lambda x: layer(x, x)


def attention(layer):
  """A layer that is called with a list."""
  return lambda x: layer([x, x])


# {layer: (shape of an example, what makes the layer or a call of it)}, as the page lists them.
LAYERS = {
    'Dense': (VECTOR, lambda: L.Dense(64)),
    'Dense, on sequences': (SEQUENCE, lambda: L.Dense(64)),
    'EinsumDense': (SEQUENCE, lambda: L.EinsumDense('abc,cde->abde', (32, 4, 16), bias_axes='de')),
    'Embedding': (WORDS, lambda: L.Embedding(1000, 64)),
    'ReversibleEmbedding': (WORDS, lambda: L.ReversibleEmbedding(1000, 64)),
    'MultiHeadAttention': (SEQUENCE, lambda: of_itself(L.MultiHeadAttention(4, 16))),
    'GroupQueryAttention': (SEQUENCE, lambda: of_itself(L.GroupQueryAttention(16, 4, 2))),
    'Attention': (SEQUENCE, lambda: attention(L.Attention(use_scale=True))),
    'AdditiveAttention': (SEQUENCE, lambda: attention(L.AdditiveAttention())),
    'LSTM': (SEQUENCE, lambda: L.LSTM(32)),
    'GRU': (SEQUENCE, lambda: L.GRU(32)),
    'SimpleRNN': (SEQUENCE, lambda: L.SimpleRNN(32)),
    'RNN': (SEQUENCE, lambda: L.RNN(L.LSTMCell(32))),
    'RNN, StackedRNNCells': (
        SEQUENCE, lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(32), L.GRUCell(32)]))),
    'Bidirectional': (SEQUENCE, lambda: L.Bidirectional(L.LSTM(32))),
    'TimeDistributed': (SEQUENCE, lambda: L.TimeDistributed(L.Dense(32))),
    'Conv1D': (LINE, lambda: L.Conv1D(16, 3)),
    'Conv2D': (IMAGE, lambda: L.Conv2D(16, 3)),
    'Conv3D': (VOLUME, lambda: L.Conv3D(8, 3)),
    'Conv1DTranspose': (LINE, lambda: L.Conv1DTranspose(16, 3)),
    'Conv2DTranspose': (IMAGE, lambda: L.Conv2DTranspose(16, 3)),
    'Conv3DTranspose': (VOLUME, lambda: L.Conv3DTranspose(8, 3)),
    'DepthwiseConv1D': (LINE, lambda: L.DepthwiseConv1D(3)),
    'DepthwiseConv2D': (IMAGE, lambda: L.DepthwiseConv2D(3)),
    'SeparableConv1D': (LINE, lambda: L.SeparableConv1D(16, 3)),
    'SeparableConv2D': (IMAGE, lambda: L.SeparableConv2D(16, 3)),
    'ConvLSTM1D': (LINES, lambda: L.ConvLSTM1D(4, 3)),
    'ConvLSTM2D': (IMAGES, lambda: L.ConvLSTM2D(4, 3)),
    'ConvLSTM3D': (VOLUMES, lambda: L.ConvLSTM3D(4, 3)),
    'LayerNormalization': (SEQUENCE, L.LayerNormalization),
    'RMSNormalization': (SEQUENCE, L.RMSNormalization),
    'GroupNormalization': (IMAGE, lambda: L.GroupNormalization(4)),
    'PReLU': (VECTOR, L.PReLU),
    'SpectralNormalization': (VECTOR, lambda: L.SpectralNormalization(L.Dense(64))),
    'BatchNormalization': (IMAGE, L.BatchNormalization),
}
# Without trainable weights, cells of the layers above, or code of other frameworks.
OTHERS = {
    'FlaxLayer', 'JaxLayer', 'TFSMLayer', 'Normalization', 'STFTSpectrogram', 'MelSpectrogram',
    'GRUCell', 'LSTMCell', 'SimpleRNNCell'}
_HEAD = """\
# Supported layers

<!-- written by: python tests/clipping/layers_table.py -->

Every Keras layer without weights is supported if it does not mix the examples of a batch. The
table lists the layers of Keras {version} with trainable weights, and the routes by which their
gradients are clipped, largest weight first. [Clipping](guides/clipping.md) explains the routes.

Routes depend on sizes. The table is for batches of 32 examples of the shape in the second column.
`print(tfdp.explain_clipping(model))` shows the routes of your model.

The third column is for a plain clip norm, as in `DPSGD` and `DPAdam`. The last one is for
optimizers that scale gradients before they clip them, such as `DPAdamSTP`.

| layer | shape of an example | route | route if scaled |
|---|---|---|---|
"""
_FOOT = """
*Refused:* `BatchNormalization` mixes examples, see
[batch normalization](guides/batch_normalization.md).
`SpectralNormalization` changes its state in every call. Use a weight constraint instead.

*One example at a time* is exact, but takes a multiple of the plain gradient's time for that layer.
To give such a layer a fast route, see [Your own layer](guides/own_layer.md).

Layers of KerasHub consist of these layers. Its own layers with weights have routes, too: {hub}.
A subclass of a layer has the layer's route if it does not change what the layer computes.
Integer `Dense`, `EinsumDense` and `Embedding` layers, as `quantize('int8')` makes them, have these
routes, with or without LoRA. `tfdp.layers.WSConv2D` has the route *explicit*.
"""


def rows():
  """`(layer, shape, route, route if scaled)` of every line."""
  for name, (shape, make) in LAYERS.items():
    inputs = keras.Input(shape, dtype='int32' if shape == WORDS else 'float32')
    model = keras.Model(inputs, L.Dense(1)(L.Flatten()(make()(inputs))))
    yield (name, str(shape), *(_route(model, scaled) for scaled in (False, True)))


def _route(model, scaled):
  try:
    validation.validate_structure(model)
  except tfdp.PrivacyError:
    return 'refused'
  layers = tfdp.explain_clipping(model, scaled=scaled, batch_size=32).layers[:-1]
  return ', '.join(dict.fromkeys(route for one in layers for route in one.route.split(', ')))


def with_weights():
  """Names of the classes of `keras.layers` that make weights of their own, without synonyms."""
  names = set()
  for kind in vars(L).values():
    if inspect.isclass(kind) and issubclass(kind, L.Layer) and kind is not L.Layer:
      own = [one for one in kind.__mro__ if one.__module__.startswith('keras.src.layers')
             and one.__name__ != 'Layer']
      if any('add_weight' in inspect.getsource(one) for one in own):
        names.add(kind.__name__)
  return names


def of_keras_hub():
  """Names of the registered classes of KerasHub, which need not be installed."""
  source = pathlib.Path(registry.__file__).with_name('keras_hub.py').read_text(encoding='utf-8')
  return sorted(set(re.findall(r"'([A-Z]\w+)'", source)))


def page():
  """The text of the page."""
  lines = [f'| {" | ".join([f"`{row[0]}`" if row[0].isidentifier() else row[0], *row[1:]])} |\n'
           for row in rows()]
  hub = ', '.join(f'`{name}`' for name in of_keras_hub())
  return _HEAD.format(version=keras.__version__) + ''.join(lines) + _FOOT.format(hub=hub)


if __name__ == '__main__':
  PAGE.write_text(page(), encoding='utf-8')
