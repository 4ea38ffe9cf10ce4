# SPDX-License-Identifier: Apache-2.0
"""An audit that sees everything, and can convict.

Looks at what really runs, each of which refutes the claim or does not:

    changes     no record moves a step's releases by more than the claim allows
    noise       the noise is as large, and as new at every step, as announced; nothing is beside it
    accounting  dp_accounting's own accountant finds no larger epsilon
    batches     the batches follow the distribution that is accounted for
    canaries    what an attacker guesses from all releases of one run
    writes      all that a step of a model leaves follows from its releases
    data        no loss, penalty, constraint or schedule of a model brings arrays along

Noise, batches and canaries are wrong with a stated probability at most; the others are exact. What
none of them refutes is not proven: other records, models and seeds may refute it.
"""

import contextlib
import dataclasses
import math
import time
import types
from typing import Any, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.accounting import second_accountant
from tfdp_adaptive.audit import batch_distribution
from tfdp_adaptive.audit import bounds
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import gradient_canaries
from tfdp_adaptive.audit import interface
from tfdp_adaptive.audit import noise_rows

CONFIDENCE = 0.95
_PROBES = 0.02  # Fraction of the allowed false alarms for noise, and for batches.
_STEPS = 12  # Steps of the plan that an audit makes where there is none.


@dataclasses.dataclass(frozen=True)
class Finding:
  """The finding of one check, and whether it refutes the claim."""

  name: str
  violated: bool
  text: str


@dataclasses.dataclass(frozen=True)
class WhiteBoxReport:
  """The result of an audit. `str(report)` is readable text.

  Attributes:
    name: The name of the audited subject.
    claimed: Epsilon.
    delta: The delta of the claim.
    confidence: The probability that no check refutes a correct claim.
    findings: One `Finding` each.
    change: `changes.Change`.
    noise: `noise_rows.Noise`.
    batches: `batch_distribution.BatchTest`, or None if there was no plan to compare with.
    canaries: `bounds.Guesses`; None for a model of your own.
    writes: `changes.Writes`; None for a query, which leaves nothing but its releases.
    seconds: The duration of the audit.
  """

  name: str
  claimed: float
  delta: float
  confidence: float
  findings: Tuple[Finding, ...]
  change: Any
  noise: Any
  batches: Any
  canaries: Any
  writes: Any
  seconds: float

  @property
  def violated(self) -> bool:
    """Whether a valid bound or probe refutes the claim."""
    return any(finding.violated for finding in self.findings)

  @property
  def vacuous(self) -> bool:
    """Whether this audit cannot refute any finite claim, whatever it finds."""
    return not self.findings

  def to_dict(self) -> dict:
    """Returns the report as JSON values. Infinite numbers become None."""
    return checks.for_json(dict(
        dataclasses.asdict(self), violated=self.violated, vacuous=self.vacuous))

  def __str__(self) -> str:
    head = (f'White-box audit of {self.name}: epsilon <= {self.claimed:.4g} at delta = '
            f'{self.delta:g} is claimed.')
    if self.vacuous:
      return (f'{head}\nNo guarantee is claimed, so this audit can prove nothing. It would take a '
              'rule and a noise multiplier whose epsilon is finite.')
    lines = [f'  {finding.name:11}{"VIOLATED: " if finding.violated else ""}{finding.text}'
             for finding in self.findings]
    verdict = (
        'The claim is violated: what runs is not what is accounted for.' if self.violated else
        'Not refuted, which is no proof: other records, models and seeds may refute it.')
    return '\n'.join([head, *lines, f'{verdict} A claim that holds is refuted with probability '
                      f'{1 - self.confidence:.2g} at most. {self.seconds:.1f} s.'])


