# SPDX-License-Identifier: Apache-2.0
"""A private optimizer as a DPQuery, from records to the update direction.

The geometry of every round (scales and clip norms, functions of past releases)
travels to the clients through `derive_sample_params`, so user-level
scale-then-privatize, delayed preconditioners and independent moments need no
aggregator of their own in TensorFlow Federated.
"""

from typing import Any, Optional, Tuple

import dp_accounting
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive import private_rule
from tfdp_adaptive import privatizer
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import choices
from tfdp_adaptive.queries import mechanism_sum


def check_rule(rule: contract.Rule) -> None:
  """Raises unless noisy gradients alone determine the rule's update."""
  contract.check_rule(rule)
  if rule.public is not None or rule.project is not None:
    needs = ('public gradients at the current parameters' if rule.public is not None
             else 'to project the parameters')
    raise ValueError(f'`rule` must not need the parameters: a DPQuery never sees them, and '
                     f'{rule.name} needs {needs}. Use its Keras optimizer. '
                     f'Received: rule={rule.name!r}.')


def _check_participations(rule: contract.Rule, most: Optional[int]) -> None:
  """Raises if a record takes part more often than the noise of a rule allows for."""
  made_for = [ask.second.participations for ask in rule.asks
              if ask.second is not None and ask.second.participations]
  if made_for and (most is None or min(made_for) < most):
    raise ValueError(
        f'`plan`, or `max_participations` of at most {min(made_for)}, must be given: the noise of '
        f'{rule.name} is made for that many participations of a record. '
        f'Received: plan=None, max_participations={most}.')


class RuleQuery(mechanism_sum.SumAggregationDPQuery):
  """The `DPQuery` of a rule. Its result is the rule's direction; subtract it from the weights.

  Records are gradient-like (`initial - final` for model updates). Every record is scaled as the
  rule demands in this round, and clipped. The sum has the L2 sensitivity that
  `privatizer.Privatizer` adds noise for. One round therefore costs one Gaussian mechanism with the
  noise multiplier, under the given adjacency.

  Works in eager mode, in `tf.function` (XLA included) and in TFF's
  `DifferentiallyPrivateFactory`.

  Args:
    rule: A `tfdp.rules` rule that needs neither public gradients nor parameters.
    specs: Tree of `tf.TensorSpec` like a record; TFF passes no template at `init`.
    plan: A `tfdp.PrivacyPlan`, instead of the numbers below.
    l2_norm_clip: Clip norm of a record, in the units of the rule's scaled records.
    noise_multiplier: Noise standard deviation in clip norms.
    batch_size: EXPECTED number of records per round, the divisor.
    adjacency: 'zero_out' (the default), 'add_remove' or 'replace'.
    mechanism: A `tfdp.mechanisms.Mechanism`; independent Gaussian by default.
    clipping: The clipping method: `tfdp.clipping.Hard()` (the default), `AutoS()`,
      `Quantile(0.5)`, `Slack()` and the like.
    steps: Number of rounds accounted for; None for no limit.
    seed: For tests only: fixed noise protects nobody.
    allow_non_private: Accept a rule that releases a statistic without noise.
    max_participations: Without a plan, the largest number of steps of a record. Nothing checks it.
      It is for rules whose noise depends on it.
  """

  def __init__(
      self, rule: contract.Rule, specs: trees.Tree, *, plan: Optional[privacy.PrivacyPlan] = None,
      l2_norm_clip: Optional[float] = None, noise_multiplier: Optional[float] = None,
      batch_size: Optional[float] = None, adjacency: Optional[str] = None,
      mechanism: Optional[mechanisms.Mechanism] = None, clipping: Optional[choices.Choice] = None,
      steps: Optional[int] = None, seed: Optional[int] = None, allow_non_private: bool = False,
      max_participations: Optional[int] = None) -> None:
    check_rule(rule)
    trees.check_specs(specs=specs)
    given: Any = dict(batch_size=batch_size, noise_multiplier=noise_multiplier)
    rule = choices.for_query(clipping).rule(rule, **{
        name: getattr(plan, name, value) for name, value in given.items()})
    numbers = privatizer.settings(
        rule, plan, l2_norm_clip=l2_norm_clip, mechanism=mechanism, adjacency=adjacency,
        steps=steps, **given)
    if plan is None:
      _check_participations(rule, max_participations)
    self._specs = specs
    self._mechanism = numbers['mechanism'] or mechanisms.IndependentGaussian()
    self._private = private_rule.PrivateRule(
        rule, specs, **numbers, seed=seed, allow_non_private=allow_non_private)

  @property
  def event(self) -> dp_accounting.DpEvent:
    """Returns the `DpEvent` of one round, before any amplification by sampling.

    Correlated noise has no event per round. Neither has a rule that releases statistics of past
    clean data, because they also reveal a record in rounds without it. The plan has the event of
    the whole run.
    """
    asks, noise_multiplier = self._private.rule.asks, self._private.privatizer.noise_multiplier
    if not noise_multiplier or not all(
        ask.second is None or ask.second.private for ask in asks):
      return dp_accounting.NonPrivateDpEvent()
    present = all(ask.second is None or ask.second.amplifiable for ask in asks)
    if present and isinstance(self._mechanism, mechanisms.IndependentGaussian):
      return dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.UnsupportedDpEvent()

  def initial_global_state(self) -> private_rule.State:
    return self._private.init()

  def derive_sample_params(self, global_state: private_rule.State) -> private_rule.Broadcast:
    return self._private.broadcast(self._private.query(global_state))

  def initial_sample_state(self, template: trees.Tree = None) -> trees.Tree:
    del template  # Sums have another structure than records.
    return self._private.zero_sums()

  def preprocess_record(self, params: private_rule.Broadcast, record: trees.Tree) -> trees.Tree:
    record = trees.like(record, self._specs, 'record')
    record = trees.map(lambda r, s: tf.cast(r, s.dtype), record, self._private.specs)
    return self._private.record(params, record)

  def get_noised_result(
      self, sample_state: trees.Tree, global_state: private_rule.State,
  ) -> Tuple[trees.Tree, private_rule.State, dp_accounting.DpEvent]:
    direction, state = self._private.answer(
        global_state, self._private.query(global_state), sample_state)
    direction = trees.map(lambda d, s: tf.cast(d, s.dtype), direction, self._specs)
    return direction, state, self.event
