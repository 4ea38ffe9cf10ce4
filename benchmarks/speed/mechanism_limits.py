# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of designs and calibrations at the ends of what can be asked for.

Usage: python benchmarks/speed/mechanism_limits.py [part of a title ...]

What takes longer than half a minute is given up; what is refused shows how its reason begins.
"""

import os
import pathlib
import signal
import sys
import time
import warnings

os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')
os.environ['TFDP_MECHANISM_CACHE'] = 'off'

import least_error_plans
import numpy as np

from tfdp_adaptive import advice
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import sampling as sampling_lib

PATIENCE = 30.0
REMARKS = pathlib.Path(__file__).parents[1] / 'remarks' / 'mechanism_limits.txt'


def schedule(steps, momentum=0.0):
  """A cosine after a warm-up."""
  t = np.arange(steps) / steps
  return mechanisms.Workload(
      momentum, np.minimum(1, 10 * (t + 1 / steps)) * (1 + np.cos(np.pi * t)))


def design(kind, *args, **kwargs):
  shown = [format(a, 'g') for a in args]
  for name, value in kwargs.items():
    if isinstance(value, mechanisms.Workload):
      momentum = f', momentum {value.momentum:g}' if value.momentum else ''
      shown.append(('schedule' if value.learning_rates else 'constant rate') + momentum)
    else:
      shown.append(f'{name}={value:g}' if isinstance(value, int) and value > 1 else
                   f'{name}={value}')
  return (f'{kind.__name__}({", ".join(shown)})',
          lambda: f'error {kind(*args, **kwargs).rmse():.5g} (one participation)')


def calibration(steps, epsilon, sampling=None, batch=256, population=60_000, **more):
  sampling = sampling or sampling_lib.Poisson()

  def run():
    plan = privacy.PrivacyPlan.calibrate(
        target_epsilon=epsilon, target_delta=1e-6, population_size=population, batch_size=batch,
        steps=steps, l2_norm_clip=1.0, sampling=sampling, **more)
    return f'noise multiplier {plan.noise_multiplier:.4g}'
  return f'calibrate {type(sampling).__name__} steps={steps:g} epsilon={epsilon:g}', run


def choice(steps, function=advice.choose, title='choose', **more):
  plan = privacy.PrivacyPlan(
      population_size=60_000, batch_size=256, steps=steps, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-6, sampling=sampling_lib.FixedOrder())
  described = ', '.join('schedule' if name == 'workload' else f'{name}={value}'
                        for name, value in more.items())

  def run():
    found = function(plan, **more)
    return type(getattr(found, 'mechanism', found)).__name__
  return f'{title} FixedOrder steps={steps:g} {described}'.rstrip(), run


M, MILLION = mechanisms, 10**6
CASES = [
    design(M.BandedInverse, 64, MILLION, workload=schedule(MILLION)),
    design(M.BandedInverse, 64, MILLION, workload=schedule(MILLION, 0.9)),
    design(M.BandedInverse, 64, MILLION, workload=schedule(MILLION), objective='max'),
    design(M.BandedInverse, 16, MILLION, workload=schedule(MILLION), min_sep=10**5,
           max_participations=10),
    design(M.BandedToeplitz, 16, 2000, workload=schedule(2000)),
    design(M.BandedToeplitz, 16, MILLION, workload=schedule(MILLION)),
    design(M.BLT, 3, 10**4, workload=schedule(10**4)),
    design(M.BLT, 3, 10**5, workload=schedule(10**5)),
    design(M.BLT, 10, 10**4, workload=schedule(10**4)),
    design(M.BLT, 3, MILLION, workload=schedule(MILLION)),
    design(M.BandedInverse, 1024, 10**5),
    design(M.BandedInverse, 1024, 20_000, min_sep=200, max_participations=100),
    design(M.BandedInverse, 64, MILLION, min_sep=10, max_participations=10**5),
    design(M.BandedToeplitz, 1024, MILLION),
    design(M.BLT, 10, MILLION, min_sep=10**4, max_participations=100),
    design(M.BLT, 10, MILLION, workload=M.Workload(0.99)),
    design(M.BLT, 3, 10**9),
    design(M.BLT, 50, MILLION),
    design(M.SquareRoot, MILLION),
    design(M.Tree, MILLION),
    design(M.Banded, 16, 1024, method='optimal'),
    design(M.Banded, 16, 2048, method='optimal'),
    design(M.Banded, 64, 1024, method='optimal'),
    design(M.Banded, 128, 1024, method='optimal'),
    design(M.Dense, 1024),
    design(M.Dense, 512, workload=M.Workload(0.99)),
    design(M.Dense, 1024, workload=M.Workload(0.99)),
    design(M.Dense, 1024, objective='max'),
    design(M.Dense, 512, objective='max', workload=M.Workload(0.99)),
    design(M.Dense, 512, min_sep=128, max_participations=4, fixed_order=True),
    design(M.Dense, 1024, min_sep=256, max_participations=4, fixed_order=True),
    design(M.Dense, 1024, min_sep=64, max_participations=16, fixed_order=True),
    design(M.Dense, 256, min_sep=4, max_participations=64, fixed_order=True),
    design(M.Dense, 1024, min_sep=32, max_participations=32, fixed_order=True),
    design(M.Dense, 2048),
    design(M.Dense, 10**4),
    calibration(10**4, 1e-4), calibration(10**4, 1e3), calibration(MILLION, 1.0),
    calibration(10**11, 1.0), calibration(10**4, 1e5),
    calibration(10**4, 1.0, sampling_lib.TruncatedPoisson(max_batch_size=350)),
    calibration(10**4, 1.0, sampling_lib.FixedOrder()),
    choice(MILLION), choice(MILLION, memory=0), choice(10**5, workload=schedule(10**5)),
    choice(10**4, least_error_plans.choose_plan, 'choose_plan'),
]


def late(*unused):
  raise TimeoutError


def main():
  print(REMARKS.read_text(encoding='utf-8'))
  warnings.simplefilter('ignore')
  signal.signal(signal.SIGPROF, late)
  for title, run in CASES:
    if sys.argv[1:] and not any(part in title for part in sys.argv[1:]):
      continue
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
      said = run()
    except TimeoutError:
      said = 'given up'
    except ValueError as error:
      said = 'refused: ' + str(error)[:100]
    finally:
      signal.setitimer(signal.ITIMER_PROF, 0)
    print(f'{title:76}{time.process_time() - start:8.2f}  {said}', flush=True)


if __name__ == '__main__':
  main()
