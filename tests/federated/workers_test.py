# SPDX-License-Identifier: Apache-2.0
"""Workers end with whoever started them, and a lost one is an error."""

import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow_federated as tff

import tfdp_adaptive as tfdp
from tfdp_adaptive.federated import isolated_worker
from tfdp_adaptive.federated import workers as workers_lib

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import sys
import tfdp_adaptive as tfdp
tfdp.__path__.append(sys.argv[1])
workers = tfdp.federated.Workers()
pid = workers.processes[0].pid
print(pid, *open(f'/proc/{pid}/task/{pid}/children').read().split(), flush=True)
if sys.argv[2] == 'default':
  import numpy as np
  import tensorflow_federated as tff
  assert tff.tensorflow.computation(lambda x: x, np.int32)(1) == 1
if sys.argv[2] == 'wait':
  import time
  time.sleep(100)
"""


@tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
def total(values):
  return tff.federated_sum(values)


def is_running(pid):
  try:
    with open(f'/proc/{pid}/stat', encoding='utf-8') as stat:
      return stat.read().rsplit(')', 1)[1].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def ends_soon(pid):
  deadline = time.monotonic() + 20
  while is_running(pid) and time.monotonic() < deadline:
    time.sleep(0.1)
  return not is_running(pid)


@pytest.mark.parametrize('how', ['end', 'default', 'kill'])
def test_nothing_is_left_running(how):
  """Also no holder of the output: reading it to its end must not wait."""
  process = subprocess.Popen(
      [sys.executable, '-c', SCRIPT, str(ROOT), 'wait' if how == 'kill' else how],
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
  pids = next([int(pid) for pid in line.split()] for line in process.stdout
              if line.replace(' ', '').strip().isdigit())
  assert len(pids) == 2  # What isolates the worker, and the worker.
  if how == 'kill':
    assert all(map(is_running, pids))
    os.kill(process.pid, signal.SIGKILL)
  rest = process.communicate(timeout=120)[0]
  assert process.returncode == (-signal.SIGKILL if how == 'kill' else 0), rest
  assert all(map(ends_soon, pids))


@pytest.mark.pitfall(
    'TFF\'s worker listens on all networks and asks nobody who they are.',
    severity='high', stops='a network namespace of its own')
def test_no_network_reaches_a_worker_that_was_started_here(worker):
  address, (process,) = worker.addresses[0], worker.processes
  with open(f'/proc/{process.pid}/task/{process.pid}/children', encoding='ascii') as children:
    (child,) = children.read().split()
  networks = {os.readlink(f'/proc/{pid}/ns/net') for pid in ('self', process.pid, child)}
  assert len(networks) == 2  # Ours, and that of the worker.
  with open(f'/proc/{child}/net/dev', encoding='ascii') as devices:
    assert [line.split(':')[0].strip() for line in devices if ':' in line] == ['lo']
  path = pathlib.Path(address[len('unix:'):])
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
  with tfdp.federated.Workers([address]):
    assert total([4, 5]) == 9


def test_the_recipe_for_other_machines_runs_as_written(tmp_path):
  text = (ROOT / 'docs' / 'guides' / 'workers.md').read_text(encoding='utf-8')
  (command,) = [line for line in text.splitlines() if 'isolated_worker ' in line]
  process = subprocess.Popen(
      command.replace('.venv/bin/python', f'exec {sys.executable}'), shell=True, cwd=tmp_path,
      env={**os.environ, 'HOME': str(tmp_path)}, stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  path = tmp_path / '.tfdp' / 'worker'
  try:
    while not path.exists():
      assert process.poll() is None, process.stderr.read()
      time.sleep(0.05)
    with tfdp.federated.Workers([f'unix:{path}']):
      assert total([4, 5]) == 9
  finally:
    process.kill()
    process.wait()


def test_only_what_is_used_is_imported():
  """A process with TensorFlow's threads cannot enter a namespace."""
  code = ('import sys, tfdp_adaptive.federated.isolated_worker\n'
          'print([name for name in ("tensorflow", "numpy", "tensorflow_federated") '
          'if name in sys.modules])\n'
          'import tfdp_adaptive as tfdp\n'
          'print(tfdp.federated.tasks.Task.__name__, "tasks" in dir(tfdp.federated))')
  done = subprocess.run([sys.executable, '-c', code], check=True, stdin=subprocess.DEVNULL,
                        capture_output=True, text=True)
  assert done.stdout == '[]\nTask True\n'
  with pytest.raises(AttributeError, match='has no attribute .nothing.'):
    tfdp.federated.nothing


