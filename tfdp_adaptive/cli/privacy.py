# SPDX-License-Identifier: Apache-2.0
"""`tfdp privacy`: epsilon of a plan, or the noise multiplier for a target epsilon."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Dict, Optional, Tuple

import tfdp_adaptive as tfdp
from tfdp_adaptive import errors
from tfdp_adaptive.cli import mechanism
from tfdp_adaptive.cli import options
from tfdp_adaptive.mechanisms import registry

_DRAWS = 1_000_000
# Name of a class in kebab case -> (its argument that SIZE sets, those that `make_plan` sets).
SAMPLINGS: Dict[str, Tuple[Optional[str], Tuple[str, ...]]] = {
    'poisson': (None, ()), 'truncated-poisson': ('max_batch_size', ()),
    'cyclic-poisson': ('cycle', ()), 'poisson-examples': ('examples_per_user', ()),
    'random-allocation': (None, ('cycle',)), 'balls-in-bins': (None, ('cycle', 'draws')),
    'min-separation': (None, ('min_sep', 'draws')), 'fixed-order': (None, ())}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.epilog = 'Samplings: ' + ', '.join(
      name if size is None else f'{name}:{size.upper()}' for name, (size, _) in SAMPLINGS.items())
  add = parser.add_argument
  add('--population-size', type=options.positive_int, required=True, metavar='N',
      help='number of records (users with --unit user), which becomes public')
  add('--batch-size', type=options.positive_int, metavar='B',
      help='expected number of records in a step')
  add('--steps', type=options.positive_int, metavar='T', help='number of steps (rounds)')
  wanted = parser.add_mutually_exclusive_group(required=True)
  wanted.add_argument('--noise-multiplier', type=options.within(1e-5, 1e13), metavar='S',
                      help='noise in clip norms; prints epsilon')
  wanted.add_argument('--epsilon', type=options.positive_float, metavar='E',
                      help='target epsilon; prints the smallest noise multiplier for it')
  add('--delta', type=options.probability, metavar='D',
      help='target delta (default: the largest power of ten below 1 / N)')
  add('--l2-norm-clip', type=options.positive_float, default=1.0, metavar='C',
      help='clip norm for the statement; epsilon ignores it (default: %(default)s)')
  add('--unit', choices=('example', 'user'), default='example',
      help='unit of privacy (default: %(default)s)')
  add('--adjacency', choices=('zero_out', 'add_remove', 'replace'), default='zero_out',
      help='relation between neighboring data sets (default: %(default)s)')
  add('--sampling', default='poisson', metavar='NAME[:SIZE]',
      help='how batches are drawn, see below (default: %(default)s)')
  add('--mechanism', default='independent', metavar='NAME[:SIZE]',
      help='noise: a name of `tfdp mechanism`, or its mechanism.json (default: %(default)s)')
  add('--min-sep', type=options.positive_int, default=1, metavar='b',
      help='smallest distance of two steps of a record, for min-separation (default: %(default)s)')
  add('--draws', type=options.positive_int, default=_DRAWS, metavar='n',
      help='random draws to account for bins and min-separation (default: %(default)s)')
  add('--accountant', choices=('pld', 'rdp'), default='pld',
      help='accounting method (default: %(default)s)')
  add('--json', action='store_true', help='print JSON')


def run(arguments: argparse.Namespace) -> None:
  plan = make_plan(arguments)
  result = {
      'epsilon': plan.epsilon(accountant=arguments.accountant), 'delta': plan.target_delta,
      'noise_multiplier': plan.noise_multiplier, 'unit': plan.unit, 'adjacency': plan.adjacency,
      'accountant': arguments.accountant}
  statement = plan.statement(accountant=arguments.accountant)
  shuffled = _shuffled(plan, arguments.accountant) if plan.amplified else None
  if arguments.json:
    result['statement'] = statement
    if shuffled is not None:
      result['shuffled'] = shuffled
    print(options.to_json(result))
  else:
    for name, value in result.items():
      print(f'{name.replace("_", " "):<17} {value if isinstance(value, str) else f"{value:.6g}"}')
    print('\n' + statement, end='')
    if shuffled is not None:
      print(f'\nIf the batches are shuffled instead: {shuffled["words"]}')


def _shuffled(plan: tfdp.PrivacyPlan, accountant: str) -> Dict[str, Any]:
  """Returns what can be proven if the run shuffles its batches, as `fit` of plain Keras does."""
  if plan.sampling.by_example:
    return {'epsilon': None, 'words': 'no epsilon can be stated, because several examples of a '
                                      'user may be in one batch.'}
  independent = plan.mechanism.bands == 1
  # An epoch is shortest where it leaves out the last, smaller batch.
  epoch = max(1, int((plan.population_size or 0) // plan.batch_size))
  try:
    fixed = dataclasses.replace(
        plan, sampling=tfdp.sampling.FixedOrder(), min_sep=None,
        max_participations=-(-plan.steps // epoch) if independent else None)
  except ValueError as error:
    return {'epsilon': None, 'words': f'no epsilon can be stated. {error}'}
  (separation, epochs), epsilon = fixed.participation(), fixed.epsilon(accountant=accountant)
  order = f'{epoch} steps' if independent else f'{separation} steps, all in the same order'
  return {'epsilon': epsilon, 'words': (
      f'epsilon {epsilon:.6g}. Nothing proves here that shuffling amplifies privacy, so each '
      f'{plan.unit} counts in full, once in each of {epochs} epochs of {order}.')}


def make_plan(arguments: argparse.Namespace) -> tfdp.PrivacyPlan:
  if not arguments.batch_size or not arguments.steps:
    raise errors.UsageError('Give --batch-size and --steps.')
  name, size = options.sized(
      arguments.sampling, {name: size for name, (size, _) in SAMPLINGS.items()}, 'A sampling')
  given = dict(min_sep=arguments.min_sep, draws=arguments.draws,
               cycle=max(1, round(arguments.population_size / arguments.batch_size)))
  meaning, others = SAMPLINGS[name]
  chosen = {**{key: given[key] for key in others}, **({meaning: size} if meaning else {})}
  with errors.usage():
    fields = dict(
        target_delta=arguments.delta or tfdp.advice.default_delta(arguments.population_size),
        population_size=arguments.population_size, population_is_public=True,
        batch_size=arguments.batch_size, steps=arguments.steps,
        l2_norm_clip=arguments.l2_norm_clip, unit=arguments.unit, adjacency=arguments.adjacency,
        sampling=getattr(tfdp.sampling, name.title().replace('-', ''))(**chosen))
    fields['mechanism'] = _mechanism(arguments.mechanism, fields)
    if arguments.epsilon is None:
      return tfdp.PrivacyPlan(noise_multiplier=arguments.noise_multiplier, **fields)
    return tfdp.PrivacyPlan.calibrate(
        target_epsilon=arguments.epsilon, accountant=arguments.accountant, **fields)


def _mechanism(text: str, fields: Dict[str, Any]) -> tfdp.mechanisms.Mechanism:
  """Returns the mechanism of a file, or one that is designed for the plan's participations."""
  if text.endswith('.json'):
    return tfdp.mechanisms.load(text)
  name, size = mechanism.parse(text)
  if name == 'independent':
    return tfdp.mechanisms.IndependentGaussian()
  plan = tfdp.PrivacyPlan(noise_multiplier=1.0, **fields)
  min_sep, most = plan.participation()
  return registry.design(name, plan.steps, size, min_sep=min_sep, max_participations=most,
                         fixed_order=plan.fixed_order)
