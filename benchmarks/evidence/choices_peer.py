# SPDX-License-Identifier: Apache-2.0
"""Trains one task of `choices_peers.py` with another library, in that library's environment.

    python benchmarks/evidence/choices_peer.py LIBRARY TASK.npz EPSILON

Prints one line of JSON about the library, and then answers each line of JSON
(`optimizer`, `rate`, `clip`, `seed`, `part`) with a line that has the loss. EPSILON 0 trains
without noise.
"""
# pylint: disable=import-outside-toplevel, protected-access

import functools
import importlib.metadata
import json
import math
import os
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np

DELTA = 1e-5


class Task(NamedTuple):
  """A task as `choices_peers.export` writes it.

  Attributes:
    layers: `(class, activation)` of each Keras layer. Convolutions are 3 x 3 with stride 2 and
      padding "same".
    weights: Arrays of each layer, in the shapes that Keras uses.
    loss: 'softmax', 'logistic' or 'squares'.
    parts: `(x, y)` of training, validation and test.
    batch_size: Expected.
    steps: Of every run.
  """

  layers: List[Tuple[str, str]]
  weights: List[List[np.ndarray]]
  loss: str
  parts: List[Tuple[np.ndarray, np.ndarray]]
  batch_size: int
  steps: int


class Peer(NamedTuple):
  """A library that is ready to train.

  Attributes:
    facts: What is printed about the library.
    run: `(optimizer, rate, clip, seed) -> weights`.
    loss: `(weights, part) -> mean loss`.
    start: The weights that training starts from.
  """

  facts: Dict[str, Any]
  run: Callable[[str, float, float, int], Any]
  loss: Callable[[Any, int], float]
  start: Any


def read(path: str) -> Task:
  with np.load(path) as file:
    layers = json.loads(str(file['layers']))
    weights = [[file[f'w{i}_{j}'] for j in range(count)] for i, (*_, count) in enumerate(layers)]
    parts = [(file[f'x{i}'], file[f'y{i}']) for i in range(3)]
    return Task([(kind, activation) for kind, activation, _ in layers], weights,
                str(file['loss']), parts, int(file['batch_size']), int(file['steps']))


def padding(side: int) -> Tuple[int, int]:
  """Returns the padding before and after, as Keras pads for 3 x 3 with stride 2 and "same"."""
  total = (math.ceil(side / 2) - 1) * 2 + 3 - side
  return total // 2, total - total // 2


