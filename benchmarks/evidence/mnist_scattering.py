# SPDX-License-Identifier: Apache-2.0
"""MNIST by scattering features and a linear head, solved from one release or trained by DP-SGD.

    PYTHONPATH=. python benchmarks/evidence/mnist_scattering.py --data FOLDER --cache CACHE
        [--seeds 1]

Images are sheared until they stand upright, each by its own second moments.
Features: two orders of Morlet wavelets of two scales and eight angles, 81 channels, by FFTs, read
at 7 x 7 places around the middle of the image. No data, public or private, decide them. Their
roots are normalized by the image itself, and the 4 x 4 lowest frequencies of each are taken: 1,296
numbers, of norm one together. Least squares adds a constant of .2. DP-SGD trains a linear head from
zero, on these features or on features whose mean and covariance were released once before: the
mean is taken off, and directions in which images differ much are shortened. That head has no bias,
which would be half of each squared gradient norm. Both costs together are at most epsilon.

Other heads: `stp`, DPAdamSTP on such whitened features; `kfc`, DPKFC with a released covariance, in
whose directions features are written, so that its diagonal is the whole factor; `kfc_public`, DPKFC
with --public images, which are public and do not train; `public`, a ridge on as many images alone,
three times. With --views, training images are moved by up to a pixel each way, and features of so
many views are computed once. Test images are as they are.

--settings trains on the first 55,000 images and prints the accuracy on the other 5,000, for trials
of settings; otherwise 60,000 images train, and accuracies are on the 10,000 test images. Delta is
1e-5.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import time
from typing import Any, List

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
from scipy import fft
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import frozen_features
from tfdp_adaptive.batches import sources
from tfdp_adaptive.estimates import moments

SIZE, SCALES, ANGLES, DELTA = 32, 2, 8, 1e-5
EPSILONS = (.1, .5, 1.2, 2.93)


def morlet(scale: int, angle: float) -> np.ndarray:
  """The Fourier transform of a wavelet of mean zero, over all aliases of a frequency."""
  axis = np.fft.fftfreq(SIZE) * 2 * np.pi
  sigma, center, slant = .8 * 2**scale, 3 * np.pi / 4 / 2**scale, 4 / ANGLES
  found = np.zeros([SIZE, SIZE])
  gauss = np.zeros([SIZE, SIZE])
  for dx in (-2, -1, 0, 1, 2):
    for dy in (-2, -1, 0, 1, 2):
      u, v = np.meshgrid(axis + 2 * np.pi * dx, axis + 2 * np.pi * dy, indexing='ij')
      along, across = u * np.cos(angle) + v * np.sin(angle), v * np.cos(angle) - u * np.sin(angle)
      bell = lambda shift: np.exp(-sigma**2 / 2 * (
          (along - shift)**2 + (across / slant)**2))
      found += bell(center)
      gauss += bell(0.0)
  return (found - gauss * found[0, 0] / gauss[0, 0]).astype(np.float32)


def places(step: int) -> np.ndarray:
  """Gaussian means around 7 x 7 places of an image whose pixels are `step` apart, as a matrix."""
  centers = SIZE / 2 + 4 * (np.arange(7) - 3)
  far = np.arange(0, SIZE, step) - centers[:, np.newaxis]
  far = (far + SIZE / 2) % SIZE - SIZE / 2  # Around the edge, as in the transforms.
  near = np.exp(-far**2 / 2 / (.8 * 2**SCALES)**2)
  near /= near.sum(1, keepdims=True)
  return np.einsum('ai,bj->ijab', near, near).reshape(-1, 49).astype(np.float32)


WAVES = np.array([[morlet(j, np.pi * k / ANGLES) for k in range(ANGLES)] for j in range(SCALES)])
PLACES = {SIZE // step: places(step) for step in (1, 2)}


def waves_in(spectrum: np.ndarray, scale: int) -> np.ndarray:
  """Moduli of wavelet transforms; of every second pixel at the second scale."""
  found = spectrum * WAVES[scale]
  if scale:
    half = SIZE // 2
    found = (found[..., :half, :] + found[..., half:, :]) / 4
    found = found[..., :half] + found[..., half:]
  found = fft.ifft2(found)
  return np.sqrt(np.square(found.real) + np.square(found.imag))


def upright(x: np.ndarray) -> np.ndarray:
  """Images [n, 32, 32] whose rows are moved until ink leans neither left nor right."""
  axis = np.arange(SIZE, dtype=np.float32)
  ink = np.maximum(x.sum((1, 2)), 1e-6)
  down, along = (axis - (x.sum(other) @ axis / ink)[:, np.newaxis] for other in (2, 1))
  slant = np.einsum('nij,ni,nj->n', x, down, along) / np.maximum(
      np.einsum('nij,ni->n', x, down**2), 1e-6)
  source = axis + (np.clip(slant, -1, 1)[:, np.newaxis] * down)[:, :, np.newaxis]
  left = np.clip(np.floor(source), 0, SIZE - 2).astype(np.int64)
  part = np.clip(source - left, 0, 1).astype(np.float32)
  take = functools.partial(np.take_along_axis, x, axis=2)
  return take(left) * (1 - part) + take(left + 1) * part


def scattering(images: np.ndarray) -> np.ndarray:
  """uint8 [n, 28, 28] to [n, 81, 49]."""
  x = upright(np.pad(images.astype(np.float32) / 255, [(0, 0), (2, 2), (2, 2)]))
  spectrum = fft.fft2(x)[:, np.newaxis]
  fine = waves_in(spectrum, 0)
  spectra = fft.fft2(fine)
  parts = [x[:, np.newaxis], fine, waves_in(spectrum, 1)]
  parts += [waves_in(spectra[:, k:k + 1], 1) for k in range(ANGLES)]
  return np.concatenate(
      [part.reshape(*part.shape[:2], -1) @ PLACES[part.shape[-1]] for part in parts], 1)


def unit(rows: np.ndarray) -> np.ndarray:
  rows = rows.reshape(len(rows), -1)
  return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)


def normalized(channels: np.ndarray) -> np.ndarray:
  """Roots of channels [n, 81, 49], normalized by the image itself; their low frequencies.

  What is common to all angles at a place is in most of the numbers, and shows little. Three tenths
  of it are left, so that more directions of the features stand out of the noise.
  """
  parts = np.sqrt(np.maximum(channels, 0)).reshape(len(channels), 81, 49)
  parts = (parts - parts.mean(2, keepdims=True)) / (parts.std(2, keepdims=True) + 1e-2)
  parts = parts.reshape(-1, 81, 7, 7)
  for first, last in ((1, 9), (9, 17), (17, 81)):
    parts[:, first:last] -= .7 * parts[:, first:last].mean(1, keepdims=True)
  return unit(fft.dctn(parts, axes=(2, 3), norm='ortho')[:, :, :4, :4])


def solved(train: Any, test: Any, epsilon: float) -> float:
  layer = tfdp.heads.least_squares(
      *train, target_epsilon=epsilon, target_delta=DELTA, constant=.2, classes=10)
  kernel, bias = layer.get_weights()
  return float(np.mean((test[0] @ kernel + bias).argmax(1) == test[1]))


def public_alone(train: Any, test: Any, chosen: np.ndarray) -> float:
  """The accuracy of a ridge on some training images alone, its strength from leaving one out."""
  add = lambda rows: np.concatenate([rows, np.full([len(rows), 1], .2)], 1)
  x, y = add(train[0][chosen]), train[1][chosen]
  values, vectors = np.linalg.eigh(x @ x.T)
  targets, best, weights = np.eye(10)[y], -1.0, np.zeros([x.shape[1], 10])
  for ridge in values[-1] * 10.0**np.arange(-7, 0, .25):
    inverse = (vectors / (np.maximum(values, 0) + ridge)) @ vectors.T
    dual = inverse @ targets
    left_out = targets - dual / np.diag(inverse)[:, np.newaxis]
    right = float(np.mean(left_out.argmax(1) == y))
    if right > best:
      best, weights = right, x.T @ dual
  return float(np.mean((add(test[0]) @ weights).argmax(1) == test[1]))


def turned(public: Any, train: Any, test: Any) -> Any:
  """Features along eigenvectors of public ones, so that DP-KFC's diagonal is its whole factor."""
  vectors = np.linalg.eigh(public.x.T.astype(np.float64) @ public.x)[1].astype(np.float32)
  turn = lambda part: (part[0] @ vectors, part[1])
  return dataclasses.replace(public, x=public.x @ vectors), turn(train), turn(test)