def white_box(
    subject: Any, *, data: Any = None, plan: Optional[privacy.PrivacyPlan] = None,
    epsilon: Optional[float] = None, delta: Optional[float] = None,
    confidence: float = CONFIDENCE, canaries: int = 512,
    batches: Optional[Iterable[Sequence[int]]] = None,
    seed: Optional[int] = None) -> WhiteBoxReport:
  """Audits a private optimizer, a query or your own model by inspecting every release.

  An optimizer trains a small model of the audit, whose gradients can be chosen. The training
  step, clipping engine, noise and rule are the real ones. A record of a query is the update of
  a user, so the audit of a query covers federated users. Your own model is audited with your
  records, and with enlarged copies of them. Their gradients cannot be chosen, so there are no
  canaries (use `tfdp.audit.run` for canaries). The audit does not change the model.

  Args:
    subject: A private optimizer that no model has used yet, such as
      `tfdp.DPAdam(plan=plan)`, a `tfdp.queries.RuleQuery`, or, with `data`, a compiled
      private model.
    data: `(x, y)` of arrays, the records of your own model. A hundred are enough.
    plan: The claim, if the subject has no plan. Without a plan, the audit uses the noise multiplier
      and batch size of the subject, full batches and a dozen steps.
    epsilon: The claim to be refuted, instead of the plan's.
    delta: The delta of the claim.
    confidence: The probability that a correct claim is not refuted.
    canaries: Number of records with a gradient of their own, and size of the audit's model.
    batches: Record indices of every step, if the plan does not draw them. The audit compares
      these batches with the sampling that the plan claims.
    seed: For tests only.

  Returns:
    A `WhiteBoxReport`.
  """
  from tfdp_adaptive.audit import subjects  # pylint: disable=g-import-not-at-top
  bounds.check_confidence(confidence)
  checks.whole(16, canaries=canaries)
  start = time.perf_counter()
  if batches is not None:
    try:
      batches = [np.asarray(batch, np.int64) for batch in batches]
    except (TypeError, ValueError, OverflowError) as error:
      raise ValueError('`batches` must be an array of record indices for every step. '
                       f'Received: batches={batches!r}.') from error
  opened: Any = (contextlib.nullcontext(subjects.of(subject, canaries)) if data is None else
                 subjects.of_model(subject, data))
  with opened as audited:
    report = _inspect(audited, plan, epsilon, delta, confidence,
                      canaries if data is None else None, batches, seed, start)
  if data is not None and not report.violated and not report.vacuous:
    subjects.passed(subject)
  return report