def opacus(task: Task, epsilon: float) -> Peer:
  """Opacus, as its README trains: `make_private_with_epsilon` on a DataLoader of the batch size."""
  import warnings

  from opacus import PrivacyEngine
  import torch
  from torch import nn
  torch.set_num_threads(1)
  warnings.simplefilter('ignore')

  class Reorder(nn.Module):
    """Brings channels last, so that Flatten gives the order of Keras."""

    def forward(self, x: Any) -> Any:
      return x.permute(0, 2, 3, 1)

  class Mean(nn.Module):

    def forward(self, x: Any) -> Any:
      return x.mean(1)

  def build() -> Any:
    stack: List[Any] = []
    side = task.parts[0][0].shape[1]
    for (kind, activation), weights in zip(task.layers, task.weights):
      if kind == 'Conv2D':
        kernel, bias = weights
        before, after = padding(side)
        side = math.ceil(side / 2)
        layer = nn.Conv2d(kernel.shape[2], kernel.shape[3], 3, 2)
        stack += [nn.ZeroPad2d((before, after, before, after)), layer]
        values = [kernel.transpose(3, 2, 0, 1), bias]
      elif kind == 'Dense':
        layer = nn.Linear(*weights[0].shape)
        stack.append(layer)
        values = [weights[0].T, weights[1]]
      elif kind == 'Embedding':
        layer = nn.Embedding(*weights[0].shape)
        stack.append(layer)
        values = weights
      else:
        stack += {'Flatten': [Reorder(), nn.Flatten()], 'GlobalAveragePooling1D': [Mean()]}[kind]
        values = []
      with torch.no_grad():
        for parameter, value in zip(layer.parameters() if values else (), values):
          parameter.copy_(torch.tensor(np.array(value)))
      stack += {'relu': [nn.ReLU()], 'tanh': [nn.Tanh()]}.get(activation, [])
    return nn.Sequential(*stack)

  criterion = {'softmax': nn.CrossEntropyLoss, 'logistic': nn.BCEWithLogitsLoss,
               'squares': nn.MSELoss}[task.loss]()

  def tensors(part: int) -> Tuple[Any, Any]:
    x, y = (torch.tensor(array) for array in task.parts[part])
    x = x.permute(0, 3, 1, 2) if x.ndim == 4 else x
    return x.contiguous(), y.long() if task.loss == 'softmax' else y.float()

  sets = [tensors(part) for part in range(3)]
  known: List[float] = [0.0] if epsilon == 0 else []

  def prepared(optimizer: str, rate: float, clip: float) -> Any:
    model = build()
    made = {'SGD': torch.optim.SGD, 'Adam': torch.optim.Adam}[optimizer](
        model.parameters(), lr=rate)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*sets[0]), batch_size=task.batch_size, shuffle=True)
    engine, same = PrivacyEngine(), dict(data_loader=loader, max_grad_norm=clip)
    if known:  # `make_private_with_epsilon` would call this with the same noise again.
      return (engine, *engine.make_private(
          module=model, optimizer=made, noise_multiplier=known[0], **same))
    found = engine.make_private_with_epsilon(
        module=model, optimizer=made, target_epsilon=epsilon, target_delta=DELTA,
        epochs=task.steps / len(loader), **same)
    known.append(found[1].noise_multiplier)
    return (engine, *found)

  def run(optimizer: str, rate: float, clip: float, seed: int) -> Any:
    torch.manual_seed(seed)
    _, model, made, loader = prepared(optimizer, rate, clip)
    model.train()
    step = 0
    while step < task.steps:
      for x, y in loader:
        if step == task.steps:
          break
        step += 1
        made.zero_grad()
        criterion(model(x), y).backward()
        made.step()
    return model._module

  def loss(model: Any, part: int) -> float:
    model.eval()
    with torch.no_grad():
      x, y = sets[part]
      return float(criterion(model(x), y))

  engine, _, made, loader = prepared('SGD', .1, 1.0)
  rate = loader.sample_rate
  facts = dict(noise_multiplier=known[0], batch_size=made.expected_batch_size,
               sampling='Poisson', accountant=engine.accountant.mechanism())
  if epsilon:
    engine.accountant.history = [(known[0], rate, task.steps)]
    facts['spent'] = engine.get_epsilon(DELTA)
  return Peer(facts, run, loss, build())


