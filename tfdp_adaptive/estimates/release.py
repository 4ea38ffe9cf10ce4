# SPDX-License-Identifier: Apache-2.0
"""The plan and the ledger entry of one Gaussian release of all records, before training."""

from typing import Any, Optional

from tfdp_adaptive import errors
from tfdp_adaptive import privacy
from tfdp_adaptive import terms
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger


def plan(
    count: int, *, sensitivity: float = 1.0, noise_multiplier: Optional[float] = None,
    target_epsilon: Optional[float] = None, population_size: Optional[int] = None,
    adjacency: str = 'zero_out', **fields: Any) -> privacy.PrivacyPlan:
  """Returns the plan of one step in which every record takes part.

  Args:
    count: The number of records, which is public unless `adjacency` is 'add_remove'.
    sensitivity: The largest distance between the statistics of neighboring data sets.
    noise_multiplier: Standard deviation of the noise in units of the sensitivity.
    target_epsilon: Epsilon for which the noise multiplier is chosen; give one of the two.
    population_size: With 'add_remove', a public number close to the number of records.
    adjacency: As in `tfdp.PrivacyPlan`.
    **fields: `target_delta`, `unit` and `seed` of the plan.
  """
  if (noise_multiplier is None) == (target_epsilon is None):
    raise ValueError(
        'One of `noise_multiplier` and `target_epsilon` must be given: it decides what the '
        f'estimate costs. Received: noise_multiplier={noise_multiplier!r}, '
        f'target_epsilon={target_epsilon!r}.')
  fields.update(
      adjacency=adjacency, steps=1,
      l2_norm_clip=sensitivity / terms.record_distance(adjacency))
  if adjacency == 'add_remove':
    if population_size is None:
      raise ValueError(
          'Under add_remove the number of records is private, so `population_size` must be a '
          'public number close to it. Received: population_size=None. Give one, or use '
          "adjacency='zero_out', under which the number is public.")
    fields.update(batch_size=population_size,
                  sampling=sampling.Poisson(sampling_probability=1.0))
  else:
    if population_size not in (None, count):
      raise ValueError(
          f'`population_size` must be the number of records under {adjacency}, or left out. '
          f'Received: population_size={population_size} for another number of records.')
    fields.update(batch_size=count, population_size=count, sampling=sampling.FixedOrder())
  if target_epsilon is not None:
    return privacy.PrivacyPlan.calibrate(target_epsilon=target_epsilon, **fields)
  found = privacy.PrivacyPlan(**fields, noise_multiplier=noise_multiplier)  # type: ignore[arg-type]
  if not found.noise_multiplier:
    raise errors.PrivacyError('An estimate without noise publishes exact statistics of the data. '
                              'Received: noise_multiplier=0. Give a positive number.')
  return found


def entry(one: privacy.PrivacyPlan, rule: str, *notes: str, delta: float = 0.0) -> ledger.Entry:
  """Returns the ledger entry of a release that was made."""
  return ledger.Entry(one, 1, rule=rule, delta=delta, run=ledger.new_run(), notes=notes)


def charge(layer: Any, *entries: ledger.Entry) -> None:
  """Records costs in the ledger of every model that has this layer."""
  weight_ledger.Ledger([*layer.variables, layer]).attach(entries)
