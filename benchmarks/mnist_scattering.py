# SPDX-License-Identifier: Apache-2.0
"""MNIST by scattering features and a linear head, solved from one release or trained by DP-SGD.

    PYTHONPATH=. python benchmarks/mnist_scattering.py --data FOLDER --cache CACHE [--seeds 1]

Features: two orders of Morlet wavelets of two scales and eight angles, 81 channels of 7 x 7, by
FFTs; no data, public or private, decide them. Groups of three channels are normalized by the image
itself. Least squares takes the 4 x 4 lowest frequencies of every channel, and a constant of .2; its
ridge and share are the defaults. DP-SGD trains a linear head from zero: rate 8, momentum .9, clip
norm .1, expected batches of 4,096, 20 epochs. Delta is 1e-5; 59,000 images train. The settings were
not searched here. Accuracies are on the 10,000 test images.
"""

import argparse
import importlib.util
import os
import time
from typing import Any, Dict, List

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
from scipy import fft
import tensorflow as tf

import tfdp_adaptive as tfdp

SIZE, SCALES, ANGLES, DELTA = 32, 2, 8, 1e-5
EPSILONS = (.1, .5, 1.2, 2.93)


def grid() -> Any:
  axis = np.fft.fftfreq(SIZE) * 2 * np.pi
  return np.meshgrid(axis, axis, indexing='ij')


def morlet(scale: int, angle: float) -> np.ndarray:
  """The Fourier transform of a wavelet of mean zero, over all aliases of a frequency."""
  sigma, center, slant = .8 * 2**scale, 3 * np.pi / 4 / 2**scale, 4 / ANGLES
  found = np.zeros([SIZE, SIZE])
  gauss = np.zeros([SIZE, SIZE])
  for dx in (-2, -1, 0, 1, 2):
    for dy in (-2, -1, 0, 1, 2):
      u, v = (w + 2 * np.pi * d for w, d in zip(grid(), (dx, dy)))
      along, across = u * np.cos(angle) + v * np.sin(angle), v * np.cos(angle) - u * np.sin(angle)
      bell = lambda shift: np.exp(-sigma**2 / 2 * (
          (along - shift)**2 + (across / slant)**2))
      found += bell(center)
      gauss += bell(0.0)
  return (found - gauss * found[0, 0] / gauss[0, 0]).astype(np.float32)


def bank() -> Dict[str, Any]:
  low = sum(np.exp(-(.8 * 2**SCALES)**2 / 2 * ((u + 2 * np.pi * a)**2 + (v + 2 * np.pi * b)**2))
            for u, v in [grid()] for a in (-1, 0, 1) for b in (-1, 0, 1))
  waves = [[morlet(j, np.pi * k / ANGLES) for k in range(ANGLES)] for j in range(SCALES)]
  return {'low': low.astype(np.float32), 'waves': waves}


BANK = bank()


def scattering(images: np.ndarray) -> np.ndarray:
  """uint8 [n, 28, 28] to [n, 81, 7, 7]."""
  x = np.pad(images.astype(np.float32) / 255, [(0, 0), (2, 2), (2, 2)])
  forward = lambda t: fft.fft2(t, axes=(-2, -1))
  smooth = lambda t: np.real(fft.ifft2(t * BANK['low'], axes=(-2, -1)))[:, ::4, ::4]
  of_x = forward(x)
  channels = [smooth(of_x)]
  for j, waves in enumerate(BANK['waves']):
    for wave in waves:
      first = forward(np.abs(fft.ifft2(of_x * wave, axes=(-2, -1))))
      channels.append(smooth(first))
      for finer in BANK['waves'][j + 1:]:
        channels += [smooth(forward(np.abs(fft.ifft2(first * other, axes=(-2, -1)))))
                     for other in finer]
  return np.stack(channels, 1)[:, :, :7, :7].astype(np.float32)


def normalized(channels: np.ndarray, groups: int = 27) -> np.ndarray:
  """Every group of channels with mean zero and variance one, by the image itself."""
  parts = channels.reshape(len(channels), groups, -1)
  parts = (parts - parts.mean(2, keepdims=True)) / (parts.std(2, keepdims=True) + 1e-2)
  return parts.reshape(channels.shape)


def unit(rows: np.ndarray) -> np.ndarray:
  rows = rows.reshape(len(rows), -1)
  return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)


def low_frequencies(channels: np.ndarray) -> np.ndarray:
  return unit(fft.dctn(channels, axes=(2, 3), norm='ortho')[:, :, :4, :4])


def solved(train: Any, test: Any, epsilon: float) -> float:
  layer = tfdp.heads.least_squares(
      *train, target_epsilon=epsilon, target_delta=DELTA, constant=.2, classes=10)
  kernel, bias = layer.get_weights()
  return float(np.mean((test[0] @ kernel + bias).argmax(1) == test[1]))


def trained(train: Any, test: Any, epsilon: float, rate: float, clip: float) -> List[float]:
  """Accuracy, and processor seconds of training."""
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=epsilon, target_delta=DELTA, population_size=len(train[0]), batch_size=4096,
      steps=tfdp.sampling.Epochs(20), l2_norm_clip=clip)
  layers = tf.keras.layers
  model = tfdp.make_private(tf.keras.Sequential([
      layers.Input([train[0].shape[1]]), layers.Dense(10, kernel_initializer='zeros')]))
  model.compile(tfdp.DPSGD(rate, momentum=.9, plan=plan),
                tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  begun = time.process_time()
  model.fit(plan.batches(train), verbose=0)
  seconds = time.process_time() - begun
  return [float(np.mean(model.predict(test[0], 1000, verbose=0).argmax(1) == test[1])), seconds]


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--cache', default=None)
  parser.add_argument('--seeds', type=int, default=1)
  parser.add_argument('--rate', type=float, default=8.0)
  parser.add_argument('--clip', type=float, default=.1)
  parser.add_argument('--only', default='')
  arguments = parser.parse_args()
  spec: Any = importlib.util.spec_from_file_location(
      'load', os.path.join(arguments.data, 'load.py'))
  data = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(data)
  (x, y), (x_test, y_test) = data.mnist()
  channels, of_test = (
      normalized(np.asarray(tfdp.features(
          scattering, part, batch_size=250, cache=arguments.cache, name='scattering, 2 scales').x))
      for part in (x, x_test))
  channels, y = channels[:59_000], y.astype(np.int32)[:59_000]
  print(f'{"head":24}{"epsilon":>8}{"accuracy":>10}', flush=True)
  low, low_test = low_frequencies(channels), low_frequencies(of_test)
  for epsilon in EPSILONS if arguments.only != 'sgd' else ():
    rows = [solved((low, y), (low_test, y_test), epsilon) for _ in range(arguments.seeds)]
    print(f'{"least squares":24}{epsilon:8}' + ''.join(f'{one:10.4f}' for one in rows), flush=True)
  wide, wide_test = unit(channels), unit(of_test)
  del channels, of_test
  for epsilon in (1.2, 2.93) if arguments.only != 'solved' else ():
    for _ in range(arguments.seeds):
      accuracy, seconds = trained(
          (wide, y), (wide_test, y_test), epsilon, arguments.rate, arguments.clip)
      print(f'{"DP-SGD":24}{epsilon:8}{accuracy:10.4f}   {seconds:.0f} CPU s', flush=True)


if __name__ == '__main__':
  main()
