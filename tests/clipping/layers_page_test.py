# SPDX-License-Identifier: Apache-2.0
"""The page of supported layers says what this library does, of every layer that Keras has."""

import pytest

from tfdp_adaptive import compat

if not compat.KERAS_3:
  pytest.skip('the page is about Keras 3', allow_module_level=True)

import layers_table  # noqa: E402


def test_every_layer_of_keras_with_weights_has_a_line():
  listed = {word for name in layers_table.LAYERS for word in name.split(', ')}
  missing = layers_table.with_weights() - listed - layers_table.OTHERS
  assert not missing and len(layers_table.with_weights()) > 30


@pytest.mark.thorough
def test_the_page_is_what_the_program_writes():
  """`python tests/clipping/layers_table.py` writes it."""
  written = layers_table.PAGE.read_text(encoding='utf-8').splitlines()
  rows = [line for line in written if line.startswith('| ') and 'shape of an example' not in line]
  now = layers_table.page().splitlines()
  assert [line for line in now if line in rows] == rows
  assert len(rows) == len(layers_table.LAYERS)
