# SPDX-License-Identifier: Apache-2.0
"""No test writes into the checkout, and none reaches beyond this machine: both raise at once.

Python reports files and connections that it opens as audit events. What TensorFlow opens by itself,
and what the processes of a test open, is not seen here.
"""

import ipaddress
import os
import pathlib
import socket
import sys

ROOT = pathlib.Path(__file__).parent.parent
_IGNORED = ('build', '__pycache__', '.git')  # Output of installations, Python and linters.
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MADE = {'os.mkdir': 0, 'os.rename': 1, 'os.link': 1, 'os.symlink': 1}  # Where the new name is.


class NotHere(RuntimeError):
  """A test did what none may do."""


def _check_path(path):
  if not isinstance(path, (str, bytes, os.PathLike)):
    return
  path = os.path.abspath(os.fsdecode(path))
  if not path.startswith(f'{ROOT}{os.sep}'):
    return
  parts = pathlib.Path(path).relative_to(ROOT).parts
  if parts[0].startswith('.venv') or set(_IGNORED).intersection(parts):
    return
  raise NotHere(
      f'A test must not write into the checkout. Received: {path}. Write into `tmp_path`.')


def _check_host(host):
  host = os.fsdecode(host or 'localhost')
  try:
    local = ipaddress.ip_address(host.partition('%')[0])
    local = local.is_loopback or local.is_unspecified
  except ValueError:
    local = host in ('localhost', socket.gethostname())
  if not local:
    raise NotHere(f'A test must do without the network. Received a connection to {host!r}.')


def hook(event, arguments):
  """Raises for an audit event that no test may cause."""
  if event == 'open':
    path, _, flags = arguments
    if flags & _WRITES:
      _check_path(path)
  elif event in _MADE:
    _check_path(arguments[_MADE[event]])
  elif event == 'socket.connect':
    one, address = arguments
    if one.family in (socket.AF_INET, socket.AF_INET6):
      _check_host(address[0])
  elif event == 'socket.getaddrinfo':
    _check_host(arguments[0])


def pytest_configure():
  sys.addaudithook(hook)
