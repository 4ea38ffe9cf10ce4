# SPDX-License-Identifier: Apache-2.0
"""The papers' synthetic experiments, run with this library's rules, beside the printed numbers.

    PYTHONPATH=. python benchmarks/evidence/reference_experiments.py [--quick] [EXPERIMENT ...]

* logistic: Figure 2 of "On Design Principles for Private Adaptive Optimizers"
  (arXiv:2507.01129): one-dimensional sparse logistic regression, AdaGrad, prefix-sum
  noise. Excess population loss by quadrature. One step size per data set and method
  is chosen; medians over the data sets where the non-private one reaches the optimum.
* regression: Figure 1 of Asi et al. (ICML 2021): absolute regression in 100 dimensions.
  The number of steps and delta are not printed: 1000 Poisson batches and 1e-5 here.
  Once with the ellipsoid given, once with private estimates of it (Algorithm 3).
* quadratic: second moments of a constant gradient (sections 4.1 to 4.3 of the first).
* noise: second moments of noise alone (Tang and Lecuyer, Table 1) and the share of
  negative ones after bias correction (Figure 4 of the first).
"""

import argparse
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import estimates
from tfdp_adaptive import gate
from tfdp_adaptive import mechanisms
from tfdp_adaptive import rules
from tfdp_adaptive import trees
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.clipping import projection

gate.experimental('dp_adagrad_ime', 'pasan')


def table(title, header, rows):
  print(f'\n### {title}\n')
  widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
  for row in [header, ['-' * w for w in widths], *rows]:
    print('| ' + ' | '.join(str(cell).ljust(w) for cell, w in zip(row, widths)) + ' |')


# Figure 2 of the design principles.


def population_loss(theta):
  """E log(1 + e^(theta x)) - y theta x over x normal, y from the true model theta = 1."""
  nodes, weights = np.polynomial.hermite_e.hermegauss(80)
  weights = weights / weights.sum()
  loss = np.zeros_like(theta)
  for x, w in zip(nodes, weights):
    loss += w * (np.logaddexp(0, theta * x) - theta * x / (1 + np.exp(-x)))
  return loss


def logistic(quick):
  steps, clip, sigma, trials = 1000, 1.0, 0.1, 30
  data_sets = 15 if quick else 60
  rates = np.geomspace(0.05, 5, 33)
  rng = np.random.default_rng(0)
  x = np.where(rng.random((data_sets, steps)) < 0.9, 0.0, rng.normal(size=(data_sets, steps)))
  y = rng.random((data_sets, steps)) < 1 / (1 + np.exp(-x))
  mechanism = mechanisms.SquareRoot(steps)
  row_norms = mechanism.row_norms(steps)
  inverse = mechanism.noising(steps)
  shape = (data_sets, len(rates), trials)

  def correlated():
    # The same noise for every step size; C^-1 is Toeplitz.
    z = rng.normal(size=(steps, data_sets, 1, trials))
    size = 2 * steps
    rows = np.fft.irfft(np.fft.rfft(inverse, size)[:, None, None, None]
                        * np.fft.rfft(z, size, axis=0), size, axis=0)[:steps]
    return np.broadcast_to(rows, (steps,) + shape[:1] + (1,) + shape[2:])

  def run(rule, sigma):
    spec = (tf.TensorSpec(shape, tf.float64),)
    state, theta = rule.init(spec), np.zeros(shape)
    mean_noise, square_noise = correlated(), correlated()
    ask = rule.asks[0]
    step = tf.function(rule.update)
    for t in range(steps):
      xt = x[:, t, None, None]
      g = np.clip((1 / (1 + np.exp(-theta * xt)) - y[:, t, None, None]) * xt, -clip, clip)
      if ask.second is None:
        stds = (clip, 0.0)
        second, second_variance = (), ()
      else:
        stds = ask.second.stddevs(clip, 1.0, 'zero_out')
        # One record per batch and one dimension: the projection of the mean is idle.
        second = (tf.constant(g**2 + sigma * stds[1] * square_noise[t]),)
        second_variance = tf.constant((sigma * stds[1] * row_norms[t])**2, tf.float64)
      release = contract.Release((tf.constant(g + sigma * stds[0] * mean_noise[t]),),
                             tf.constant((sigma * stds[0] * row_norms[t])**2, tf.float64),
                             second, second_variance)
      (direction,), state = step(state, (release,), ())
      theta = theta - rates[:, None] * direction.numpy()
    excess = population_loss(theta) - population_loss(np.ones(1))
    return excess.mean(axis=2).min(axis=1)

  methods = (
      ('non-private AdaGrad', rules.dp_adagrad(), 0.0, '.5976'),
      ('post-processing', rules.dp_adagrad(), sigma, '.6010'),
      ('independent moments', rules.dp_adagrad_ime(epsilon=1.0, floor=True), sigma, '.5981'),
      ('independent moments, printed noise', rules.dp_adagrad_ime(
          epsilon=1.0, floor=True, printed_2B_plus_1=True), sigma, ''),
      ('independent moments "for free"', rules.dp_adagrad_ime(epsilon=1.0, floor=True),
       sigma / np.sqrt(2), '.5980'),
      ('bias correction', rules.dp_adagrad_bc(epsilon=1.0), sigma, ''),
      ('post-processing with the same floor', rules.dp_adagrad_bc(epsilon=1.0), None, ''),
  )
  results = {}
  for name, rule, noise, _ in methods:
    if noise is None:  # Without the correction: as if the variance were unknown.
      uncorrected = rule.update
      rule = rule._replace(update=lambda state, releases, public=(): uncorrected(
          state, tuple(r._replace(variance=tf.zeros([], tf.float64)) for r in releases), public))
      noise = sigma
    results[name] = run(rule, noise)
  good = results['non-private AdaGrad'] < 5e-5
  post = results['post-processing']
  table(f'1-D logistic regression (test loss, shown as .5976 + excess; {good.sum()} of '
        f'{data_sets} data sets)',
        ('method', 'median', 'mean', 'better than post-processing', 'paper'),
        [(name, f'{.5976 + np.median(results[name][good]):.4f}',
          f'{.5976 + np.mean(results[name][good]):.4f}',
          f'{np.mean(results[name][good] < post[good]):.2f}', paper)
         for name, _, _, paper in methods])


