# SPDX-License-Identifier: Apache-2.0
"""Recommends a private optimizer for a batch size, a noise level and a model size.

Formulas of "On Design Principles for Private Adaptive Optimizers"
(arXiv:2507.01129, sections 3.5 and 4.3 to 4.4, appendix C), computed, not the
rounded numbers printed there: its Eq. 2 allows 1.9e8 parameters at batch size
2048 and noise multiplier 1, and its Eq. 3 allows 9.2e4.
"""

import dataclasses
import math
from typing import NamedTuple, Optional, Tuple

from scipy import stats

from tfdp_adaptive import checks
from tfdp_adaptive import terms

_LARGEST = 1e30  # Of what is squared and multiplied.
STABLE = 0.9  # Largest noise-to-signal factor at which scale-then-privatize is advised.


class Finding(NamedTuple):
  """A number, how it was computed and what it means."""

  name: str
  value: float
  formula: str
  meaning: str


@dataclasses.dataclass(frozen=True)
class Advice:
  """The result of `advise`. `str(advice)` is readable text.

  Attributes:
    regime: 'low-dimensional': unbiased second moments are rarely negative
      whatever the gradients (Eq. 3 holds); 'intermediate': it depends on how far
      the examples agree (Eq. 2 holds, Eq. 3 does not); 'high-dimensional': many
      are negative even if all examples agree (Eq. 2 fails).
    recommended: Name of the optimizer class to begin with.
    reason: Why, in one sentence.
    findings: The numbers.
    warnings: Likely problems of the given settings.
  """

  regime: str
  recommended: str
  reason: str
  findings: Tuple[Finding, ...]
  warnings: Tuple[str, ...]

  def __getitem__(self, name: str) -> float:
    return {finding.name: finding.value for finding in self.findings}[name]

  def to_dict(self) -> dict:
    """JSON-serializable."""
    return checks.for_json(vars(self))

  def __str__(self) -> str:
    lines = [f'Regime: {self.regime}.', f'Begin with: {self.recommended}. {self.reason}', '']
    for finding in self.findings:
      lines += [f'{finding.name} = {finding.value:.4g}   [{finding.formula}]',
                f'    {finding.meaning}']
    return '\n'.join(lines + ['', *(f'WARNING: {text}' for text in self.warnings)]).rstrip()


