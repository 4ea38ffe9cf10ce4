# SPDX-License-Identifier: Apache-2.0
"""Runs TFF's worker where no network reaches it, behind a socket in the file system.

    python -m tfdp_adaptive.federated.isolated_worker SOCKET [WORKER_BINARY [FLAG ...]]

TFF's `worker_binary` listens on all networks of its machine, encrypts nothing, asks nobody
who they are, and runs whatever code it is sent. So it gets a network of its own, which
has nothing but a loopback (a Linux network namespace; no privileges are needed), and this
program passes on what comes in through SOCKET, whose folder its user alone can enter.
From another machine: `ssh -N -L 8000:SOCKET host`.

WORKER_BINARY is the one of the installed tensorflow_federated by default.

It imports neither TensorFlow nor NumPy: a process with threads cannot enter a namespace. It
ends with status 77 where the system allows for no namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import pathlib
import signal
import socket
import struct
import sys
import threading
import time

NOT_ALLOWED = 77
_PORT = 8000  # Of a network that nobody else is in.
_NEW_USER, _NEW_NETWORK, _PARENT_DEATH_SIGNAL = 0x10000000, 0x40000000, 1
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41
_BYTES = 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
  """Ends this process when `parent` does, in whatever way."""
  _LIBC.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
  if os.getppid() != parent:
    sys.exit()


def isolate() -> None:
  """Leaves all networks for an empty one; exits where that is not allowed."""
  user, group = os.getuid(), os.getgid()
  try:
    if _LIBC.unshare(_NEW_USER | _NEW_NETWORK):
      raise OSError(ctypes.get_errno(), 'unshare')
    for name, text in (('setgroups', 'deny'), ('uid_map', f'{user} {user} 1'),
                       ('gid_map', f'{group} {group} 1')):
      pathlib.Path('/proc/self', name).write_text(text, encoding='ascii')
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
      fcntl.ioctl(control, _SET_FLAGS, struct.pack('16sH14x', b'lo', _UP_AND_RUNNING))
  except OSError as error:
    print(f'No network namespace can be had here: {error}.', file=sys.stderr)
    sys.exit(NOT_ALLOWED)


def start(binary: str, flags: tuple) -> None:
  """Runs the worker, which ends with this process; this process ends with it."""
  me, child = os.getpid(), os.fork()
  if not child:
    die_with(me)
    os.execv(binary, [binary, f'--port={_PORT}', *flags])

  def wait() -> None:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xff or 1)

  threading.Thread(target=wait, daemon=True).start()


def connection() -> socket.socket:
  """A connection to the worker, as soon as it listens."""
  while True:
    try:
      return socket.create_connection(('127.0.0.1', _PORT))
    except OSError:
      time.sleep(0.05)


def pass_on(source: socket.socket, sink: socket.socket) -> None:
  """Copies bytes one way until their end."""
  try:
    while data := source.recv(_BYTES):
      sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)
  except OSError:
    for end in (source, sink):
      end.close()


def serve(path: pathlib.Path) -> None:
  """Passes on connections for ever; the socket is there when the worker listens."""
  connection().close()
  new = path.with_name(path.name + '.new')
  for left in (path, new):
    left.unlink(missing_ok=True)
  with socket.socket(socket.AF_UNIX) as server:
    server.bind(str(new))
    new.chmod(0o600)
    server.listen()
    new.rename(path)
    while True:
      outside, _ = server.accept()
      inside = connection()
      for ends in ((outside, inside), (inside, outside)):
        threading.Thread(target=pass_on, args=ends, daemon=True).start()


def installed_binary() -> str:
  """Returns the path of TFF's worker, which is found and not imported."""
  found = importlib.util.find_spec('tensorflow_federated')
  for folder in (found.submodule_search_locations or ()) if found else ():
    return str(pathlib.Path(folder) / 'data' / 'worker_binary')
  sys.exit('WORKER_BINARY must be given: tensorflow_federated is not installed here.')


def main(path: str, binary: str = '', *flags: str) -> None:
  binary = binary or installed_binary()
  parent = os.environ.pop('TFDP_WORKER_PARENT', '')
  if parent:
    die_with(int(parent))
  isolate()
  pathlib.Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
  start(binary, flags)
  serve(pathlib.Path(path))


if __name__ == '__main__':
  main(*sys.argv[1:])
