# SPDX-License-Identifier: Apache-2.0
"""`tfdp explain-clipping`: shows how each layer of a model is clipped, and the cost."""

import argparse
import importlib
import os
import sys
import traceback
from typing import Any

import tfdp_adaptive as tfdp
from tfdp_adaptive import errors
from tfdp_adaptive.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add('model', metavar='MODEL',
      help='a saved Keras model (a .keras or .h5 file), or module:function that returns one')
  add('--batch-size', type=options.positive_int, metavar='B',
      help="batch size (default: that of the model's private optimizer, or 32)")
  add('--scaled', action='store_true',
      help='scale before clipping, as scale-then-privatize does (default: as the optimizer)')
  add('--json', action='store_true', help='print JSON')


def run(arguments: argparse.Namespace) -> None:
  model = load(arguments.model)
  with errors.usage():
    explanation = tfdp.explain_clipping(
        model, batch_size=arguments.batch_size, scaled=arguments.scaled or None)
  options.show(explanation, arguments.json)


def load(name: str) -> Any:
  """Returns the Keras model that an argument names, or raises a `UsageError`."""
  from tfdp_adaptive import compat  # It loads Keras. pylint: disable=import-outside-toplevel
  module, colon, function = name.partition(':')
  if os.path.exists(name):
    importlib.import_module('tfdp_adaptive.keras.private')  # Keras finds what was imported.
    try:
      return compat.keras.models.load_model(name, compile=False)
    except Exception as error:  # pylint: disable=broad-except
      raise errors.UsageError(
          f'{name} cannot be loaded: {_first_line(error)} A model with layers of your own '
          'needs their code: give module:function, which returns the model.') from error
  if not colon:
    raise errors.UsageError('MODEL must be a file, or module:function that returns a model. '
                            f'Received: {name}, which does not exist.')
  sys.path.insert(0, os.getcwd())
  try:
    return getattr(importlib.import_module(module), function)()
  except Exception as error:  # The user's code may raise anything. pylint: disable=broad-except
    last = traceback.extract_tb(error.__traceback__)[-1]
    raise errors.UsageError(
        f'{name} must be a module and a function in it, here or on PYTHONPATH, that returns a '
        f'model when it is called without arguments. Received: {type(error).__name__}: '
        f'{_first_line(error)} ({last.filename}, line {last.lineno})') from error
  finally:
    sys.path.remove(os.getcwd())


def _first_line(error: BaseException) -> str:
  """Returns the first line of an error."""
  return (str(error).splitlines() or [type(error).__name__])[0]
