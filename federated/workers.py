# SPDX-License-Identifier: Apache-2.0
"""TFF worker processes: started here or elsewhere, driven by gRPC, never left behind.

TFF's default context starts a worker that shares Python's output and often outlives it, so that
`python train.py | tail` never ends. It also retries a lost worker for ever. The workers here have
no output and end with their parent process. A lost worker is an error.

The connection is neither encrypted nor authenticated. Anyone who can reach a worker can read its
data and run code on it. No network reaches the workers that are started here, see
`isolated_worker`. Use it and an SSH tunnel for other workers, too.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import gc
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, List, Sequence
import warnings

import grpc

from tfdp_adaptive import errors

from . import isolated_worker
from . import rounds
from . import tff

_START_SECONDS, _ANSWER_SECONDS = 60, 10  # For a worker started here, and elsewhere.
_MESSAGE_BYTES = 2 * 1000**3
_EXECUTORS = 16  # `rounds` makes calls of no more sizes than that.
_CHANNEL_OPTIONS = [('grpc.max_receive_message_length', _MESSAGE_BYTES),
                    ('grpc.max_send_message_length', _MESSAGE_BYTES),
                    # Each worker has its own connection, also on the same machine.
                    ('grpc.use_local_subchannel_pool', 1)]
# Runs the binary with "kill me when my parent dies" set; safer than a
# `preexec_fn`, which would run Python between fork and exec of a threaded process.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])
"""


class Workers:
  """One or more TFF workers, each with its own execution context.

  Use it as a context manager. Inside, TFF computations run on the first worker. At the end, the
  processes that it started are ended.

  Args:
    addresses: 'host:port' or 'unix:/path' of running workers. Without addresses, `count` workers
      are started on this machine.
    count: Number of local workers.
    max_concurrent_clients: The number of clients that a local worker trains at a time; 0 for no
        limit.
      Each client needs memory for its own model.

  Attributes:
    addresses: 'unix:/path' or 'host:port' of each worker.
    contexts: The TFF context of each worker.
    processes: `subprocess.Popen` of the workers started here.
  """

  def __init__(
      self, addresses: Sequence[str] = (), *, count: int = 1,
      max_concurrent_clients: int = 0) -> None:
    self.processes: List[subprocess.Popen] = []
    self._channels: List[grpc.Channel] = []
    self._installed = contextlib.ExitStack()
    self._folders = contextlib.ExitStack()
    self.addresses, self.contexts = [], []
    try:
      for _ in range(0 if addresses else count):
        self.addresses.append(self._start(max_concurrent_clients))
      self.addresses.extend(addresses)
      for address in self.addresses:
        check_address(address)
        channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._channels.append(channel)
        self._wait_for(channel, address)
        self.contexts.append(tff.remote_context(_ExecutorFactory(_Stub(channel, address))))
    except BaseException:
      self.close()
      raise

  def installed(self) -> Any:
    """Returns a context manager in which TFF computations run on the first worker."""
    return tff.get_context_stack().install(self.contexts[0])

  def __enter__(self) -> 'Workers':
    self._installed.enter_context(self.installed())
    return self

  def __exit__(self, *error: Any) -> None:
    self._installed.close()
    self.close()

  def close(self) -> None:
    """Ends the processes that were started here; remote workers keep running."""
    for channel in self._channels:
      channel.close()
    for process in self.processes:
      process.kill()
      process.wait()
    self._channels, self.processes = [], []
    self._folders.close()

  def _start(self, max_concurrent_clients: int) -> str:
    """Starts a worker, isolated from the network if possible, and returns its address."""
    flags = [f'--max_concurrent_computation_calls={max_concurrent_clients or -1}']
    folder = pathlib.Path(self._folders.enter_context(tempfile.TemporaryDirectory()))
    path = folder / 'worker'
    process = _run([isolated_worker.__file__, str(path), binary(), *flags],
                   TFDP_WORKER_PARENT=str(os.getpid()))
    while not path.exists() and process.poll() is None:
      time.sleep(0.05)
    if process.returncode != isolated_worker.NOT_ALLOWED:
      self.processes.append(process)
      return f'unix:{path}'
    warnings.warn(
        'The TFF worker of this run listens on all networks of this machine, and runs the code '
        'of whoever reaches it: the system allows for no network namespace of its own. Use a '
        'machine that no stranger reaches, or a firewall.', errors.Caution, stacklevel=2)
    with socket.socket() as probe:
      probe.bind(('localhost', 0))
      port = probe.getsockname()[1]
    self.processes.append(_run(
        ['-c', _LAUNCHER, str(os.getpid()), binary(), f'--port={port}', *flags]))
    return f'localhost:{port}'

  def _wait_for(self, channel: grpc.Channel, address: str) -> None:
    deadline = time.monotonic() + (_START_SECONDS if self.processes else _ANSWER_SECONDS)
    while not _answers(channel):
      ended = [p.returncode for p in self.processes if p.poll() is not None]
      if ended or time.monotonic() > deadline:
        raise rounds.WorkerLostError(
            f'No TFF worker answers at {address}. Start one there with `python -m '
            'tfdp_adaptive.federated.isolated_worker` and `ssh -L` (README, "More machines"), '
            'and check that the tunnel is open. '
            f'Exit codes of workers started here: {ended}.')


