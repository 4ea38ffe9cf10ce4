# SPDX-License-Identifier: Apache-2.0
"""Records the releases that a rule gets in a training step, and the state after it."""

from __future__ import annotations

from typing import Any, Callable, Dict, Sequence, Tuple, TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees

if TYPE_CHECKING:
  from tfdp_adaptive import contract


class Watched:
  """Records the arguments of a rule's update while it is traced.

  Attributes:
    seen: The releases of the current step; emptied when a step begins.
    held: Whether the rule gets fixed numbers in place of releases.
  """

  def __init__(self, rule: contract.Rule, l2_norm_clip: float) -> None:
    self._rule, self._l2_norm_clip = rule, l2_norm_clip
    self.seen: Tuple[Any, ...] = ()
    self.held = tf.Variable(False, trainable=False)

  def update(
      self, state: Any, releases: contract.Releases,
      public: trees.Tree = ()) -> Tuple[trees.Tree, trees.Tree]:
    self.seen += tuple(
        (release.mean, release.variance, release.second, release.second_variance,
         self._l2_norm_clip * tf.cast(query.relative_clip, tf.float32),
         release.rider, release.rider_variance)
        for release, query in zip(releases, self._rule.query(state, public)))
    fixed = lambda tree: trees.map(lambda t: tf.where(self.held, tf.ones_like(t), t), tree)
    releases = tuple(
        release._replace(mean=fixed(release.mean), second=fixed(release.second),
                         rider=fixed(release.rider)) for release in releases)
    return self._rule.update(state, releases, public)

  def written(
      self, model: Any, optimizer: Any, variables: Sequence[Any], run: Any,
      others: Sequence[Tuple[Any, Any]]) -> Callable[..., Dict[str, np.ndarray]]:
    """`Run.written` of a model's training step.

    Args:
      model: The model.
      optimizer: Its optimizer, whose clean past is no release.
      variables: The variables that `run` takes and returns.
      run: `Run.step`.
      others: `captured` by it; filled by its first run at the latest.
    """
    def step(tensors: Any, records: Any, weights: Any, row: int) -> Dict[str, np.ndarray]:
      if not others:
        run(tensors, records, weights, row)
      for variable, value in others:
        variable.assign(value)
      self.held.assign(True)
      _, after = run(tensors, records, weights, row)
      self.held.assign(False)
      left = [*zip(variables, after), *((v, tf.convert_to_tensor(v)) for v, _ in others)]
      private = {id(compat.raw_variable(v)) for v in (
          self.held, *tf.nest.flatten(optimizer.run.state[1].secret),
          *(v for metric in model.metrics for v in metric.variables))}
      return {f'{getattr(v, "path", v.name)} ({i})': np.asarray(value)
              for i, (v, value) in enumerate(left) if id(compat.raw_variable(v)) not in private}

    return step


def captured(traced: Any, variables: Sequence[Any]) -> Sequence[Tuple[Any, Any]]:
  """Returns the other variables that a traced step reads or writes, with their values."""
  known = {id(compat.raw_variable(v)) for v in variables}
  return [(v, tf.convert_to_tensor(v)) for v in traced.graph.variables if id(v) not in known]
