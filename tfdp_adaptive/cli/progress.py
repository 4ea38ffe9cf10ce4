# SPDX-License-Identifier: Apache-2.0
"""Reports that a command is at work after a long silence."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any, Callable, Iterator, TextIO

FIRST, LATER = 1.5, 15.0  # Seconds of silence at the start, and after that.


class Watch:
  """An error stream that knows how long nothing was written to it.

  Args:
    stream: The stream to write to.
    command: Name of the command.
    clock: `() -> seconds`.
  """

  def __init__(
      self, stream: TextIO, command: str, clock: Callable[[], float] = time.monotonic) -> None:
    self._stream, self._command, self._clock = stream, command, clock
    self._began = self._last = clock()
    self._patience, self._in_line = FIRST, False

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    self._last, self._patience = self._clock(), LATER
    self._in_line = not text.endswith('\n')
    return self._stream.write(text)

  def beat(self) -> None:
    """Writes a line after a long silence, below a progress bar that is not finished."""
    now = self._clock()
    if now - self._last >= self._patience:
      self.write('\n' * self._in_line
                 + f'{self._command}: at work for {now - self._began:.0f} s\n')
      self._stream.flush()


@contextlib.contextmanager
def shown(command: str) -> Iterator[None]:
  """Watches the process' own error stream, but not a stream that a caller installed."""
  stream = sys.__stderr__
  if stream is None or sys.stderr is not stream:
    yield
    return
  watch, done = Watch(stream, command), threading.Event()

  def beats() -> None:
    while not done.wait(.25):
      with contextlib.suppress(OSError, ValueError):  # A stream that was closed.
        watch.beat()

  thread = threading.Thread(target=beats, daemon=True)
  sys.stderr = watch  # type: ignore[assignment]
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
    sys.stderr = stream
