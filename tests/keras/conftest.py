# SPDX-License-Identifier: Apache-2.0
"""Models that are alike are examined once: a third of what a first step takes."""

import json
import re

import pytest

from tfdp_adaptive.independence import validation

# Files about the examination itself.
EXAMINE = ('autograph_test.py', 'habits_test.py', 'misuse_test.py', 'padding_test.py')
_KNOWN = set()


def _kind(model, x):
  """All that the outcome depends on, but for weights; None where a configuration is not all."""
  if not all(type(layer).__module__.split('.')[0] == 'keras'
             for layer in model._flatten_layers(include_self=False)):
    return None
  try:
    config = json.dumps(model.get_config(), sort_keys=True, default=str)
  except (NotImplementedError, TypeError, ValueError):
    return None
  return type(model), re.sub(r'"name": "[^"]*"', '', config), str(x)


@pytest.fixture(autouse=True)
def alike_models_are_examined_once(request, monkeypatch):
  if request.path.name in EXAMINE:
    return
  validate = validation.validate_model

  def once(model, x=None):
    kind = _kind(model, x)
    if kind is None or kind not in _KNOWN:
      validate(model, x)
      _KNOWN.add(kind)
    validation._PROBED.add(model)

  monkeypatch.setattr(validation, 'validate_model', once)
