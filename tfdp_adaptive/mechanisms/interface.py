# SPDX-License-Identifier: Apache-2.0
"""The interface of all noise mechanisms, offline, in float64 NumPy.

A mechanism is a factorization of a workload A (prefix sums by default) into
`A = B C`: the noise of step t is `noise_multiplier * l2_norm_clip * (C^-1 Z)_t`
with Z standard normal. ONE convention in the whole library: the strategy C is
lower triangular with maximal column norm one, so a record that takes part once
changes `C G` by at most one clip norm. The accountant divides the noise
multiplier by `sensitivity(...)`; it is never also put into the noise.

A mechanism is immutable. Its numbers (`arrays`) are designed when they are first
read, or come from a file; two mechanisms are equal if they run with the same
numbers, bit by bit. Sensitivities are computed from the numbers and never stored.
"""

import abc
import copy
import functools
import inspect
import json
import math
import os
from typing import Any, Dict, Mapping, Optional, Tuple, Type, TypeVar, Union

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive import gate
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import workload as workload_lib


class Frozen:
  """Attributes may be set in the constructor of an object's own class, and never again.

  `_arguments` is a copy of what that constructor was given, by name, with its defaults.
  """

  _arguments: Dict[str, Any]

  def __init_subclass__(cls, **kwargs: Any) -> None:
    super().__init_subclass__(**kwargs)
    initialize, signature = cls.__init__, inspect.signature(cls.__init__)

    @functools.wraps(initialize)
    def initialize_and_freeze(self: Any, *args: Any, **kwargs: Any) -> None:
      initialize(self, *args, **kwargs)
      if type(self) is cls:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])  # All but `self`.
        self.__dict__.update(_frozen=True, _arguments=copy.deepcopy(given))

    cls.__init__ = initialize_and_freeze  # type: ignore[method-assign]

  def __setattr__(self, name: str, value: Any) -> None:
    if self.__dict__.get('_frozen'):
      raise AttributeError(f'A {type(self).__name__} cannot be changed: make another one. '
                           f'Received: {name}={value!r} for {self!r}.')
    super().__setattr__(name, value)

  def __delattr__(self, name: str) -> None:
    raise AttributeError(f'A {type(self).__name__} cannot be changed: make another one. '
                         f'Received: del {name} of {self!r}.')


NORM_TOLERANCE = 1e-9  # Relative; a design has maximal column norm one.

_AnyMechanism = TypeVar('_AnyMechanism', bound='Mechanism')


