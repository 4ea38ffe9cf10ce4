# SPDX-License-Identifier: Apache-2.0
"""Entry point of `tfdp`: reads the arguments and runs one subcommand."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import io
import os
import signal
import sys
import textwrap
import threading
import types
from typing import Any, Iterable, Iterator, NoReturn, Optional, Sequence, Type, Union
import warnings

from tfdp_adaptive import errors
from tfdp_adaptive import gate
from tfdp_adaptive.cli import options

# Command -> (summary, examples). Each is a module of this package with `add_arguments(parser)` and
# `run(arguments)`. It is imported when it is called, so that help does not wait.
COMMANDS = {
    'demo': (
        'compare and federated on one text, into one table',
        ('tfdp demo', 'tfdp demo --data posts.jsonl --vocabulary words.txt --out runs/mine')),
    'compare': (
        'train with each private optimizer, example by example, and compare',
        ('tfdp compare --data posts.jsonl --vocabulary words.txt',
         'tfdp compare --methods dp_sgd,dp_adam --epsilon 2 --steps 500 --json')),
    'federated': (
        'train over users, with noise at the server, and compare',
        ('tfdp federated --data posts.jsonl --rounds 100 --out runs/users',)),
    'audit': (
        'measure how much privacy is lost at least, by an attack or by looking at every step',
        ('tfdp audit --method dp_adam_stp',
         'tfdp audit --white-box --method DPAdamIME --epsilon 2 --json')),
    'privacy': (
        'epsilon of a plan, or the noise multiplier for a target',
        ('tfdp privacy --population-size 20000 --batch-size 500 --steps 1000 --epsilon 3',
         'tfdp privacy --population-size 20000 --batch-size 500 --steps 1000 '
         '--noise-multiplier 1.1 --json')),
    'card': (
        'the privacy card of a run or of a saved model, for people and for programs',
        ('tfdp card runs/mine --out card', 'tfdp card model.keras --words "the data=one review '
         'a person"')),
    'verify': (
        'check a privacy card: epsilon again, by another accountant, and all else that follows',
        ('tfdp verify card.json --weights model.keras',)),
    'explain-clipping': (
        'which way each layer of a model is clipped, and what that costs',
        ('tfdp explain-clipping model.keras',
         'tfdp explain-clipping my_package.models:build --batch-size 256')),
    'doctor': (
        'versions, devices and the clipping of a model, for a report; reads no data',
        ('tfdp doctor', 'tfdp doctor model.keras')),
    'mechanism': (
        'design correlated noise, beside the alternatives',
        ('tfdp mechanism --steps 1000 --design blt:4',
         'tfdp mechanism --steps 2000 --min-sep 400 --max-participations 5 '
         '--design banded-toeplitz:64 --json')),
}
_SLOW = 'tensorflow'  # Seconds to import.
_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Runs `tfdp`; returns the exit status: 2 for what the user can put right."""
  argv = sys.argv[1:] if argv is None else argv
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # TF 2.14 logs missing GPUs as errors.
  _open_closed_streams()
  command, interrupts = 'tfdp', _Interrupts()
  _load_when_used(_SLOW, interrupts)
  try:
    if argv and not argv[0].startswith('-'):
      try:
        argv = [options.one_of(argv[0], list(COMMANDS)), *argv[1:]]
      except argparse.ArgumentTypeError as error:
        parser().error(f'the command {error}')
    arguments = parser(argv).parse_args(argv)
    command = f'tfdp {arguments.command}'
    if getattr(arguments, 'out', None) is not None:
      options.check_folder(arguments.out)
    with _notes(command), gate.loading():  # Typing the name of an experimental part allows it.
      status = arguments.run(arguments) or 0
    sys.stdout.flush()  # A full disk or a closed pipe shows here at the latest.
    return status
  except KeyboardInterrupt:
    return _interrupted(command)
  except Exception as error:  # pylint: disable=broad-except
    # An interrupt while a library is imported may come out as any error of its own.
    return _interrupted(command) if interrupts.seen else _status(command, error)
  finally:
    interrupts.close()


def _status(command: str, error: Exception) -> int:
  """Reports errors that the user can fix. Raises all other errors again."""
  if isinstance(error, BrokenPipeError):  # `tfdp ... | head`.
    _drop_output()
    return _BROKEN_PIPE
  if isinstance(error, MemoryError):
    return _fail(command, f'more memory is needed than there is. {error}')
  # Such as a full disk, or a part that is not installed.
  if isinstance(error, (errors.UsageError, OSError, ImportError)):
    return _fail(command, error)
  raise error


@contextlib.contextmanager
def _notes(command: str) -> Iterator[None]:
  """Prints the library's warnings in one line, without file and line number."""
  usual = warnings.showwarning

  def show(
      message: Union[Warning, str], category: Type[Warning], *place: Any, **kwargs: Any) -> None:
    if issubclass(category, errors.Caution):
      import tqdm  # Not for `--help`, which it would keep waiting.
      tqdm.tqdm.write(f'{command}: note: {message}', file=sys.stderr)  # Above a progress bar.
    else:
      usual(message, category, *place, **kwargs)

  warnings.showwarning = show
  try:
    yield
  finally:
    warnings.showwarning = usual


