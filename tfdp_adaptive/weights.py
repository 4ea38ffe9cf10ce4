# SPDX-License-Identifier: Apache-2.0
"""Functions that weight a record by its norm, one class per kind.

A record of norm n has the norm `norm(n, zeta)` afterwards, which never exceeds the clip norm zeta.
So the sum over records moves by at most zeta for each kind, and noise and accounting are those of
hard clipping. n, gamma and r are in units of the scaled gradient. AutoV, AutoS and PSAC scale short
records up: set zeta to one, and tune the learning rate instead.
"""

import dataclasses
from typing import Any, ClassVar, Dict, Optional, Sequence

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import trees

Rule = Any  # A `contract.Rule`, which has a field of this module.
SHORTEST = 1e-12  # Norm below which directions are rounding, for AutoV.


class Clipping:
  """A clipping method; see its subclasses."""

  def __repr__(self) -> str:
    """Returns the call that creates this value, without default arguments."""
    fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
    values = [(one.name, getattr(self, one.name)) for one in fields
              if getattr(self, one.name) != one.default]
    return f'tfdp.clipping.{type(self).__name__}({", ".join(f"{n}={v!r}" for n, v in values)})'

  def rule(self, rule: Rule, batch_size: Optional[float] = None,
           noise_multiplier: Optional[float] = None) -> Rule:
    """Returns the rule with this clipping. Groups are added once variables are known."""
    raise NotImplementedError

  def grouped(self, rule: Rule, variables: Sequence[compat.Variable]) -> Rule:
    """Returns the same rule on gradients clipped in groups of these variables."""
    del variables
    return rule

  def get_config(self) -> Dict[str, Any]:
    """Returns a value that JSON can hold, see `choices.from_config`."""
    fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
    values = {one.name: getattr(self, one.name) for one in fields}
    return {'kind': type(self).__name__, **{
        name: value.get_config() if isinstance(value, Clipping) else value
        for name, value in values.items() if value is not None}}


class Weight(Clipping):
  """A weight of records by their norm.

  Attributes:
    may_grow: Whether records may become longer.
    passes: Whether records within the clip norm do not change, bit by bit.
  """

  may_grow: ClassVar[bool] = False
  passes: ClassVar[bool] = False

  def __post_init__(self) -> None:
    checks.positive(**{one.name: getattr(self, one.name)
                       for one in dataclasses.fields(self)})  # type: ignore[arg-type]

  def __str__(self) -> str:
    """Returns the kind with all of its constants, for statements."""
    constants: Any = dataclasses.asdict(self)  # type: ignore[call-overload]
    return f'{type(self).__name__}({", ".join(f"{n}={v:g}" for n, v in constants.items())})'

  def rule(self, rule: Rule, batch_size: Optional[float] = None,
           noise_multiplier: Optional[float] = None) -> Rule:
    checks.require(self.passes or all(ask.projection == 'rescale' for ask in rule.asks),
                   f'be Hard() for {rule.name}, whose records are projected, not rescaled '
                   "(projection='euclidean')", clipping=self)
    return rule._replace(asks=tuple(ask._replace(weight=self) for ask in rule.asks))

  def norm(self, norm: tf.Tensor, clip_norm: trees.Scalar) -> tf.Tensor:
    """Returns the norm of the weighted record, for norms [...] from 0 to infinity."""
    zeta = like(clip_norm, norm)
    relative = tf.minimum(self._relative(norm, zeta), tf.ones_like(norm))
    # With a clip norm of zero, quotients may not be finite.
    return tf.where(zeta > 0, zeta * relative, tf.zeros_like(norm))

  def factor(self, norm: tf.Tensor, clip_norm: trees.Scalar) -> tf.Tensor:
    """Returns the weight itself, for finite norms; zero at zero."""
    positive = norm > 0
    safe = tf.where(positive, norm, tf.ones_like(norm))
    return tf.where(positive, self.norm(norm, clip_norm) / safe, tf.zeros_like(norm))

  def _relative(self, norm: tf.Tensor, zeta: tf.Tensor) -> tf.Tensor:
    """Returns the norm over zeta of the weighted record."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, repr=False)
class Hard(Weight):
  """Scales records above the clip norm down to it."""

  passes: ClassVar[bool] = True

  def factor(self, norm: tf.Tensor, clip_norm: trees.Scalar) -> tf.Tensor:
    positive = norm > 0
    safe = tf.where(positive, norm, tf.ones_like(norm))
    inside = tf.minimum(tf.ones_like(norm), like(clip_norm, norm) / safe)
    return tf.where(positive, inside, tf.ones_like(norm))

  def _relative(self, norm: tf.Tensor, zeta: tf.Tensor) -> tf.Tensor:
    return norm / zeta


@dataclasses.dataclass(frozen=True, repr=False)
class AutoV(Weight):
  """Scales every record to the clip norm (AUTO-V, arXiv:2206.07136)."""

  may_grow: ClassVar[bool] = True

  def _relative(self, norm: tf.Tensor, zeta: tf.Tensor) -> tf.Tensor:
    return tf.where(norm > SHORTEST, tf.ones_like(norm), tf.zeros_like(norm))


@dataclasses.dataclass(frozen=True, repr=False)
class AutoS(Weight):
  """Scales a norm n to C n / (n + gamma), for the clip norm C (AUTO-S, arXiv:2206.07136)."""

  gamma: float = 0.01
  may_grow: ClassVar[bool] = True

  def _relative(self, norm: tf.Tensor, zeta: tf.Tensor) -> tf.Tensor:
    return 1 / (1 + tf.constant(self.gamma, norm.dtype) / norm)


@dataclasses.dataclass(frozen=True, repr=False)
class PSAC(Weight):
  """Scales a norm n to C / (1 + r / (n (n + r))), for the clip norm C (arXiv:2212.00328)."""

  r: float = 0.1
  may_grow: ClassVar[bool] = True

  def _relative(self, norm: tf.Tensor, zeta: tf.Tensor) -> tf.Tensor:
    r = tf.constant(self.r, norm.dtype)
    return 1 / (1 + r / norm / (norm + r))


@dataclasses.dataclass(frozen=True, repr=False)
class Tanh(Weight):
  """Scales a norm n to C tanh(n / C), for the clip norm C."""

  def _relative(self, norm: tf.Tensor, zeta: tf.Tensor) -> tf.Tensor:
    return tf.tanh(norm / zeta)


@dataclasses.dataclass(frozen=True, repr=False)
class PNorm(Weight):
  """Scales a norm n to (n^-p + C^-p)^(-1/p), for the clip norm C and p >= 1."""

  p: float = 2.0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.p < 1:
      raise ValueError(f'`p` of a way of clipping must be at least 1. Received: p={self.p}.')

  def _relative(self, norm: tf.Tensor, zeta: tf.Tensor) -> tf.Tensor:
    top, p = tf.maximum(norm, zeta), tf.constant(self.p, norm.dtype)
    powers = tf.pow(norm / top, p) + tf.pow(zeta / top, p)  # Powers of either may leave the range.
    relative = norm / top / tf.pow(powers, 1 / p)
    return tf.where(tf.math.is_finite(norm), relative, tf.ones_like(norm))


def like(number: trees.Scalar, tensor: tf.Tensor) -> tf.Tensor:
  """Returns a number in the dtype of a tensor. A Python float is rounded only once."""
  return tf.cast(number, tensor.dtype) if tf.is_tensor(number) else tf.constant(
      number, tensor.dtype)
