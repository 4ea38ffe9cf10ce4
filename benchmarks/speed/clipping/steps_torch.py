# SPDX-License-Identifier: Apache-2.0
"""Opacus 1.6 on the same models in PyTorch: gradients, and whole steps with noise and Adam."""

import functools
import warnings

import models
from opacus import grad_sample
from opacus import optimizers
from opacus.layers import dp_rnn
from opacus.utils import fast_gradient_clipping_utils as fast
import torch
from torch import nn

warnings.filterwarnings('ignore', message='Full backward hook is firing')
torch.set_num_threads(2)


class Attention(nn.Module):
  """Causal self-attention of linear maps, which all of Opacus' ways know."""

  def __init__(self, width, heads):
    super().__init__()
    self.heads = heads
    self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

  def forward(self, x):
    n, length, width = x.shape
    split = lambda t: t.reshape(n, length, self.heads, width // self.heads).transpose(1, 2)
    y = nn.functional.scaled_dot_product_attention(
        split(self.q(x)), split(self.k(x)), split(self.v(x)), is_causal=True)
    return self.out(y.transpose(1, 2).reshape(n, length, width))


class Residual(nn.Module):

  def __init__(self, *inner):
    super().__init__()
    self.inner = nn.Sequential(*inner)

  def forward(self, x):
    return x + self.inner(x)


class Recurrent(nn.Module):
  """Two LSTM layers; Opacus needs its own kind."""

  def __init__(self, width, kind):
    super().__init__()
    self.lstm = kind(width, width, num_layers=2, batch_first=True)

  def forward(self, x):
    return self.lstm(x)[0]


class Mean(nn.Module):

  def forward(self, x):
    return x.mean(1)


def build(name, private):
  if name == 'mlp':
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                         nn.Linear(512, 10))
  if name == 'cnn':
    return nn.Sequential(
        nn.ZeroPad2d(3), nn.Conv2d(1, 16, 8, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))
  if name == 'lstm':
    kind = dp_rnn.DPLSTM if private else nn.LSTM
    return nn.Sequential(nn.Embedding(8000, 120), Recurrent(120, kind), nn.Linear(120, 8000))
  if name == 'embedding':
    return nn.Sequential(nn.Embedding(50000, 64), Mean(), nn.Linear(64, 64), nn.ReLU(),
                         nn.Linear(64, 10))
  blocks, width = {'transformer': 2, 'transformer6': 6}[name], 128
  inner = []
  for _ in range(blocks):
    inner += [Residual(nn.LayerNorm(width), Attention(width, 4)),
              Residual(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                       nn.Linear(4 * width, width))]
  return nn.Sequential(nn.Embedding(2000, width), *inner, nn.LayerNorm(width),
                       nn.Linear(width, 2000))


def cases(name):
  return {
      'plain': functools.partial(_step, name, None, False),
      'Opacus hooks': functools.partial(_step, name, 'hooks', False),
      'Opacus ghost': functools.partial(_step, name, 'ghost', False),
      'plain fit': functools.partial(_step, name, None, True),
      'Opacus hooks fit': functools.partial(_step, name, 'hooks', True),
      'Opacus ghost fit': functools.partial(_step, name, 'ghost', True),
  }


def _step(name, way, whole):
  task = models.MODELS[name]()
  x, y = torch.from_numpy(task.x), torch.from_numpy(task.y).long()
  if name == 'cnn':
    x = x.permute(0, 3, 1, 2).contiguous()
  if task.x.dtype.kind == 'i':
    x = x.long()
  model = build(name, way is not None)
  state = sum(4 * p.numel() for p in model.parameters()) * (3 if whole else 1)
  adam = torch.optim.Adam(model.parameters(), 1e-3)
  arguments = {'noise_multiplier': 1.0, 'max_grad_norm': 0.1, 'expected_batch_size': len(x)}

  def losses():
    values = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction='none')
    return values.reshape(len(x), -1).mean(1)

  # Gradients are let go at the end of a step, as TensorFlow and JAX do.
  if way is None:
    def step():
      losses().mean().backward()
      if whole:
        adam.step()
      adam.zero_grad()
  elif way == 'hooks':
    model = grad_sample.GradSampleModule(model, loss_reduction='mean')
    optimizer = optimizers.DPOptimizer(adam, **arguments)
    def step():
      losses().mean().backward()
      optimizer.step() if whole else optimizer.clip_and_accumulate()
      optimizer.zero_grad(set_to_none=True)
  else:
    model = grad_sample.GradSampleModuleFastGradientClipping(
        model, max_grad_norm=0.1, use_ghost_clipping=True, loss_reduction='mean')
    optimizer = optimizers.DPOptimizerFastGradientClipping(adam, **arguments)
    def step():
      fast.DPTensorFastGradientClipping(model, optimizer, losses(), 'mean').backward()
      if whole:
        optimizer.step()
      optimizer.zero_grad(set_to_none=True)
  return step, state
