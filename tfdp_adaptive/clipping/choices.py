# SPDX-License-Identifier: Apache-2.0
"""Clipping methods of optimizers, such as `Hard()`, `Quantile(0.5)` or `PerLayer()`.

All of them have the privacy of `Hard()` at the same noise.
"""

import dataclasses
import numbers
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Type, Union

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive.rules import following_clip
from tfdp_adaptive.rules import groups as groups_lib
from tfdp_adaptive.weights import AutoS
from tfdp_adaptive.weights import AutoV
from tfdp_adaptive.weights import Clipping
from tfdp_adaptive.weights import Hard
from tfdp_adaptive.weights import PNorm
from tfdp_adaptive.weights import PSAC
from tfdp_adaptive.weights import Tanh
from tfdp_adaptive.weights import Weight

Choice = Union[Clipping, Mapping[str, Any]]  # A clipping method, or its config.
Kinds = Union[type, Tuple[type, ...]]
_PLAIN = contract.Rule(  # A rule for checks of arguments.
    lambda specs: (), lambda state, public: (), lambda *_: ((), ()), elementwise=True)


@dataclasses.dataclass(frozen=True, repr=False)
class _Following(Clipping):
  """Adapts the clip norm to the norms of records; it begins at `l2_norm_clip`."""

  quantile: float = 0.5
  weights: Clipping = Hard()
  learning_rate: Optional[float] = None
  bounds: Optional[Tuple[float, float]] = None

  def __post_init__(self) -> None:
    _check(self, 'weights', Weight)
    if self.bounds is not None:
      object.__setattr__(self, 'bounds', tuple(self.bounds))
    self.rule(_PLAIN)

  def _arguments(self) -> Dict[str, Any]:
    """Returns arguments of the function of `tfdp.rules`, which has the defaults."""
    values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
    del values['weights']
    return {name: value for name, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True, repr=False)
class Quantile(_Following):
  """Adapts the clip norm to a quantile of norms; arguments: see `tfdp.rules.quantile_clip`.

  The count of records within the clip norm is part of the same release and of its cost.
  """

  stddev: Optional[float] = None

  def rule(self, rule: contract.Rule, batch_size: Optional[float] = None,
           noise_multiplier: Optional[float] = None) -> contract.Rule:
    return following_clip.quantile_clip(self.weights.rule(rule), **self._arguments())


@dataclasses.dataclass(frozen=True, repr=False)
class Slack(_Following):
  """Adapts the clip norm to the slack below it, at no cost; see `tfdp.rules.slack_clip`."""

  buckets: Optional[int] = None

  def rule(self, rule: contract.Rule, batch_size: Optional[float] = None,
           noise_multiplier: Optional[float] = None) -> contract.Rule:
    buckets = 1
    if batch_size and noise_multiplier is not None:
      buckets = following_clip.slack_buckets(batch_size, noise_multiplier)
    return following_clip.slack_clip(
        self.weights.rule(rule), **{'buckets': buckets, **self._arguments()})


@dataclasses.dataclass(frozen=True, repr=False)
class Automatic(Clipping):
  """Adapts the clip norm to a high quantile, from 1 on. It is the default without a clip norm.

  The clip norm adapts within a few steps at every noise level, as part of the same release and of
  its cost. Gradients are divided by the clip norm, so one learning rate suits gradients of any
  size. Apart from the noise, DP-SGD moves the weights by at most the learning rate per step. On
  seven tasks at two epsilons, with the best learning rate each, DP-SGD and DP-Adam were 2% better
  and 9% worse than with the best constant clip norm; with clip norm 1 they were 27% and 51% worse
  (`benchmarks/evidence/clip_defaults.py`).

  Attributes:
    quantile: The fraction of examples that should be within the clip norm.
  """

  quantile: float = 0.9

  def rule(self, rule: contract.Rule, batch_size: Optional[float] = None,
           noise_multiplier: Optional[float] = None) -> contract.Rule:
    size, sigma = batch_size or 1.0, noise_multiplier or 0.0
    rate = min(1.0, size / (10 * following_clip.count_stddev(sigma, size)))
    try:
      return following_clip.quantile_clip(
          rule, self.quantile, rate, bounds=(1e-8, 1e8), units=True)
    except ValueError as error:
      raise ValueError(f'`l2_norm_clip` must be given for the rule {rule.name}, whose clip norm '
                       f'cannot follow the examples. {error}') from error


