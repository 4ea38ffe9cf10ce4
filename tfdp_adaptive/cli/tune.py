# SPDX-License-Identifier: Apache-2.0
"""`tfdp tune`: settings chosen privately, one epsilon for all runs, the best one saved.

The number of runs is random and secret, as is how they end; a progress bar would tell of
both. What is printed at the end may be known at the epsilon that is printed with it, but
for the exact numbers on held-out text. A search that was interrupted goes on when the
command is given again with the same --out; `tune.state/` in it is secret until the end.
"""

import argparse
from typing import List

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import settings as settings_lib
from tfdp_adaptive.examples import tune


def add_arguments(parser: argparse.ArgumentParser) -> None:
  text_options.add_arguments(parser, 'centralized training')
  group = parser.add_argument_group('search')
  group.add_argument('--runs', type=options.within(1, 1e4), default=10.0, metavar='K',
                     help='expected number of runs, at least 1 (default: %(default)g)')
  group.add_argument('--shape', type=options.within(0, 100), default=1.0, metavar='ETA',
                     help='shape of the distribution of the number of runs: 0 is logarithmic '
                          'and cheapest, 1 geometric (default: %(default)g)')
  group.add_argument('--score-noise', type=options.positive_float, default=10.0, metavar='S',
                     help='noise on the score of a run, in validation sentences (default: '
                          '%(default)g)')
  group.add_argument('--grid', action='append', default=[], metavar='NAME=V,V,...',
                     help='values to try for a setting; may be repeated (default: the '
                          'recorded grid)')
  text_options.add_arguments(parser, 'data', 'output', 'privacy')
  text_options.add_one_method_arguments(parser, settings_lib.CENTRALIZED)


def run(arguments: argparse.Namespace) -> None:
  method = settings_lib.CENTRALIZED[arguments.method]
  settings = options.changed(method.settings, arguments.set)
  grid = options.assigned('--grid', arguments.grid, list(method.settings), _values) or {
      name: list(values) for name, values in method.grid.items()}
  search = tfdp.privacy.Search(arguments.runs, arguments.shape, arguments.score_noise)
  with text_options.report(arguments, 'tune') as report:
    tune.run(report, text_options.text(arguments), text_options.by_sentence(arguments),
             arguments.method, settings, grid, search)


def _values(text: str) -> List[float]:
  return [options.positive_float(value) for value in text.split(',')]