# Figure 1 of PAGAN.


def regression(quick):
  n, d, batch, tau = 5000, 100, 70, 0.01
  steps, runs = (300, 4) if quick else (1000, 10)
  rates = np.array([0.005, 0.01, 0.05, 0.1, 0.15, 0.2, 0.4, 0.5, 1.0])
  stddevs = np.arange(1, d + 1)**-1.5
  rng = np.random.default_rng(0)
  solution = rng.choice([-1.0, 1.0], size=d)
  a = rng.normal(size=(n, d)) * stddevs
  b = a @ solution + rng.laplace(scale=tau, size=n)
  a32, b32 = tf.constant(a, tf.float32), tf.constant(b, tf.float32)
  padded = int(batch + 6 * np.sqrt(batch))
  spec = (tf.TensorSpec([d], tf.float32),)
  ball = np.full(d, 1 / np.sum(stddevs**2))

  def train(rule, sigma, private=True):
    """Median over runs of the last iterate's loss, at the best step size."""
    copies = runs * len(rates)
    rate = tf.constant(np.tile(rates, runs), tf.float32)
    clip = tf.constant(1.0 if private else 1e9)

    def one(args):
      state, theta, indices, mask, z, rate = args
      (query,) = rule.query(state)
      rows, targets = tf.gather(a32, indices), tf.gather(b32, indices)
      gradients = tf.sign(tf.linalg.matvec(rows, theta) - targets)[:, tf.newaxis] * rows
      sums = tf.vectorized_map(lambda g: projection.project_record(
          rule.asks[0], query, clip, (g,)).total[0], gradients)
      total = tf.linalg.matvec(sums, tf.cast(mask, tf.float32), transpose_a=True)
      mean = (total + sigma * z) / batch
      (direction,), state = rule.update(
          state, (contract.Release((mean,), tf.square(sigma / batch)),))
      return state, theta - rate * direction

    @tf.function(jit_compile=True)
    def step(state, theta, indices, mask, z):
      # Runs see their own batches; all step sizes of a run the same ones.
      each = [tf.repeat(t, len(rates), axis=0) for t in (indices, mask, z)]
      return tf.vectorized_map(one, (state, theta, *each, rate))

    sigma = tf.constant(sigma if private else 0.0, tf.float32)
    state = trees.map(lambda t: tf.stack([t] * copies), rule.init(spec))
    theta = tf.zeros([copies, d])
    draw = np.random.default_rng(1)
    for _ in range(steps):
      sampled = draw.random((runs, n)) < batch / n
      indices = np.argsort(~sampled, axis=1, kind='stable')[:, :padded]
      mask = np.take_along_axis(sampled, indices, axis=1)
      z = draw.normal(size=(runs, d))
      state, theta = step(state, theta, tf.constant(indices), tf.constant(mask),
                          tf.constant(z, tf.float32))
    losses = np.abs(a @ theta.numpy().T - b[:, np.newaxis]).mean(axis=0).reshape(runs, len(rates))
    best = np.median(losses, axis=0)
    return best.min(), rates[best.argmin()]

  def multiplier(epsilon, delta=1e-5):
    def of(sigma):
      event = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(
          batch / n, dp_accounting.GaussianDpEvent(sigma)), steps)
      return cost.epsilon(event, delta, 'rdp')
    low, high = 0.3, 50.0
    while high / low > 1.001:
      middle = np.sqrt(low * high)
      low, high = (middle, high) if of(middle) > epsilon else (low, middle)
    return high

  epsilons = (1.0,) if quick else (0.1, 1.0, 4.0)
  sigmas = [multiplier(epsilon) for epsilon in epsilons]
  paper = {
      'non-private SGD': '', 'non-private AdaGrad': '',
      'PASAN, A = I (DP-SGD)': 'slow', 'PASAN, C = 1/sigma': '',
      'PAGAN, A = I (private AdaGrad)': 'slow', 'PAGAN, C = sigma^(-4/3)': 'best'}
  methods = (
      ('non-private SGD', rules.pasan(projection='rescale'), False),
      ('non-private AdaGrad', rules.pagan(projection='rescale'), False),
      ('PASAN, A = I (DP-SGD)', rules.pasan([ball], 'rescale'), True),
      ('PASAN, C = 1/sigma', rules.pasan([rules.pasan_ellipsoid(stddevs)], 'rescale'), True),
      ('PAGAN, A = I (private AdaGrad)', rules.pagan([ball], 'rescale'), True),
      ('PAGAN, C = sigma^(-4/3)', rules.pagan([rules.pagan_ellipsoid(stddevs)], 'rescale'), True),
      ('the same, Euclidean projection', rules.pagan([rules.pagan_ellipsoid(stddevs)]), True),
      ('PAGAN, C from private estimates', None, True),
  )

  def with_estimates(epsilon):
    """Half the budget goes to Algorithm 3 on the features, whose sizes gradients have."""
    found = estimates.private_stddevs(
        a, scale=1.0, moment_ratio=1.0, target_epsilon=epsilon / 2, target_delta=5e-6,
        rng=np.random.default_rng(2))
    off = np.abs(np.log2(found / stddevs))
    print(f'epsilon {epsilon:g}: {np.mean(off <= 1):.0%} of the private estimates are within a '
          f'factor of two, the others off by up to 2^{off.max():.1f}')
    rule = rules.pagan([rules.pagan_ellipsoid(found)], 'rescale')
    return train(rule, multiplier(epsilon / 2, 5e-6))
  rows = []
  for name, rule, private in methods:
    if quick and name.startswith('the same'):
      continue
    if rule is None:
      results = [with_estimates(epsilon) for epsilon in epsilons]
    else:
      results = [train(rule, sigma, private) for sigma in (sigmas if private else sigmas[:1])]
    rows.append((name, *(f'{loss:.4f} ({rate:g})' for loss, rate in results),
                 *[''] * (len(sigmas) - len(results)), paper.get(name, '')))
  start, best = np.abs(b).mean(), np.abs(a @ solution - b).mean()
  table(f'Absolute regression (median loss of the last iterate, best step size; {steps} steps, '
        f'f(0) = {start:.4f}, f(solution) = {best:.4f})',
        ('method', *(f'epsilon {e:g} (noise {s:.3g})' for e, s in zip(epsilons, sigmas)), 'paper'),
        rows)


