# SPDX-License-Identifier: Apache-2.0
"""Methods of this library beside Opacus, JAX Privacy and TensorFlow Privacy, with twelve runs each.

    make bench-peers  # environments with the other libraries
    PYTHONPATH=. python benchmarks/evidence/choices_peers.py [--data FOLDER] [--packages FOLDER]
        [TASK ...]
    PYTHONPATH=. python benchmarks/evidence/choices_peers.py --check [TASK ...]
    PYTHONPATH=. python benchmarks/evidence/choices_peers.py --table >
        benchmarks/results/choices_peers.txt

Each library trains the same model from the same weights, with the same epsilon, delta, expected
batch size and number of steps, by the training loop and the accountant that its documentation
teaches, with SGD and with Adam. Each optimizer is tuned by `models_run.search`: twelve runs, scored
on validation records. The chosen setting runs three times more, on test records. "tfdp, SGD" and
"tfdp, Adam", where given, are tuned over the same settings in this library. Our other rows come
from choices_models.json. FILE keeps what is done.

Tasks of `recommend.py` are named `recommend.NAME`. Their validation records are the public examples
of that program, whose statistics scale the inputs. They need 10,000 to 99,999 private examples, so
that delta is the same.

Not equal: the rates of the others are constant, as in their examples, and ours fall linearly to
zero. TensorFlow Privacy trains on shuffled batches, and accounts for them as for Poisson sampling.
Opacus rounds the batch size.
"""

import argparse
import functools
import json
import os
import subprocess
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import kept
import models_run
import models_tasks
import numpy as np
import recommend
import recommend_tasks
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

TASKS = 'digits', 'skewed', 'diamonds', 'snippets'
EPSILONS = (1.0, 8.0)
LOSSES = {id(models_tasks.SOFTMAX): 'softmax', id(models_tasks.LOGISTIC): 'logistic',
          id(models_tasks.SQUARES): 'squares'}
PEERS = {'Opacus': 'build/peers/torch/bin/python', 'jax_privacy': 'build/peers/jax/bin/python',
         'TensorFlow Privacy': '.venv/bin/python'}
RATES = {'SGD': np.geomspace(.01, 30, 6), 'Adam': models_run.RATES}
CLIPS = (1.0, .1, 10.0)  # The first is tried first.
ONE_THREAD = dict(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1', TF_CPP_MIN_LOG_LEVEL='3',
                  XLA_FLAGS='--xla_cpu_multi_thread_eigen=false', JAX_PLATFORMS='cpu')


def of_recommend(make: Callable[[], recommend_tasks.Task]) -> models_tasks.Task:
  """Returns a task of `recommend.py`, with a model of logits."""
  task = recommend.scaled(make())
  assert tfdp.advice.default_delta(len(task.private[0])) == models_run.DELTA

  def build() -> Any:
    model = task.build()
    model.layers[-1].activation = compat.keras.activations.linear
    return model

  losses = dict(binary_crossentropy=models_tasks.LOGISTIC, mse=models_tasks.SQUARES,
                sparse_categorical_crossentropy=models_tasks.SOFTMAX)
  return models_tasks.Task(
      f'{task.name} of recommend', build, losses[task.loss],
      [task.private, task.public, task.test], task.batch_size, task.steps)


def export(task: models_tasks.Task, path: str) -> None:
  """Writes a task for `choices_peer.read`."""
  model = task.build()
  arrays: Dict[str, Any] = dict(loss=LOSSES[id(task.loss)], batch_size=task.batch_size,
                                steps=task.steps)
  layers = []
  for i, layer in enumerate(model.layers):
    weights = layer.get_weights()
    layers.append((type(layer).__name__, layer.get_config().get('activation'), len(weights)))
    arrays.update({f'w{i}_{j}': array for j, array in enumerate(weights)})
  for i, (x, y) in enumerate(task.parts):
    arrays.update({f'x{i}': x, f'y{i}': y})
  np.savez(path, layers=json.dumps(layers), **arrays)


