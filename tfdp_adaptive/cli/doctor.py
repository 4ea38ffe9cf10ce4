# SPDX-License-Identifier: Apache-2.0
"""`tfdp doctor`: what an issue report needs, as text to paste. It reads no data."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
from typing import Any, Dict

from tfdp_adaptive import errors
from tfdp_adaptive import version
from tfdp_adaptive.cli import options
from tfdp_adaptive.examples import report

_EXTRAS = {'plots': 'matplotlib', 'flower': 'flwr', 'ray': 'ray', 'keras-hub': 'keras_hub',
           'onnx': 'onnx', 'sign': 'model_signing', 'completion': 'argcomplete'}
_SETTINGS = ('KERAS_BACKEND', 'TF_USE_LEGACY_KERAS', 'TF_XLA_FLAGS', 'XLA_FLAGS',
             'TF_DETERMINISTIC_OPS', 'TF_ENABLE_ONEDNN_OPTS', 'CUDA_VISIBLE_DEVICES')


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add('model', metavar='MODEL', nargs='?',
      help='a saved Keras model, or module:function that returns one: also show how its layers '
           'are clipped')
  add('--json', action='store_true', help='print JSON')


def run(arguments: argparse.Namespace) -> None:
  found = facts()
  clipping: Any = None
  if arguments.model is not None:
    import tfdp_adaptive as tfdp  # pylint: disable=import-outside-toplevel
    from tfdp_adaptive.cli import explain_clipping  # pylint: disable=import-outside-toplevel
    model = explain_clipping.load(arguments.model)
    with errors.usage():
      clipping = tfdp.explain_clipping(model)
    found['model'] = type(model).__name__
  if arguments.json:
    if clipping is not None:
      found['clipping'] = clipping.to_dict()
    print(options.to_json(found))
    return
  for name, value in found.items():
    shown = value if isinstance(value, str) else json.dumps(value)
    print(f'{name:<10} {shown}')
  if clipping is not None:
    print(f'\n{clipping}')
  print('\nPaste this into a report, after you have read it. It holds nothing of your data. '
        f'Repository: {version.REPOSITORY}')


def facts() -> Dict[str, Any]:
  """Returns versions, the stack, the machine and the settings that change what runs."""
  import tensorflow as tf  # pylint: disable=import-outside-toplevel

  from tfdp_adaptive import compat  # pylint: disable=import-outside-toplevel
  return {
      'versions': ', '.join(f'{name} {found}' for name, found in report.versions().items()),
      'stack': f'Keras {3 if compat.KERAS_3 else 2}'
               + (', TensorFlow Federated' if _has('tensorflow_federated') else ''),
      'system': f'{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs',
      'devices': [device.device_type for device in tf.config.list_physical_devices()],
      'extras': [name for name, module in _EXTRAS.items() if _has(module)],
      'settings': {name: os.environ[name] for name in _SETTINGS if name in os.environ}}


def _has(module: str) -> bool:
  return importlib.util.find_spec(module) is not None
