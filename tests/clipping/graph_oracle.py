# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of what is traced: what a graph computes, apart from its names.

Two tensors of equal expressions are made by the same operations with the same
attributes from the same variables and arguments, in the same way connected: they
hold the same bits. What hands its input on unchanged is left out, calls are
looked into, and of loops what others collect on the way does not count.
"""

import tensorflow as tf

_SAME = {'Identity', 'IdentityN', 'StopGradient', 'PreventGradient', 'EnsureShape'}
_CALLS = {'PartitionedCall', 'StatefulPartitionedCall'}
_LOOPS = {'While', 'StatelessWhile'}
_CONDITIONS = {'If', 'StatelessIf'}
# Names, hints on shapes, and seeds of random operations, which count the operations traced before.
_IGNORED = {'_class', '_output_shapes', 'shape', 'seed', 'seed2', 'shared_name', 'container',
            '_XlaHasReferenceVars', '_lower_using_switch_merge', '_num_original_outputs',
            '_read_only_resource_inputs', '_xla_propagate_compile_time_consts'}


class Expressions:
  """Expressions of tensors, as numbers that are equal for equal ones; shared by graphs."""

  def __init__(self):
    self._numbers = {}

  def of(self, concrete, tensors):
    """One number for every tensor of a concrete function's graph."""
    arguments = {}
    captured = {id(inside): outside for outside, inside in concrete.graph.captures}
    for i, tensor in enumerate(concrete.graph.inputs):
      outside = captured.get(id(tensor))
      if outside is None:
        what = ('argument', i)
      elif outside.dtype == tf.resource:
        what = ('variable', id(outside))
      else:
        what = ('constant', outside.dtype.name, tuple(outside.shape), outside.numpy().tobytes())
      arguments[id(tensor)] = self._number(what)
    seen = {}
    return [self._tensor(tensor, arguments, seen) for tensor in tensors]

  def _number(self, what):
    return self._numbers.setdefault(what, len(self._numbers))

  def _tensor(self, tensor, arguments, seen):
    """`arguments`: numbers of a graph's inputs by `id`; `seen`: of its other tensors."""
    stack = [tensor]
    while stack:  # Operations before those that use them.
      top = stack[-1]
      missing = [] if id(top) in arguments else [
          t for t in top.op.inputs if id(t) not in seen and id(t) not in arguments]
      if missing and id(top) not in seen:
        stack += missing
        continue
      stack.pop()
      if id(top) not in seen:
        seen[id(top)] = arguments.get(id(top))
        if seen[id(top)] is None:
          inputs = [arguments.get(id(t), seen.get(id(t))) for t in top.op.inputs]
          seen[id(top)] = self._result(top.op, top.value_index, inputs)
    return seen[id(tensor)]

  def _result(self, operation, index, inputs):
    if operation.type in _SAME:
      return inputs[index]
    if operation.type in _CALLS:
      return self._called(operation, 'f', index, inputs)
    if operation.type in _CONDITIONS:
      return self._number(('if', inputs[0]) + tuple(
          self._called(operation, branch, index, inputs[1:])
          for branch in ('then_branch', 'else_branch')))
    if operation.type in _LOOPS:
      return self._looped(operation, index, inputs)
    attributes = tuple(sorted(
        (name, value.SerializeToString(deterministic=True))
        for name, value in operation.node_def.attr.items() if name not in _IGNORED))
    return self._number((operation.type, index, attributes, tuple(inputs)))

  def _called(self, operation, attribute, index, inputs):
    graph = _function(operation, attribute)
    return self._tensor(graph.outputs[index], dict(zip(map(id, graph.inputs), inputs)), {})

  def _looped(self, operation, index, inputs):
    """By the loop variables that this one and the condition depend on."""
    body, condition = (_function(operation, name) for name in ('body', 'cond'))
    todo = [(body, body.outputs[index])] + [(condition, t) for t in condition.outputs]
    needed = set()
    while todo:
      graph, tensor = todo.pop()
      for i in _reached(graph, tensor) - needed:
        needed.add(i)
        todo.append((body, body.outputs[i]))
    order = sorted(needed)
    # Those that the loop hands on are what they are; of others only their place counts.
    own = {i: inputs[i] if body.outputs[i] is body.inputs[i] else self._number(('looped', place))
           for place, i in enumerate(order)}
    started = tuple((own[i], inputs[i]) for i in order)

    def inside(graph, tensor):
      return self._tensor(tensor, {id(t): own.get(i, -1) for i, t in enumerate(graph.inputs)}, {})

    return self._number(
        ('while', started, tuple(inside(condition, t) for t in condition.outputs),
         tuple(inside(body, body.outputs[i]) for i in order),
         own.get(index, inside(body, body.outputs[index]))))


def _function(operation, attribute):
  return operation.graph._get_function(operation.get_attr(attribute).name).graph


def _reached(graph, tensor):
  """Returns the inputs of a graph that a tensor depends on."""
  places = {id(t): i for i, t in enumerate(graph.inputs)}
  reached, todo, seen = set(), [tensor], set()
  while todo:
    top = todo.pop()
    if id(top) in seen:
      continue
    seen.add(id(top))
    if id(top) in places:
      reached.add(places[id(top)])
    else:
      todo += list(top.op.inputs)
  return reached
