# SPDX-License-Identifier: Apache-2.0
"""The best setting of each method: in simulation, and then on the model itself."""

from __future__ import annotations

import functools
from typing import Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from tfdp_adaptive.advice import methods
from tfdp_adaptive.advice import trial

_At = Tuple[float, float]  # Notches from the simulated rate, and from the simulated clip norm.
_LOWER = [(rate, 0) for rate in range(-3, 1)]  # These are tried on the model itself,
_LOWEST = [(rate, 0) for rate in range(-4, -7, -1)]  # and these, if none of those helps.
_CLIMBED = 2  # Steps at most, to larger rates or clip norms.
# One step. Scale-then-privatize has none: with a larger clip norm its scales can become unstable.
_LARGER_CLIPS = {'DPSGD': (.5, 1), 'DPAdam': (0, 1)}
_HUGE = 1e30  # In place of a loss that is not finite.


class Outcome(NamedTuple):
  """A method at its best setting.

  Attributes:
    helps: Whether records that were not trained on become better.
    losses: [n] of all records after training, means over rates beside each other.
  """

  method: methods.Method
  setting: trial.Setting
  helps: bool
  losses: np.ndarray

  @property
  def rank(self) -> Tuple[bool, float]:
    return not self.helps, float(self.losses.mean())


def in_simulation(method: methods.Method, public: trial.Records) -> Outcome:
  """Returns the method at its best setting for the model of `trial`.

  Each half of the records trains once, and both judge a setting together with the next larger
  rate. Those that make records better that were not trained on come first.
  """
  steps, count = trial.course(method.plan), len(public.losses)
  order = np.random.default_rng(0).permutation(count)
  halves = order[:count // 2], order[count // 2:]
  seen, unseen = np.zeros((2, len(method.candidate.settings), count))
  for i, rows in enumerate(halves):
    weights = trial.train(method.candidate, public.part(rows), steps, i)
    with np.errstate(over='ignore', invalid='ignore'):
      losses = np.nan_to_num(public.values(weights), nan=_HUGE, posinf=_HUGE)
    seen[:, rows], unseen[:, halves[1 - i]] = losses[:, rows], losses[:, halves[1 - i]]

  def smooth(losses: np.ndarray) -> np.ndarray:
    """[clip norms, rates - 1, n]: each with the next larger rate."""
    grid = losses.reshape(-1, methods.RATES, count)
    return (grid[:, :-1] + grid[:, 1:]) / 2

  helps = smooth(unseen).mean(2) <= public.losses.mean()
  losses = smooth(seen + unseen) / 2
  scores = (np.where(helps, losses.mean(2), np.inf) if helps.any() else smooth(unseen).mean(2))
  clip, rate = np.unravel_index(np.argmin(scores), scores.shape)
  return Outcome(method, method.candidate.settings[clip * methods.RATES + rate], bool(helps.any()),
                 losses[clip, rate])


def of_the_model(outcomes: Sequence[Outcome], full: trial.Records) -> List[Outcome]:
  """Returns each method on the model itself, at settings near its best simulated one."""
  replayed: Dict[str, Outcome] = {}
  for one in outcomes:
    if one.method.name not in replayed:
      method, = (same for same in methods.of(one.method.plan, full, 1.0)
                 if same.name == one.method.name)
      at = one.method.candidate.settings.index(one.setting)
      replayed[method.name] = _confirmed(method, method.candidate.settings[at], full)
  return sorted(replayed.values(), key=lambda one: one.rank)


def _confirmed(method: methods.Method, simulated: trial.Setting, full: trial.Records) -> Outcome:
  """Returns the method at the best setting for the model itself.

  Half of the records trains it, and overfits more than the many records of the real training will:
  with those, the loss is between those of the two halves. So all records judge a setting. As each
  rate sees noise of its own, and where training nearly diverges some noise is lucky, the best rate
  is tried again half a notch below and above: the other half must become better with all three.
  Else the next best is tried, and last still smaller ones.

  From the rate that is found it climbs: to larger rates, if the simulated one is best, and to
  larger clip norms, since gradients may grow on the way. A step is taken if the mean loss of the
  three rates becomes less.
  """
  rows, others = np.array_split(np.random.default_rng(0).permutation(len(full.losses)), 2)
  steps, start = trial.course(method.plan), full.losses[others].mean()

  def setting(at: _At) -> trial.Setting:
    rate, clip = methods.NOTCH**np.array(at)
    return trial.Setting(simulated.rate * rate, simulated.clip * clip)

  @functools.lru_cache(None)
  def losses(at: _At) -> np.ndarray:
    candidate = method.candidate._replace(settings=[setting(at)])
    seed = int(20 + 2 * at[0] + 100 * at[1])
    weights = trial.train(candidate, full.part(rows), steps, seed)
    return np.nan_to_num(full.at(weights[0]).losses, nan=_HUGE, posinf=_HUGE)

  def unseen(at: _At) -> float:
    return float(losses(at)[others].mean())

  def confirmed(at: _At) -> Outcome:
    less, more = ((at[0] + notches, at[1]) for notches in (-.5, .5))
    worst = max(at, less, more, key=unseen)
    helps = unseen(worst) <= start
    mean = (2 * losses(at) + losses(less) + losses(more)) / 4
    return Outcome(method, setting(at), helps, mean if helps else losses(worst))

  def climb(at: _At, best: Outcome, by: _At) -> Tuple[_At, Outcome]:
    for _ in range(_CLIMBED):
      further = at[0] + by[0], at[1] + by[1]
      if losses(further).mean() >= best.losses.mean():
        break
      one = confirmed(further)
      if one.rank >= best.rank:
        break
      at, best = further, one
    return at, best

  found = []
  better = [at for at in _LOWER if unseen(at) <= start]
  for at in (*sorted(better, key=lambda one: losses(one).mean()), *_LOWEST):
    found.append(confirmed(at))
    if found[-1].helps:
      break
  best = min(found, key=lambda one: one.rank)
  if best.helps and at == (0, 0):
    at, best = climb(at, best, (1, 0))
  if best.helps and method.name in _LARGER_CLIPS:
    at, best = climb(at, best, _LARGER_CLIPS[method.name])
  return best