@np.errstate(all='ignore')  # Numbers that are not finite are violations, not warnings.
def _inspect(
    subject: interface.Subject, plan: Optional[privacy.PrivacyPlan], epsilon: Optional[float],
    delta: Optional[float], confidence: float, canaries: Optional[int],
    batches: Optional[List[np.ndarray]], seed: Optional[int], start: float) -> WhiteBoxReport:
  """Returns the report. Without `canaries`, it is about your own model."""
  allowed = _PROBES * (1 - confidence)
  own = subject.plan if plan is None else plan
  plan = _full_batches(subject) if own is None else own
  claimed = plan.epsilon() if epsilon is None else float(epsilon)
  if epsilon is None and not subject.private:
    claimed = math.inf
  delta = plan.target_delta if delta is None else delta
  change = noise = batch_test = guessed = writes = None
  findings = []
  if claimed < math.inf:
    change = changes.largest(subject, seed)
    findings.append(_changes_finding(change))
    if canaries is None:
      findings.append(Finding('data', bool(subject.data_problem), subject.data_problem or (
          'what a step calls, such as losses and penalties, holds no arrays that are not public')))
    noise = noise_rows.measure(subject, seed)
    findings.append(_noise_finding(noise, allowed))
    findings.append(_accounting_finding(
        plan, claimed, plan.target_delta if epsilon is None else delta))
    if own is not None or batches is not None:
      batch_test = batch_distribution.check(
          plan, batches, plan.population_size or canaries or subject.count // 2)
      findings.append(Finding('batches', batch_test.p_value <= allowed, (
          f'the most unusual of {batch_test.steps} batches: {batch_test.what} '
          f'(probability {batch_test.p_value:.2g})')))
    if canaries is not None:
      scores, included = gradient_canaries.run(subject, plan, canaries, seed, batches)
      bounds_used = 1 if plan.amplified else 2
      guessed = bounds.guess(
          scores, included, delta, 1 - (1 - confidence - 2 * allowed) / bounds_used)
      findings.append(_canaries_finding(guessed, claimed, delta, plan))
    if subject.writes:
      writes = changes.past_noise(subject, seed)
      findings.append(_writes_finding(writes))
  return WhiteBoxReport(subject.name, claimed, delta, confidence, tuple(findings), change, noise,
                        batch_test, guessed, writes, time.perf_counter() - start)


def _full_batches(subject: interface.Subject) -> privacy.PrivacyPlan:
  """Returns a plan of a few steps with every record in each."""
  whole = max(1, math.ceil(subject.batch_size))
  return privacy.PrivacyPlan(
      batch_size=whole, population_size=whole, population_is_public=True, l2_norm_clip=1.0,
      steps=subject.limit(min(_STEPS, subject.participations or _STEPS)), target_delta=1e-5,
      noise_multiplier=subject.noise_multiplier, mechanism=subject.mechanism,
      adjacency='replace' if subject.adjacency == 'replace' else 'zero_out',
      sampling=sampling.FixedOrder(), extra_releases=subject.extra_releases)


def _changes_finding(change: changes.Change) -> Finding:
  text = (f'one record moves a release by {change.size:.4g} times what is claimed '
          f'({change.pairs} pairs; the worst: {change.where})')
  if change.rounding > 0.05:
    text += (f'; rounding may be {change.rounding:.2g} of it, so this proves little: it would take '
             'a smaller noise multiplier')
  return Finding('changes', change.violated, text)


def _noise_finding(noise: noise_rows.Noise, allowed: float) -> Finding:
  text = (f'the standard deviation is {noise.size:.4g} times what is announced ({noise.values} '
          f'numbers; the weakest: {noise.what}, probability {noise.p_value:.2g})')
  return Finding('noise', noise.p_value <= allowed, text)


def _accounting_finding(plan: privacy.PrivacyPlan, claimed: float, delta: float) -> Finding:
  if plan.population_size is None or (plan.min_sep, plan.max_participations) != (None, None):
    return Finding('accounting', False, 'not repeated: it rests on numbers that the plan was given')
  entry = types.SimpleNamespace(plan=plan, steps=plan.steps, shared=(), has_seed=False, notes=())
  accounted = second_accountant.answer([entry], delta)
  if accounted.epsilon is None:
    return Finding('accounting', False, f'not repeated: {accounted.method}')
  allowed = claimed * (1 + accounted.tolerance) + 1e-6
  return Finding('accounting', accounted.epsilon > allowed, (
      f'{accounted.method} give epsilon = {accounted.epsilon:.4g} for the steps of the plan'))


def _canaries_finding(
    guessed: bounds.Guesses, claimed: float, delta: float, plan: privacy.PrivacyPlan) -> Finding:
  """Compares the bounds with the claim. A Gaussian bound counts for Gaussian claims only."""
  gaussian = not plan.amplified
  lower = max(guessed.epsilon_lower, guessed.gaussian_lower if gaussian else 0.0)
  text = (f'{guessed.correct} of {guessed.guesses} guesses right with {guessed.canaries} canaries: '
          f'epsilon >= {guessed.epsilon_lower:.3g}, or {guessed.gaussian_lower:.3g} for a claim of '
          f'Gaussian shape{"" if gaussian else " (which this is not)"}')
  if guessed.estimate is not None:  # It needs a delta above zero.
    text += f'; estimate, no bound: {guessed.estimate.epsilon:.3g}'
  if not gaussian and guessed.provable <= claimed:
    needed = bounds.demand(guessed.canaries, claimed, delta, guessed.confidence)
    text += (f'; so few canaries can prove nothing: even perfect guesses prove only '
             f'{guessed.provable:.3g}. It would take {needed}')
  return Finding('canaries', lower > claimed, text)


def _writes_finding(writes: changes.Writes) -> Finding:
  text = (f'{", ".join(writes.past_noise)} depend on the batch by something else than its noised '
          'releases' if writes.past_noise else
          f'{writes.looked_at} tensors that a step leaves follow from its releases')
  return Finding('writes', bool(writes.past_noise), f'{text} ({writes.pairs} pairs of batches)')