# Second moments.


def second_moments(rule, gradient, std, steps, copies, clip=None):
  """State after `steps` releases of a constant `gradient`, each coordinate `copies` times."""
  rng = np.random.default_rng(0)
  g = np.tile(gradient, (copies, 1))
  state = rule.init((tf.TensorSpec(g.shape, tf.float64),))

  @tf.function
  def step(state, z):
    (query,) = rule.query(state)
    scale = query.scale if query.scale else (tf.ones_like(z),)
    # In the scaled space, with a clip norm that the gradient does not reach.
    mean = (scale[0] * g + std * z,)
    return rule.update(state, (contract.Release(mean, tf.constant(std**2, tf.float64)),))[1]

  for _ in range(steps):
    state = step(state, tf.constant(rng.normal(size=g.shape)))
  return state


def scaled_moment(q, beta_2, steps):
  """E nu_hat / c^2 after `steps`: the limit 1/(1-q^2) comes 1/(1-q^2) times later than Adam's.

  nu' = beta_2 nu + (1 - beta_2) (c + q sqrt(nu_hat) z)^2, whose mean is linear in nu. Once
  nu_hat = nu, the distance to the limit shrinks by 1 - (1 - beta_2) (1 - q^2) a step.
  """
  moment = hat = 0.0
  for t in range(1, steps + 1):
    moment = beta_2 * moment + (1 - beta_2) * (1 + q**2 * hat)
    hat = moment / (1 - beta_2**t)
  return hat


