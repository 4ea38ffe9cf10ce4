# SPDX-License-Identifier: Apache-2.0
"""Trees against tensorflow_privacy's and dp_accounting's own analyses of them."""

import importlib
import math

import dp_accounting
from dp_accounting import rdp
import pytest

from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.privacy import plan as plan_lib

# This also makes the package importable where it is not whole.
if compat.privacy_module('tree_aggregation') is None:
  pytest.skip('needs tensorflow_privacy', allow_module_level=True)
analysis = importlib.import_module(
    'tensorflow_privacy.privacy.analysis.tree_aggregation_accountant')
NODE_NOISE = 2.0


def nodes(tree, **participation):
  """Squared sensitivity in units of the nodes' noise; tensorflow_privacy's nodes have scale one."""
  return (tree.sensitivity(**participation) * tree.node_scale)**2


@pytest.mark.parametrize('steps,min_sep,k', [
    (5, 1, 5), (5, 2, 3), (16, 3, 4), (24, 5, 3), (32, 8, 4), (32, 31, 2), (100, 20, 4),
    (100, 45, 2),
    (129, 40, 3), (64, 1, 2)])
@pytest.mark.parametrize('variant', ['online', 'naive'])
def test_many_participations_are_exact(steps, min_sep, k, variant):
  """Kairouz et al. 2021, appendix D.2; its separation counts the steps in between."""
  tree = mechanisms.Tree(steps, variant)
  alpha = 2.0
  theirs = analysis.compute_rdp_single_tree(
      noise_multiplier=1.0, total_steps=steps, max_participation=k, min_separation=min_sep - 1,
      orders=alpha) * 2 / alpha
  ours = nodes(tree, min_sep=min_sep, max_participations=k)
  assert ours == pytest.approx(theirs, rel=1e-9)
  assert nodes(tree, min_sep=min_sep, max_participations=k, fixed_order=True) <= ours * (1 + 1e-12)


def renyi(event, order):
  accountant = rdp.RdpAccountant(
      [order], neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
  return accountant.compose(event)._rdp[0]  # pylint: disable=protected-access


@pytest.mark.parametrize('steps,restart_every', [
    (2000, None), (2000, 1000), (2000, 600), (100, 7), (8, 4), (5, 1)])
def test_restarted_trees_have_the_events_of_dp_accounting(steps, restart_every):
  """A record in one tree counts in the deepest; a record in all of them, in each."""
  tree = mechanisms.Tree(steps, restart_every=restart_every)
  block = restart_every or steps
  sizes = [min(block, steps - first) for first in range(0, steps, block)]
  noise_multiplier = NODE_NOISE / tree.node_scale
  order = 3.0
  once = dp_accounting.SingleEpochTreeAggregationDpEvent(NODE_NOISE, sizes)
  ours = dp_accounting.GaussianDpEvent(noise_multiplier / tree.sensitivity())
  assert renyi(ours, order) == pytest.approx(renyi(once, order), rel=1e-9)
  each = dp_accounting.ComposedDpEvent([
      dp_accounting.SingleEpochTreeAggregationDpEvent(NODE_NOISE, size) for size in sizes])
  # A place of its own in every tree, whatever place: at least `block` steps apart.
  size = tree.sensitivity(min_sep=block, max_participations=len(sizes))
  ours = dp_accounting.GaussianDpEvent(noise_multiplier / size)
  assert renyi(ours, order) >= renyi(each, order) * (1 - 1e-9)
  if steps % block == 0:
    assert renyi(ours, order) == pytest.approx(renyi(each, order), rel=1e-9)
    assert renyi(ours, order) == pytest.approx(
        analysis.compute_rdp_tree_restart(NODE_NOISE, sizes, order), rel=1e-9)


def test_a_plan_with_restarts():
  """2000 steps, node noise 2, as in the literature; the exact trade-off is below Renyi's bound."""
  for restart_every, k, renyi_epsilon in ((None, 1, 10.090), (1000, 2, None)):
    tree = mechanisms.Tree(2000, restart_every=restart_every)
    plan = plan_lib.PrivacyPlan(
        batch_size=1, steps=2000, l2_norm_clip=1., noise_multiplier=NODE_NOISE / tree.node_scale,
        target_delta=1e-7, population_size=2000 // k, sampling=sampling.FixedOrder(),
        mechanism=tree)
    assert plan.participation() == (2000 // k, k)
    expected = gaussian.epsilon(NODE_NOISE / math.sqrt(k * tree.levels), 1e-7)
    assert plan.epsilon() == pytest.approx(expected, rel=1e-9)
    assert plan.epsilon() < plan.epsilon(accountant='rdp')
    if renyi_epsilon:
      assert plan.epsilon() == pytest.approx(9.546, abs=5e-4)
      assert plan.epsilon(accountant='rdp') == pytest.approx(renyi_epsilon, abs=5e-3)