@dataclasses.dataclass(frozen=True, repr=False)
class Groups(Clipping):
  """Clips groups of variables separately; see `tfdp.rules.grouped`.

  Attributes:
    groups: The group of every variable.
    within: How each group is clipped: with `Quantile` or `Slack` each has a norm of its own.
    split: See `tfdp.rules.grouped`.
    norms: See `tfdp.rules.grouped`.
  """

  groups: Any = None
  within: Clipping = Hard()
  split: str = 'optimal'
  norms: Optional[Tuple[float, ...]] = None

  def __post_init__(self) -> None:
    _check(self, 'within', (Weight, _Following))
    if self.norms is not None:
      object.__setattr__(self, 'norms', tuple(float(norm) for norm in self.norms))
    whole = isinstance(self.groups, (list, tuple)) and all(
        isinstance(group, numbers.Integral) and int(group) >= 0 for group in self.groups)
    if type(self) is Groups and not (whole and self.groups):
      raise ValueError('`groups` must be the group of every variable, whole numbers. '
                       f'Received: groups={self.groups!r}.')
    if whole:
      object.__setattr__(self, 'groups', tuple(int(group) for group in self.groups))
    groups_lib.grouped(_PLAIN, (0,), split=self.split)  # Raises for wrong arguments.

  def rule(self, rule: contract.Rule, batch_size: Optional[float] = None,
           noise_multiplier: Optional[float] = None) -> contract.Rule:
    rule = self.within.rule(rule, batch_size, noise_multiplier)
    groups_lib.grouped(rule, (0,))  # Raises for wrong arguments, before there are any variables.
    return rule

  def grouped(self, rule: contract.Rule, variables: Sequence[Any]) -> contract.Rule:
    names = list(self._names(variables))
    first = list(dict.fromkeys(names))
    groups = self.groups or tuple(first.index(name) for name in names)
    return groups_lib.grouped(rule, groups, split=self.split, norms=self.norms)

  def _names(self, variables: Sequence[Any]) -> Sequence[str]:
    """Returns the key that the variables of a group share."""
    return [str(i) for i in range(len(variables))]


@dataclasses.dataclass(frozen=True, repr=False)
class _Named(Groups):
  """Groups determined by the variables."""

  groups: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, repr=False)
class PerLayer(_Named):
  """Clips every layer separately, as in `PerLayer(Quantile(0.5))`. Arguments: see `Groups`."""

  def _names(self, variables: Sequence[Any]) -> Sequence[str]:
    return [getattr(v, 'path', v.name).rpartition('/')[0] or str(i)
            for i, v in enumerate(variables)]


@dataclasses.dataclass(frozen=True, repr=False)
class PerVariable(_Named):
  """Clips every variable separately. Arguments: see `Groups`."""


_KINDS: Dict[str, Any] = {one.__name__: one for one in (
    Hard, AutoV, AutoS, PSAC, Tanh, PNorm, Quantile, Slack, Automatic, Groups, PerLayer,
    PerVariable)}


def _check(choice: Clipping, name: str, kinds: Kinds) -> None:
  value = getattr(choice, name)
  if isinstance(value, dict):
    object.__setattr__(choice, name, from_config(value))
  elif not isinstance(value, kinds):
    raise ValueError(
        f'`{name}` of {type(choice).__name__} must be a way of clipping that can stand inside it, '
        f'such as tfdp.clipping.Hard(). Received: {name}={value!r}.')


def followed(clipping: Optional[Choice]) -> Tuple[Choice, Optional[float]]:
  """Returns `(clipping, l2_norm_clip)` if no clip norm is given; adaptive ones begin at 1."""
  clipping = Automatic() if clipping is None else clipping
  return clipping, 1.0 if isinstance(clipping, (_Following, Automatic)) else None


def caution(clipping: Clipping) -> str:
  """Returns a warning about clipping methods that bias training, or ''."""
  biased = isinstance(clipping, (AutoS, AutoV)) or (
      isinstance(clipping, Quantile) and clipping.quantile <= .5)
  return biased and (
      f'{clipping!r} gives rare examples little weight: where classes are unequal, it was up to '
      'four times worse than hard clipping at a larger norm. Compare with no `clipping` and no '
      '`l2_norm_clip`, or with `tfdp.clipping.Quantile(0.9)`.') or ''


def from_config(config: Mapping[str, Any]) -> Clipping:
  """Returns the value for a config of `Clipping.get_config`.

  Examples:
    >>> from_config(PerLayer(Quantile(0.4)).get_config())
    tfdp.clipping.PerLayer(within=tfdp.clipping.Quantile(quantile=0.4))
  """
  fields = dict(config)
  try:
    kind: Type[Clipping] = _KINDS[fields.pop('kind', '')]
    return kind(**fields)
  except (KeyError, TypeError) as error:
    raise ValueError('`clipping` must be a way of clipping, such as tfdp.clipping.Hard(). '
                     f'Received: clipping={config!r}.') from error


def chosen(clipping: Optional[Choice]) -> Clipping:
  """Returns the value of an optimizer's argument `clipping`: a `Clipping`, its config or None."""
  if isinstance(clipping, dict):
    clipping = from_config(clipping)
  value: Any = Hard() if clipping is None else clipping
  checks.instance(Clipping, 'a way of clipping, such as tfdp.clipping.Hard()', clipping=value)
  return value


def for_query(
    clipping: Optional[Choice], kinds: Kinds = (Weight, _Following)) -> Clipping:
  """Returns `chosen` for a query, which has no layers."""
  value = chosen(clipping)
  if not isinstance(value, kinds):
    raise ValueError('`clipping` of a query must not follow the records where it sums alone, and '
                     'groups are of its rule: `tfdp.rules.grouped(rule, groups)`. '
                     f'Received: clipping={value!r}.')
  return value
