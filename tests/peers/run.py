# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of peers, as their packages install them, on the private classes.

    python tests/peers/run.py [suite or suite:file or suite:folder ...]

`SUITES` lists what the packages of this Python are asked for; a suite whose package is missing is
left out. Prints how many tests pass, are refused in words, or differ: tests that fail in another
way on private classes, and pass on those of the package. What differs is listed in `reasons.py`,
with the reason; anything else that differs ends the program with status 1. Nothing of the peers is
copied.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple, Tuple

import reasons

HERE = pathlib.Path(__file__).parent


class Suite(NamedTuple):
  """Tests of a package: their folder, the plugin that makes classes private, files or folders."""

  folder: str
  plugin: str
  paths: Tuple[str, ...]


SUITES = {
    # Other tests of layers/preprocessing train nothing.
    'keras': Suite('keras/src', 'private_keras', (
        'models', 'trainers', 'losses', 'metrics', 'saving', *(f'layers/{name}' for name in (
            'activations', 'attention', 'convolutional', 'core', 'merging', 'normalization',
            'pooling', 'regularization', 'reshaping', 'rnn')))),
    'tensorflow_privacy': Suite('tensorflow_privacy/privacy', 'private_tfp', (
        'dp_query/gaussian_query_test.py', 'dp_query/normalized_query_test.py',
        'dp_query/nested_query_test.py',
        'dp_query/tree_aggregation_query_test.py::TreeResidualQueryTest',
        # Its other tests are of `tf.estimator`.
        'optimizers/dp_optimizer_keras_test.py::DPOptimizerComputeGradientsTest',
        'keras_models/dp_keras_model_test.py')),
    # Its wheel has no tests: put a checkout on PYTHONPATH.
    'keras_hub': Suite('keras_hub/src/models', 'private_keras', (
        'bert/bert_text_classifier_test.py', 'gpt2/gpt2_causal_lm_test.py',
        'resnet/resnet_image_classifier_test.py')),
    'dp_accounting': Suite('dp_accounting', 'private_accounting', (
        'pld/pld_privacy_accountant_test.py',)),
}


def root_of(suite):
  """Returns the folder of a suite's tests."""
  package = importlib.util.find_spec(suite.folder.partition('/')[0]).origin
  return pathlib.Path(package).parent.parent / suite.folder


def results(kind, suite, tests):
  """Returns {test: (outcome, first line of the error)}, by processes of their own."""
  root, found = root_of(suite), {}
  for some in tests:
    with tempfile.TemporaryDirectory() as folder:
      file = pathlib.Path(folder) / 'results'
      path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get('PYTHONPATH', '')])
      environment = dict(os.environ, TFDP_PEERS=kind, TFDP_PEERS_RESULTS=str(file), PYTHONPATH=path,
                         CUDA_VISIBLE_DEVICES='-1', TF_CPP_MIN_LOG_LEVEL='3')
      ended = subprocess.run(
          [sys.executable, '-m', 'pytest', '-q', '-p', 'outcomes', '-p', suite.plugin, '-p',
           'no:cacheprovider', '--continue-on-collection-errors', '-c', os.devnull,
           '--rootdir', str(root),
           *[str(root / one) for one in some]],
          env=environment, cwd=folder, capture_output=True, text=True, check=False)
      lines = file.read_text(encoding='utf-8').splitlines() if file.exists() else []
      found.update((name, (outcome, text)) for name, outcome, text in map(json.loads, lines))
      print(f'{kind}: {len(lines)} tests of {some[0]}', flush=True)
      if ended.returncode not in (0, 1):
        found[f'{some[0]} ended'] = 'failed', (
            f'status {ended.returncode}: {(ended.stdout + ended.stderr)[-300:]!r}')
  return found


def judge(name, paths):
  """Prints what is refused and what differs of a suite; returns what has no reason."""
  suite = SUITES[name]
  private = results('private', suite, [[path] for path in paths])
  doubtful = [test for test, (outcome, _) in private.items() if outcome in ('failed', 'refused')]
  plain = results('plain', suite, [doubtful]) if doubtful else {}
  counts, unknown = {}, []
  for test, (outcome, text) in private.items():
    if outcome == 'skipped' or test in doubtful and not test.endswith(' ended') and (
        plain.get(test, ['failed'])[0] != 'passed'):
      continue  # It asks for what is not installed, or fails without privacy, too.
    word = {'failed': 'differs'}.get(outcome, outcome)
    counts[word] = counts.get(word, 0) + 1
    if word != 'passed':
      reason = reasons.of(test) if word == 'differs' else ''
      unknown += [test] * (word == 'differs' and not reason)
      print(f'{word}: {test}: {reason or text}', flush=True)
  print(f'{name}: {counts} of {sum(counts.values())} tests that pass without privacy', flush=True)
  return unknown if counts else [name]


def main(asked):
  """Judges suites, or files of them."""
  paths = {}
  for one in asked or SUITES:
    name, _, path = one.partition(':')
    first = (path or SUITES[name].paths[0]).partition(':')[0]
    if importlib.util.find_spec(name) is not None and (root_of(SUITES[name]) / first).exists():
      paths.setdefault(name, []).extend([path] if path else SUITES[name].paths)
  unknown = [test for name, some in paths.items() for test in judge(name, some)]
  if unknown:
    print(f'{len(unknown)} differ without a reason: {unknown}')
  return 1 if unknown or not paths else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
