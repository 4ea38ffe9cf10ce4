# SPDX-License-Identifier: Apache-2.0
"""Figure 3 of arXiv:2507.01129 in miniature: a transformer on arXiv abstracts, variants x noises.

    PYTHONPATH=. python benchmarks/evidence/abstracts.py [--study small|large] [--data FOLDER]
        [--out FOLDER]
        [--runs FOLDER] [--only-tables]

The next of the first words of an abstract, by two layers. `small` starts from random weights and
`large`, of a million parameters, from some steps on WikiText-2 without privacy (the paper
fine-tunes a pretrained TinyBERT of 4.4 million on masked words); the frequencies of WikiText-2's
words are a fixed bias. Rules, noise and accounting are the library's. All noises have the same
epsilon. In `small` every method has two kinds of settings and three rates: all six are tried with
independent noise, by the loss of one run on validation abstracts; with the other noises, and
without noise, the rates of the better kind, and a best rate at an end is followed by the next one.
`large` has three rates of one kind, which is that of `small`, and with a BLT the best rate with
banded noise; scale-then-privatize has the clip norm .3 sqrt(m), which was best in `small` with
banded noise. Losses are of two other runs, on test abstracts. The diagnostics without privacy are
not tuned: they have the settings of the method of which they are the ideal. The command goes on
where it was interrupted, and prints tables of all that is there.
"""

import argparse
import json
import os
import pathlib
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import abstracts_model as model_lib
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules

tfdp.experimental('dp_adam_ime')

EPSILON, DELTA, BANDS, TRAIN = 8.0, 1e-5, 8, 10_240
TUNING_SEED, TEST_SEEDS = 1, (11, 12)
NOISES = ('independent', 'banded', 'blt')
UNIT = .5  # Clip norm of all methods that do not scale, in median norms at the start.
RATES = {'DP-SGD': 3.0}  # The middle one of three rates; for SGD it is times 1 - momentum.
ADAM_RATE = .01


class Study(NamedTuple):
  """A model and the length of its training."""

  file: str
  sizes: model_lib.Sizes
  batch: int
  steps: int
  pretraining: int = 0  # Steps on public words, without privacy.
  kinds: Dict[str, int] = {}  # Kinds that are not tuned; empty: all of the first two.
  rates: Dict[str, float] = {}  # In the middle of three, where not `RATES`.
  like: Dict[str, str] = {}  # Noises that are not tuned: that whose rates they have.


STUDIES = {
    'small': Study('abstracts', model_lib.Sizes(800, 800, 16, 48, 96), 256, 100),
    'large': Study(
        'abstracts_large', model_lib.Sizes(5000, 1000, 8, 128, 256), 512, 40, 300,
        {'DP-SGD': 1, 'post-processing': 1, 'scale-then-privatize': 2, 'bias correction': 1,
         'independent moments': 1},
        {'DP-SGD': .3, 'post-processing': .01, 'bias correction': .01, 'independent moments': .0316,
         'scale-then-privatize': .01}, {'blt': 'banded'})}


class Kind(NamedTuple):
  """A rule, for gradients in units of the clip norm, or of the median norm where it scales."""

  make: Callable[[float, int], contract.Rule]  # (noise of a coordinate, parameters) -> rule.
  text: str
  scaled_clip: float = 0.0  # Times sqrt(parameters); 0: not scaled, clipped at `UNIT`.
  rate_factor: float = 1.0


def _floors(rule: Any, *times: float, **more: Any) -> Tuple[Kind, ...]:
  return tuple(Kind(lambda floor, size, t=t: rule(epsilon=t * floor, **more),
                    f'epsilon {t:g} floors') for t in times)


def _scaled(rule: Any, **more: Any) -> Tuple[Kind, ...]:
  return tuple(Kind(
      lambda floor, size: rule(
          epsilon=.03 / np.sqrt(size) if more else 1e-8, scale_epsilon=.03 / np.sqrt(size), **more),
      f'clip norm {c:g} sqrt(m)', c) for c in (1.0, 4.0, .3, .1))  # 4 is B^(1/4).


_NOISELESS = rules.non_private_noiseless_adam
METHODS = {
    'DP-SGD': tuple(Kind(lambda floor, size, m=m: rules.dp_sgd(m), f'momentum {m:g}', 0.0, 1 - m)
                    for m in (0.0, .9)),
    'post-processing': _floors(rules.dp_adam, .1, 1.0),
    'scale-then-privatize': _scaled(rules.scale_then_privatize),
    'bias correction': _floors(rules.dp_adam_bc, .3, 1.0),
    'independent moments': _floors(rules.dp_adam_ime, 3.0, 10.0)}
