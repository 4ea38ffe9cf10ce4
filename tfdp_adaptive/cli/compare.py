# SPDX-License-Identifier: Apache-2.0
"""`tfdp compare`: the same model with each private optimizer, sentence by sentence."""

import argparse

from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import compare
from tfdp_adaptive.examples import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
  text_options.add_arguments(parser, 'centralized training', 'data', 'output', 'privacy')
  text_options.add_method_arguments(parser, settings.CENTRALIZED)


def run(arguments: argparse.Namespace) -> None:
  methods = {name: settings.CENTRALIZED[name] for name in arguments.methods}
  with text_options.report(arguments) as report:
    compare.run(report, text_options.text(arguments), text_options.by_sentence(arguments), methods,
                arguments.tune)