def whitened(found: Any, train: Any, test: Any, options: Any) -> Any:
  """Features [n, d] or [n, views, d] by a release of their mean and covariance."""
  base, (x, y) = found.whitening(options.power, options.floor), train
  test = base.predict(test[0], 1000, verbose=0), test[1]
  made = tfdp.features(base, x.reshape(-1, x.shape[-1]), batch_size=4000)
  return frozen_features.Features(
      made.x.reshape(x.shape), sources.of((y,)), None if x.ndim == 2 else x.shape[1],
      made.entries, made.base), test


def trained(train: Any, test: Any, epsilon: float, head: str, options: Any) -> List[float]:
  """Accuracy, processor seconds of training, and epsilon with that of a release."""
  ledger, public = tfdp.Ledger(), None
  if head == 'kfc_public':
    public = moments.PublicInputs(*(part[:options.public] for part in train), ledger)
    public, train, test = turned(public, [part[options.public:] for part in train], test)
  elif head != 'trained':
    found = tfdp.estimates.second_moments(
        train[0], noise_multiplier=options.release, constant=0.0 if head == 'kfc' else .5)
    ledger = found.ledger
    if head == 'kfc':
      public, train, test = turned(found.public_data(classes=10), train, test)
    else:
      train, test = whitened(found, train, test, options)
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=epsilon, target_delta=DELTA,
      population_size=options.images - options.public * (head == 'kfc_public'), spent=ledger,
      batch_size=options.batch, steps=tfdp.sampling.Epochs(options.epochs),
      l2_norm_clip=options.clip)
  layers = tf.keras.layers
  model = tfdp.make_private(tf.keras.Sequential([
      layers.Input([test[0].shape[1]]),
      layers.Dense(10, use_bias=head == 'trained', kernel_initializer='zeros')]))
  rate = tf.keras.optimizers.schedules.PolynomialDecay(options.rate, plan.steps, 0.0)
  if head == 'stp':
    optimizer = tfdp.DPAdamSTP(rate, plan=plan, scale_epsilon=options.scale)
  elif public is not None:
    optimizer = tfdp.DPKFC(rate, momentum=.9, plan=plan, public_data=public, power=options.power,
                           scale_epsilon=options.scale)
  else:
    optimizer = tfdp.DPSGD(rate, momentum=.9, plan=plan)
  model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  begun = time.process_time()
  model.fit(plan.batches(train), verbose=0)
  seconds = time.process_time() - begun
  return [float(np.mean(model.predict(test[0], 1000, verbose=0).argmax(1) == test[1])), seconds,
          model.ledger.epsilon(DELTA)]