def jax_privacy(task: Task, epsilon: float) -> Peer:
  """JAX Privacy, as its examples train: an execution plan for DP-SGD, and an optax optimizer."""
  import jax
  from jax import numpy as jnp
  from jax_privacy import batch_selection
  from jax_privacy.experimental import execution_plan
  import optax

  def patches(x: Any) -> Any:
    """What a convolution multiplies by its kernel: its gradients, one by one, are slow in XLA."""
    before, after = padding(x.shape[1])
    x = jnp.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))
    last = x.shape[1] - 2
    return jnp.concatenate([x[:, i:i + last:2, j:j + last:2] for i in range(3) for j in range(3)],
                           -1)

  def logits(weights: Any, x: Any) -> Any:
    for (kind, activation), values in zip(task.layers, weights):
      if kind == 'Conv2D':
        x = patches(x) @ values[0].reshape(-1, values[0].shape[3]) + values[1]
      elif kind == 'Dense':
        x = x @ values[0] + values[1]
      elif kind == 'Embedding':
        x = values[0][x]
      elif kind == 'Flatten':
        x = x.reshape(len(x), -1)
      elif kind == 'GlobalAveragePooling1D':
        x = x.mean(1)
      else:
        raise ValueError(f'No layer for {kind}.')
      x = {'relu': jax.nn.relu, 'tanh': jnp.tanh}.get(activation, lambda x: x)(x)
    return x

  def mean_loss(weights: Any, x: Any, y: Any) -> Any:
    z = logits(weights, x)
    if task.loss == 'softmax':
      return optax.softmax_cross_entropy_with_integer_labels(z, y).mean()
    if task.loss == 'logistic':
      return optax.sigmoid_binary_cross_entropy(z, y).mean()
    return jnp.mean((z - y)**2)

  sets = [(x, y.astype(int) if task.loss == 'softmax' else y) for x, y in task.parts]
  start = jax.tree.map(jnp.asarray, task.weights)
  size = len(sets[0][0])
  room = int(task.batch_size + 3 * task.batch_size**.5)  # Larger batches take two of these.
  same = dict(iterations=task.steps, normalize_by=float(task.batch_size),
              sampling_prob=task.batch_size / size)
  if epsilon:
    import dp_accounting
    config = execution_plan.BandMFExecutionPlanConfig.default(
        num_bands=1, epsilon=epsilon, delta=DELTA, **same)
    event = config.plan.dp_event
    noise = event.event.event.noise_multiplier
    accountant = dp_accounting.pld.PLDAccountant(execution_plan.NeighboringRelation.REPLACE_SPECIAL)
    spent = accountant.compose(event).get_epsilon(DELTA)
  else:
    noise, spent = 0.0, None

  def plan(clip: float, seed: int) -> Any:
    return execution_plan.BandMFExecutionPlanConfig(  # One band is DP-SGD.
        strategy=np.ones(1), epsilon=None, delta=None, noise_multiplier=noise, noise_seed=seed,
        l2_clip_norm=clip, **same).plan

  @functools.lru_cache(maxsize=None)
  def gradient(clip: float) -> Any:
    return jax.jit(plan(clip, 0).clipped_grad(mean_loss, batch_argnums=(1, 2)))

  # By default, gradients are divided by the clip norm: the noise is the same at every clip norm.
  noisy = jax.jit(plan(1.0, 0).noise_addition_transform.update)

  @functools.lru_cache(maxsize=None)
  def update(optimizer: str) -> Any:
    made = optax.inject_hyperparams({'SGD': optax.sgd, 'Adam': optax.adam}[optimizer])(
        learning_rate=.1)

    @jax.jit
    def change(gradients: Any, state: Any, weights: Any) -> Any:
      updates, state = made.update(gradients, state)
      return optax.apply_updates(weights, updates), state

    return made.init, change

  def run(optimizer: str, rate: float, clip: float, seed: int) -> Any:
    init, change = update(optimizer)
    chosen = plan(clip, seed)
    weights, state = start, init(start)
    state.hyperparams['learning_rate'] = jnp.asarray(rate, jnp.float32)
    noise_state = chosen.noise_addition_transform.init(start)
    x, y = sets[0]
    for rows in chosen.batch_selection_strategy.batch_iterator(size, rng=seed):
      rows = batch_selection.pad_to_multiple_of(rows, room)
      clipped = gradient(clip)(weights, x[rows], y[rows], is_padding_example=rows == -1)
      noised, noise_state = noisy(clipped, noise_state)
      weights, state = change(noised, state, weights)
    return weights

  return Peer(dict(noise_multiplier=noise, batch_size=task.batch_size, sampling='Poisson',
                   accountant='pld', spent=spent), run,
              lambda weights, part: float(mean_loss(weights, *sets[part])), start)


