# SPDX-License-Identifier: Apache-2.0
"""The methods that `recommend` tries, in simulation and as optimizers of the model itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Iterator, NamedTuple, Tuple

import numpy as np

from tfdp_adaptive import compat
from tfdp_adaptive import rules
from tfdp_adaptive import terms
from tfdp_adaptive.advice import advice
from tfdp_adaptive.advice import trial
from tfdp_adaptive.privacy import plan as plan_lib

RATES = 10  # Of a grid, each so many times the one before:
NOTCH = (100 / .003)**(1 / (RATES - 1))
_CLIPS = (.1, .3, 1.0)  # Times the median norm of a gradient.
_TUNED = (.1, NOTCH**2)  # The same, to tune within: gradients of many models grow on the way.
_MOMENTUM = .9
_EDGE = .03  # `scale_epsilon` over the size of a coordinate.
Range = Tuple[float, float]


def floor(plan: plan_lib.PrivacyPlan) -> float:
  """Returns the noise per coordinate of a mean over the clip norm, before it is correlated."""
  return plan.noise_multiplier * terms.record_distance(plan.adjacency) / plan.batch_size


def _stddevs(plan: plan_lib.PrivacyPlan) -> np.ndarray:
  """Returns the noise of each step, over the clip norm."""
  return floor(plan) * plan.mechanism.row_norms(plan.steps)


class Method(NamedTuple):
  """A method with the noise of one plan.

  Attributes:
    name: Of the class.
    plan: With clip norm 1.
    candidate: Its settings are all rates of the first clip norm, then those of the second, ....
  """

  name: str
  plan: plan_lib.PrivacyPlan
  candidate: trial.Candidate


def of(plan: plan_lib.PrivacyPlan, public: trial.Records, shrunk: float) -> Iterator[Method]:
  """Yields what is tried, in units of the simulation, whose coordinates are `shrunk` times more."""
  count, norm = public.gradients.shape[1], _norm(public)
  steps = trial.course(plan)
  rates = .003 * NOTCH**np.arange(RATES) / (norm * math.sqrt(len(steps.inverse)))
  grid = lambda clips: [trial.Setting(rate, clip) for clip in clips for rate in rates]
  clips = np.array(_CLIPS) * norm
  yield Method('DPSGD', plan, trial.Candidate(rules.dp_sgd(_MOMENTUM), False, grid(clips)))
  yield Method('DPAdam', plan, trial.Candidate(
      rules.dp_adam(epsilon=steps.stddev), False, grid(clips)))
  clips = math.sqrt(count) * plan.batch_size**np.array([0, .25, .5])
  largest = advice.STABLE / float(np.max(_stddevs(plan))) / shrunk
  clips = clips[clips <= largest] if clips[0] <= largest else np.array([largest])
  yield Method('DPAdamSTP', plan, trial.Candidate(rules.scale_then_privatize(
      epsilon=1e-8, scale_epsilon=_EDGE * norm / math.sqrt(count)), True, grid(clips)))


def _norm(public: trial.Records) -> float:
  norms = np.linalg.norm(public.gradients, axis=1)
  return float(np.median(norms)) or float(norms.max())


def decay(rate: float, plan: plan_lib.PrivacyPlan) -> Any:
  """A learning rate that falls linearly to zero."""
  return compat.keras.optimizers.schedules.PolynomialDecay(float(f'{rate:.3g}'), plan.steps, 0.0)


class Settled(NamedTuple):
  """A method for the model itself: see `Recommendation`."""

  plan: plan_lib.PrivacyPlan
  settings: Dict[str, Any]
  ranges: Dict[str, Range]


def settled(method: Method, setting: trial.Setting, public: trial.Records, shrunk: float
            ) -> Settled:
  """Returns settings of the model itself: of all its coordinates and all steps of the plan."""
  plan, clip = method.plan, setting.clip
  steps = trial.course(plan)
  arguments: Dict[str, float] = {}
  means, clips = np.abs(public.gradients.mean(0)), np.array(_TUNED) * _norm(public)
  rate = setting.rate * len(steps.inverse) / plan.steps
  if method.name == 'DPSGD':
    rate /= clip
    arguments['momentum'] = _MOMENTUM
  elif method.name == 'DPAdam':
    # Steps are as long, where Adam divides by the root of signal and noise of a coordinate.
    size = lambda stddevs: clip * np.sqrt(np.mean(np.square(stddevs)))
    rate *= np.sum(means**2 / np.hypot(means, size(steps.stddevs))) / np.sum(
        means**2 / np.hypot(means / shrunk, size(_stddevs(plan))))
    arguments['epsilon'] = clip * floor(plan)
  else:
    rate /= shrunk
    clip *= shrunk
    arguments['scale_epsilon'] = _EDGE * _norm(public) / math.sqrt(
        public.gradients.shape[1]) / shrunk
    clips = shrunk * np.array([one.clip for one in method.candidate.settings])
  return Settled(
      dataclasses.replace(plan, l2_norm_clip=float(f'{clip:.3g}')),
      dict(learning_rate=decay(rate, plan), **arguments),
      dict(learning_rate=(rate / NOTCH**2, rate * NOTCH**2),
           l2_norm_clip=(float(clips.min()), float(clips.max()))))
