# SPDX-License-Identifier: Apache-2.0
"""Private rounds beside those of pfl-research, on the same clients and cores.

    python benchmarks/speed/federated_pfl.py --pfl PYTHON [--rounds 5] [--wall]

PYTHON has pfl and PyTorch, and runs this file as well. Every client has 20 examples and takes
one SGD step on them; its update is clipped, summed and noised. Both sides hold the clients in
memory and take turns, round by round. Counted is the CPU time of a side, which work of others on
the machine changes little. An operation has one thread on both sides: more make steps this small
slower, and simulations are spread over processes there and over threads here.

With --wall the time that passes is counted, with two workers here and two processes there. Each of
these has half of the clients, and what they would send each other is left out.
"""

import argparse
import pathlib
import subprocess
import sys
import time

import numpy as np

FEATURES, CLASSES, EXAMPLES = 100, 10, 20
ROWS = [(1_000, 71_000), (10_000, 4_800), (100, 1_000_000)]  # Clients, parameters.
RATE, CLIP, NOISE = 0.1, 1.0, 1.0
REMARKS = pathlib.Path(__file__).parents[1] / 'remarks' / 'federated_pfl.txt'


def data(clients):
  rng = np.random.default_rng(0)
  return (rng.normal(size=(clients, EXAMPLES, FEATURES)).astype(np.float32),
          rng.integers(CLASSES, size=(clients, EXAMPLES)))


def width(parameters):
  return parameters // (FEATURES + CLASSES + 1)


class Theirs:
  """pfl-research, FederatedAveraging with a central Gaussian mechanism."""

  def __init__(self, clients, parameters):
    # pylint: disable=g-import-not-at-top
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
    import torch
    torch.set_num_threads(1)

    class Net(torch.nn.Module):
      def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, width(parameters)), torch.nn.ReLU(),
            torch.nn.Linear(width(parameters), CLASSES))

      def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.layers(x), y)

      def metrics(self, x, y):
        del x, y
        return {}

    xs, ys = map(torch.from_numpy, data(clients))
    order = iter(int(i) for _ in range(1000) for i in range(clients))
    users = FederatedDataset(lambda i: Dataset([xs[i], ys[i]], user_id=str(i)), lambda: next(order))
    net = Net()
    self._model = PyTorchModel(net, torch.optim.SGD,
                               torch.optim.Adam(net.parameters(), 0.01))
    self._backend = SimulatedBackend(users, None, postprocessors=[
        CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, NOISE))])
    self._algorithm = FederatedAveraging()
    self._parameters = NNAlgorithmParams(
        central_num_iterations=1000, evaluation_frequency=1000, train_cohort_size=clients,
        val_cohort_size=None)
    self._local = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=RATE, local_batch_size=EXAMPLES)
    self._round = 0

  def round(self):
    contexts, self._model, _ = self._algorithm.get_next_central_contexts(
        self._model, self._round, self._parameters, self._local, None)
    for context in contexts:
      statistics, metrics = self._backend.gather_results(
          self._model, self._algorithm, central_context=context)
      self._model, _ = self._algorithm.process_aggregated_statistics(
          context, metrics, self._model, statistics)
    self._round += 1


class Ours:
  """What `simulate` does: clients trained in process, the private server beside it."""

  def __init__(self, clients, parameters, workers):
    # pylint: disable=g-import-not-at-top
    import tensorflow as tf
    tf.config.threading.set_intra_op_parallelism_threads(1)

    import tfdp_adaptive as tfdp
    from tfdp_adaptive import rules
    from tfdp_adaptive.federated import rounds as rounds_lib
    xs, ys = data(clients)
    layers = tf.keras.layers
    self._users = tfdp.federated.Users(
        {str(i): dict(x=x, y=y.astype(np.int32)) for i, (x, y) in enumerate(zip(xs, ys))},
        batch_size=EXAMPLES)
    self._process = tfdp.federated.build_private_fed_avg(
        lambda: tf.keras.Sequential([
            layers.Input((FEATURES,)), layers.Dense(width(parameters), activation='relu'),
            layers.Dense(CLASSES)]),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        server_rule=rules.dp_adam(), server_learning_rate=0.01, plan=tfdp.PrivacyPlan(
            batch_size=clients, steps=1000, l2_norm_clip=CLIP, noise_multiplier=NOISE,
            target_delta=1e-6, population_size=10_000, unit='user'),
        client_optimizer_fn=lambda: tf.keras.optimizers.SGD(RATE))
    self._state = tf.nest.map_structure(tf.constant, self._process.initialize())
    self._step = tf.function(self._process.server.step)
    self._run = rounds_lib.run
    self._workers = workers

  def round(self):
    with self._process.reach(self._workers, self._users) as engine:
      outcome = self._run(self._process, engine, self._state, self._users.client_ids)
    self._state, _ = self._step(self._state, outcome.answers)


def serve(clients, parameters):
  """A round for every line read; its CPU seconds for an answer."""
  side = Theirs(clients, parameters)
  for _ in sys.stdin:
    start = time.process_time()
    side.round()
    print(time.process_time() - start, flush=True)


class Processes:
  """Some processes that `serve`, each with its part of the clients."""

  def __init__(self, python, count, clients, parameters):
    self._all = [subprocess.Popen(
        [python, __file__, '--serve', str(clients // count), str(parameters)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]

  def round(self):
    """Returns the CPU seconds of all."""
    for process in self._all:
      process.stdin.write('round\n')
      process.stdin.flush()
    return sum(float(process.stdout.readline()) for process in self._all)

  def close(self):
    for process in self._all:
      process.stdin.close()
      process.wait()


def measure(arguments, clients, parameters):
  """[rounds, 2] seconds, ours and theirs."""
  count = 2 if arguments.wall else 1
  theirs, seconds = Processes(arguments.pfl, count, clients, parameters), []
  try:
    ours = Ours(clients, parameters, count)
    for _ in range(arguments.rounds + 1):
      passed, spent = time.perf_counter(), time.process_time()
      ours.round()
      mine = time.perf_counter() - passed, time.process_time() - spent
      passed = time.perf_counter()
      spent = theirs.round()
      seconds.append((mine[0], time.perf_counter() - passed) if arguments.wall
                     else (mine[1], spent))
  finally:
    theirs.close()
  return np.array(seconds[1:])


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--pfl', help='A Python that has pfl and torch.')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--rows', default='012', help='Which of the rows.')
  parser.add_argument('--wall', action='store_true', help='The time that passes, on two cores.')
  parser.add_argument('--serve', nargs=2, type=int, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.serve:
    serve(*arguments.serve)
    return
  if not arguments.wall:
    print(REMARKS.read_text(encoding='utf-8'))
  unit = 'second that passes, two cores' if arguments.wall else 'CPU second'
  print(f'Median of {arguments.rounds} rounds each after one to warm up; clients per {unit}\n',
        flush=True)
  print(f'{"clients":>8} {"parameters":>10} {"ours":>6} {"pfl":>6} ratio')
  for clients, parameters in [ROWS[int(i)] for i in arguments.rows]:
    mine, other = measure(arguments, clients, parameters).T
    print(f'{clients:8} {parameters:10} {clients / np.median(mine):6.0f} '
          f'{clients / np.median(other):6.0f} {np.median(other / mine):5.2f}', flush=True)


if __name__ == '__main__':
  main()
