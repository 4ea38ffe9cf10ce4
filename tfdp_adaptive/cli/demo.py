# SPDX-License-Identifier: Apache-2.0
"""`tfdp demo`: what the library is for, in one table and one picture.

`tfdp compare` and `tfdp federated` on one text, and two tasks of seconds on data made
up for them: inputs of very different scale, where the noise must have the geometry of
the optimizer, and rare classes, where the noise of the steps must cancel.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from tfdp_adaptive.cli import compare
from tfdp_adaptive.cli import federated
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import report as report_lib
from tfdp_adaptive.cli import settings as settings_lib
from tfdp_adaptive.cli import showcases
from tfdp_adaptive.cli import tasks

if TYPE_CHECKING:
  import argparse

def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('demo', description=__doc__)
  compare.add_arguments(parser)
  federated.add_arguments(parser)
  options.add_data_arguments(parser)
  options.add_privacy_arguments(
      parser, f'{compare.EPSILON:g} per sentence, {federated.EPSILON:g} per client')
  options.add_tune_argument(parser)
  return parser


def run(arguments: argparse.Namespace) -> None:
  federated.require(arguments.workers)
  with report_lib.Report(arguments.out, federated.PART) as report:
    task = tasks.load(arguments, need_client=True)
    by_sentence = compare.make_plan(arguments, task)
    by_client = federated.make_plan(arguments, task)
    report.describe(task, arguments)
    report.state(*report_lib.preamble(task, arguments))
    compare.train_all(arguments, task, by_sentence, settings_lib.CENTRALIZED, report)
    for case in (showcases.SCALES, showcases.NOISE):
      showcases.run(case, report, arguments.tune)
    report.state('The parts "scales" and "noise" used data made up for them.')
    federated.train_all(arguments, task, by_client, settings_lib.FEDERATED, report)
    report.state('Both parts on text used the same. The models of the centralized part promise '
                 'nothing for a client as a whole, so neither do both parts together.')
    report.finish(arguments.json)