class Peer:
  """A library that runs in its own environment and answers with losses."""

  def __init__(self, name: str, path: str, epsilon: float) -> None:
    self._process = subprocess.Popen(
        [PEERS[name], os.path.join(os.path.dirname(__file__), 'choices_peer.py'), name, path,
         str(epsilon)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **ONE_THREAD})
    self.facts = self._answer()

  def _answer(self) -> Dict[str, Any]:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError('The other library stopped; its error is above.')
    return dict(json.loads(line))

  def loss(self, optimizer: str, rate: float, clip: float, seed: int, part: int) -> float:
    assert self._process.stdin is not None
    print(json.dumps(dict(optimizer=optimizer, rate=float(rate), clip=clip, seed=seed, part=part)),
          file=self._process.stdin, flush=True)
    value = float(self._answer()['loss'])
    return value if np.isfinite(value) else 1e9

  def close(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait()


class Ours:
  """This library with the clip norms of the others, at rates that fall linearly to zero."""

  def __init__(self, task: models_tasks.Task, epsilon: float) -> None:
    plan = models_run.make_plan(task, epsilon)
    floor = plan.noise_multiplier / task.batch_size
    self._runners = {'SGD': models_run.Runner(task, plan, tfdp.rules.dp_sgd()),
                     'Adam': models_run.Runner(task, plan, tfdp.rules.dp_adam(epsilon=floor))}
    self.facts = dict(
        versions={'tfdp_adaptive': tfdp.__version__}, noise_multiplier=plan.noise_multiplier,
        batch_size=task.batch_size, sampling='Poisson', accountant='pld', spent=plan.epsilon(),
        start=models_run.evaluate(task, task.build(), 2))

  def loss(self, optimizer: str, rate: float, clip: float, seed: int, part: int) -> float:
    self._runners[optimizer].run(rate, clip, seed)
    return float(self._runners[optimizer].loss(part))

  def close(self) -> None:
    pass


def actual_rate(library: str, optimizer: str, rate: float, clip: float) -> float:
  """The learning rate to pass, so that a rate of SGD means the same at every clip norm.

  JAX Privacy (by default) and `Ours` divide clipped gradients by the clip norm. The others do not,
  so the rate is divided instead.
  """
  return rate if optimizer == 'Adam' or library in ('jax_privacy', 'tfdp') else rate / clip


def tuned(peer: Any, library: str, optimizer: str) -> Dict[str, Any]:
  """Chooses by one run on validation records; losses are of three others, on test records."""
  tried = []

  def loss(rate: float, clip: float, seed: int, part: int) -> float:
    return peer.loss(optimizer, actual_rate(library, optimizer, rate, clip), clip, seed, part)

  def score(rate: float, clip: float) -> float:
    tried.append((clip, actual_rate(library, optimizer, rate, clip),
                  loss(rate, clip, models_run.TUNING_SEED, 1)))
    return tried[-1][-1]

  rate, clip = models_run.search(score, RATES[optimizer], CLIPS)
  runs = [loss(rate, clip, seed, 2) for seed in models_run.SEEDS]
  return dict(loss=float(np.mean(runs)), runs=runs, clip=float(clip),
              rate=float(actual_rate(library, optimizer, rate, clip)), tried=tried)


def rows(task: models_tasks.Task, done: List[Dict[str, Any]], epsilons: Any, path: str,
         libraries: Any) -> Iterator[Dict[str, Any]]:
  start = models_run.evaluate(task, task.build(), 2)
  have = lambda key: any(key.items() <= one.items() for one in done)
  for epsilon in epsilons:
    for library in libraries:
      keys = [dict(task=task.name, epsilon=epsilon, library=library, optimizer=optimizer)
              for optimizer in RATES]
      if all(have(key) for key in keys):
        continue
      peer = Ours(task, epsilon) if library == 'tfdp' else Peer(library, path, epsilon)
      if abs(peer.facts['start'] - start) > 1e-4:
        raise AssertionError(f'{library} does not build the same model: its loss before training '
                             f'is {peer.facts["start"]}, not {start}.')
      for key in keys:
        if not have(key):
          began = time.time()
          found = tuned(peer, library, key['optimizer'])
          yield dict(key, **peer.facts, **found, seconds=round(time.time() - began, 1))
      peer.close()


class ConstantRate(models_run.Runner):
  """Trains at a constant learning rate."""

  def run(self, rate: float, clip: float, seed: int) -> None:
    self.model.set_weights(self._start)
    state, private = self._rule.init(self._specs), self._privatizer(seed).init()
    rate, clip = tf.constant(rate, tf.float32), tf.constant(clip, tf.float32)
    for batch in models_run.batches(self.task, self._bands, seed):
      state, private = self._step(*map(tf.constant, batch), rate, clip, state, private)


def check(task: models_tasks.Task, path: str, libraries: Any) -> Iterator[str]:
  """Losses of training without noise at a constant rate, with a clip norm that clips nothing."""
  plan = tfdp.PrivacyPlan(
      batch_size=task.batch_size, steps=task.steps, l2_norm_clip=1.0, noise_multiplier=0.0,
      target_delta=models_run.DELTA, population_size=len(task.parts[0][0]))
  clip = 1e3
  peers = {library: Peer(library, path, 0.0) for library in libraries}
  for optimizer, rule, rate in (('SGD', tfdp.rules.dp_sgd(), .1 * clip),
                                ('Adam', tfdp.rules.dp_adam(epsilon=1e-8), .01)):
    runner = ConstantRate(task, plan, rule)

    def ours(seed: int, runner: Any = runner, rate: float = rate) -> float:
      runner.run(rate, clip, seed)
      return float(runner.loss(2))

    found = {'ours': [ours(seed) for seed in models_run.SEEDS]}
    for library, peer in peers.items():
      found[library] = [
          peer.loss(optimizer, actual_rate(library, optimizer, rate, clip), clip, seed, 2)
          for seed in models_run.SEEDS]
    for name, losses in found.items():
      yield f'{task.name:32} {optimizer:5} {name:20} ' + ' '.join(f'{x:.4f}' for x in losses)
  for peer in peers.values():
    peer.close()


def best(group: List[Dict[str, Any]]) -> Dict[str, Any]:
  return min(group, key=lambda one: one['loss'])


def our_rows(ours: List[Dict[str, Any]], task: str, epsilon: float) -> Dict[str, Any]:
  """`{label: row}` of the methods of this library, tuned with twelve runs."""
  return {f'tfdp {one["method"]}{", banded" if one["bands"] > 1 else ""}, 12 runs': one
          for one in ours if (one['task'], one['epsilon']) == (task, epsilon)}


def table(done: List[Dict[str, Any]], ours: List[Dict[str, Any]]) -> str:
  """A line per library, optimizer, task and epsilon; then versions, noise and a summary."""
  lines: List[str] = []
  gaps: List[float] = []
  for task, epsilon in dict.fromkeys((one['task'], one['epsilon']) for one in done):
    group = [one for one in done if (one['task'], one['epsilon']) == (task, epsilon)]
    found = {f'{one["library"]}, {one["optimizer"]}, 12 runs': one for one in group}
    lines += [f'{task}, epsilon {epsilon:g}', f'  {"untrained":45} {group[0]["start"]:8.4f}']
    mine = our_rows(ours, task, epsilon)
    least = best([*found.values(), *mine.values()])
    for label, one in {**found, **mine}.items():
      error = np.std(one['runs'], ddof=1) / len(one['runs'])**.5
      lines.append(f'  {label:45} {one["loss"]:8.4f} +- {error:.4f}' + (
          f'   clip {one["clip"]:<5.3g} rate {one["rate"]:.3g}' if 'library' in one else '') + (
              '   least' if one is least else ''))
    if mine:
      gaps.append(best([*mine.values()])['loss'] / best(
          [one for one in group if one['library'] in PEERS])['loss'] - 1)
    lines.append('')
  lines.append('The best of this library over the best of the others: '
               + ', '.join(f'{gap:+.1%}' for gap in gaps))
  lines += ['', 'Noise multiplier (epsilon spent), expected batch size, sampling and accountant:']
  for task, epsilon in dict.fromkeys((one['task'], one['epsilon']) for one in done):
    group = [one for one in done if (one['task'], one['epsilon']) == (task, epsilon)]
    lines.append(f'  {task}, epsilon {epsilon:g}')
    for one in {one['library']: one for one in group}.values():
      lines.append('    {library:20} {noise_multiplier:.4f} ({spent:.4f}), {batch_size}, '
                   '{sampling}, {accountant}'.format(**one))
  versions = {name: version for one in done for name, version in one['versions'].items()}
  return '\n'.join([(__doc__ or '').strip(), '', *lines, '', ', '.join(f'{name} {version}'
                                          for name, version in versions.items())])


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('tasks', nargs='*', metavar='TASK')
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--packages', default='build/data', help='folder of the packages')
  parser.add_argument('--out', default='benchmarks/results/choices_peers.json')
  parser.add_argument('--ours', default='benchmarks/results/choices_models.json')
  parser.add_argument('--epsilons', type=float, nargs='+', default=EPSILONS)
  parser.add_argument('--libraries', nargs='+', default=[*PEERS, 'tfdp'], choices=[*PEERS, 'tfdp'])
  parser.add_argument('--check', action='store_true', help='train without noise')
  parser.add_argument('--table', action='store_true', help='print what is in the files')
  options = parser.parse_args()
  done = kept.read(options.out)
  if options.table:
    print(table(done, kept.read(options.ours)))
    return
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  tasks = models_tasks.all_tasks(options.data, options.packages)
  tasks.update({f'recommend.{name}': functools.partial(of_recommend, make)
                for name, make in recommend_tasks.all_tasks(options.data).items()})
  with tempfile.TemporaryDirectory() as folder:
    for name in options.tasks or TASKS:
      task, path = tasks[name](), os.path.join(folder, f'{name}.npz')
      export(task, path)
      if options.check:
        for line in check(task, path, [name for name in options.libraries if name in PEERS]):
          print(line, flush=True)
        continue
      for one in rows(task, done, options.epsilons, path, options.libraries):
        done.append(one)
        print('{task:32} {epsilon:g} {library:18} {optimizer:5} {loss:.4f} of {start:.4f} '
              '{clip:.3g} {rate:.3g} {seconds:.0f} s'.format(**one), flush=True)
        kept.write(options.out, done)


if __name__ == '__main__':
  main()
