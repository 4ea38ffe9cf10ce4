# SPDX-License-Identifier: Apache-2.0
"""Where a private step spends its time: passes over the weights, and processor time, by stage.

    python benchmarks/speed/passes.py [DPAdam DPSGD ...] [--rounds 9]

The model is the perceptron of 670,000 weights of the other tables. A stage is the difference of two
graphs, one of which ends after it. `read` and `written` are how often all weights are read and
written, counted from the operations of the graph and of the functions that it calls: numbers in
tensors without the batch axis, over the number of weights. A function that XLA compiles counts as
one pass over its arguments and its results; reshapes, and reads and assignments of variables, are
free. Time is
processor time (all threads), as a ratio to a plain Keras step with Adam in the same run: the
median of rounds in which all stages take turns.
"""

import argparse
import math
import os
import time
import warnings

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import step

keras = compat.keras
BATCH = 250  # No weight has an axis of this length.
STAGES = 'clip', 'draw noise', 'add noise, update rule', 'write and move'
FREE = {'Placeholder', 'Const', 'Identity', 'NoOp', 'ReadVariableOp', 'Reshape', 'ExpandDims',
        'Squeeze', 'Bitcast', 'Shape', 'AssignVariableOp', 'EnsureShape', 'StridedSlice'}
CALLS = {'PartitionedCall', 'StatefulPartitionedCall'}
CONDITIONS = {'If', 'StatelessIf'}  # They are counted by their first branch, the usual one.


def made(kind=None):
  layers = [keras.Input((784,)), keras.layers.Dense(512, 'relu'), keras.layers.Dense(512, 'relu'),
            keras.layers.Dense(10)]
  optimizer = keras.optimizers.Adam(1e-3) if kind is None else getattr(tfdp, kind)(
      learning_rate=1e-3, l2_norm_clip=1., noise_multiplier=1., batch_size=BATCH,
      **({'scale_epsilon': 1e-4} if kind.endswith('STP') else {}))
  model = (keras.Sequential if kind is None else tfdp.DPSequential)(layers)
  model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False)
  rng = np.random.default_rng(0)
  x = tf.constant(rng.normal(size=[BATCH, 784]), tf.float32)
  y = tf.constant(rng.integers(0, 10, BATCH))
  model.train_on_batch(x, y)
  return model, (x, y)


def until(model, last):
  """Returns a graph of a private step that ends after stage `last`."""
  optimizer, variables = model.optimizer, model.trainable_variables

  def run(x, y):
    batch, tag, _ = step.unpack((x, y), optimizer.plan)
    loss = model.prepare_step(x)
    state, request, public = step.query(optimizer, variables, x)
    batch, noise = step.check_batch(optimizer, batch, tag, state.privatizer.noise)
    state = state._replace(privatizer=state.privatizer._replace(noise=noise))
    sums = step.clip(model, loss, batch, request).sums
    if last == 0:
      return corners(sums)
    if last == 1:
      drawn, noise = optimizer.private.privatizer.draw(state.privatizer.noise, sums)
      return corners((sums, drawn.vectors))
    direction, state = optimizer.private.answer(state, request, sums, public)
    if last == 2:
      return corners((direction, state))
    return step.apply(optimizer, variables, direction, state)

  return tf.function(run, autograph=False)


def corners(tree):
  """Returns a number of each tensor, so that none is computed in vain or copied."""
  return [t[(0,) * t.shape.rank] for t in tf.nest.flatten(tree) if t.shape.rank]


def passes(graph, weights):
  """Returns `(read, written)`, in numbers of weights."""
  definition = graph.as_graph_def(add_shapes=True)
  functions = {one.signature.name: one for one in definition.library.function}

  def size(shape):
    sides = [side.size for side in shape.dim]
    return 0 if shape.unknown_rank or BATCH in sides or -1 in sides else math.prod(sides)

  def count(nodes, arguments):
    sizes, total = dict(arguments), np.zeros(2)
    for node in nodes:
      written = [size(shape) for shape in node.attr['_output_shapes'].list.shape]
      sizes.update({(node.name, place): n for place, n in enumerate(written)})
      sizes[node.name, None] = written[0] if written else 0
    for node in nodes:
      if node.op in FREE:
        continue
      branch = 'then_branch' if node.op in CONDITIONS else 'f' if node.op in CALLS else None
      inner = functions.get(node.attr[branch].func.name) if branch else None
      if inner is not None and not inner.attr['_XlaMustCompile'].b:
        names = [one.name for one in inner.signature.input_arg]
        shapes = inner.attr['_input_shapes'].list.shape
        total += count(inner.node_def, {
            (name, None): size(shape) for name, shape in zip(names, shapes)})
        continue
      total += (sum(sizes.get(source(one), 0) for one in node.input if one[0] != '^'),
                sum(size(shape) for shape in node.attr['_output_shapes'].list.shape))
    return total

  def source(text):
    name, *rest = text.split(':')
    return name, int(rest[-1]) if rest and rest[-1] != '0' else None

  return count(definition.node, {}) / weights


def main():
  warnings.simplefilter('ignore')
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('kinds', nargs='*', default=['DPAdam', 'DPSGD', 'DPAdamSTP'])
  parser.add_argument('--rounds', type=int, default=9)
  arguments = parser.parse_args()
  plain, data = made()
  cases = {('plain', 'gradients and update'): tf.function(plain.train_step)}
  found = {}
  for kind in arguments.kinds:
    model, data = made(kind)
    weights, before = model.count_params(), np.zeros(2)
    for last, stage in enumerate(STAGES):
      cases[kind, stage] = graph = until(model, last)
      total = passes(graph.get_concrete_function(*data).graph, weights)
      found[kind, stage], before = total - before, total
  times = {case: [] for case in cases}
  for case, graph in cases.items():
    call = (lambda graph=graph: graph(data)) if case[0] == 'plain' else (
        lambda graph=graph: graph(*data))
    cases[case] = call
    call()
  for _ in range(arguments.rounds):
    for case, call in cases.items():
      start = time.process_time()
      for _ in range(20):
        call()
      times[case].append((time.process_time() - start) / 20)
  base = np.array(times['plain', 'gradients and update'])
  print(f'TensorFlow {tf.__version__}, plain step {1e3 * np.median(base):.1f} ms')
  print(f'{"":12}{"stage":24}{"read":>6}{"written":>9}{"time":>7}{"in all":>8}')
  for kind in arguments.kinds:
    before = 0.0
    for stage in STAGES:
      ratio = np.median(np.array(times[kind, stage]) / base)
      read, written = found[kind, stage]
      print(f'{kind:12}{stage:24}{read:6.1f}{written:9.1f}{ratio - before:7.2f}{ratio:8.2f}')
      before = ratio


if __name__ == '__main__':
  main()
