# SPDX-License-Identifier: Apache-2.0
"""A first private model of a table, at usual settings: does noise over signal tell how it ends?

    PYTHONPATH=. python benchmarks/evidence/first_try.py

20,000 people, a fifth of them positive, 20 standardized inputs of which some have heavy tails, one
hidden layer, DP-Adam at epsilon 2. All private runs have the same batches, steps and noise
multiplier, so noise over signal is the same, in units of the clip norm.
"""

import keras
import numpy as np

import tfdp_adaptive as tfdp

BATCH, STEPS, PEOPLE = 256, 300, 20_000
SETTINGS = ((1.0, .001), (1.0, .01), (1.0, .05), (3.0, .01), (10.0, .01), (None, .05))


def main() -> None:
  rng = np.random.default_rng(3)
  hidden = rng.normal(size=(24_000, 6))
  x = np.concatenate([hidden @ rng.normal(size=(6, 8)), np.exp(1.5 * hidden[:, :4]),
                      rng.integers(0, 2, size=(24_000, 8))], 1)
  score = hidden @ np.array([1.0, -.8, .6, .3, 0, 0]) + .5 * hidden[:, 0] * hidden[:, 1] - 1.9
  y = (rng.random(len(x)) < 1 / (1 + np.exp(-score))).astype(np.float32)
  x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
  train, test = (x[:PEOPLE], y[:PEOPLE]), (x[PEOPLE:], y[PEOPLE:])
  share = train[1].mean()
  print(f'{share:.1%} positive; log loss of a constant '
        f'{-np.mean(np.log(np.where(test[1] > 0, share, 1 - share))):.3f}')
  for clip, rate in (('none', .001), *SETTINGS):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.layers.Input([20]), keras.layers.Dense(64, 'relu'),
        keras.layers.Dense(1, 'sigmoid')])
    if clip == 'none':
      model.compile(keras.optimizers.Adam(rate), 'binary_crossentropy')
      model.fit(*train, batch_size=BATCH, epochs=10, verbose=0)
      print(f'Adam, not private, 10 epochs: {model.evaluate(*test, verbose=0):.3f}', flush=True)
      continue
    plan = tfdp.PrivacyPlan.calibrate(
        target_epsilon=2.0, target_delta=1e-5, population_size=PEOPLE, batch_size=BATCH,
        steps=STEPS, l2_norm_clip=clip)
    model = tfdp.make_private(model)
    model.compile(tfdp.DPAdam(rate, plan=plan), 'binary_crossentropy')
    model.fit(plan.batches(train), verbose=0)
    noise = plan.noise_multiplier * model.count_params()**.5 / BATCH
    print(f'clip norm {"left out" if clip is None else format(clip, "g"):8}  rate {rate:<5g}  '
          f'noise over clip norm {noise:.2f}  log loss {model.evaluate(*test, verbose=0):.3f}',
          flush=True)


if __name__ == '__main__':
  main()
