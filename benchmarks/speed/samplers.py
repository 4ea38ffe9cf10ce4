# SPDX-License-Identifier: Apache-2.0
"""What a choice of cycle and bands is worth: prefix sums at equal epsilon, from formulas alone.

    python benchmarks/speed/samplers.py [--records 4096 60000 50021] >
        benchmarks/results/samplers.txt

Errors are the noise multiplier that epsilon needs times the root mean square error of the
mechanism, in clip norms; those of one block may be compared. `least_error_plans.choose_plan`
stands beside the choice of jax_privacy's `optimize_coefs_for_amplifications`, by its formula
and not by its code: cyclic Poisson sampling, as many bands as groups, of all factors of the
number of records the one of least error. Both are accounted for here, with the same
mechanisms.
"""

import argparse
import dataclasses
import warnings

import least_error_plans

from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.privacy import plan as plan_lib

SETTINGS = {4096: (256, 64), 60_000: (500, 1200), 50_021: (500, 1000)}  # Records: batch, steps.


def calibrated(epsilon, mechanism, scheme, **setting):
  return plan_lib.PrivacyPlan.calibrate(
      target_epsilon=epsilon, l2_norm_clip=1.0, mechanism=mechanism, sampling=scheme, **setting)


def error(plan):
  return plan.noise_multiplier * plan.mechanism.rmse(plan.steps)


def show(title, plan):
  print(f'  {title:44} sigma {plan.noise_multiplier:7.3f}   error {error(plan):8.3f}', flush=True)


def factors(number):
  return [b for b in range(1, number + 1) if number % b == 0]


def theirs(epsilon, setting):
  plans = [calibrated(
      epsilon, mechanisms.BandedToeplitz(b, setting['steps']) if b > 1 else
      mechanisms.IndependentGaussian(), sampling.CyclicPoisson(b), **setting)
           for b in factors(setting['population_size'])
           if b <= min(setting['steps'], setting['population_size'] // setting['batch_size'])]
  return min(plans, key=error)


def main():
  warnings.simplefilter('ignore')
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--records', type=int, nargs='*', default=list(SETTINGS))
  for population in parser.parse_args().records:
    batch, steps = SETTINGS[population]
    setting = dict(population_size=population, batch_size=batch, steps=steps, target_delta=1e-6)
    for epsilon in (1.0, 8.0):
      print(f'\n{population} records, batch {batch}, {steps} steps, delta 1e-6, '
            f'epsilon {epsilon:g}\n')
      plain = calibrated(epsilon, mechanisms.IndependentGaussian(), sampling.Poisson(), **setting)
      show('Poisson, independent', plain)
      other = theirs(plain.epsilon(), setting)
      show(f'formula of jax_privacy: {other.mechanism.bands} bands', other)
      for memory in (32, steps):
        ours = least_error_plans.choose_plan(plain, memory=memory)
        cycle = ours.sampling.cycle
        name = f'{type(ours.sampling).__name__} {cycle}, {type(ours.mechanism).__name__}'
        show(f'choose_plan, memory {memory}: {name}', dataclasses.replace(ours))


if __name__ == '__main__':
  main()
