# SPDX-License-Identifier: Apache-2.0
"""A rule, its noise and its clip norm as one pure object: the only private step there is.

    query(state) -> the geometry to clip in         PUBLIC
    answer(state, request, sums) -> direction       PUBLIC, with the next state

Between the two, an engine of `clipping` turns records into clipped sums. Keras' step, `RuleQuery`
and the federated server are adapters of this object. If clients clip their own records, they get
the result of `broadcast` and call `record`.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, NamedTuple, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import privatizer as privatizer_lib
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection


class State(NamedTuple):
  """State of rule and noise. It is SECRET: it determines later noise."""

  rule: trees.Tree  # It is PUBLIC, since it depends on releases only.
  privatizer: privatizer_lib.State


class Broadcast(NamedTuple):
  """The public values that a client needs to clip its record."""

  scales: Tuple[trees.Tree, ...]  # Per ask, as `geometry.packed`, or ().
  clips: Tuple[tf.Tensor, ...]  # [] absolute clip norm per ask, in scaled units.
  groups: Tuple[trees.Tree, ...] = ()  # `contract.Groups` per ask, or ().


class PrivateRule:
  """A rule with the noise of one run.

  Args:
    rule: The `contract.Rule`.
    specs: Tree of `tf.TensorSpec` like the parameters.
    one_pass: Whether to compile noise and update of an elementwise rule into one pass over the
      memory.
    **noise: Arguments of `privatizer.Privatizer`, such as `privatizer.settings` returns.

  Attributes:
    rule: The `contract.Rule`.
    privatizer: Adds the noise.
  """

  def __init__(
      self, rule: contract.Rule, specs: trees.Tree, one_pass: bool = False, **noise: Any) -> None:
    self.rule = rule
    self.privatizer = privatizer_lib.Privatizer(rule.asks, specs, **noise)
    self._one_pass = one_pass and rule.elementwise
    # Statistics may compute with whole matrices.
    together = self._one_pass and not any(ask.second for ask in rule.asks)
    self._finish = trees.one_pass(self._finished) if together else self._finished
    self._update = trees.one_pass(rule.update) if (
        self._one_pass and not together) else rule.update

  def watched(self, update: Callable[..., Any]) -> PrivateRule:
    """Returns a copy with another update, not compiled, which may save its arguments."""
    other = copy.copy(self)
    other._update, other._finish = update, other._finished
    return other

  @property
  def specs(self) -> trees.Tree:
    """Specs of the values that are clipped and noised: float32 at least."""
    return self.privatizer.specs

  def init(self) -> State:
    """Returns a fresh SECRET state, whose key is drawn when this runs."""
    return State(self.rule.init(self.specs), self.privatizer.init())

  def query(self, state: State, public: trees.Tree = ()) -> interface.Request:
    """Returns the query of the rule at this step, with absolute clip norms."""
    queries = self.rule.query(state.rule, public)
    return interface.Request(self.rule.asks, queries, self.privatizer.resolve(queries))

  def answer(
      self, state: State, request: interface.Request, sums: Tuple[contract.Sums, ...],
      public: trees.Tree = (), penalties: Optional[trees.Tree] = None) -> Tuple[trees.Tree, State]:
    """Adds noise to the sums of a step, and updates the rule with the result.

    Args:
      state: The state that the request was made of.
      request: The result of `query`.
      sums: SECRET sums over all records, one entry per ask.
      public: Public gradients, for a rule that needs some.
      penalties: Gradients of losses on the weights alone, or None. They are added to the means.

    Returns:
      The direction to descend, and the next state.
    """
    drawn, noise = self.privatizer.draw(state.privatizer.noise, sums)
    direction, rule, secret = self._finish(
        state.rule, state.privatizer.secret, request.queries, sums, drawn, public,
        () if penalties is None else penalties)
    return direction, State(rule, privatizer_lib.State(noise, secret))

  def _finished(
      self, rule: trees.Tree, secret: Tuple[trees.Tree, ...], queries: contract.Queries,
      sums: Tuple[contract.Sums, ...], drawn: privatizer_lib.Drawn, public: trees.Tree,
      penalties: trees.Tree) -> Tuple[trees.Tree, trees.Tree, Tuple[trees.Tree, ...]]:
    """Returns the direction and the next states of rule and statistics; arithmetic alone."""
    releases, secret = self.privatizer.combine(secret, queries, sums, drawn)
    if not trees.absent(penalties):
      releases = tuple(
          one._replace(mean=trees.map(tf.add, one.mean, geometry.rescale(penalties, query.scale)))
          for one, query in zip(releases, queries))
    return (*self._update(rule, releases, public), secret)

  def broadcast(self, request: interface.Request) -> Broadcast:
    """Returns what a client needs to clip its record; public."""
    return Broadcast(tuple(geometry.packed(query.scale) for query in request.queries),
                     request.clips, tuple(query.groups for query in request.queries))

  def queries(self, broadcast: Broadcast, record: trees.Tree) -> contract.Queries:
    """Returns the queries of a broadcast, with the structure of a record."""
    return tuple(contract.Query(geometry.unpacked(scale, record), groups=groups)
                 for scale, groups in zip(broadcast.scales, broadcast.groups))

  def record(self, broadcast: Broadcast, record: trees.Tree) -> Tuple[contract.Sums, ...]:
    """Returns the clipped sums of one record; SECRET.

    A record that is not finite counts as zero.
    """
    return tuple(
        projection.project_record(ask, query, clip, record)
        for ask, query, clip in zip(
            self.rule.asks, self.queries(broadcast, record), broadcast.clips))

  def zero_sums(self) -> Tuple[contract.Sums, ...]:
    """Returns the sums over no records."""
    return tuple(interface.zero_sums(ask, self.specs) for ask in self.rule.asks)
