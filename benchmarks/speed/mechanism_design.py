# SPDX-License-Identifier: Apache-2.0
"""How long mechanisms take to design, and how good they are, beside jax_privacy.

    make bench-peers  # an environment with requirements/peers-jax.in
    PYTHONPATH=. <that environment>/bin/python benchmarks/speed/mechanism_design.py [--quick]

Both sides run in turns in this process, from the same description to the
numbers of a strategy, compilation included (a design is made once). Errors are
root mean square (or maximal, for "max") errors of prefix sums, sensitivity
included; both are evaluated by the same code of ours. ">" marks a run of
jax_privacy that was cut to one or a few of its 250 optimizer steps because all
of them would take up to hours: its time is a lower bound, its error not final.
Without jax_privacy, only our columns are printed.
"""

import argparse
import os
import platform
import time

os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')  # Two threads on a busy machine wait for spins.
os.environ['TFDP_MECHANISM_CACHE'] = 'off'

import numpy as np

from tfdp_adaptive import mechanisms

try:
  import jax
  import jax_privacy
  from jax_privacy.matrix_factorization import buffered_toeplitz
  from jax_privacy.matrix_factorization import dense
  from jax_privacy.matrix_factorization import toeplitz
except ImportError:
  jax = None


def toeplitz_case(steps, bands, limit=250, slow=False):
  """(title, ours, theirs, error, optimizer steps of theirs, slow)."""
  def theirs():
    return mechanisms.BandedToeplitz(bands, steps, coefficients=np.asarray(
        toeplitz.optimize_banded_toeplitz(steps, bands, max_optimizer_steps=limit)))
  return (f'BandedToeplitz T={steps:g} b={bands}', lambda: mechanisms.BandedToeplitz(bands, steps),
          theirs, lambda m: m.rmse(), limit, slow)


def blt_case(steps, objective='mean', min_sep=1, k=1, limit=250, slow=False):
  pattern = dict(min_sep=min_sep, max_participations=k)

  def theirs():
    c = buffered_toeplitz.optimize(
        n=steps, error=objective, min_buffers=3, max_buffers=3, max_optimizer_steps=limit,
        **pattern)
    order = np.argsort(-np.asarray(c.buf_decay))
    return mechanisms.BLT(3, steps, decays=np.asarray(c.buf_decay)[order],
                          weights=np.asarray(c.output_scale)[order])

  def error(m):
    return m.max_error(**pattern) if objective == 'max' else m.rmse(**pattern)
  title = f'BLT d=3 T={steps:g} {objective}' + (f' b={min_sep} k={k}' if k > 1 else '')
  return (title, lambda: mechanisms.BLT(3, steps, objective=objective, **pattern), theirs, error,
          limit, slow)


def dense_case(steps, k=1, slow=False):
  pattern = dict(min_sep=steps // k, max_participations=k, fixed_order=k > 1)
  theirs = lambda: mechanisms.Dense(steps, strategy=_lower(dense.optimize(steps, epochs=k)))
  title = f'Dense T={steps}' + (f' k={k}, fixed order' if k > 1 else '')
  return (title, lambda: mechanisms.Dense(steps, **pattern), theirs, lambda m: m.rmse(**pattern),
          250, slow)


def banded_case(steps, bands):
  theirs = lambda: mechanisms.Dense(
      steps, strategy=_lower(dense.optimize(steps, bands=bands, equal_norm=True)))
  return (f'Banded (optimal) T={steps} b={bands}',
          lambda: mechanisms.Banded(bands, steps, method='optimal'), theirs, lambda m: m.rmse(),
          250, False)


def _lower(c):
  return np.tril(np.asarray(c, np.float64))


CASES = [
    toeplitz_case(1000, 16), toeplitz_case(2000, 128), toeplitz_case(10**4, 64),
    toeplitz_case(10**5, 16, slow=True), toeplitz_case(10**6, 64, limit=1, slow=True),
    blt_case(1000), blt_case(2000, min_sep=400, k=5), blt_case(10**4, slow=True),
    blt_case(10**6, 'max'), blt_case(10**6, limit=1, slow=True),
    dense_case(256), dense_case(512), dense_case(1024, slow=True), dense_case(64, k=4),
    dense_case(256, k=4), banded_case(256, 16),
]


def measure(make, error):
  """Seconds from description to numbers, and the error of what was made."""
  start = time.perf_counter()
  mechanism = make()
  mechanism.arrays  # pylint: disable=pointless-statement
  seconds = time.perf_counter() - start
  return seconds, error(mechanism)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='leave out what takes minutes')
  parser.add_argument('--only', default='', help='cases whose title contains this')
  arguments = parser.parse_args()
  versions = f'Python {platform.python_version()}, NumPy {np.__version__}'
  if jax is not None:
    versions += f', jax {jax.__version__}, jax_privacy {jax_privacy.__version__}'
  print(f'{versions}; {os.cpu_count()} CPUs, {platform.machine()}\n')
  header = (f'{"design":38}{"ours s":>9}{"jax_privacy s":>15}{"ratio":>9}'
            f'{"our error":>12}{"their error":>13}{"ratio":>10}')
  print(header + '\n' + '-' * len(header), flush=True)
  for title, ours, theirs, error, limit, slow in CASES:
    if arguments.only not in title or (slow and arguments.quick):
      continue
    seconds, our_error = measure(ours, error)
    line = f'{title:38}{seconds:9.3f}'
    if jax is None:
      print(line + f'{"-":>15}{"-":>9}{our_error:12.6g}', flush=True)
      continue
    their_seconds, their_error = measure(theirs, error)
    cut = '>' if limit < 250 else ''
    print(line + f'{cut + format(their_seconds, ".2f"):>15}'
          f'{cut + format(their_seconds / seconds, ".0f"):>9}{our_error:12.6g}'
          f'{their_error:13.6g}{our_error / their_error:10.6f}', flush=True)


if __name__ == '__main__':
  main()
