# SPDX-License-Identifier: Apache-2.0
"""The guide's app in real processes: a SuperLink, two SuperNodes, and servers that are killed."""

import collections
import contextlib
import csv
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

import bounded
import numpy as np
import pytest

from tfdp_adaptive import runfolder

pytest.importorskip('flwr', reason='needs Flower, which this environment does not have')

ROOT = pathlib.Path(__file__).parents[2]
BINARIES = pathlib.Path(sys.executable).parent
# Written into the app: which noise a round draws, by its keys and its row, and whose process it is.
SPY = """
def _spy():
  import os, numpy as np
  from tfdp_adaptive import noise
  from tfdp_adaptive.federated import rounds
  original = rounds.run

  def keys(tree):
    if isinstance(tree, noise.State):
      return [np.asarray(tree.key).tolist()]
    return [key for child in tree for key in keys(child)] if isinstance(tree, tuple) else []

  def run(process, engine, state, *args, **kwargs):
    with open(os.environ['NOISE_USED'], 'a') as file:
      print(os.getpid(), keys(state), int(state.round), file=file, sep='|')
    return original(process, engine, state, *args, **kwargs)

  rounds.run = run
"""


def free_ports(count):
  with contextlib.ExitStack() as stack:
    probes = [stack.enter_context(socket.socket()) for _ in range(count)]
    for probe in probes:
      probe.bind(('127.0.0.1', 0))
    return [probe.getsockname()[1] for probe in probes]


def wait_for(condition, seconds=400):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.1)


class Federation:
  """A SuperLink and two SuperNodes on loopback, ended with all that they start."""

  def __init__(self, folder):
    self.folder, self.processes = folder, []
    link, *nodes = free_ports(3)
    (folder / 'home').mkdir()
    (folder / 'home' / 'config.toml').write_text(
        '[superlink]\ndefault = "here"\n[superlink.here]\n'
        f'address = "127.0.0.1:{link}"\ninsecure = true\n', encoding='utf-8')
    self.environment = {
        **os.environ, 'FLWR_HOME': str(folder / 'home'), 'FLWR_TELEMETRY_ENABLED': '0',
        'NOISE_USED': str(folder / 'noise_used'), 'TF_CPP_MIN_LOG_LEVEL': '3',
        'CUDA_VISIBLE_DEVICES': '', 'PATH': f'{BINARIES}{os.pathsep}{os.environ["PATH"]}'}
    self.start('flower-superlink', '--insecure', '--disable-runtime-dependency-installation',
               '--host', '127.0.0.1', '--port', str(link), '--database', 'state.db')
    wait_for(lambda: socket.socket().connect_ex(('127.0.0.1', link)) == 0)
    for i, port in enumerate(nodes):
      self.start('flower-supernode', '--insecure', '--superlink', f'127.0.0.1:{link}', '--host',
                 '127.0.0.1', '--port', str(port), '--node-config', f'partition-id={i}')
    wait_for(lambda: len(re.findall('Activated node_id', self.said())) == 2)

  def start(self, *command):
    with open(self.folder / f'log{len(self.processes)}', 'wb') as log:
      self.processes.append(subprocess.Popen(
          command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, cwd=self.folder,
          stderr=subprocess.STDOUT, start_new_session=True, umask=0o077))  # As the guide says.

  def said(self):
    return (self.folder / 'log0').read_text(encoding='utf-8', errors='replace')

  def run(self, app, *flags, **config):
    settings = ' '.join(f'{name.replace("_", "-")}={json.dumps(value)}'
                        for name, value in config.items())
    return subprocess.run(
        ['flwr', 'run', str(app), 'here', '--run-config', settings, *flags], check=True,
        env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=900).stdout

  def end(self):
    for pid in [pid for process in self.processes
                for pid in bounded.descendants(process.pid)]:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for process in self.processes:
      process.wait()


