# SPDX-License-Identifier: Apache-2.0
"""`tfdp demo`: compares private optimizers in one table and one picture.

It runs `tfdp compare` and `tfdp federated` on one text, and two synthetic tasks that take
seconds. One task has inputs of very different scales, which need adaptive optimizers. The
other has rare classes, which need correlated noise.
"""

import argparse

from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import demo
from tfdp_adaptive.examples import federated


def add_arguments(parser: argparse.ArgumentParser) -> None:
  text_options.add_arguments(
      parser, 'centralized training', 'federated training', 'data', 'output', 'privacy')
  text_options.add_tune_argument(parser)


def run(arguments: argparse.Namespace) -> None:
  with text_options.report(arguments, federated.PART) as report:
    demo.run(report, text_options.text(arguments), text_options.by_sentence(arguments),
             text_options.by_client(arguments), arguments.tune)