def _answers(channel: grpc.Channel) -> bool:
  """Returns whether a server answers soon; it answers that it does not know the method.

  gRPC's own function to wait leaves a thread behind, which prints "Channel closed!" later.
  """
  probe = channel.unary_unary('/tfdp_adaptive/IsThere')
  try:
    probe(b'', timeout=0.2, wait_for_ready=True)
  except grpc.RpcError as error:
    return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
  return True


def binary() -> str:
  """Returns the path of the `worker_binary` of the installed tensorflow_federated."""
  if not tff.WORKER_BINARY.is_file():
    raise FileNotFoundError(
        f'tensorflow_federated must come with {tff.WORKER_BINARY}, and it does not.')
  return str(tff.WORKER_BINARY)


def _run(arguments: Sequence[str], **environment: str) -> subprocess.Popen:
  return subprocess.Popen(
      [sys.executable, '-S', '-E', *arguments], env={**os.environ, **environment},
      stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def check_address(address: str) -> None:
  """Raises unless the address is host and port, or the path of a socket."""
  if address.startswith('unix:/'):
    return
  host, _, port = address.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ValueError("`workers` must be addresses like 'host:8000'. "
                     f'Received: {address!r}.')


def _cause(error: Any) -> str:
  return f'{error.code().name}, {error.details()}' if isinstance(error, grpc.Call) else error


class _Stub(tff.RemoteExecutorGrpcStub):
  """Raises `rounds.WorkerLostError` where TFF would retry for ever."""

  def __init__(self, channel: grpc.Channel, address: str) -> None:
    # Not TFF's own initializer: it subscribes to the channel, and the thread behind
    # that prints "Channel closed!" at the end.
    self._stub = tff.ExecutorGroupStub(channel)
    self._channel, self.address = channel, address

  @property
  def is_ready(self) -> bool:
    return True


def _fail_fast(name: str) -> Any:
  base_method = getattr(tff.RemoteExecutorGrpcStub, name)

  @functools.wraps(base_method)
  def method(self: Any, request: Any) -> Any:
    try:
      return base_method(self, request)
    except tff.RetryableError as error:
      raise rounds.WorkerLostError(
          f'The TFF worker at {self.address} was lost. The round was not released; start the '
          f'worker again and resume from the last saved state. Cause: {_cause(error)}') from error

  return method


for _name in ('get_executor', 'create_value', 'create_struct', 'create_call', 'create_selection',
              'compute'):
  setattr(_Stub, _name, _fail_fast(_name))


class _ExecutorFactory(tff.ExecutorFactory):
  """Keeps the last few executors, one for each number of clients.

  A new executor compiles every computation again. TFF's own factory keeps ten and does not close
  the eleventh, which leaks memory in the worker.
  """

  def __init__(self, stub: _Stub) -> None:
    self._stub = stub
    self._executors: collections.OrderedDict = collections.OrderedDict()

  def create_executor(self, cardinalities: Any) -> Any:
    clients = sum(cardinalities.values())  # Only clients have a cardinality here.
    if clients not in self._executors:
      executor = tff.RemoteExecutor(self._stub)
      executor.set_cardinalities({tff.CLIENTS: clients})
      self._executors[clients] = executor
      if len(self._executors) > _EXECUTORS:
        self._executors.popitem(last=False)[1].close()
    self._executors.move_to_end(clients)
    return self._executors[clients]

  def clean_up_executor(self, cardinalities: Any) -> None:
    del cardinalities
    while self._executors:
      self._executors.popitem()[1].close()


@atexit.register
def end_default_worker() -> None:
  """Ends the worker of TFF's own default context, which would outlive Python."""
  tff.remove_default_context()
  gc.collect()
