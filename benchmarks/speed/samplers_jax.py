# SPDX-License-Identifier: Apache-2.0
"""jax_privacy's own choice of bands in the settings of samplers.py, to lay beside its formula.

    build/peers/jax/bin/python benchmarks/speed/samplers_jax.py >
        benchmarks/results/samplers_jax.txt

It accounts by Renyi divergences, and samplers.py by privacy loss distributions: what may be
compared is the bands, and the error over the noise multiplier, which is the mechanism's.
"""

import argparse
import time

import jax.numpy as jnp
import jax_privacy
from jax_privacy.matrix_factorization import toeplitz

SETTINGS = {4096: (256, 64), 60_000: (500, 1200), 50_021: (500, 1000)}  # As in samplers.py.


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--records', type=int, nargs='*', default=list(SETTINGS))
  print(f'jax_privacy {jax_privacy.__version__}, optimize_coefs_for_amplifications, delta 1e-6\n')
  print(f'{"records, batch, steps":24}{"epsilon":>8}{"bands":>7}{"sigma":>8}{"error":>9}'
        f'{"error / sigma":>15}{"CPU s":>8}')
  for records in parser.parse_args().records:
    batch, steps = SETTINGS[records]
    for epsilon in (1.0, 8.0):
      start = time.process_time()
      coefficients, stddev = toeplitz.optimize_coefs_for_amplifications(
          steps, dataset_size=records, expected_batch_size=batch, epsilon=epsilon, delta=1e-6)
      multiplier = stddev / jnp.sqrt(toeplitz.sensitivity_squared(coefficients, n=steps))
      error = stddev * jnp.sqrt(jnp.mean(
          toeplitz.per_query_error(strategy_coef=coefficients, n=steps)))
      print(f'{f"{records}, {batch}, {steps}":24}{epsilon:8g}{len(coefficients):7d}'
            f'{multiplier:8.3f}{error:9.3f}{error / multiplier:15.4f}'
            f'{time.process_time() - start:8.1f}', flush=True)


if __name__ == '__main__':
  main()
