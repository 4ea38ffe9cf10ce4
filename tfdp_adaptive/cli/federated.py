# SPDX-License-Identifier: Apache-2.0
"""`tfdp federated`: trains the same model over users, who keep their text, with a private server.

An interrupted run resumes when the command is given again with the same --out. The state that it
saves there (`federated.state/`) is secret, and is removed at the end.
"""

import argparse

from tfdp_adaptive.cli import text_options
from tfdp_adaptive.examples import federated
from tfdp_adaptive.examples import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
  text_options.add_arguments(parser, 'federated training', 'data', 'output', 'privacy')
  text_options.add_method_arguments(parser, settings.FEDERATED)


def run(arguments: argparse.Namespace) -> None:
  methods = {name: settings.FEDERATED[name] for name in arguments.methods}
  with text_options.report(arguments, federated.PART) as report:
    federated.run(report, text_options.text(arguments), text_options.by_client(arguments), methods,
                  arguments.tune)
