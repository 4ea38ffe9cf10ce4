# SPDX-License-Identifier: Apache-2.0
"""Different rules for different variables, on one noisy gradient."""

from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import wrapping

Predicate = Callable[[tf.TensorSpec], bool]


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  rules: Any  # States of the rules, in their order; () of one without variables.
  parts: trees.Tree  # Empty tensors [0, rule, *shape], one per variable.


def partition(parts: Sequence[Tuple[Predicate, contract.Rule]]) -> contract.Rule:
  """Returns a rule that applies different rules to different variables.

      rules.partition([(lambda spec: len(spec.shape) == 2, rules.muon()),
                       (lambda spec: True, rules.dp_adam())])

  The gradients of a record for all variables have one joint norm. They are clipped once and get
  noise once, so sensitivity, noise and accounting are those of a single rule. Only the update is
  split: each rule gets the noisy gradients of its variables. A partition into equal rules gives the
  same result as the rule, unless the rule combines several variables (`update_clip`, subspaces).

  All rules share one learning rate. Combine rules whose directions have the same unit, such as
  order one per coordinate.

  Args:
    parts: Pairs `(predicate, rule)`. A variable gets the rule of the first predicate that is
      true for its `tf.TensorSpec` (shape, dtype and, in Keras, its path as `name`). All rules
      must make the same single query. Apply `with_clipping`,
      `quantile_clip`, `slack_clip` and `grouped` to the partition, not to its parts.

  Returns:
    A `contract.Rule`.
  """
  parts = _checked(parts)
  predicates, rules = zip(*parts)
  return _partition(predicates, rules)


def _checked(parts: Any) -> Tuple[Tuple[Predicate, contract.Rule], ...]:
  try:
    parts = tuple((predicate, rule) for predicate, rule in parts)
  except (TypeError, ValueError):
    parts = ()
  if not parts or not all(
      callable(predicate) and isinstance(rule, contract.Rule) for predicate, rule in parts):
    raise ValueError('`parts` must be one or more pairs `(predicate, rule)` of a function of a '
                     f'`tf.TensorSpec` and a `tfdp.rules` rule. Received: parts={parts}.')
  first = parts[0][1]
  for _, rule in parts:
    wrapping.require(rule, 'query', 'clip norm', 'step')
    if rule.asks[0].side_query is not None or rule.asks[0].groups:
      raise ValueError('What moves or splits the clip norm goes around the partition, not into it. '
                       f'Received: rule={rule.name}.')
    if rule.asks != first.asks:
      raise ValueError(
          '`parts` must be of rules that ask for the same, since records are clipped once and get '
          'noise once. Apply `with_clipping` to the partition. Combine rules with a second '
          'statistic with each other only. '
          f'Received: {first.name} and {rule.name}, whose asks differ.')
  wanted = {rule.public for _, rule in parts} - {None}
  if len(wanted) > 1:
    raise ValueError('`parts` must agree on the public gradients they need. '
                     f'Received: {sorted(map(str, wanted))}.')
  return parts


def _check_statistic(rule: contract.Rule, specs: trees.Tree) -> None:
  second = rule.asks[0].second
  shapes = lambda tree: [leaf.shape for leaf in tf.nest.flatten(tree)]
  if second is not None and shapes(specs) != shapes(second.specs(specs)):
    raise ValueError('`parts` must be of rules whose statistics have one value per coordinate. '
                     f'Received: rule={rule.name}.')


def _partition(
    predicates: Tuple[Predicate, ...], rules: Tuple[contract.Rule, ...]) -> contract.Rule:
  """Returns the rule whose variables get the rule of the first predicate that is true for them."""

  def part_of(spec: tf.TensorSpec) -> int:
    for k, predicate in enumerate(predicates):
      if predicate(spec):
        return k
    raise ValueError(
        '`parts` must have a rule for every variable: let the last predicate be '
        f'`lambda spec: True`. Received: none for {spec}.')

  def numbers(parts: trees.Tree) -> List[int]:
    return [part.shape[1] for part in tf.nest.flatten(parts)]

  def pieces(state: State, tree: trees.Tree) -> Tuple[trees.Tree, ...]:
    """Returns one tuple of leaves per rule; an absent tree is absent for all rules."""
    if trees.absent(tree):
      return ((),) * len(rules)
    return wrapping.cut(tree, numbers(state.parts), len(rules))

  def whole(state: State, of_rules: Sequence[trees.Tree]) -> trees.Tree:
    return tf.nest.pack_sequence_as(
        state.parts, wrapping.joined(of_rules, numbers(state.parts)))

  def used(state: State) -> List[bool]:
    return [bool(piece) for piece in pieces(state, state.parts)]

  def public_of(state: State, public: trees.Tree) -> Tuple[trees.Tree, ...]:
    return tuple(piece if rule.public is not None else ()
                 for rule, piece in zip(rules, pieces(state, public)))

  def init(specs: trees.Tree) -> State:
    _check_statistic(rules[0], specs)
    parts = trees.map(lambda s: tf.zeros([0, part_of(s), *s.shape], s.dtype), specs)
    own = wrapping.cut(specs, numbers(parts), len(rules))
    return State(
        moments.first_step(),
        tuple(rule.init(piece) if piece else () for rule, piece in zip(rules, own)), parts)

  def query(state: State, public: trees.Tree = ()) -> contract.Queries:
    asked = [rule.query(own, known)[0] if there else None for rule, own, known, there in zip(
        rules, state.rules, public_of(state, public), used(state))]
    scales = [() if one is None else one.scale for one in asked]
    if all(trees.absent(scale) for scale in scales):
      return (contract.Query(),)
    return (contract.Query(whole(state, [
        trees.map(lambda part: tf.ones(part.shape[2:], part.dtype), piece)
        if trees.absent(scale) else scale
        for scale, piece in zip(scales, pieces(state, state.parts))])),)

  def update(
      state: State, release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, State]:
    directions, states = [], []
    for rule, own, mean, second, known, there in zip(
        rules, state.rules, pieces(state, release.mean), pieces(state, release.second),
        public_of(state, public), used(state)):
      direction, after = rule.update(
          own, (release._replace(mean=mean, second=second),), known) if there else ((), ())
      directions.append(direction)
      states.append(after)
    return whole(state, directions), state._replace(step=state.step + 1, rules=tuple(states))

  def project(state: State, params: trees.Tree) -> trees.Tree:
    return whole(state, [
        piece if rule.project is None or not there else rule.project(own, piece)
        for rule, own, piece, there in zip(
            rules, state.rules, pieces(state, params), used(state))])

  public = {rule.public for rule in rules} - {None}
  return contract.Rule(
      init, query, contract.of_release(update), asks=rules[0].asks,
      public=public.pop() if public else None,
      project=project if any(rule.project is not None for rule in rules) else None,
      name=f'partition({", ".join(rule.name for rule in rules)})',
      independent_noise=any(rule.independent_noise for rule in rules),
      cautions=lambda *numbers: tuple(dict.fromkeys(
          message for rule in rules for message in rule.cautions(*numbers))),
      elementwise=all(rule.elementwise for rule in rules))