def quadratic(quick):
  c, std, steps = np.array([1.0, 0.01]), 0.1, 500 if quick else 3000
  copies = 200

  def root(state):
    return np.sqrt(state.second[0].numpy().mean(axis=0) / (1 - 0.99**steps))

  rows = []
  for name, noise, paper in (('non-private', 0.0, '(.99, .0101)'),
                             ('post-processing', std, '(1.00, .0974)')):
    got = root(second_moments(rules.dp_adam(beta_2=0.99), c, noise, steps, copies))
    expected = np.sqrt(c**2 + noise**2)
    rows.append((name, *('({:.3f}, {:.4f})'.format(*v) for v in (got, expected)), paper))
  table('Root of the second moment of the gradient (1, 0.01), noise 0.1',
        ('method', 'measured', 'sqrt(c^2 + noise^2)', 'paper'), rows)
  rows = []
  for q in (0.1, 0.5, 0.9):
    rule = rules.scale_then_privatize(beta_2=0.99, scale_epsilon=1e-6)
    got = root(second_moments(rule, c, q, steps, copies))**2 / c**2
    rows.append((q, '{:.2f}, {:.2f}'.format(*got), f'{scaled_moment(q, .99, steps):.2f}',
                 f'{1 / (1 - q**2):.2f}'))
  table(f'Scale-then-privatize: nu / c^2 of both coordinates at q = zeta sigma / B, {steps} steps',
        ('q', 'measured', 'expected by then', '1 / (1 - q^2)'), rows)


def noise(quick):
  clip, sigma, batch, size = 0.1, 0.4, 256, 4000 if quick else 20000
  std = clip * sigma / batch
  rng = np.random.default_rng(0)
  rule = rules.dp_adam_bc()
  state = rule.init((tf.TensorSpec([size], tf.float64),))
  step = tf.function(rule.update)
  rows, expected = [], {1: '.6827', 2: '.632', 10: '.555', 100: '.515', 5000: '.504'}
  for t in range(1, 5001):
    z = (tf.constant(std * rng.normal(size=size)),)
    _, state = step(state, (contract.Release(z, tf.constant(std**2, tf.float64)),), ())
    if t in expected:
      rows.append((t, f'{float(rules.negative_fraction(state.second, state.bias)):.3f}',
                   expected[t]))
  table('Share of negative second moments of pure noise after bias correction',
        ('step', 'measured', 'derived'), rows)
  low, median, high = np.percentile(state.second[0], [25, 50, 75])
  table('v_5000 of pure noise (SNLI setting, phi = 2.4414e-8)', ('quantity', 'measured', 'paper'), [
      ('median', f'{median:.4g}', '2.426e-8'),
      ('quartiles / phi', f'{low / std**2:.4f}, {high / std**2:.4f}', '')])


EXPERIMENTS = {f.__name__: f for f in (logistic, regression, quadratic, noise)}


def main():
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('experiments', nargs='*', metavar='EXPERIMENT',
                      help=f'of {", ".join(EXPERIMENTS)}; all by default')
  parser.add_argument('--quick', action='store_true', help='smaller, a minute or two in all')
  options = parser.parse_args()
  unknown = set(options.experiments) - set(EXPERIMENTS)
  if unknown:
    parser.error(f'unknown experiments: {sorted(unknown)}')
  for name in options.experiments or EXPERIMENTS:
    EXPERIMENTS[name](options.quick)


if __name__ == '__main__':
  main()