@pytest.fixture(name='federation', scope='module')
def _federation(tmp_path_factory):
  if shutil.which('flower-superlink', path=str(BINARIES)) is None:
    pytest.skip("needs Flower's programs beside Python")
  federation = Federation(tmp_path_factory.mktemp('flower'))
  yield federation
  federation.end()


@pytest.fixture(name='app', scope='module')
def _app(federation):
  """The guide's app as it is shown, with the spy."""
  page = (ROOT / 'docs' / 'guides' / 'flower.md').read_text(encoding='utf-8')
  blocks = collections.defaultdict(list)
  for kind, text in re.findall(r'^```(\w*)[^\n]*\n(.*?)^```$', page, re.S | re.M):
    blocks[kind].append(text)
  folder = federation.folder / 'app'
  folder.mkdir()
  (folder / 'private_app.py').write_text(
      blocks['python'][0].replace('  config = context.run_config\n',
                                  '  _spy()\n  config = context.run_config\n').replace(
                                      'timeout=600', 'timeout=60') + SPY,
      encoding='utf-8')
  (folder / 'pyproject.toml').write_text(blocks['text'][0], encoding='utf-8')
  return folder


def rows(out):
  with open(out / 'metrics.csv', encoding='utf-8') as file:
    return list(csv.DictReader(file))


def test_the_app_of_the_guide_trains(federation, app, tmp_path):
  out = tmp_path / 'out'
  said = federation.run(app, '--stream', nodes=2, nodes_per_round=2, rounds=2, out=str(out))
  assert 'Guarantee: (4.000, 1e-06)-differential privacy after all 2 steps' in said, said
  released = rows(out)
  assert [int(row['round']) for row in released] == [1, 2]
  assert 'not_private' not in str(released[0]) and 'private/loss' in released[0]
  assert stat.S_IMODE((out / 'state.npz').stat().st_mode) == 0o600
  assert len(json.loads((out / 'nodes.json').read_text(encoding='utf-8'))) == 2
  databases = list(federation.folder.glob('state.db*'))  # With the raw answers of the nodes.
  assert databases and {stat.S_IMODE(file.stat().st_mode) for file in databases} == {0o600}


@pytest.mark.parametrize('protect', ['record', 'node'])
def test_the_app_of_the_examples_protects_records_or_nodes(federation, protect, tmp_path):
  app = tmp_path / 'app'
  shutil.copytree(ROOT / 'examples' / 'flower_app', app)
  said = federation.run(app, '--stream', protect=protect, rounds=2, steps_per_round=2,
                        out=str(tmp_path / 'out'), silos=str(tmp_path / 'silos'))
  if protect == 'node':
    assert 'after all 2 steps' in said, said
    return
  steps = [runfolder.load(path)[1]['steps'] for path in (tmp_path / 'silos').glob('*/silo.npz')]
  assert steps == [4, 4], said


@pytest.mark.slow
def test_ten_servers_are_killed_and_no_noise_is_used_twice(federation, app, tmp_path):
  out, steps = tmp_path / 'out', 14
  used = federation.folder / 'noise_used'
  used.unlink(missing_ok=True)
  coins = np.random.default_rng(0)
  config = dict(nodes=2, nodes_per_round=2, rounds=steps, out=str(out))

  def lines():
    return used.read_text(encoding='utf-8').splitlines() if used.exists() else []

  for _ in range(10):
    before = len(lines())
    federation.run(app, **config)
    wait_for(lambda n=before: len(lines()) > n + 1)  # A round is done.
    time.sleep(coins.uniform(0, 3))  # While it sends, waits, saves or releases the next one.
    os.kill(int(lines()[-1].split('|')[0]), signal.SIGKILL)
  said = federation.run(app, '--stream', **config)
  assert f'after all {steps} steps' in said, said
  assert [int(row['round']) for row in rows(out)] == list(range(1, steps + 1))
  noise = [line.split('|', 1)[1] for line in lines()]
  assert len({line.split('|')[0] for line in lines()}) == 11
  assert len(set(noise)) == len(noise) >= steps