def tensorflow_privacy(task: Task, epsilon: float) -> Peer:
  """TensorFlow Privacy, as its tutorial trains: `fit` of a DPSequential on shuffled batches."""
  import tensorflow as tf
  import tensorflow_privacy as tf_privacy
  from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib
  from tensorflow_privacy.privacy.analysis import compute_noise_from_budget_lib
  from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  keras = tf.keras

  def layer(kind: str, activation: str, weights: Any) -> Any:
    if kind == 'Conv2D':
      return keras.layers.Conv2D(weights[0].shape[3], 3, 2, 'same', activation=activation)
    if kind == 'Dense':
      return keras.layers.Dense(weights[0].shape[1], activation=activation)
    if kind == 'Embedding':
      return keras.layers.Embedding(*weights[0].shape)
    return getattr(keras.layers, kind)()

  def build(clip: float) -> Any:
    x, _ = task.parts[0]
    model = tf_privacy.DPSequential(
        l2_norm_clip=clip, noise_multiplier=noise,
        layer_registry=layer_registry.make_default_layer_registry(),
        layers=[keras.layers.InputLayer(x.shape[1:], dtype=x.dtype)] + [
            layer(*names, weights) for names, weights in zip(task.layers, task.weights)])
    model.set_weights(start)
    return model

  start = [array for layer in task.weights for array in layer]
  criterion = {'softmax': keras.losses.SparseCategoricalCrossentropy(from_logits=True),
               'logistic': keras.losses.BinaryCrossentropy(from_logits=True),
               'squares': keras.losses.MeanSquaredError()}[task.loss]
  size = len(task.parts[0][0])
  epochs = task.steps * task.batch_size / size * (1 - 1e-9)  # Rounded up to these steps.
  noise, spent = 0.0, None
  if epsilon:
    noise = float(compute_noise_from_budget_lib.compute_noise(
        size, task.batch_size, epsilon, epochs, DELTA, .1))
    spent = compute_dp_sgd_privacy_lib._compute_dp_sgd_example_privacy(
        epochs, noise, DELTA, used_microbatching=False,
        poisson_subsampling_probability=task.batch_size / size)
  batches = tf.data.Dataset.from_tensor_slices(task.parts[0]).shuffle(size).batch(
      task.batch_size, drop_remainder=True).repeat()

  @functools.lru_cache(maxsize=None)
  def compiled(optimizer: str, clip: float) -> Any:
    model = build(clip)
    model.compile(getattr(keras.optimizers, optimizer)(), criterion)
    return model

  def run(optimizer: str, rate: float, clip: float, seed: int) -> Any:
    tf.random.set_seed(seed)
    model = compiled(optimizer, clip)
    model.set_weights(start)
    for variable in model.optimizer.variables:
      variable.assign(tf.zeros_like(variable))
    model.optimizer.learning_rate.assign(rate)
    model.fit(batches, steps_per_epoch=task.steps, epochs=1, verbose=0)
    return model

  def loss(model: Any, part: int) -> float:
    x, y = task.parts[part]
    return float(criterion(y, model(x, training=False)))

  return Peer(dict(noise_multiplier=noise, batch_size=task.batch_size,
                   sampling='shuffled batches (accounted as Poisson)', accountant='rdp',
                   spent=spent), run, loss, build(1.0))


PEERS: Dict[str, Tuple[Callable[[Task, float], Peer], Tuple[str, ...]]] = {
    'Opacus': (opacus, ('opacus', 'torch')),
    'jax_privacy': (jax_privacy, ('jax_privacy', 'jax', 'optax')),
    'TensorFlow Privacy': (tensorflow_privacy, ('tensorflow_privacy', 'tensorflow'))}


def main() -> None:
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # Output of the libraries does not mix with the answers.
  _, name, path, epsilon = sys.argv
  make, packages = PEERS[name]
  peer = make(read(path), float(epsilon))
  versions = {package: importlib.metadata.version(package) for package in packages}
  answer = lambda **known: print(json.dumps(known), file=answers, flush=True)
  answer(versions=versions, start=peer.loss(peer.start, 2), **peer.facts)
  for line in sys.stdin:
    wanted = json.loads(line)
    part = wanted.pop('part')
    answer(loss=peer.loss(peer.run(**wanted), part))


if __name__ == '__main__':
  main()