def advise(
    *, batch_size: float, noise_multiplier: float, parameters: int, l2_norm_clip: float,
    beta_2: float = 0.999, epsilon: Optional[float] = None, gradient_norm: Optional[float] = None,
    adjacency: str = 'zero_out') -> Advice:
  """Recommends a private adaptive optimizer for the regime of a run.

  Args:
    batch_size: B, the divisor (the expected batch size).
    noise_multiplier: sigma.
    parameters: Number m of trainable parameters.
    l2_norm_clip: zeta, of unscaled gradients.
    beta_2: Decay of the second moment.
    epsilon: Stability constant you mean to use with bias correction or
      independent moments, in units of a gradient.
    gradient_norm: Norm of the mean clipped gradient over the clip norm, if
      known from public data; between 1/sqrt(B) (examples are orthogonal) and 1
      (all agree). The paper measured 0.27.
    adjacency: 'replace' doubles the noise.

  Returns:
    An `Advice`. It uses public constants only, and costs no privacy.
  """
  checks.positive(batch_size=batch_size, noise_multiplier=noise_multiplier,
                  l2_norm_clip=l2_norm_clip)
  checks.whole(parameters=parameters)
  checks.probability(beta_2=beta_2)
  if epsilon is not None:
    checks.positive(epsilon=epsilon)
  if gradient_norm is not None and not (
      checks.is_number(gradient_norm) and 0 < gradient_norm <= 1):
    raise ValueError('`gradient_norm` is a share of the clip norm and must be in (0, 1]. '
                     f'Received: gradient_norm={gradient_norm!r}.')
  terms.check_adjacency(adjacency)
  sizes = dict(batch_size=batch_size, noise_multiplier=noise_multiplier, parameters=parameters,
               l2_norm_clip=l2_norm_clip, epsilon=epsilon or 1.0)
  if not all(1 / _LARGEST <= size <= _LARGEST for size in sizes.values()):
    raise ValueError(f'Sizes must be between {1 / _LARGEST:g} and {_LARGEST:g}. '
                     f'Received: {sizes}.')
  sigma = noise_multiplier * terms.record_distance(adjacency)
  root_phi = l2_norm_clip * sigma / batch_size
  c = ((1 - beta_2) / (1 + beta_2))**0.25
  agreeing = (batch_size / (c * sigma))**2
  orthogonal = agreeing / batch_size
  scaled_noise = sigma * math.sqrt(parameters) / batch_size
  if parameters <= orthogonal:
    regime = 'low-dimensional'
  elif parameters <= agreeing:
    regime = 'intermediate'
  else:
    regime = 'high-dimensional'

  def negative(norm: float) -> float:
    signal = (norm / scaled_noise)**2  # g^2 / phi of a coordinate of average size.
    return negative_fraction(signal, beta_2)

  findings = [
      Finding('noise_floor', root_phi, 'sqrt(phi) = zeta sigma / B',
              'Noise per coordinate of the mean gradient. Second moments by post-processing '
              'cannot tell smaller gradients apart.'),
      Finding('parameters_if_examples_agree', agreeing,
              f'Eq. 2: B/sigma >= c sqrt(m), c = ((1-beta_2)/(1+beta_2))^(1/4) = {c:.3g}',
              'Up to so many parameters few unbiased second moments are negative, if all '
              'examples have the same gradient.'),
      Finding('parameters_if_examples_are_orthogonal', orthogonal,
              'Eq. 3: sqrt(B)/sigma >= c sqrt(m)',
              'The same, if the gradients of different examples have nothing in common.'),
      Finding('parameters_if_noise_cancels', batch_size**2 / ((1 - beta_2) * sigma**2),
              'B/sigma >= sqrt((1-beta_2) m)',
              'As the first, with correlated noise on independent moments, at the very best.'),
      Finding('negative_if_examples_agree', negative(1.0),
              'P[chi2_k(k g^2/phi) < k], k = (1+beta_2)/(1-beta_2), g = zeta/sqrt(m)',
              'Expected fraction of negative second moments with bias correction, after many '
              'steps, for gradients of even size. Uneven ones have more.'),
      Finding('negative_if_examples_are_orthogonal', negative(batch_size**-0.5),
              'the same with g = zeta/sqrt(B m)',
              'The same if they have nothing in common: at most so many, for even sizes.'),
      Finding('scaled_clip', math.sqrt(parameters), 'zeta from sqrt(m)',
              'Smallest clip norm that scale-then-privatize needs: where examples agree, records '
              'have unit size in every coordinate.'),
      Finding('largest_scaled_clip', math.sqrt(parameters * batch_size), 'zeta to sqrt(m B)',
              'Largest that it may need: where examples have nothing in common, the mean has unit '
              'size and a record is sqrt(B) times larger. The noise grows with it.'),
      Finding('scaled_noise', scaled_noise, 'zeta sigma / B with zeta = sqrt(m)',
              'Second moments of scale-then-privatize come out 1/(1-q^2) too large for this q, '
              'and grow without bound from 1 on.'),
      Finding('scaled_noise_at_this_clip', root_phi, 'q = zeta sigma / B',
              'The same q, if the clip norm given were used in scaled units.'),
  ]
  if gradient_norm is not None:
    findings.append(Finding(
        'negative_at_this_gradient_norm', negative(gradient_norm),
        f'the same with g = {gradient_norm:g} zeta/sqrt(m)', 'For the gradient norm given.'))
  if epsilon is not None:
    findings.append(Finding(
        'epsilon_over_noise_floor', epsilon / root_phi, 'EPS / sqrt(phi)',
        'Where a second moment is negative, noise of size sqrt(phi) is divided by EPS.'))
  warnings = []
  if epsilon is not None and epsilon < root_phi and regime != 'low-dimensional':
    warnings.append(
        f'epsilon={epsilon:g} is below the noise floor sqrt(phi) = {root_phi:.3g}: with bias '
        'correction or independent moments, coordinates with a negative second moment take steps '
        f'of up to {root_phi / epsilon:.3g} learning rates of pure noise. Try epsilon of the '
        'order of sqrt(phi).')
  if epsilon is not None and epsilon > 10 * root_phi:
    warnings.append(
        f'epsilon={epsilon:g} is far above the noise floor sqrt(phi) = {root_phi:.3g}: it, and '
        'not the second moment, will scale most coordinates.')
  recommended, reason = _recommend(regime, scaled_noise)
  if root_phi >= STABLE:
    warnings.append(
        f'zeta sigma / B = {root_phi:.3g}: scale-then-privatize with this clip norm is unstable. '
        'Use larger batches or less noise.')
  return Advice(regime, recommended, reason, tuple(findings), tuple(warnings))


def _recommend(regime: str, scaled_noise: float) -> Tuple[str, str]:
  if scaled_noise < STABLE:
    return 'DPAdamSTP', (
        f'Scaled before it is privatized, with a clip norm of the order of sqrt(m), the noise is '
        f'{scaled_noise:.3g} of the signal per coordinate: stable (B > sigma sqrt(m)), and no '
        'second moment can be negative.')
  if regime == 'low-dimensional':
    return 'DPAdamBC', (
        'Few unbiased second moments are negative (Eq. 3), and scale-then-privatize would be '
        'unstable with a clip norm of sqrt(m).')
  return 'DPAdam', (
      'Noise outweighs the gradient per coordinate (B < sigma sqrt(m)): scale-then-privatize is '
      'unstable, and about half of the unbiased second moments would be negative. '
      'Post-processing is robust; compare with DPSGD and, if you can, raise the batch size.')


def negative_fraction(signal: float, beta_2: float, steps: Optional[int] = None) -> float:
  """Probability that a bias-corrected second moment is negative.

  The average of k squares of N(g, phi), with the k that gives the exponential
  average its variance: exact for one step, and within 0.02 for all.

  Args:
    signal: g^2 / phi of the coordinate.
    beta_2: Decay.
    steps: Number of steps averaged so far; None for many.
  """
  decay = 0.0 if steps is None else beta_2**steps
  k = (1 + beta_2) / (1 - beta_2) * (1 - decay) / (1 + decay)
  return float(stats.ncx2.cdf(k, k, k * signal) if signal > 0 else stats.chi2.cdf(k, k))
