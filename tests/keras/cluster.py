# SPDX-License-Identifier: Apache-2.0
"""Workers of a `MultiWorkerMirroredStrategy`: real processes on this machine."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

_SECONDS = 400
# Devices and clusters are fixed when TensorFlow starts, hence processes of their own.
BEGIN = '''
import sys
import numpy as np
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Before TensorFlow does anything else.
assert strategy.num_replicas_in_sync == 2
worker = strategy.cluster_resolver.task_id
import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
keras = compat.keras
'''


def config(index, ports):
  return json.dumps({'cluster': {'worker': [f'127.0.0.1:{port}' for port in ports]},
                     'task': {'type': 'worker', 'index': index}})


def free_ports(count=2):
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for one in sockets:
      one.bind(('127.0.0.1', 0))
    return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def started(command, folder, count=2):
  """The processes of `command`, a list; each logs to `worker N.log`. None outlives the block."""
  ports, processes = free_ports(count), []
  try:
    for index in range(count):
      environment = dict(os.environ, TF_CONFIG=config(index, ports), TF_CPP_MIN_LOG_LEVEL='2',
                         CUDA_VISIBLE_DEVICES='', GRPC_ENABLE_FORK_SUPPORT='0')
      with open(log(folder, index), 'ab') as file:
        processes.append(subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True))
    yield processes
  finally:
    for process in processes:
      if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def log(folder, index):
  return pathlib.Path(folder) / f'worker {index}.log'


def run(program, folder, *arguments):
  """Runs `BEGIN` and a program on two workers to their ends."""
  command = [sys.executable, '-c', BEGIN + program, *map(str, arguments)]
  with started(command, folder) as processes:
    end = time.monotonic() + _SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
      time.sleep(0.1)
      if any(process.poll() for process in processes):  # The others would wait for it.
        break
  failed = [log(folder, index).read_text()[-3000:] for index, process in enumerate(processes)
            if process.returncode]
  assert not failed, '\n\n'.join(failed)
