"""Entry point of `tfdp`: reads the arguments and runs one subcommand."""

import argparse
import importlib
import os
import sys

from tfdp_adaptive.cli import options
from tfdp_adaptive.data import corpus

# A module of this package each, with `add_parser(subparsers)` and `run(arguments)`;
# it is imported when it is asked for, so that help does not wait for TensorFlow.
COMMANDS = {
    'demo': 'compare and federated on one text, into one table',
    'compare': 'train with each private optimizer, example by example, and compare',
    'federated': 'train over users with TensorFlow Federated and compare',
    'train': 'train one private model and save it with its privacy statement',
    'audit': 'train with canaries and measure how much privacy was lost at least',
    'privacy': 'epsilon of a plan, or the noise multiplier for a target',
    'explain-clipping': 'which way each layer of a model is clipped, and what that costs',
    'mechanism': 'design correlated noise, beside the alternatives',
}


def main(argv=None) -> int:
  """Runs `tfdp`; returns the exit status: 2 for what the user can put right."""
  argv = sys.argv[1:] if argv is None else argv
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # TF 2.14 logs missing GPUs as errors.
  parser = argparse.ArgumentParser(
      prog='tfdp', description='Differentially private training with adaptive optimizers.')
  subparsers = parser.add_subparsers(dest='command', metavar='command', required=True)
  for name, summary in COMMANDS.items():
    if name in argv[:1]:
      module = importlib.import_module(f'tfdp_adaptive.cli.{name.replace("-", "_")}')
      module.add_parser(subparsers).set_defaults(run=module.run)
    else:
      subparsers.add_parser(name, help=summary)
  arguments = parser.parse_args(argv)
  try:
    return arguments.run(arguments) or 0
  except (options.UsageError, corpus.DataError, OSError) as error:  # Such as a full disk.
    print(f'tfdp {arguments.command}: error: {error}', file=sys.stderr)
    return 2
  except MemoryError as error:
    print(f'tfdp {arguments.command}: error: more memory is needed than there is. {error}',
          file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print(f'tfdp {arguments.command}: interrupted', file=sys.stderr)
    return 130


if __name__ == '__main__':
  sys.exit(main())
