# SPDX-License-Identifier: Apache-2.0
"""Finds the constants, comparisons and written inputs of a traced function.

A layer, penalty or constraint that captured an array may hold the training data, which then
reaches every gradient without clipping and noise.

Code that does something else for a certain word, above some size of the batch, or from some step on
does so for batches that no random probe meets. So its constants are taken from the graph, as
fuzzers of programs do. Constants are followed that a comparison, a remainder or a quotient takes
directly or through a cast. Those that no batch decides are left out: comparisons of uniform or
normal draws and constants alone, of sizes that every batch has, and remainders that only seed
draws, as Keras takes of its seeds. Data in a seed change the draws, whatever the remainder.

Every value of the graph is followed, through functions, conditions and loops, from the data to the
operations that write a variable, a table, a queue or a file. A write is allowed if its value, and
whether and how often it happens, do not depend on the data: seeds that advance, counters of steps.
What Python code does that the graph calls (`tf.py_function`, `tf.numpy_function`) cannot be seen,
and `tf.print` is left to the caller.
"""

import collections
import re
from typing import Any, Callable, Container, Dict, Iterable, Iterator, List, NamedTuple, Set, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat

Concrete = Any  # A concrete function of TensorFlow.
Graph = Any  # A `GraphDef`.
Node = Any  # A `NodeDef` or `FunctionDef`.
Constant = Any  # A number or text that a graph compares with.
_COMPARE = frozenset((
    'Less', 'LessEqual', 'Greater', 'GreaterEqual', 'Equal', 'NotEqual', 'ApproximateEqual',
    'FloorMod', 'Mod', 'TruncateMod', 'FloorDiv', 'TruncateDiv', 'Minimum', 'Maximum'))
_NOT_FINITE = {'IsInf': np.inf, 'IsFinite': np.inf}
_PASS = ('Identity', 'Cast')
_ARITHMETIC = ('Identity', 'Cast', 'Mul', 'Add', 'AddV2', 'Sub', 'RealDiv', 'FloorDiv', 'FloorMod',
               'Minimum', 'Maximum', 'Prod', 'Sqrt')
# Draws whose law is their own: that of any other is an input, which may be data.
_OF_NO_DATA = re.compile(
    '(Stateless)?(RandomUniform(?!Int)|RandomNormal|RandomStandardNormal|TruncatedNormal)')
_UNSEEN = re.compile('.*PyFunc|ReadFile|Restore|.*Reader|Decode(Padded)?Raw|ParseTensor')
_MOST = 16  # Largest number of constants of each kind.
_STRUCTURE = 16  # Integers of a pad: two for each of at most eight axes.


class Held(NamedTuple):
  """The constants of a function.

  Attributes:
    shapes: The shapes of every array that may be data: with two different floating-point numbers
      or more integers than axes, slices and paddings take.
    variables: Every variable it reads or writes.
    tables: The number of lookup tables, data sets and the like that it reads.
    unseen: Operations that bring data which no graph shows: Python functions, reads of files, and
      texts that are read as numbers.
  """

  shapes: List[Tuple[int, ...]]
  variables: Tuple[Any, ...]
  tables: int = 0
  unseen: Tuple[str, ...] = ()


def held(concrete: Concrete) -> Held:
  """Returns what a concrete function holds.

  Args:
    concrete: A concrete function, from `tf.function(...).get_concrete_function(...)`.

  Examples:
    >>> table = tf.constant([1.0, 2.0])
    >>> held(tf.function(lambda: tf.reduce_sum(table * 3.0)).get_concrete_function()).shapes
    [(2,)]
  """
  found = compat.graph_nodes(concrete.graph.as_graph_def())
  values = [tf.make_ndarray(node.attr['value'].tensor) for node in found if node.op == 'Const']
  outside = [outer for outer, _ in concrete.graph.captures]
  values += [outer.numpy() for outer in outside if hasattr(outer, 'numpy')
             and outer.dtype not in (tf.resource, tf.variant)]
  of_variables = {id(v.handle) for v in concrete.graph.variables}
  tables = {id(outer) for outer in outside if outer.dtype in (tf.resource, tf.variant)
            and id(outer) not in of_variables}
  return Held([tuple(value.shape) for value in values if _may_be_data(value)],
              tuple(concrete.graph.variables), len(tables),
              tuple(sorted({node.op for node in found if _UNSEEN.match(node.op)})))


