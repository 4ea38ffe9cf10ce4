# SPDX-License-Identifier: Apache-2.0
"""`tfdp federated`: the same model over users, who keep their text, with a private server.

A run that was interrupted, or lost a worker, goes on when the command is given again
with the same --out. What it keeps there for that (`federated.state/`) is secret and is
removed at the end.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import federated
from tfdp_adaptive.examples import settings

if TYPE_CHECKING:
  import argparse


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('federated', description=__doc__)
  text_options.add_client_arguments(parser)
  text_options.add_data_arguments(parser)
  text_options.add_privacy_arguments(parser, f'{federated.EPSILON:g}')
  text_options.add_method_arguments(parser, settings.FEDERATED)
  return parser


def run(arguments: argparse.Namespace) -> None:
  methods = text_options.chosen(arguments.methods, settings.FEDERATED, '--methods')
  federated.require(arguments.workers)
  with text_options.report(arguments, federated.PART) as report:
    federated.run(report, text_options.text(arguments), text_options.by_client(arguments), methods,
                  arguments.tune, arguments.workers)
