# SPDX-License-Identifier: Apache-2.0
"""Finds what a traced function writes of its inputs into anything that outlives the call.

Follows every value of the graph, through functions, conditions and loops, from the data to
the operations that write a variable, a table, a queue or a file. A write whose value, and
whether and how often it happens, do not depend on the data is none of data: seeds that
advance, counters of steps. What Python code does that the graph calls (`tf.py_function`,
`tf.numpy_function`) cannot be seen, and `tf.print` is left to the caller.
"""

import re
from typing import Any, Dict, List, NamedTuple, Set, Tuple

# Operations with a resource that change nothing but, perhaps, which numbers are drawn next.
_READS = re.compile(
    'ReadVariableOp|VariableShape|VarIsInitializedOp|ResourceGather|LookupTable(Find|Size|Export)'
    '|RngReadAndSkip|RngSkip|Identity|NoOp|.*PyFunc|Destroy|Placeholder|TensorArray|Stack')
_MAKES = re.compile('VarHandleOp|.*HashTable|.*Queue(V2)?$|.*Summary(File)?Writer|Barrier')
_FILES = re.compile('WriteFile|Save')  # Without a resource.
_BRANCHES = ('If', 'StatelessIf', 'Case', 'StatelessCase')
_LOOPS = ('While', 'StatelessWhile')


class Value(NamedTuple):
  """What is known of a tensor."""

  data: bool = False  # Whether its value depends on the data.
  resource: Any = None  # The name of the resource that it is a handle of.


def find(concrete: Any, inputs: Any) -> List[str]:
  """What is written of the data, in words.

  Args:
    concrete: A concrete function.
    inputs: How many of its first inputs are data.
  """
  definition = concrete.graph.as_graph_def()
  search = _Search(definition.library.function)
  names = {inner.op.name: _name(concrete, outer)
           for outer, inner in concrete.graph.captures if outer.dtype.name == 'resource'}
  known = {t.op.name: (Value(i < inputs, names.get(t.op.name)),)
           for i, t in enumerate(concrete.inputs)}
  search.scan(definition.node, known, False)
  return sorted(search.found)


def _name(concrete: Any, handle: Any) -> str:
  names = [v.name for v in concrete.graph.variables if v.handle is handle]
  return f'variable {names[0]!r}' if names else 'a table or another resource'


class _Search:
  """Follows data through graphs; `found` grows."""

  def __init__(self, library: Any) -> None:
    self.found: Set[str] = set()
    self._library = {f.signature.name: f for f in library}
    self._results: Dict[Any, Any] = {}

  def scan(self, nodes: Any, known: Any, control: Any) -> Any:
    """What is known of every node's outputs.

    Args:
      nodes: `NodeDef`s in any order.
      known: Node or argument -> tuple of `Value`s.
      control: Whether data decide if these nodes run.
    """
    start = set(known)
    changed = True
    while changed:  # Nodes need not be sorted; what is known only grows.
      changed = False
      for node in nodes:
        if node.name in start:
          continue
        inputs = [_value(known, name) for name in node.input if not name.startswith('^')]
        values = self._outputs(node, inputs, control)
        if known.get(node.name) != values:
          known[node.name], changed = values, True
    return known

  def _outputs(self, node: Any, inputs: Any, control: Any) -> Tuple[Value, ...]:
    functions = _functions(node)
    if node.op in _BRANCHES and functions:
      choice, *arguments = inputs
      results = [self._call(name, arguments, control or choice.data) for name in functions]
      return tuple(Value(choice.data or any(v.data for v in values), values[0].resource)
                   for values in zip(*results)) or (Value(),)
    if node.op in _LOOPS and functions:
      return self._loop(node, inputs, control)
    if functions and len(self._library[functions[0]].signature.input_arg) == len(inputs):
      return self._call(functions[0], inputs, control) or (Value(),)
    data, handles = any(v.data for v in inputs), [v.resource for v in inputs if v.resource]
    if node.op in ('Identity', 'IdentityN'):
      return tuple(inputs)
    if (data or control) and (
        handles and not _READS.match(node.op) or _FILES.match(node.op)):
      self.found.add(f'{node.op} into {handles[0] if handles else "a file"}')
    return (Value(data, f'a resource ({node.op})' if _MAKES.match(node.op) else None),)

  def _loop(self, node: Any, inputs: Any, control: Any) -> Any:
    condition, body = (node.attr[name].func.name for name in ('cond', 'body'))
    state = tuple(inputs)
    while True:
      decides = self._call(condition, state, control)[0].data
      after = self._call(body, state, control or decides)
      merged = tuple(Value(a.data or b.data or decides, a.resource or b.resource)
                     for a, b in zip(state, after))
      if merged == state:
        return state
      state = merged

  def _call(self, name: str, arguments: Any, control: Any) -> Any:
    key = name, tuple(arguments), control
    if key not in self._results:
      function = self._library[name]
      known = {argument.name: (value,)
               for argument, value in zip(function.signature.input_arg, arguments)}
      known = self.scan(function.node_def, known, control)
      self._results[key] = tuple(
          _value(known, function.ret[result.name]) for result in function.signature.output_arg)
    return self._results[key]


def _functions(node: Any) -> List[str]:
  """Names of the functions that a node calls."""
  names = []
  for name in sorted(node.attr):
    attribute = node.attr[name]
    names += [f.name for f in ([attribute.func] if attribute.HasField('func')
                               else attribute.list.func)]
  return names


def _value(known: Any, reference: str) -> Value:
  """Of 'node', 'node:1' or, inside functions, 'node:output:1'."""
  name, *rest = reference.split(':')
  values = known.get(name, (Value(),))
  place = int(rest[-1]) if rest else 0
  return values[place if place < len(values) else 0]