WITHOUT_NOISE = {'SGD': 'DP-SGD', 'Adam': 'post-processing'}
IDEALS = {  # Diagnostics without privacy: (of which method, kinds).
    'noiseless preconditioner': (
        'post-processing', _floors(_NOISELESS, .1, 1.0, allow_non_private=True)),
    'scaled, noiseless': (
        'scale-then-privatize', _scaled(_NOISELESS, allow_non_private=True))}
LESS_CLIP = {'scaled, smaller clip norms': METHODS['scale-then-privatize'][2:]}
KINDS = {**METHODS, **LESS_CLIP, **{name: METHODS[of] for name, of in WITHOUT_NOISE.items()},
         **{name: kinds for name, (_, kinds) in IDEALS.items()}}


def make_plan(study: Study, noise: str) -> tfdp.PrivacyPlan:
  steps = study.steps
  common: Dict[str, Any] = dict(
      population_size=TRAIN, batch_size=study.batch, steps=steps, l2_norm_clip=1.0,
      target_delta=DELTA)
  if noise == 'none':
    return tfdp.PrivacyPlan(noise_multiplier=0.0, **common)
  if noise == 'banded':
    common.update(mechanism=tfdp.mechanisms.BandedToeplitz(BANDS, steps),
                  sampling=tfdp.sampling.CyclicPoisson(cycle=BANDS))
  elif noise == 'blt':
    epochs = -(-steps * study.batch // TRAIN)
    common.update(sampling=tfdp.sampling.FixedOrder(), mechanism=tfdp.mechanisms.BLT(
        3, steps, min_sep=TRAIN // study.batch, max_participations=epochs))
  return tfdp.PrivacyPlan.calibrate(target_epsilon=EPSILON, **common)


def batches(study: Study, noise: str, rng: np.random.Generator) -> Iterator[np.ndarray]:
  """Rows of every step: Poisson, cyclic Poisson or a fixed order."""
  order = rng.permutation(TRAIN)
  groups = order % BANDS
  batch = study.batch
  for step in range(study.steps):
    if noise == 'blt':
      yield order.reshape(-1, batch)[step % (TRAIN // batch)]
    elif noise == 'banded':
      taken = rng.random(TRAIN) < BANDS * batch / TRAIN
      yield np.flatnonzero(taken & (groups == step % BANDS))
    else:
      yield np.flatnonzero(rng.random(TRAIN) < batch / TRAIN)


class Bench:
  """Data, the model at its start, and one compiled step per method, kind and noise."""

  def __init__(self, study: Study, folder: str, runs: pathlib.Path) -> None:
    self.study, sizes = study, study.sizes
    (train, *self.held_out, public), self.frequencies = model_lib.read(folder, sizes)
    self.train = train[:TRAIN]
    self.start = model_lib.start(sizes, 3)
    if study.pretraining:
      kept = runs / f'{study.file}.npz'
      if not kept.exists():
        runs.mkdir(parents=True, exist_ok=True)
        np.savez(kept, *model_lib.pretrained(
            sizes, self.start, public, self.frequencies, study.pretraining, study.batch))
      with np.load(kept) as saved:
        self.start = [saved[name] for name in saved.files]
    self.size = sum(w.size for w in self.start)
    weights = [tf.constant(w) for w in self.start]
    _, norms = model_lib.clipped(
        sizes, weights, tf.constant(self.held_out[0]), self.frequencies, 1.0, contract.Query(),
        tf.constant(1.0))
    self.norm = float(np.median(norms))
    self._loss = tf.function(lambda w, words: tf.reduce_mean(
        model_lib.forward(sizes, w, words, self.frequencies)[0]))

  def loss(self, weights: Any, part: int) -> float:
    """Mean loss per word, of abstracts; 0 is validation, 1 test."""
    value = float(self._loss(weights, tf.constant(self.held_out[part])))
    return value if np.isfinite(value) else 1e9

  def unigrams(self) -> float:
    """Test loss of the exact word frequencies of the training abstracts."""
    known = lambda words: np.where(words < len(self.frequencies), words, model_lib.UNKNOWN)
    counts = np.bincount(known(self.train[:, 1:]).ravel(), minlength=len(self.frequencies)) + 1.0
    counts[model_lib.PADDING] = 0
    words = known(self.held_out[1][:, 1:])
    with np.errstate(divide='ignore'):
      each = np.where(words != model_lib.PADDING, -np.log(counts / counts.sum())[words], 0)
    return float(np.mean(each.sum(1) / (words != model_lib.PADDING).sum(1)))

  def trainer(self, kind: Kind, noise: str, plan: tfdp.PrivacyPlan
              ) -> Callable[[float, int], Dict[str, Any]]:
    """`(rate, seed) -> weights and diagnostics` of one run."""
    study = self.study
    unit = self.norm * (1 if kind.scaled_clip else UNIT)
    clip = kind.scaled_clip * np.sqrt(self.size) if kind.scaled_clip else 1.0
    floor = (plan.noise_multiplier or .5) / study.batch
    rule = kind.make(floor, self.size)
    specs = [tf.TensorSpec(w.shape, tf.float32) for w in self.start]
    seeded = lambda seed: privatizer.Privatizer(
        rule.asks, specs, l2_norm_clip=clip, noise_multiplier=plan.noise_multiplier,
        batch_size=study.batch, mechanism=plan.mechanism, steps=study.steps, seed=seed,
        allow_non_private=True)
    noised = seeded(0)  # Its seed is in the state that the others make.

    @tf.function(reduce_retracing=True)
    def step(state: Any, secret: Any, weights: Any, words: tf.Tensor, rate: tf.Tensor) -> Any:
      queries = rule.query(state)
      sums, norms = zip(*(
          model_lib.clipped(study.sizes, weights, words, self.frequencies, unit, query, bound)
          for query, bound in zip(queries, noised.resolve(queries))))
      releases, secret = noised.release(secret, queries, sums)
      direction, state = rule.update(state, releases)
      length = tf.linalg.global_norm(sums[0].total) / (study.batch * clip)
      return (state, secret, [w - rate * d for w, d in zip(weights, direction)], length,
              tf.reduce_mean(tf.cast(norms[0] > clip, tf.float32)))

    def run(rate: float, seed: int) -> Dict[str, Any]:
      rng = np.random.default_rng(seed)
      state, secret = rule.init(specs), seeded(seed).init()
      weights = [tf.constant(w) for w in self.start]
      lengths, cut, negative = [], [], {}
      for t, rows in enumerate(batches(study, noise, rng), 1):
        state, secret, weights, length, share = step(
            state, secret, weights, tf.constant(self.train[rows]), tf.constant(rate, tf.float32))
        lengths.append(float(length))
        cut.append(float(share))
        if hasattr(state, 'bias') and t in (1, 10, 30, 50, 100, study.steps):
          negative[t] = round(float(rules.negative_fraction(state.second, state.bias)), 3)
      result = dict(weights=weights, mean_norm=round(float(np.mean(lengths)), 4),
                    clipped=round(float(np.mean(cut)), 3), negative=negative)
      if noise == 'none' and hasattr(state, 'second'):
        nu = np.concatenate([np.ravel(v) for v in state.second]) / (1 - .999**study.steps)
        result['roots'] = [float(f'{v:.3g}') for v in np.sqrt(np.percentile(nu, range(0, 101, 5)))]
      return result

    return run


def missing(study: Study, rows: List[Dict[str, Any]]
            ) -> Iterator[Tuple[str, str, int, float, int]]:
  """(method, noise, kind, rate, seed) of the next runs; `rows` grows between them."""
  def of(method: str, noise: str, **key: Any) -> List[Dict[str, Any]]:
    return [one for one in rows if dict(key, method=method, noise=noise).items() <= one.items()]

  def best(method: str, noise: str) -> Dict[str, Any]:
    return min(of(method, noise, seed=TUNING_SEED), key=lambda one: one['validation'])

  def tuning(method: str, noise: str) -> Iterator[Tuple[str, str, int, float, int]]:
    tuned = WITHOUT_NOISE.get(method, method)
    if study.kinds:
      kinds = [study.kinds[tuned]]
    elif noise == NOISES[0] or method in LESS_CLIP:
      kinds = [0, 1]
    else:
      kinds = [best(tuned, NOISES[0])['kind']]
    for kind in kinds:
      factor = study.rates.get(tuned) or (
          RATES.get(tuned, ADAM_RATE) * KINDS[method][kind].rate_factor)
      exponents = [0, -1, 1]
      while exponents:
        rate = float(f'{factor * 10**(exponents.pop(0) / 2):.3g}')
        if not of(method, noise, kind=kind, rate=rate, seed=TUNING_SEED):
          yield method, noise, kind, rate, TUNING_SEED
        tried = {one['rate']: one['validation']
                 for one in of(method, noise, kind=kind, seed=TUNING_SEED)}
        least = min(tried, key=lambda r: tried[r])
        ends = {min(tried): -1, max(tried): 1}
        if not exponents and least in ends and not study.kinds:
          exponents = [round(2 * np.log10(least / factor)) + ends[least]]

  cells = [(m, NOISES[0]) for m in METHODS] + [(m, 'none') for m in WITHOUT_NOISE]
  less = () if study.kinds else LESS_CLIP
  cells += [(m, n) for n in NOISES[1:] for m in (*METHODS, *less)]
  cells += [(m, n) for n in NOISES for m in IDEALS]
  for seed in TEST_SEEDS:
    for method, noise in cells:
      tuned = study.like.get(noise, noise)
      if method not in IDEALS:
        yield from tuning(method, tuned)
      like = best(IDEALS[method][0] if method in IDEALS else method, tuned)
      if not of(method, noise, seed=seed):
        yield method, noise, like['kind'], like['rate'], seed


def table(rows: List[Dict[str, Any]]) -> str:
  """Test losses of the settings that were chosen, a line per method; * has one run."""
  columns = (*NOISES, 'none')
  lines = [f'{"test loss":26}' + ''.join(f'{noise:>13}' for noise in columns) + '  settings']
  spread: List[float] = []
  for method, kinds in KINDS.items():
    cells, chosen, text = [], [], ''
    for noise in columns:
      found = [one for one in rows if (one['method'], one['noise']) == (method, noise)
               and one['seed'] in TEST_SEEDS]
      cells.append(f'{np.mean([one["test"] for one in found]):.4f}' if found else '-')
      if len(found) > 1:
        spread.append(float(np.var([one['test'] for one in found], ddof=1)))
      elif found:
        cells[-1] += '*'
      if found:
        chosen.append(f'{found[0]["rate"]:g}')
        text = kinds[found[0]['kind']].text
    if chosen:
      lines.append(f'{method:26}' + ''.join(f'{cell:>13}' for cell in cells)
                   + f'  {text}; rates {", ".join(chosen)}')
  if spread:
    lines.append(f'Standard deviation of one run, over all cells: {np.sqrt(np.mean(spread)):.4f}')
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', default='shared/data', help='folder with load.py')
  parser.add_argument('--study', choices=list(STUDIES), default='small')
  parser.add_argument('--only-tables', action='store_true', help='trains nothing')
  parser.add_argument('--runs', type=pathlib.Path, default=pathlib.Path('runs/abstracts'),
                      help='folder of weights that were trained on public words')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('benchmarks/results'))
  options = parser.parse_args()
  study = STUDIES[options.study]
  out = options.out / f'{study.file}.json'
  rows: List[Dict[str, Any]] = (
      json.loads(out.read_text(encoding='utf-8')) if out.exists() else [])
  if not options.only_tables:
    bench = Bench(study, options.data, options.runs)
    plans = {noise: make_plan(study, noise) for noise in (*NOISES, 'none')}
    print(f'{bench.size} parameters, loss {bench.loss(bench.start, 1):.4f} at the start, '
          f'{bench.unigrams():.4f} by the exact frequencies of the abstracts, median norm '
          f'{bench.norm:.3f}', flush=True)
    for noise, plan in plans.items():
      sigma, mechanism = plan.noise_multiplier, plan.mechanism
      print(f'{noise:12} sigma {sigma:.3f}, error of prefix sums '
            f'{sigma * mechanism.rmse(study.steps):.2f}, of a step '
            f'{sigma * np.max(mechanism.row_norms(study.steps)):.2f}', flush=True)
    trainer: Any = (None, None)
    for method, noise, kind, rate, seed in missing(study, rows):
      began = time.process_time()
      if trainer[0] != (method, noise, kind):
        trainer = (method, noise, kind), bench.trainer(KINDS[method][kind], noise, plans[noise])
      found = trainer[1](rate, seed)
      weights = found.pop('weights')
      rows.append(dict(
          method=method, noise=noise, kind=kind, rate=rate, seed=seed,
          validation=round(bench.loss(weights, 0), 5), test=round(bench.loss(weights, 1), 5),
          noise_multiplier=round(plans[noise].noise_multiplier, 4), **found,
          seconds=round(time.process_time() - began, 1)))
      print(json.dumps(rows[-1]), flush=True)
      new = out.with_suffix('.new')
      new.write_text('[\n' + ',\n'.join(map(json.dumps, rows)) + '\n]\n', encoding='utf-8')
      new.replace(out)
  print(table(rows))


if __name__ == '__main__':
  main()
