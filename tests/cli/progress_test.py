# SPDX-License-Identifier: Apache-2.0
"""A command is never silent for long; what it writes itself is left as it is."""

import io

from tfdp_adaptive.cli import progress


def watched():
  now, stream = [0.0], io.StringIO()
  watch = progress.Watch(stream, 'tfdp train', clock=lambda: now[0])

  def at(second):
    now[0] = second
    watch.beat()
    return stream.getvalue()

  return watch, at


def test_the_first_line_comes_within_two_seconds():
  _, at = watched()
  assert at(1.0) == '' and at(1.75) == 'tfdp train: at work for 2 s\n'
  assert at(16.0).count('\n') == 1 and at(17.0).count('\n') == 2


def test_what_the_command_writes_counts_and_is_kept():
  watch, at = watched()
  watch.write('reading\n')
  assert at(14.0) == 'reading\n'
  watch.write('\r 3/50')
  assert at(28.0) == 'reading\n\r 3/50'
  assert at(29.5) == 'reading\n\r 3/50\ntfdp train: at work for 30 s\n'  # Below the bar.
  assert at(60.0).endswith('30 s\ntfdp train: at work for 60 s\n')


def test_streams_of_callers_are_left_alone(capsys):
  import sys  # pylint: disable=g-import-not-at-top
  before = sys.stderr
  with progress.shown('tfdp train'):
    assert sys.stderr is before
  assert capsys.readouterr().err == ''
