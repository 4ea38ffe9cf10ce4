# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that Keras installs with itself, on plain models and on private ones.

    python tests/peers/run.py [file or folder of keras/src ...]

Prints how many pass, are refused in words, or differ: tests that pass on plain models and fail on
private ones in another way. What differs is listed in `reasons.py`, with the reason; anything else
that differs ends the program with status 1. Nothing of Keras is copied.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import keras
import reasons

HERE = pathlib.Path(__file__).parent
KERAS = pathlib.Path(keras.__file__).parent / 'src'
DEFAULT = ('models', 'trainers', 'losses', 'layers/core', 'layers/normalization', 'saving')


def results(kind, paths):
  """Returns {test: (outcome, first line of the error)}, by a process of its own."""
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'results.json'
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get('PYTHONPATH', '')])
    environment = dict(os.environ, TFDP_PEERS=kind, TFDP_PEERS_RESULTS=str(file), PYTHONPATH=path,
                       CUDA_VISIBLE_DEVICES='-1')
    subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'private_keras', '-p', 'no:cacheprovider',
         '--continue-on-collection-errors',
         '-c', os.devnull, '--rootdir', str(KERAS), *[str(KERAS / one) for one in paths]],
        env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        check=False)
    return json.loads(file.read_text(encoding='utf-8')) if file.exists() else {}


def main(paths):
  """Prints the counts, and every test that is refused or differs."""
  plain, private = results('plain', paths), results('private', paths)
  counts, unknown = {}, []
  for name, (outcome, _) in plain.items():
    now, text = private.get(name, ('failed', 'it ended the process'))
    if outcome != 'passed' or now == 'skipped':
      continue
    word = {'failed': 'differs'}.get(now, now)
    counts[word] = counts.get(word, 0) + 1
    if word != 'passed':
      reason = reasons.DIFFERS.get(name, '') if word == 'differs' else ''
      unknown += [name] * (word == 'differs' and not reason)
      print(f'{word}: {name}: {reason or text}')
  print(f'keras {keras.__version__}: {counts} of {sum(counts.values())} tests that plain models '
        'pass')
  return 1 if unknown or not counts else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:] or DEFAULT))