def _may_be_data(value: object) -> bool:
  """Whether an array may hold data: its numbers are not all equal, nor consecutive positions."""
  value = np.asarray(value)  # A single text is no array of NumPy.
  flat = value.ravel()
  if value.dtype.kind in 'iub':
    steps = np.diff(flat.astype(np.int64))
    return flat.size > _STRUCTURE and bool((steps != steps[0]).any())
  least = _STRUCTURE if value.dtype.kind in 'OSU' else 1  # Names of axes and the like are few.
  return value.dtype.kind in 'fVOSU' and flat.size > least and bool((flat != flat[0]).any())


class Constants(NamedTuple):
  """Distinct constants, each kind in the order of the graph.

  Attributes:
    integers: Integers.
    reals: Floating-point numbers.
    texts: Strings, as bytes.
  """

  integers: List[int]
  reals: List[float]
  texts: List[bytes]


def compared(concrete: Concrete) -> Constants:
  """Returns constants that a function and its callees compare with, at most 16 per kind."""
  definition = concrete.graph.as_graph_def()
  # A graph for one batch size also compares with that size, so other sizes must be tried.
  any_size = concrete.inputs and concrete.inputs[0].shape[:1] == [None]
  settled = {op.name for op in concrete.graph.get_operations() if any_size
             and op.type in _COMPARE and all(map(_is_settled, op.inputs))}
  constants: Dict[str, Dict[Any, None]] = {'i': {}, 'f': {}, 'O': {}}
  graphs = [(definition.node, settled)] + [(f.node_def, ()) for f in definition.library.function]
  for nodes, left_out in graphs:
    for value in _compared(nodes, left_out):
      kind = {'u': 'i', 'V': 'f', 'S': 'O'}.get(value.dtype.kind, value.dtype.kind)
      for item in value.ravel()[:_MOST] if kind in constants else ():
        constants[kind][item if kind == 'O' else {'i': int, 'f': float}[kind](item)] = None
  return Constants(*([*constants[kind]][:_MOST] for kind in 'ifO'))


def _is_settled(tensor: tf.Tensor) -> bool:
  """Whether a tensor is a constant, or an axis' size that is the same for all batches."""
  source = tensor.op.inputs[0] if tensor.op.type == 'StridedSlice' else tensor
  if tensor.shape.rank or source.op.type != 'Shape':
    return tf.get_static_value(tensor) is not None
  axis, sizes = tf.get_static_value(tensor.op.inputs[1]), source.op.inputs[0].shape
  return (axis is not None and len(axis) == 1 and sizes.rank is not None
          and sizes[int(axis[0])] is not None)


def batches(leaves: List[np.ndarray], found: Constants) -> Iterator[Tuple[List[np.ndarray], Any]]:
  """Yields `(arrays, constant)`: batches without the constant, with some of it, or below it."""
  constants: List[Any] = [np.nan, *found.integers, *found.reals, *found.texts]
  for c in constants:
    if any(_holds(leaf, c) for leaf in leaves):
      yield leaves, c
    for i, leaf in enumerate(leaves):
      if _holds(leaf, c):
        mixed = np.copy(leaf)
        mixed[np.indices(leaf.shape).sum(0) % 2 == 0] = c
        yield leaves[:i] + [mixed] + leaves[i + 1:], c
    if not isinstance(c, bytes) and np.isfinite(c) and c and any(map(real, leaves)):
      yield [t * np.asarray(0.5 * abs(c) / (np.max(np.abs(t)) or 1), t.dtype) if real(t) else t
             for t in leaves], c


def filled(rows: np.ndarray, value: Constant) -> np.ndarray:
  """Returns rows filled with a constant, or unchanged if their dtype cannot hold it."""
  return np.full_like(rows, value) if _holds(rows, value) else rows


def _holds(leaf: np.ndarray, value: Constant) -> bool:
  if isinstance(value, bytes) or leaf.dtype.kind in 'OSU':
    return isinstance(value, bytes) and leaf.dtype.kind in 'OSU'
  if real(leaf):
    return True
  if leaf.dtype.kind not in 'iu' or not np.isfinite(value) or value != int(value):
    return False
  bounds = np.iinfo(leaf.dtype)
  return bool(bounds.min <= value <= bounds.max)


def real(array: np.ndarray) -> bool:
  """Whether an array holds floating-point numbers."""
  return array.dtype.kind in 'fV'  # V: bfloat16.