def _interrupted(command: str) -> int:
  print(f'{command}: interrupted', file=sys.stderr)
  return _INTERRUPTED


class _Interrupts:
  """Whether Ctrl-C was pressed, even if the exception was caught elsewhere."""

  def __init__(self) -> None:
    self.seen = self._held = False
    self._before = signal.getsignal(signal.SIGINT)
    self._ours = (self._before is signal.default_int_handler
                  and threading.current_thread() is threading.main_thread())
    if self._ours:
      signal.signal(signal.SIGINT, self._note)

  def _note(self, number: int, frame: Optional[types.FrameType]) -> None:
    self.seen = True
    if not self._held:
      signal.default_int_handler(number, frame)

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Raises an interrupt at the end: while TensorFlow loads, its C++ would print a traceback."""
    self._held = True
    try:
      yield
    finally:
      self._held = False
    if self.seen:
      raise KeyboardInterrupt

  def close(self) -> None:
    if self._ours:
      signal.signal(signal.SIGINT, self._before)


class _Parser(argparse.ArgumentParser):
  """Reports an error in one line, by the command that was called, without all its options."""

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    found, unknown = super().parse_known_args(args, namespace)
    if unknown:
      close = difflib.get_close_matches(unknown[0].split('=')[0], self._option_string_actions, 1)
      self.error(f'unrecognized arguments: {" ".join(unknown)}'
                 + (f'. Did you mean {close[0]}?' if close else ''))
    return found, unknown

  def error(self, message: str) -> NoReturn:
    self.exit(2, f'{self.prog}: error: {message} (see {self.prog} --help)\n')


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
  """Returns the parser, with the arguments of the subcommand that `argv` starts with."""
  result = _Parser(
      prog='tfdp', formatter_class=argparse.RawDescriptionHelpFormatter,
      description='Differentially private training with adaptive optimizers.',
      epilog=_epilog(examples[0] for _, examples in COMMANDS.values()))
  result.add_argument('--version', action=_Version, nargs=0,
                      help='print the versions of tfdp, Python, TensorFlow and Keras')
  subparsers = result.add_subparsers(dest='command', metavar='command', required=True)
  completing = '_ARGCOMPLETE' in os.environ and importlib.util.find_spec('argcomplete')
  for name, (summary, examples) in COMMANDS.items():
    if completing or name in argv[:1]:
      module = importlib.import_module(f'tfdp_adaptive.cli.{name.replace("-", "_")}')
      command = subparsers.add_parser(
          name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
      module.add_arguments(command)
      command.set_defaults(run=module.run)
      notes = textwrap.fill(command.epilog or '', 80)
      command.epilog = '\n\n'.join(filter(None, [notes, _epilog(examples)]))
    else:
      subparsers.add_parser(name, help=summary)
  if completing:
    importlib.import_module('argcomplete').autocomplete(result)
  return result


def _epilog(examples: Iterable[str]) -> str:
  return '\n'.join(['examples:', *(f'  {example}' for example in examples)])


class _Version(argparse.Action):
  """Prints the versions of the library and of its platform, in one line."""

  def __call__(self, *_: object) -> None:
    from tfdp_adaptive.examples import report  # pylint: disable=import-outside-toplevel
    print(', '.join(f'{name} {found}' for name, found in report.versions().items()))
    raise SystemExit(0)


class _Later(types.ModuleType):
  """A module that is imported when something in it is used: wrong arguments do not wait for it.

  The files below import TensorFlow at their top, as is usual, which takes seconds.
  """

  def __init__(self, spec: importlib.machinery.ModuleSpec, interrupts: _Interrupts) -> None:
    super().__init__(spec.name)
    self.__spec__ = spec
    self.__held__ = interrupts.held

  def __getattr__(self, attribute: str) -> Any:
    if attribute.startswith('__') and attribute != '__path__':  # Asked by the import system.
      raise AttributeError(attribute)
    if sys.modules.get(self.__name__) is self:
      del sys.modules[self.__name__]
    with self.__held__():
      module = importlib.import_module(self.__name__)
    return getattr(module, attribute)


def _load_when_used(name: str, interrupts: _Interrupts) -> None:
  spec = None if name in sys.modules else importlib.util.find_spec(name)
  if spec is not None:
    sys.modules[name] = _Later(spec, interrupts)


def _open_closed_streams() -> None:
  """Opens the null device for a closed stream, as of `tfdp >&-`."""
  for name in ('stdout', 'stderr'):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, 'w', encoding='utf-8'))
    elif hasattr(getattr(sys, name), 'reconfigure'):
      getattr(sys, name).reconfigure(errors='backslashreplace')  # Under LANG=C, too.


def _fail(command: str, error: object) -> int:
  _drop_output()
  text = ' '.join(str(error).split())  # It is one line.
  print(f'{command}: error: {text}', file=sys.stderr)
  return 2


def _drop_output() -> None:
  """Discards unwritten output, so that Python does not retry it at exit."""
  try:
    sys.stdout.flush()
  except OSError:
    try:
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, io.UnsupportedOperation):
      pass


if __name__ == '__main__':
  sys.exit(main())
