# SPDX-License-Identifier: Apache-2.0
"""The page of pitfalls says what the tests of misuse say, and each line has its words."""

import pitfalls


def test_the_page_is_what_the_tests_say():
  assert pitfalls.PAGE.read_text(encoding='utf-8') == pitfalls.page(pitfalls.collect()), (
      'Run `python tests/pitfalls.py`.')


def test_every_pitfall_is_one_sentence_with_a_severity():
  collected = list(pitfalls.collect())
  assert len(collected) >= 60 and {one.area for one in collected} == set(pitfalls.AREAS.values())
  for one in collected:
    assert one.severity in pitfalls.SEVERITIES and one.stops and one.what.endswith('.'), one
    assert '|' not in one.what + one.stops, one
  assert len({one.what for one in collected}) == len(collected)
