# SPDX-License-Identifier: Apache-2.0
"""`tfdp mechanism`: designs a noise mechanism and compares it with alternatives."""

import argparse
import json
import sys
from typing import Optional, Tuple

from tfdp_adaptive import errors
from tfdp_adaptive import mechanisms
from tfdp_adaptive.cli import options
from tfdp_adaptive.examples import designs
from tfdp_adaptive.examples import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.epilog = (
      'NAME is one of ' + ', '.join(
          name if design.size is None else f'{name}:{design.size.upper()}'
          for name, (_, design) in mechanisms.DESIGNS.items())
      + '. Errors are those of the prefix sums of gradients (the iterates of SGD, with --momentum) '
      'per unit noise multiplier and clip norm, sensitivity included.')
  add = parser.add_argument
  add('--steps', type=options.positive_int, required=True, metavar='T')
  add('--design', default='blt:4', metavar='NAME[:SIZE]',
      help='the mechanism to save (default: %(default)s)')
  add('--beside', metavar='NAME[:SIZE],...',
      help='mechanisms to compare with, or "none" (default: those that fit the number of steps)')
  add('--min-sep', type=options.positive_int, metavar='B',
      help='smallest number of steps between two participations of a record')
  add('--max-participations', type=options.positive_int, default=1, metavar='K',
      help='largest number of steps a record takes part in (default: %(default)s)')
  add('--fixed-order', action='store_true',
      help='same order in every epoch, so that all distances are multiples of --min-sep')
  add('--momentum', type=float, default=0.0, metavar='M',
      help='momentum of the optimizer (default: %(default)s)')
  add('--objective', choices=('mean', 'max', 'last'), default='mean',
      help='the error to minimize (default: %(default)s)')
  add('--parameters', type=options.positive_int, metavar='P',
      help='show memory and time of the noise on this machine for P parameters')
  add('--out', type=options.path, metavar='DIR',
      help='folder for mechanism.json, results.json and errors.png (default: runs/<time>)')
  add('--json', action='store_true', help='print the results as JSON instead of a table')


def run(arguments: argparse.Namespace) -> None:
  wanted = designs.Wanted(**{name: getattr(arguments, name) for name in designs.Wanted._fields})
  beside = arguments.beside
  names = (designs.alternatives(wanted) if beside is None else
           [] if beside == 'none' else beside.split(','))
  with errors.usage():
    rows = designs.compare(wanted, [parse(text) for text in [arguments.design, *names]])
  bound = designs.lower_bound(wanted)
  shown = [{key: value for key, value in row.items() if key != 'made'} for row in rows]
  results = json.dumps(dict(options=options.asked(arguments), lower_bound_of_mean_error=bound,
                            rows=shown), indent=1)
  paths = designs.save(arguments.out or report.unused(), rows, results, wanted)
  if arguments.json:
    print(results)
  else:
    print(designs.table(rows))
    print(f'\nNo mechanism has a mean error below {bound:.6g}.' if bound else '')
    print(f'{rows[0]["mechanism"]} is in mechanism.json: tfdp.mechanisms.load(...).\n')
  print('\n'.join(map(str, paths)), file=sys.stderr if arguments.json else sys.stdout)


def parse(text: str) -> Tuple[str, Optional[int]]:
  """Returns `(name, size)` of `NAME[:SIZE]`."""
  sizes = {name: design.size for name, (_, design) in mechanisms.DESIGNS.items()}
  return options.sized(text, sizes, 'A mechanism')