def moved(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Scattering of images that are moved by up to a pixel each way, each by its own numbers."""
  wide = np.pad(images, [(0, 0), (1, 1), (1, 1)])
  down, along = rng.integers(0, 3, size=[2, len(images), 1, 1])
  axis = np.arange(images.shape[1])
  return scattering(
      wide[np.arange(len(images))[:, np.newaxis, np.newaxis], down + axis[:, np.newaxis],
           along + axis])


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', default='../shared/data', help='folder of the real data')
  parser.add_argument('--cache', default=None)
  parser.add_argument('--seeds', type=int, default=1)
  parser.add_argument('--epsilons', type=float, nargs='+', default=EPSILONS)
  parser.add_argument('--heads', nargs='+', default=['public', 'solved', 'trained', 'released'],
                      help='also stp, kfc, kfc_public')
  parser.add_argument('--rate', type=float, default=100.0)
  parser.add_argument('--clip', type=float, default=.1)
  parser.add_argument('--batch', type=int, default=4096)
  parser.add_argument('--epochs', type=int, default=20)
  parser.add_argument('--release', type=float, default=5.0, help='noise multiplier')
  parser.add_argument('--power', type=float, default=.4, help='of the whitening')
  parser.add_argument('--floor', type=float, default=.004, help='of the whitening')
  parser.add_argument('--scale', type=float, default=1.0, help='scale_epsilon of stp, kfc')
  parser.add_argument('--public', type=int, default=1000, help='images that are public')
  parser.add_argument('--views', type=int, default=0, help='of training images, moved; cached')
  parser.add_argument('--settings', action='store_true', help='hold 5,000 training images out')
  options = parser.parse_args()
  spec: Any = importlib.util.spec_from_file_location('load', os.path.join(options.data, 'load.py'))
  data = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(data)
  (x, y), (x_test, y_test) = data.mnist()

  def channels(
      part: np.ndarray, base: Any = scattering, more: str = '', views: Any = None) -> np.ndarray:
    return tfdp.features(
        base, part, batch_size=20, cache=options.cache, views=views,
        name=f'scattering of upright digits, 7 x 7 places{more}').x

  rows = lambda part: np.concatenate([
      normalized(np.asarray(part[i:i + 5000])) for i in range(0, len(part), 5000)])
  train, test = (rows(channels(x)), y.astype(np.int32)), (None, y_test)
  if options.settings:
    train, test = tuple(a[:55_000] for a in train), tuple(a[55_000:] for a in train)
  else:
    test = rows(channels(x_test)), y_test
  options.images = len(train[0])
  print(f'{options.images} images train; {options}')
  if 'public' in options.heads:
    order = np.random.default_rng(0).permutation(options.images)
    for i in range(3):
      chosen = order[i * options.public:(i + 1) * options.public]
      print(f'{"public alone":16}{0:8}{public_alone(train, test, chosen):10.4f}', flush=True)
  if options.views:
    base = functools.partial(moved, rng=np.random.default_rng(0))
    views = channels(x[:options.images], base, ', moved by a pixel', options.views)
    train = np.stack([rows(views[:, i]) for i in range(options.views)], 1), train[1]
  for epsilon in options.epsilons:
    for _ in range(options.seeds):
      for head in options.heads:
        if head == 'solved':
          accuracy = solved(train, test, epsilon)
          print(f'{"least squares":16}{epsilon:8}{accuracy:10.4f}', flush=True)
        elif head != 'public':
          accuracy, seconds, spent = trained(train, test, epsilon, head, options)
          print(f'{head:16}{epsilon:8}{accuracy:10.4f}   {seconds:.0f} CPU s, epsilon {spent:.4f}',
                flush=True)


if __name__ == '__main__':
  main()
