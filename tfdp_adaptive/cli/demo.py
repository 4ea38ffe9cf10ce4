# SPDX-License-Identifier: Apache-2.0
"""`tfdp demo`: compares private optimizers in one table and one picture.

It runs `tfdp compare` and `tfdp federated` on one text, and two synthetic tasks that take
seconds. One task has inputs of very different scales, which need adaptive optimizers. The
other has rare classes, which need correlated noise.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import compare
from tfdp_adaptive.examples import demo
from tfdp_adaptive.examples import federated

if TYPE_CHECKING:
  import argparse


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('demo', description=__doc__)
  text_options.add_sentence_arguments(parser)
  text_options.add_client_arguments(parser)
  text_options.add_data_arguments(parser)
  text_options.add_privacy_arguments(
      parser, f'{compare.EPSILON:g} per sentence, {federated.EPSILON:g} per client')
  text_options.add_tune_argument(parser)
  return parser


def run(arguments: argparse.Namespace) -> None:
  federated.require(arguments.workers)
  with text_options.report(arguments, federated.PART) as report:
    demo.run(report, text_options.text(arguments), text_options.by_sentence(arguments),
             text_options.by_client(arguments), arguments.tune, arguments.workers)
