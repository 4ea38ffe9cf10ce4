# SPDX-License-Identifier: Apache-2.0
"""`tfdp compare`: the same model with each private optimizer, sentence by sentence."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import compare
from tfdp_adaptive.examples import settings

if TYPE_CHECKING:
  import argparse


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
  parser = subparsers.add_parser('compare', description=__doc__)
  text_options.add_sentence_arguments(parser)
  text_options.add_data_arguments(parser)
  text_options.add_privacy_arguments(parser, f'{compare.EPSILON:g}')
  text_options.add_method_arguments(parser, settings.CENTRALIZED)
  return parser


def run(arguments: argparse.Namespace) -> None:
  methods = text_options.chosen(arguments.methods, settings.CENTRALIZED, '--methods')
  with text_options.report(arguments) as report:
    compare.run(report, text_options.text(arguments), text_options.by_sentence(arguments), methods,
                arguments.tune)