class Mechanism(Frozen, abc.ABC):
  """A strategy matrix C, known offline.

  Attributes:
    steps: The number of steps that it was designed for; None if any number is allowed.
      A stream refuses to continue after the last step.
    bands: Number of non-zero diagonals of C (the main one included) if C is
      banded, else None. Decides whether cyclic Poisson amplification applies.
    workload: The workload whose error is measured and minimized.
    objective: 'mean', 'max' or 'last' (iterate): which error was minimized.
    dtype: The dtype that the arrays were rounded to; 'float64' as designed. Both the stream and the
      accountant must use `rounded(run-time dtype)`.
    reason: Why `choose` chose the mechanism. Two mechanisms that differ only in their reason are
      equal.
  """

  steps: Optional[int] = None
  bands: Optional[int] = None
  dtype: str = 'float64'
  reason: str = ''
  cached: bool = False  # Whether a design takes long enough to be kept on disk.
  _given_arrays: Optional[Dict[str, np.ndarray]] = None
  _unrounded: Any = None  # The mechanism that a rounded one was made of.

  def __init__(
      self, *, workload: workload_lib.Like = None, objective: str = 'mean',
      min_sep: Optional[int] = None, max_participations: int = 1, **counts: int) -> None:
    """Checks that `counts` (steps, bands, ...) are positive integers up to `steps`, and keeps them.

    `min_sep` and `max_participations` are the participation pattern that a design is for, if it is
    for one.
    """
    checks.whole(**counts)
    for name, value in counts.items():
      if value > counts.get('steps', value):
        raise ValueError(f'`{name}` must be at most `steps`. '
                         f'Received: {name}={value}, steps={counts["steps"]}.')
      setattr(self, name, int(value))
    checks.one_of(workload_lib.OBJECTIVES, objective=objective)
    self.workload = workload_lib.get(workload)
    self.objective = objective
    self.min_sep, self.max_participations = sensitivity_lib.participation(
        min_sep, max_participations)
    if self.steps is not None:
      self.workload.check(self.steps)

  @classmethod
  def for_run(cls: Type[_AnyMechanism], **options: Any) -> _AnyMechanism:
    """Constructs the mechanism, with only those options that its constructor takes."""
    taken = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in options.items() if name in taken})

  @abc.abstractmethod
  def design(self) -> Mapping[str, npt.ArrayLike]:
    """Returns the numbers that define C, by name, before rounding. May take long."""

  @abc.abstractmethod
  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    """Returns the first n coefficients of a Toeplitz C, or its leading n x n block."""

  @abc.abstractmethod
  def noising(self, n: Optional[int] = None) -> np.ndarray:
    """Does the same for C^-1."""

  def row_norms(self, n: Optional[int] = None) -> np.ndarray:
    """Returns [n] row norms of C^-1: the noise of step t has variance r_t, the square."""
    return np.linalg.norm(self.noising(n), axis=1)

  def squared_errors(self, n: Optional[int] = None) -> np.ndarray:
    """Returns [n] squared row norms of B: noise variance of each answer of the workload."""
    return np.sum(self.workload.apply(self.noising(n))**2, axis=1)

  @abc.abstractmethod
  def _sensitivity(self, min_sep: int, k: int) -> float:
    ...

  def get_config(self) -> Dict[str, Any]:
    """Returns the constructor arguments as JSON values, with defaults filled in."""
    understood = {**self._arguments, **{
        name: value for name, value in vars(self).items() if name in self._arguments}}
    return {name: _plain(value) for name, value in understood.items()}

  # --- Numbers.

  @property
  def arrays(self) -> Dict[str, np.ndarray]:
    """The numbers that a stream uses, by attribute name, in float64 and rounded to `dtype`."""
    return dict(self._arrays)

  @functools.cached_property
  def _arrays(self) -> Dict[str, np.ndarray]:
    if self._unrounded is not None:
      numbers = self._unrounded.arrays
    elif self._given_arrays is not None:
      numbers = self._given_arrays
    else:
      numbers = registry.cached(self) if self.cached else self.design()
      self._say()
    arrays = {name: _constant(value, self.dtype) for name, value in numbers.items()}
    self.check_arrays(arrays)
    return arrays

  def _say(self) -> None:
    """Warns of what a design, from the cache or not, leaves out."""

  @functools.cached_property
  def digest(self) -> str:
    """A hash of `arrays`, the numbers that a stream uses."""
    return registry.checksum(self.arrays)

  @property
  def loaded(self) -> bool:
    """Whether the numbers were given (`with_numbers`, a file) instead of designed."""
    return (self._unrounded or self)._given_arrays is not None

  @abc.abstractmethod
  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    """Returns the shape of each of `arrays`, by name."""

  def check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises if numbers that were rounded or loaded do not define C and C^-1."""
    shapes = {name: np.shape(value) for name, value in arrays.items()}
    if shapes != self.shapes() or not all(np.all(np.isfinite(a)) for a in arrays.values()):
      raise ValueError(f'The numbers of {self!r} must be finite in {self.dtype}, of shapes '
                       f'{self.shapes()}. Received: shapes {shapes}.')

  def rounded(self: _AnyMechanism, dtype: str = 'float32') -> _AnyMechanism:
    """Returns the mechanism of a run in `dtype`, with the sensitivity of the rounded C.

    A run in bfloat16 keeps its noise in float32.
    """
    checks.one_of(('float16', 'float32', 'float64'), dtype=dtype)
    if dtype == self.dtype:
      return self
    if self._unrounded is not None:
      return self._unrounded.rounded(dtype)
    return self._variant(dtype=str(dtype), reason=self.reason, _unrounded=self)

  def with_numbers(self: _AnyMechanism, arrays: Mapping[str, np.ndarray]) -> _AnyMechanism:
    """Returns the mechanism that runs with these `arrays` instead of a design of its own.

    Raises:
      ValueError: If the arrays do not define C and C^-1, or if the largest column norm of C is not
        one.
    """
    arrays = {name: _constant(value, 'float64') for name, value in arrays.items()}
    other = self.rounded('float64')._variant(reason=self.reason, _given_arrays=arrays)
    norm = other.sensitivity()
    if not abs(norm - 1) <= NORM_TOLERANCE:
      raise ValueError(f'The strategy must have maximal column norm one. Received: {norm}.')
    return other

  def because(self: _AnyMechanism, reason: str) -> _AnyMechanism:
    """Returns a copy that also says why it was chosen."""
    other = copy.copy(self)
    other.__dict__['reason'] = reason
    return other

  def _variant(self: _AnyMechanism, **fields: Any) -> _AnyMechanism:
    """Constructs the mechanism again, so that nothing computed from other numbers is kept."""
    with gate.loading():
      other = type(self)(**self.get_config())
    other.__dict__.update(fields)
    return other

  # --- Answers.

  def sensitivity(self, *, min_sep: Optional[int] = None, max_participations: int = 1,
                  fixed_order: bool = False) -> float:
    """Returns by how much one record changes C G, in clip norms (zero-out or add-remove).

    Exact where that is known, else an upper bound (see `sensitivity.py`).

    Args:
      min_sep: Smallest distance b between two steps in which one record takes
        part (j - i >= b); a reshuffled epoch has b = 1. Required when
        `max_participations` > 1.
      max_participations: Largest number k of steps it takes part in.
      fixed_order: Whether all distances are multiples of `min_sep`, as if every
        epoch of `min_sep` steps has the same order. Never more than without.
    """
    min_sep, k = sensitivity_lib.participation(min_sep, max_participations)
    min_sep = min_sep or 1
    if self.steps is not None:
      k = sensitivity_lib.most_participations(self.steps, min_sep, k)
    size = self._sensitivity(min_sep, k)
    if fixed_order and k > 1:
      size = min(size, self._fixed_order_sensitivity(min_sep, k))
    return float(size)

  def rmse(self, n: Optional[int] = None, **participation: Any) -> float:
    """Returns the RMS error of the workload's first n answers, times `sensitivity(...)`."""
    return self._error('mean', n, participation)

  def max_error(self, n: Optional[int] = None, **participation: Any) -> float:
    """Returns the largest standard error of the first n answers, times `sensitivity(...)`."""
    return self._error('max', n, participation)

  def last_error(self, n: Optional[int] = None, **participation: Any) -> float:
    """Returns the standard error of answer n, times `sensitivity(...)`."""
    return self._error('last', n, participation)

  def memory(self) -> int:
    """Returns rows of the parameters' size that a stream keeps between two steps."""
    return 0

  def passes(self) -> int:
    """Returns rows of standard normals that a stream draws for the most expensive step."""
    return 1

  def materialize(self, n: Optional[int] = None) -> np.ndarray:
    """Returns [n, n] C, for tests and small problems."""
    n = self._rows(n)
    return matrices.toeplitz_matrix(self.strategy(n), n)

  def materialize_inverse(self, n: Optional[int] = None) -> np.ndarray:
    """Returns [n, n] C^-1."""
    n = self._rows(n)
    return matrices.toeplitz_matrix(self.noising(n), n)

  def _fixed_order_sensitivity(self, epoch: int, k: int) -> float:
    """Returns the sensitivity under a fixed order, or inf where computing it takes too long."""
    if self.steps is None or self.steps > sensitivity_lib.FIXED_ORDER_LIMIT:
      return math.inf
    return sensitivity_lib.fixed_order(self.strategy(), epoch, k)

  def _error(self, objective: str, n: Optional[int], participation: Dict[str, Any]) -> float:
    size = self.sensitivity(**participation)
    return size * math.sqrt(self._squared_error(objective, self._rows(n)))

  def _squared_error(self, objective: str, n: int) -> float:
    squares = self.squared_errors(n)
    return float({'mean': squares.mean(), 'max': squares.max(), 'last': squares[-1]}[objective])

  def _rows(self, n: Optional[int]) -> int:
    """Returns n, or all steps. Raises for rows the mechanism does not have."""
    n = self.steps if n is None else n
    if n is None:
      raise ValueError('`n` must be given: the mechanism has no fixed number of steps. '
                       'Received: n=None.')
    checks.whole(n=n)
    if self.steps is not None and n > self.steps:
      raise ValueError(f'`n` must be at most {self.steps}, the steps the mechanism was designed '
                       f'for: its sensitivity does not cover more. Received: n={n}. '
                       f'Design it for steps={n}.')
    return int(n)

  # --- Identity.

  def to_json(self) -> str:
    """Returns description and numbers; `mechanisms.from_json` restores both bit by bit."""
    return registry.to_json(self)

  def save(self, path: Union[str, os.PathLike]) -> None:
    """Writes `to_json()`; `mechanisms.load` reads it."""
    with open(path, 'w', encoding='utf-8') as file:
      file.write(self.to_json())

  def __eq__(self, other: object) -> bool:
    if self is other:
      return True
    return (type(self) is type(other) and self._description() == other._description()
            and self.digest == other.digest)

  def __hash__(self) -> int:
    return hash((type(self), self._description(), self.digest))

  def __repr__(self) -> str:
    shown = {k: v for k, v in self.get_config().items() if v is not None}
    if self.workload == workload_lib.Workload():
      shown.pop('workload', None)
    arguments = ', '.join(f'{k}={v!r}' for k, v in shown.items())
    given = (self._unrounded or self)._given_arrays
    if given is not None:
      arguments += f', numbers={registry.checksum(given)[:8]}'
    return f'{type(self).__name__}({arguments})'

  def _description(self) -> str:
    return json.dumps([self.get_config(), self.dtype], sort_keys=True)


def _plain(argument: Any) -> Any:
  """Returns an argument of a constructor as JSON has it."""
  if isinstance(argument, workload_lib.Workload):
    return argument.get_config()
  if isinstance(argument, (list, tuple, np.ndarray)):
    return np.asarray(argument, np.float64).tolist()
  return argument


def _constant(value: Any, dtype: str) -> np.ndarray:
  with np.errstate(over='ignore'):
    result = np.asarray(value, np.float64).astype(dtype).astype(np.float64)
  result.setflags(write=False)
  return result