def _compared(nodes: Iterable[Any], left_out: Container[str]) -> Iterable[np.ndarray]:
  by_name = {node.name: node for node in nodes}
  find = lambda name: by_name.get(name.split(':')[0])
  users: Dict[str, List[Any]] = collections.defaultdict(list)
  for node in by_name.values():
    for name in node.input:
      users[name.split(':')[0].lstrip('^')].append(node)
  for node in by_name.values():
    if node.op in _NOT_FINITE:
      yield np.array(_NOT_FINITE[node.op])
    compared = [find(name) for name in node.input
                ] if node.op in _COMPARE and node.name not in left_out else []
    if not any(_has_data(source, find) for source in compared) or (
        node.op == 'FloorMod' and _only_seeds(node, users)):
      continue
    for source in compared:
      while source is not None and source.op in _PASS:
        source = find(source.input[0])
      if source is not None and source.op == 'Const':
        yield tf.make_ndarray(source.attr['value'].tensor)


def _only_seeds(node: Node, users: Dict[str, List[Any]]) -> bool:
  """Whether a node's value is the key of random draws, and nothing else."""
  after = users[node.name]
  return bool(after) and all(
      user.op == 'StatelessRandomGetKeyCounter' or user.op in _PASS and _only_seeds(user, users)
      for user in after)


def _has_data(node: Node, find: Callable[[str], Any]) -> bool:
  """Whether a node is made of more than constants and random draws, as masks of dropout are."""
  waiting, seen = [node], set()
  while waiting:
    node = waiting.pop()
    if node is not None and node.op in _ARITHMETIC:
      waiting += [find(name) for name in node.input if name not in seen]
      seen.update(node.input)
    elif node is None or not (node.op in ('Const', 'Rank') or _OF_NO_DATA.match(node.op)):
      return True
  return False


# Operations with a resource that change nothing but, perhaps, which numbers are drawn next.
_READS = re.compile(
    'ReadVariableOp|VariableShape|VarIsInitializedOp|ResourceGather|LookupTable(Find|Size|Export)'
    '|RngReadAndSkip|RngSkip|Identity|NoOp|.*PyFunc|Destroy|Placeholder|TensorArray|Stack')
_MAKES = re.compile('VarHandleOp|.*HashTable|.*Queue(V2)?$|.*Summary(File)?Writer|Barrier')
_FILES = re.compile('WriteFile|Save')  # Without a resource.
_BRANCHES = ('If', 'StatelessIf', 'Case', 'StatelessCase')
_LOOPS = ('While', 'StatelessWhile')


class Value(NamedTuple):
  """The known properties of a tensor."""

  data: bool = False  # Whether its value depends on the data.
  resource: Any = None  # The name of the resource that it is a handle of.


Known = Dict[str, Any]  # Tuples of `Value`s, by the name of a node or argument.


def written(concrete: Concrete, inputs: int) -> List[str]:
  """Returns what is written of the data, in words.

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


def _name(concrete: Concrete, handle: tf.Tensor) -> str:
  names = [v.name for v in concrete.graph.variables if v.handle is handle]
  return f'variable {names[0]!r}' if names else 'a table or another resource'


class _Search:
  """Follows data through graphs; `found` grows."""

  def __init__(self, library: Iterable[Node]) -> None:
    self.found: Set[str] = set()
    self._library = {f.signature.name: f for f in library}
    self._results: Dict[Any, Any] = {}

  def scan(self, nodes: Iterable[Node], known: Known, control: bool) -> Any:
    """Returns the known properties of every node's outputs.

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

  def _outputs(self, node: Node, inputs: List[Value], control: bool) -> Tuple[Value, ...]:
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

  def _loop(self, node: Node, inputs: List[Value], control: bool) -> Any:
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

  def _call(self, name: str, arguments: Iterable[Value], control: bool) -> Any:
    key = name, tuple(arguments), control
    if key not in self._results:
      function = self._library[name]
      known = {argument.name: (value,)
               for argument, value in zip(function.signature.input_arg, arguments)}
      known = self.scan(function.node_def, known, control)
      self._results[key] = tuple(
          _value(known, function.ret[result.name]) for result in function.signature.output_arg)
    return self._results[key]


def _functions(node: Node) -> List[str]:
  """Names of the functions that a node calls."""
  names = []
  for name in sorted(node.attr):
    attribute = node.attr[name]
    names += [f.name for f in ([attribute.func] if attribute.HasField('func')
                               else attribute.list.func)]
  return names


def _value(known: Known, reference: str) -> Value:
  """Returns the properties of 'node', 'node:1' or, inside functions, 'node:output:1'."""
  name, *rest = reference.split(':')
  values = known.get(name, (Value(),))
  place = int(rest[-1]) if rest else 0
  return values[place if place < len(values) else 0]
