# SPDX-License-Identifier: Apache-2.0
"""Writes docs/audit.md: `make audit-table`, some minutes on one core.

With `--only` the page keeps what is not named: classes, `users`, `bugs`, `alarms`, `lira`.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import re
import time
import warnings

import numpy as np
import planted
from scipy import special

import tfdp_adaptive as tfdp
from tfdp_adaptive import audit
from tfdp_adaptive import compat
from tfdp_adaptive import gate
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.audit import batch_distribution
from tfdp_adaptive.audit import bounds
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import noise_rows
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.examples import white_box

keras = compat.keras
SEEDS, CONFIDENCE = 1000, 0.95
SHADOWS, RECORDS, RATES = 16, 256, (0.001, 0.01, 0.03, 0.1, 0.3)
USERS = 'DPAdam, users'
PROBES = 0.02 * (1 - CONFIDENCE)
TEXT = '''# What the audit finds

`make audit-table` makes this page. `tfdp audit --white-box --method NAME` audits one class with
fresh noise. On this page the seeds are fixed. Every class runs for {steps} steps on {canaries}
records. All records are canaries, and {batch} take part per step. The noise multiplier is the one
that the plan needs for the claim at delta = {delta:g}.

* **claim** is the epsilon that the plan states.
* **change** is how far one record moved a release, divided by the claimed distance. A value above 1
  refutes the claim.
* **noise** is the measured standard deviation of the noise, divided by the announced one.
* **bound** is the epsilon that the canaries prove with confidence {confidence}, by
  `one_run_epsilon`. If the claim has no amplification, `one_run_gaussian_epsilon` is computed as
  well, and the larger bound counts.
* **estimate** is the epsilon that the canaries' scores suggest if they are normal. It proves
  nothing.
* **refuted** says whether the claim is refuted. Three things can refute it: one of these numbers,
  the distribution of the batches, or a step that writes more about its batch into weights or state
  than it releases.
* **bugs** has the numbers of bugs that were caught and planted. They are planted into the real
  code, one at a time.
* **seconds** is the time on one core to audit the class. The first class of a process takes about
  11 seconds more, for tracing.

| class | claim | change | noise | bound | estimate | refuted | bugs | seconds |
|---|---|---|---|---|---|---|---|---|
{rows}

In the last row, users take part with three examples each. The bugs planted there are no clipping,
half the noise, the same noise at each step, and examples that are clipped one by one.

The bugs of the other rows are: {switched}. The two classes with independent moments also have a
sensitivity of B instead of 2B - 1. Four more bugs are planted once. In one, the optimizer adds and
announces half the planned noise. In the others, the plan claims Poisson sampling and batches are
cyclic, shuffled by epochs, or always the same. The audit caught {others}
of these {others_planted} bugs.

The audit of a correct library also raises false alarms. These are the numbers of false alarms in
{seeds} seeds, with the allowed mean in brackets: {alarms}. For noise, batches and canaries, these
are alarms of the statistics, on normals and batches drawn for them. Classes with one sum per step
all have the noise of DPAdamW. The searches for changes and for writes past the noise have no
randomness.

## An attack on models

The likelihood-ratio attack (LiRA, `tfdp.audit.shadow_models`) knows the data and how models are
trained, but sees final models only. It attacks each of {shadows} Keras models with the help of the
others. Each model was trained on {lira_records} records with random labels, which it can only
memorize. Each cell is the fraction of members that the attack finds, at the rate of false
alarms of its column.

| models | {rates} | AUC |
|---|{lines}---|
{lira}

The last line is an upper bound for every attack at that epsilon and delta. An attack that finds
little does not show that a model is private, because another attack may find more. It cannot refute
a plan either, because it proves no bound on epsilon. The white-box audit above looks for proofs.
'''


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', type=pathlib.Path,
                      default=pathlib.Path(__file__).parents[2] / 'docs' / 'audit.md')
  parser.add_argument('--only', nargs='+', default=[
      *white_box.METHODS, 'users', 'bugs', 'alarms', 'lira'])
  arguments = parser.parse_args()
  warnings.simplefilter('ignore')
  tfdp.experimental(*gate.PARTS)
  old = arguments.out.read_text(encoding='utf-8') if arguments.out.exists() else ''
  rows = {line.split(' | ')[0][2:]: line for line in old.splitlines() if line.startswith('| ')}
  if set(arguments.only) - {'bugs', 'alarms', 'lira'}:
    white_box.report('DPSGD', seed=1, canaries=64, batch_size=16)  # The first takes longer.
  for name in arguments.only:
    if name in white_box.METHODS:
      rows[name] = row(name)
  if 'users' in arguments.only:
    rows[USERS] = row('DPAdam', 'user')
  caught = list(other_bugs()) if 'bugs' in arguments.only else None
  found = re.search(r'caught (\d+)\nof these (\d+) bugs', old)
  others, planted_others = (
      (sum(caught), len(caught)) if caught is not None else map(int, found.groups()))
  said = ('; '.join(map(_shown, alarms())) if 'alarms' in arguments.only
          else re.search(r'in brackets: (.*?)\. For', old, re.S).group(1))
  text = TEXT.format(
      steps=white_box.STEPS, canaries=white_box.CANARIES, batch=white_box.BATCH_SIZE,
      delta=white_box.DELTA, confidence=CONFIDENCE,
      rows='\n'.join(rows[name] for name in [*white_box.METHODS, USERS] if name in rows),
      switched=', '.join(planted.SWITCHED), others=others, others_planted=planted_others,
      seeds=SEEDS, alarms=said, shadows=SHADOWS, lira_records=RECORDS,
      rates=' | '.join(f'{rate:.1%}' for rate in RATES), lines='---|' * len(RATES),
      lira='\n'.join(lira() if 'lira' in arguments.only else
                     [line for line in old.splitlines() if line.startswith('| LiRA: ')]))
  arguments.out.parent.mkdir(exist_ok=True)
  arguments.out.write_text(text, encoding='utf-8')


def lira():
  """Lines of the table of the attack on models, and of what is the most that can be found."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(RECORDS, 16)).astype(np.float32)
  y = rng.integers(2, size=RECORDS)
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=4.0, target_delta=1e-3, population_size=RECORDS, batch_size=64, steps=80,
      l2_norm_clip=1.0)

  def train(members, private):
    model = keras.Sequential([
        keras.layers.Input([16]), keras.layers.Dense(64, 'relu'), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if private:
      model = tfdp.make_private(model)
      model.compile(tfdp.DPAdam(0.01, plan=plan), loss)
      model.fit(plan.batches((x, y, members.astype(np.float32))), verbose=0)
    else:
      model.compile(keras.optimizers.Adam(0.01), loss)
      model.fit(x[members], y[members], epochs=40, batch_size=64, verbose=0)
    return audit.logit_scores(special.softmax(model.predict(x, verbose=0), axis=1), y)

  for name, private in (('not private', False), ('epsilon 4, delta 0.001', True)):
    report = audit.shadow_models(lambda members: train(members, private), RECORDS, models=SHADOWS)
    cells = ' | '.join(f'{report.true_positives_at(rate):.1%}' for rate in RATES)
    yield _shown(f'| LiRA: {name} | {cells} | {report.auc:.3f} |')
  most = (min(math.exp(4.0) * rate + 1e-3, 1 - math.exp(-4.0) * (1 - 1e-3 - rate))
          for rate in RATES)
  yield f'| LiRA: no more than | {" | ".join(f"{share:.1%}" for share in most)} | |'


def _shown(text):
  print(text, flush=True)
  return text


def row(name, unit='example'):
  start = time.process_time()
  report = white_box.report(name, seed=1, confidence=CONFIDENCE, unit=unit)
  seconds = time.process_time() - start
  if report.vacuous:
    claimed = white_box.report(name, epsilon=4.0, seed=1, canaries=64, batch_size=16)
    return (f'| {name} | none | | | | | {"yes" if claimed.violated else "no"}, for a claim of '
            f'epsilon 4 | | {seconds:.1f} |')
  amplified = report.batches.what != 'every record in its place'
  bound = max(report.canaries.epsilon_lower,
              0.0 if amplified else report.canaries.gaussian_lower)
  caught = list(bugs(name) if unit == 'example' else bugs_of_users(name))
  print(report, caught, flush=True)
  name = name if unit == 'example' else USERS
  return (f'| {name} | {report.claimed:.3f} | {report.change.size:.4f} | {report.noise.size:.3f} | '
          f'{bound:.2f} | {report.canaries.estimate.epsilon:.2f} | '
          f'{"YES" if report.violated else "no"} | {sum(caught)} / {len(caught)} | {seconds:.1f} |')


def subject(name, unit='example'):
  return subjects.of(
      white_box.make(name, (), 4.0, white_box.DELTA, 128, 24, 16, 5, unit), 64)


def bugs(name):
  """Whether each bug was caught."""
  with planted.switched() as switches:
    one = subject(name)
    for bug in planted.applying(name):
      switches.only(bug)
      yield planted.caught(one, planted.SWITCHED[bug])
  if name in planted.SQUARED_MEAN:
    with planted.b_for_2b_minus_1():
      yield planted.caught(subject(name), 'changes')


def bugs_of_users(name):
  with planted.switched() as switches:
    one = subject(name, 'user')
    for bug in ('no clipping', 'half the noise', 'the same noise at each step'):
      switches.only(bug)
      yield planted.caught(one, planted.SWITCHED[bug])
  with planted.examples_as_records():
    yield planted.caught(subject(name, 'user'), 'changes')


def other_bugs():
  with planted.half_the_noise_announced():
    yield changes.largest(subject('DPSGD'), 1).violated
  for plant in planted.BATCHES.values():
    with plant():
      yield batch_distribution.check(plan(0)).p_value <= PROBES


@functools.lru_cache(maxsize=None)
def plan(seed):
  if seed:
    return dataclasses.replace(plan(0), seed=seed)
  return white_box.make('DPSGD', (), 4.0, white_box.DELTA, white_box.CANARIES, white_box.STEPS,
                        white_box.BATCH_SIZE, seed).plan


def alarms():
  """False alarms of every look, in words."""
  rng = np.random.default_rng(0)
  noise = sum(noise_rows.weakest([('mean', rng.standard_normal((12, 256)))]
                                 + [('mean', rng.standard_normal((12, 256)))]).p_value <= PROBES
              for _ in range(SEEDS))
  yield f'noise {noise} ({SEEDS * PROBES:g})'
  one = subject('DPAdamW')  # Others with one sum per step draw the same numbers.
  noise = sum(noise_rows.measure(one, 2 * seed, steps=3).p_value <= PROBES for seed in range(SEEDS))
  yield f'noise of DPAdamW as it runs {noise} ({SEEDS * PROBES:g})'
  law = sum(batch_distribution.check(one, list(one.index_batches())).p_value <= PROBES
            for one in map(plan, range(SEEDS)))
  yield f'batches {law} ({SEEDS * PROBES:g})'
  mu, left = 0.78, 1 - CONFIDENCE - 2 * PROBES
  truth = gaussian.epsilon(1 / mu, white_box.DELTA)
  canaries = 0
  for _ in range(SEEDS):
    included = rng.random(white_box.CANARIES) < 0.5
    guessed = bounds.guess(
        rng.standard_normal(len(included)) + mu * included, included, white_box.DELTA,
        1 - left / 2)
    canaries += max(guessed.epsilon_lower, guessed.gaussian_lower) > truth
  yield f'canaries {canaries} ({SEEDS * left:g})'


if __name__ == '__main__':
  main()