def test_where_there_are_no_namespaces_it_says_so(tmp_path, monkeypatch):
  refusing = tmp_path / 'refusing.py'
  refusing.write_text(f'raise SystemExit({isolated_worker.NOT_ALLOWED})', encoding='utf-8')
  monkeypatch.setattr(isolated_worker, '__file__', str(refusing))
  with pytest.warns(UserWarning, match='listens on all networks'):
    workers = tfdp.federated.Workers()
  with workers:
    assert workers.addresses[0].startswith('localhost:') and total([1, 2]) == 3


def test_a_lost_worker_is_an_error_and_not_a_wait():
  with tfdp.federated.Workers(count=2) as workers:
    assert total([1, 2, 3]) == 6
    second = tff.framework.get_context_stack()
    with second.install(workers.contexts[1]):
      assert total([]) == 0
    os.kill(workers.processes[0].pid, signal.SIGKILL)
    with pytest.raises(tfdp.federated.WorkerLostError, match=workers.addresses[0]):
      total([1, 2])
  assert not any(is_running(process.pid) for process in workers.processes)


def test_no_thread_outlives_its_channel_and_complains(monkeypatch):
  """gRPC's watchers print "Channel closed!" after whatever really happened."""
  complaints = []
  monkeypatch.setattr(threading, 'excepthook', complaints.append)
  monkeypatch.setattr(workers_lib, '_ANSWER_SECONDS', 0.3)
  before = set(threading.enumerate())
  with tfdp.federated.Workers() as workers:
    assert total([1, 2]) == 3
    tfdp.federated.Workers(workers.addresses).close()
  with pytest.raises(tfdp.federated.WorkerLostError):
    tfdp.federated.Workers(['localhost:9'])
  time.sleep(0.5)
  assert not complaints
  assert not [thread for thread in set(threading.enumerate()) - before
              if 'poll_connectivity' in thread.name or 'deliver' in thread.name]


def test_executors_are_kept_and_the_oldest_is_closed(monkeypatch):
  closed = []

  class Executor:

    def __init__(self, stub):
      del stub

    def set_cardinalities(self, cardinalities):
      self.clients = cardinalities[tff.CLIENTS]

    def close(self):
      closed.append(self.clients)

  monkeypatch.setattr(workers_lib.tff, 'RemoteExecutor', Executor)
  monkeypatch.setattr(workers_lib, '_EXECUTORS', 2)
  factory = workers_lib._ExecutorFactory(None)
  create = lambda clients: factory.create_executor({tff.CLIENTS: clients})
  first = create(1)
  create(2)
  assert create(1) is first and not closed
  create(3)
  assert closed == [2] and create(1) is first
  assert factory.create_executor({}).clients == 0 and closed == [2, 3]
  factory.clean_up_executor({})
  assert sorted(closed) == [0, 1, 2, 3]


def test_addresses_are_checked(monkeypatch):
  with pytest.raises(ValueError, match="Received: 'example.org'"):
    tfdp.federated.Workers(['example.org'])
  monkeypatch.setattr(workers_lib, '_ANSWER_SECONDS', 0.5)
  with pytest.raises(tfdp.federated.WorkerLostError, match='No TFF worker answers at localhost:9'):
    tfdp.federated.Workers(['localhost:9'])
