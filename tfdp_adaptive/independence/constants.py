# SPDX-License-Identifier: Apache-2.0
"""Finds the constants of a traced function: what it holds, and what it compares with.

A layer, penalty or constraint that captured an array may hold the training data, which then
reaches every gradient without clipping and noise.

Code that does something else for a certain word, above some size of the batch, or from
some step on does it for batches that nobody makes up by chance; fuzzers of programs take
such constants from the program, too. Followed are constants that a comparison, a
remainder or a quotient takes directly or through a cast. Comparisons of uniform or normal
draws and constants alone, as gradients of means make of their axes, are none of them: no batch
decides these.
"""

import re
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

import numpy as np
import tensorflow as tf

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
_MOST = 16  # Of each kind.


class Held(NamedTuple):
  """What a function holds.

  Attributes:
    shapes: Of every array with at least two different floating-point numbers.
    variables: Every variable it reads or writes.
  """

  shapes: List[Tuple[int, ...]]
  variables: Tuple[Any, ...]


def held(concrete: Any) -> Held:
  """Returns what a concrete function holds.

  Args:
    concrete: Of `tf.function(...).get_concrete_function(...)`.

  Examples:
    >>> table = tf.constant([1.0, 2.0])
    >>> held(tf.function(lambda: tf.reduce_sum(table * 3.0)).get_concrete_function()).shapes
    [(2,)]
  """
  definition = concrete.graph.as_graph_def()
  values = [tf.make_ndarray(node.attr['value'].tensor)
            for nodes in [definition.node] + [f.node_def for f in definition.library.function]
            for node in nodes if node.op == 'Const' and (
                tf.as_dtype(node.attr['dtype'].type).is_floating)]
  values += [outer.numpy() for outer, _ in concrete.graph.captures
             if outer.dtype.is_floating and hasattr(outer, 'numpy')]
  shapes = [tuple(value.shape) for value in values
            if value.size > 1 and (value != value.ravel()[0]).any()]
  return Held(shapes, tuple(concrete.graph.variables))


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


def compared(concrete: Any) -> Constants:
  """What a concrete function, and all it calls, compares with: at most 16 of each kind."""
  definition = concrete.graph.as_graph_def()
  constants: Dict[str, Dict[Any, None]] = {'i': {}, 'f': {}, 'O': {}}
  for nodes in [definition.node] + [f.node_def for f in definition.library.function]:
    for value in _compared(nodes):
      kind = {'u': 'i', 'V': 'f', 'S': 'O'}.get(value.dtype.kind, value.dtype.kind)
      for item in value.ravel()[:_MOST] if kind in constants else ():
        constants[kind][item if kind == 'O' else {'i': int, 'f': float}[kind](item)] = None
  return Constants(*([*constants[kind]][:_MOST] for kind in 'ifO'))


def batches(leaves: List[np.ndarray], found: Constants) -> Iterator[Tuple[List[np.ndarray], Any]]:
  """`(arrays, constant)`: examples that hold it nowhere, here and there, or lie below it."""
  constants: List[Any] = [np.nan, *found.integers, *found.reals, *found.texts]
  for c in constants:
    if any(_holds(leaf, c) for leaf in leaves):
      yield leaves, c
    for i, leaf in enumerate(leaves):
      if _holds(leaf, c):
        marked = np.copy(leaf)
        marked[np.indices(leaf.shape).sum(0) % 2 == 0] = c
        yield leaves[:i] + [marked] + leaves[i + 1:], c
    if not isinstance(c, bytes) and np.isfinite(c) and c and any(map(_real, leaves)):
      yield [t * np.asarray(0.5 * abs(c) / (np.max(np.abs(t)) or 1), t.dtype) if _real(t) else t
             for t in leaves], c


def filled(rows: np.ndarray, value: Any) -> np.ndarray:
  """Rows of a constant, where they may hold it."""
  return np.full_like(rows, value) if _holds(rows, value) else rows


def _holds(leaf: np.ndarray, value: Any) -> bool:
  if isinstance(value, bytes) or leaf.dtype.kind in 'OSU':
    return isinstance(value, bytes) and leaf.dtype.kind in 'OSU'
  if _real(leaf):
    return True
  if leaf.dtype.kind not in 'iu' or not np.isfinite(value) or value != int(value):
    return False
  bounds = np.iinfo(leaf.dtype)
  return bool(bounds.min <= value <= bounds.max)


def _real(array: np.ndarray) -> bool:
  return array.dtype.kind in 'fV'  # V: bfloat16.


def _compared(nodes: Iterable[Any]) -> Iterable[np.ndarray]:
  by_name = {node.name: node for node in nodes}
  find = lambda name: by_name.get(name.split(':')[0])
  for node in by_name.values():
    if node.op in _NOT_FINITE:
      yield np.array(_NOT_FINITE[node.op])
    compared = [find(name) for name in node.input] if node.op in _COMPARE else []
    if not any(_has_data(source, find) for source in compared):
      continue
    for source in compared:
      while source is not None and source.op in _PASS:
        source = find(source.input[0])
      if source is not None and source.op == 'Const':
        yield tf.make_ndarray(source.attr['value'].tensor)


def _has_data(node: Any, find: Callable[[str], Any]) -> bool:
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
