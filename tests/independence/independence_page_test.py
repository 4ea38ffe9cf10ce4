# SPDX-License-Identifier: Apache-2.0
"""The page of what the probe of values refuses and passes has every case of its tests."""

import honest_models_test
import independence_table
import independence_test


def test_the_page_has_every_case():
  """`make independence-table` writes it."""
  text = independence_table.PAGE.read_text(encoding='utf-8')
  cases = [*independence_test.MIXING, *independence_test.RARELY, *honest_models_test.HONEST]
  rows = [line for line in text.splitlines() if line.startswith('| ')]
  assert [line.split(' | ')[0][2:] for line in rows if line[2:6] != 'What'] == cases
