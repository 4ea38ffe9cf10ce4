# SPDX-License-Identifier: Apache-2.0
"""`tfdp privacy`: epsilon of a plan, or the noise multiplier for a target epsilon."""

from __future__ import annotations

import argparse

import tfdp_adaptive as tfdp
from tfdp_adaptive import errors
from tfdp_adaptive.advice import budget
from tfdp_adaptive.cli import options

_DRAWS = 1_000_000
# Name -> the scheme, of the arguments and the number of bins.
SAMPLINGS = {
    'poisson': lambda given, bins: tfdp.sampling.Poisson(),
    'fixed-order': lambda given, bins: tfdp.sampling.FixedOrder(),
    'random-allocation': lambda given, bins: tfdp.sampling.RandomAllocation(bins),
    'balls-in-bins': lambda given, bins: tfdp.sampling.BallsInBins(bins, draws=given.draws),
    'min-separation': lambda given, bins: tfdp.sampling.MinSeparation(
        given.min_sep, draws=given.draws),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add('--population-size', type=options.positive_int, required=True, metavar='N',
      help='number of records (users with --unit user), which becomes public')
  add('--batch-size', type=options.positive_int, metavar='B',
      help='expected number of records in a step')
  add('--steps', type=options.positive_int, metavar='T', help='number of steps (rounds)')
  add('--budget', type=options.positive_float, metavar='C',
      help='total number of examples, in place of --batch-size and --steps; proposes both and '
      'prints the choices; needs --epsilon')
  wanted = parser.add_mutually_exclusive_group(required=True)
  wanted.add_argument('--noise-multiplier', type=options.within(1e-5, 1e13), metavar='S',
                      help='noise in clip norms; prints epsilon')
  wanted.add_argument('--epsilon', type=options.positive_float, metavar='E',
                      help='target epsilon; prints the smallest noise multiplier for it')
  add('--delta', type=options.probability, metavar='D',
      help='target delta (default: the largest power of ten below 1 / N)')
  add('--l2-norm-clip', type=options.positive_float, default=1.0, metavar='C',
      help='clip norm for the statement and --advise; epsilon ignores it (default: %(default)s)')
  add('--unit', choices=('example', 'user'), default='example',
      help='unit of privacy (default: %(default)s)')
  add('--adjacency', choices=('zero_out', 'add_remove', 'replace'), default='zero_out',
      help='relation between neighboring data sets (default: %(default)s)')
  add('--sampling', choices=tuple(SAMPLINGS), default='poisson',
      help='how batches are drawn; a fixed order does not amplify (default: %(default)s)')
  add('--min-sep', type=options.positive_int, default=1, metavar='b',
      help='smallest distance of two steps of a record, for min-separation (default: %(default)s)')
  add('--draws', type=options.positive_int, default=_DRAWS, metavar='n',
      help='random draws to account for bins and min-separation (default: %(default)s)')
  add('--accountant', choices=('pld', 'rdp'), default='pld',
      help='accounting method (default: %(default)s)')
  add('--advise', type=options.positive_int, metavar='M',
      help='also recommend a private Adam for a model with M parameters')
  add('--beta-2', type=options.probability, default=0.999, metavar='b',
      help='decay of the second moment, for --advise (default: %(default)s)')
  add('--json', action='store_true', help='print JSON')


def run(arguments: argparse.Namespace) -> None:
  if arguments.budget is not None:
    _print_choices(arguments)
    return
  plan = make_plan(arguments)
  result = {
      'epsilon': plan.epsilon(accountant=arguments.accountant), 'delta': plan.target_delta,
      'noise_multiplier': plan.noise_multiplier, 'unit': plan.unit, 'adjacency': plan.adjacency,
      'accountant': arguments.accountant}
  statement = plan.statement(accountant=arguments.accountant)
  advice = None
  if arguments.advise is not None:
    advice = tfdp.advise(
        batch_size=plan.batch_size, noise_multiplier=plan.noise_multiplier,
        parameters=arguments.advise, l2_norm_clip=plan.l2_norm_clip, beta_2=arguments.beta_2,
        adjacency=plan.adjacency)
  if arguments.json:
    result['statement'] = statement
    if advice is not None:
      result['advice'] = advice.to_dict()
    print(options.to_json(result))
  else:
    for name, value in result.items():
      print(f'{name.replace("_", " "):<17} {value if isinstance(value, str) else f"{value:.6g}"}')
    print('\n' + statement, end='')
    if advice is not None:
      print(f'\n{advice}')


def _print_choices(arguments: argparse.Namespace) -> None:
  if arguments.epsilon is None or arguments.batch_size or arguments.steps:
    raise errors.UsageError('--budget takes the place of --batch-size and --steps, and needs '
                            '--epsilon.')
  choices = tfdp.advice.batch_and_steps(
      population_size=arguments.population_size, target_epsilon=arguments.epsilon,
      target_delta=arguments.delta, examples=arguments.budget, parameters=arguments.advise or 1,
      adjacency=arguments.adjacency, unit=arguments.unit, population_is_public=True)
  options.show(choices, arguments.json)


def make_plan(arguments: argparse.Namespace) -> tfdp.PrivacyPlan:
  if not arguments.batch_size or not arguments.steps:
    raise errors.UsageError('Give --batch-size and --steps, or --budget.')
  fields = dict(
      target_delta=arguments.delta or budget.default_delta(arguments.population_size),
      population_size=arguments.population_size, population_is_public=True,
      batch_size=arguments.batch_size, steps=arguments.steps,
      l2_norm_clip=arguments.l2_norm_clip, unit=arguments.unit, adjacency=arguments.adjacency,
      sampling=SAMPLINGS[arguments.sampling](
          arguments, max(1, round(arguments.population_size / arguments.batch_size))))
  with errors.usage():
    if arguments.epsilon is None:
      return tfdp.PrivacyPlan(noise_multiplier=arguments.noise_multiplier, **fields)
    return tfdp.PrivacyPlan.calibrate(
        target_epsilon=arguments.epsilon, accountant=arguments.accountant, **fields)
