# SPDX-License-Identifier: Apache-2.0
"""Named one-line bugs, why each matters, and the tests that should notice.

`old` is in its file once; `new` takes its place. Tests are arguments of pytest, relative to
`tests/`; the quick ones of them run (see `selection`). A bug that no test can notice, because it
changes nothing that is promised, is no line here but of `EQUIVALENT`, with the proof.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
  name: str
  file: str
  old: str
  new: str
  why: str
  tests: str

  @property
  def federated(self) -> bool:
    """Whether TensorFlow Federated is needed to notice it."""
    return self.file.startswith('federated/')


_PRIVATIZER, _STATS = 'privatizer_test.py', 'rules/statistic_sensitivity_test.py'
_RIDER = 'privatizer_rider_test.py rules/following_clip_test.py'
_PROJECTION, _NUMBERS = 'clipping/projection_test.py', 'clipping/bookkeeping_numbers_test.py'
_ENGINE = 'clipping/bookkeeping_test.py clipping/bookkeeping_numbers_test.py'
_STREAMS, _GAUSSIAN = 'noise/noise_streams_test.py', 'noise/noise_gaussian_test.py'
_DISCRETE, _SENSITIVITY = 'noise/discrete_noise_test.py', 'mechanisms/sensitivity_test.py'
_ACCOUNTING, _SAMPLING = 'accounting/accounting_test.py', 'accounting/sampling_test.py'
_LEDGER, _ADMISSION = 'privacy/ledger_test.py', 'keras/admission_test.py'
_ORACLE, _SUM = 'rules/rules_oracle_test.py', 'queries/mechanism_sum_test.py'
_SERVER = 'federated/server_test.py'

_BY_FILE = {
    'tfdp_adaptive/contract.py': [
        ('replace counts once', "return 2.0 if adjacency == 'replace' else 1.0", 'return 1.0',
         'Under replace two records differ: half the noise that is accounted for.', _PRIVATIZER),
        ('mean sensitivity without adjacency',
         'return record_distance(adjacency) * clip_norm / batch_size',
         'return clip_norm / batch_size', 'Half the noise under replace.', _PRIVATIZER),
        ('riders where there is no room', 'ask.rider is not None and ask.rider.shrinks and (',
         'ask.rider is not None and not ask.rider.shrinks and (',
         'Slack that a rule has given away is used twice.', _RIDER),
        ('every rule is steady', 'return rule.query is isotropic or rule.steady', 'return True',
         'Releases in different units would be averaged.', 'rules/low_pass_test.py'),
    ],
    'tfdp_adaptive/privatizer.py': [
        ('data after the last step', 'tf.where(allowed, t / self._batch_size, 0), _as_specs('
         'ask_sums.total', 'tf.where(asked, t / self._batch_size, 0), _as_specs(ask_sums.total',
         'Steps beyond the plan would release data that nobody accounts for.', _PRIVATIZER),
        ('noise without share', 'tf.sqrt(excess / tf.where(asked, share, 1))', 'tf.sqrt(excess)',
         'Two queries of one step would cost twice.', _PRIVATIZER),
        ('shares beyond one', 'excess = tf.maximum(tf.add_n(shares), 1)',
         'excess = tf.ones([], dtype)', 'Shares that add up to more than one cost more privacy.',
         _PRIVATIZER),
        ('negative shares', 'shares = [tf.where(share > 0, share, 0) for share in shares]',
         'shares = [tf.abs(share) for share in shares]', 'What is not positive is no share.',
         _PRIVATIZER),
        ('clean statistics after the last step',
         'value = trees.map(lambda v: tf.where(allowed, v, 0), _as_specs(value, spec[1]))',
         'value = _as_specs(value, spec[1])', 'The value may hold the clean past.',
         'privatizer_test.py rules/statistic_sensitivity_test.py'),
        ('clean state moves unasked',
         'secret = trees.map(lambda new, old: tf.where(allowed, new, old), new_secret, secret)',
         'secret = new_secret', 'A step that is not asked would leave a trace in later ones.',
         'privatizer_test.py rules/identities_test.py'),
        ("rider's noise under replace", '(distance * std / self._noise_multiplier',
         '(std / self._noise_multiplier', 'Half the noise of quantile_clip under replace.', _RIDER),
        ('variance without row norm', 'tf.square(std) * row_variance, 0)', 'tf.square(std), 0)',
         'Rules that subtract the noise would subtract the wrong one.', _PRIVATIZER),
        ('second statistic beside a rider', '*(_noised(value, row[1], value_std, factor * spread,',
         '*(_noised(value, row[1], value_std, spread,',
         'The rider has taken room that the second statistic still uses.', _RIDER),
        ('mean beside a rider', '*_noised(mean, row[0], std, factor * spread,',
         '*_noised(mean, row[0], std, spread,', 'The rider rides for nothing: two releases.',
         _RIDER),
        ('more steps than designed', 'self._steps = min(limits)', 'self._steps = max(limits)',
         'Rows beyond the mechanism have no sensitivity.', _PRIVATIZER),
        ('noise of one sign', 'v + tf.cast(std, v.dtype) * z', 'v + tf.cast(std, v.dtype) * '
         'tf.abs(z)', 'Half-normal noise hides nothing on one side.', _PRIVATIZER),
        ('variance of the mean as its root',
         'contract.mean_sensitivity(l2_norm_clip, batch_size, adjacency), 2)',
         'contract.mean_sensitivity(l2_norm_clip, batch_size, adjacency), 1)',
         'phi is what users set epsilon by.', _PRIVATIZER),
    ],
    'tfdp_adaptive/clipping/projection.py': [
        ('records up to twice the clip norm', 'inside = norm <= clip_norm',
         'inside = norm <= 2 * clip_norm', 'Twice the sensitivity.', _PROJECTION),
        ('records that are not finite', 'return tf.where(finite, clipped, tf.zeros_like(v))',
         'return clipped', 'One NaN would end the training, and tell that it was there.',
         _PROJECTION),
        ('squares that overflow, alone',
         'return tf.cond(tf.math.is_finite(norm) & ordinary, quickly, carefully)',
         'return tf.cond(ordinary, quickly, carefully)', 'A huge record would vanish or be NaN.',
         _PROJECTION),
        ('numbers of records that are not finite',
         'return tf.where(is_finite(scaled), numbers, tf.zeros_like(numbers))', 'return numbers',
         'A record that counts as none would move the clip norm.',
         'clipping/projection_test.py rules/following_clip_test.py'),
        ('square of what was not clipped', 'square = trees.map(tf.square, total)',
         'square = trees.map(tf.square, gradient)', 'Squares of any size enter a release.',
         'clipping/projection_test.py clipping/materialized_test.py'),
        ('ellipsoid left by rounding', 'flat = clip(u * safe / (1 + lam * a), clip_norm)',
         'flat = u * safe / (1 + lam * a)', 'Sixteen steps of Newton need not reach the root.',
         _PROJECTION),
    ],
    'tfdp_adaptive/clipping/bookkeeping.py': [
        ('padding counts', 'finite = [mask for _ in asks]',
         'finite = [tf.ones_like(mask) for _ in asks]', 'Rows that are no records are summed.',
         _ENGINE),
        ('sums are not scaled', 'per_ask = [total if trees.absent(scale) else scale * total',
         'per_ask = [total', 'Clipped in one geometry, noised in another.', _ENGINE),
        ('numbers of padding', 'keep = (tf.math.is_finite(norm) & mask)[:, tf.newaxis]',
         'keep = tf.math.is_finite(norm)[:, tf.newaxis]',
         'Padding would be counted by quantile_clip.',
         'rules/following_clip_test.py clipping/record_weights_test.py'),
        ('layers do not add up', 'norms[p] += square', 'norms[p] = tf.maximum(norms[p], square)',
         "A record is as long as its largest layer's gradient: too short.", _ENGINE),
    ],
    'tfdp_adaptive/clipping/factors.py': [
        ('norm of a product', 'arithmetic.usable(left * right, left, right)',
         'arithmetic.usable(left + right, left, right)', 'The norm of nearly every dense layer.',
         _ENGINE),
        ('curvature once', 'curvature, sums = tf.square(self._matrix(scale))',
         'curvature, sums = self._matrix(scale)', 'Norms in a geometry, with its root.', _ENGINE),
        ('weights on both sides', 'return [self._product(self.inputs, self.cotangents * protocol',
         'return [self._product(self.inputs * 2, self.cotangents * protocol',
         'Sums twice as long as the norms say.', _ENGINE),
    ],
    'tfdp_adaptive/clipping/protocol.py': [
        ('what cancels is free',
         'return [norm + lost**2 * squares(scale) for norm, scale in zip(norms, scales)]',
         'return norms', 'Rounding of steps that cancel comes back in the sum, unclipped.',
         'clipping/cancelling_test.py'),
    ],
    'tfdp_adaptive/clipping/overflow.py': [
        ('one moderate record is enough', 'moderate = tf.reduce_all(tf.stack(norms) < MODERATE)',
         'moderate = tf.reduce_any(tf.stack(norms) < MODERATE)',
         'A huge record beside a small one would count as none, or as NaN.', _NUMBERS),
        ('gradients beyond the largest number',
         "again = tf.where(fits & (again <= largest), again, float('inf'))",
         "again = tf.where(fits, again, float('inf'))",
         'Norms that their type cannot hold.', _NUMBERS + ' clipping/magnitudes_test.py'),
    ],
    'tfdp_adaptive/clipping/weights.py': [
        ('automatic clipping upside down', 'relative = 1 / (1 + constant / norm)',
         'relative = 1 / (1 + norm / constant)', 'Long records would count least.',
         'clipping/record_weights_test.py'),
        ('short records brought up',
         'inside = tf.minimum(tf.ones_like(norm), _like(clip_norm, norm) / safe)',
         'inside = _like(clip_norm, norm) / safe', 'Hard clipping would normalize.', _ENGINE),
    ],
    'tfdp_adaptive/clipping/groups.py': [
        ('clip norms of groups add up to more',
         'whole = tf.maximum(tf.norm(relative), tf.ones([], relative.dtype))',
         'whole = tf.ones([], relative.dtype)', 'A rule could ask for more than one clip norm.',
         'rules/grouped_test.py clipping/grouped_engines_test.py'),
    ],
    'tfdp_adaptive/noise/gaussian.py': [
        ('both halves alike', 'tf.constant([[0], [2**(width - 2)]], bits.dtype)',
         'tf.constant([[0], [0]], bits.dtype)', 'Two coordinates would share their noise.',
         _GAUSSIAN),
        ('noise too small', 'return tf.sqrt(-2 * tf.math.log(u))',
         'return tf.sqrt(-1.98 * tf.math.log(u))', 'Half a percent of noise.', _GAUSSIAN),
        ('infinite noise', 'u = (tf.cast(bits[0], dtype) + 0.5)', 'u = tf.cast(bits[0], dtype)',
         'The logarithm of zero, once in 2^32 draws.', _GAUSSIAN),
        ('the far half of the circle', 'turn += far * (half - 2 * turn)', 'turn += 0 * far',
         'A sine whose series does not reach so far.', _GAUSSIAN),
    ],
    'tfdp_adaptive/noise/keys.py': [
        ('the same key again', 'return pair[0], pair[1]', 'return pair[0], key',
         'The same noise at every step: a difference of two releases is clean.',
         'noise/noise_keys_test.py noise/noise_streams_test.py'),
        ('half a key', 'for half in (1, 2)])', 'for half in (1, 1)])',
         'Keys of 64 bits, twice the same.', 'noise/noise_keys_test.py'),
    ],
    'tfdp_adaptive/noise/streams.py': [
        ('rows are not counted', 'State(key, state.row + 1, history)',
         'State(key, state.row, history)', 'The plan would never be used up.', _STREAMS),
        ('one row too many', 'return tf.identity(row) < steps', 'return tf.identity(row) <= steps',
         'One release beyond the plan, under XLA.', _STREAMS + ' privatizer_test.py'),
        ('a restart keeps its past', 'tf.zeros_like(state.row), empty(gaussian.flat_specs(specs)))',
         'tf.zeros_like(state.row), state.history)',
         'Noise of another run would cancel what was never added.', _STREAMS),
        ('variance of the first row', 'tf.gather(variances, tf.minimum(state.row, '
         'len(variances) - 1))', 'tf.gather(variances, tf.zeros_like(state.row))',
         'Correlated noise grows; what rules subtract would not.', _STREAMS),
    ],
    'tfdp_adaptive/noise/banded.py': [
        ('past noise added', 'x -= c_j * slot', 'x += c_j * slot',
         'Noise of another matrix than the one that is accounted for.', _STREAMS),
    ],
    'tfdp_adaptive/noise/blt.py': [
        ('buffers of other noise', 'theta * s + x for theta', 'theta * s + z for theta',
         'Noise of another matrix than the one that is accounted for.', _STREAMS),
    ],
    'tfdp_adaptive/noise/discrete.py': [
        ('tail cut at four sigma', '(size < 64 * sigma)', '(size < 4 * sigma)',
         'Outcomes that one neighbour alone can have: delta of 6e-5.', _DISCRETE),
        ('coins upside down', 'k % 2 == 1', 'k % 2 == 0', 'Another law altogether.', _DISCRETE),
        ('zero twice', '~(negative & (size == 0)) & ', '', 'Zero has two ways to be drawn.',
         _DISCRETE),
        ('rounding of one number', 'math.ceil(noise_multiplier * math.sqrt(size) / rounding',
         'math.ceil(noise_multiplier / rounding',
         'Rounding moves D coordinates, sqrt(D) as far as one.', _DISCRETE),
    ],
    'tfdp_adaptive/mechanisms/sensitivity.py': [
        ('coefficients that grow again', 'np.maximum.accumulate(np.abs(c)[::-1])[::-1]',
         'np.abs(c)', 'The equally spaced pattern is not the worst one.', _SENSITIVITY),
        ('the last participation', 'return min(max_participations, -(-steps // min_sep))',
         'return min(max_participations, steps // min_sep)', 'A record may take part once more.',
         _SENSITIVITY),
        ('patterns further apart', 'np.maximum(np.arange(n) + 1 - min_sep, 0)',
         'np.maximum(np.arange(n) - min_sep, 0)', 'Patterns that may occur are left out.',
         _SENSITIVITY),
        ('one participation fewer', 'min_sep, k - 1)\n  return np.diagonal(gram) + others',
         'min_sep, max(k - 2, 0))\n  return np.diagonal(gram) + others', 'A bound that is none.',
         _SENSITIVITY),
        ('overlaps once', 'gram[j, j] + 2 * overlaps', 'gram[j, j] + overlaps',
         'Half of what columns have in common.', _SENSITIVITY),
        ('squares of columns', 'return float(np.sqrt(best_pattern(np.asarray(squared_norms),',
         'return float(np.sqrt(np.max(squared_norms) + 0 * best_pattern(np.asarray(squared_norms),',
         'Participations do not add up.', _SENSITIVITY),
    ],
    'tfdp_adaptive/mechanisms/toeplitz.py': [
        ('columns longer than one', 'np.asarray(c) / np.linalg.norm(c)', 'np.asarray(c)',
         'All else takes columns of length one.', 'mechanisms/mechanism_contract_test.py '
         'mechanisms/mechanism_identity_test.py'),
        ('square root of another matrix', '(2 * k - 1) / (2 * k)', '(2 * k - 1) / (2 * k + 1)',
         'More error than need be.', 'mechanisms/golden_values_test.py'),
    ],
    'tfdp_adaptive/accounting/losses.py': [
        ('a sampled step a little weaker', 'Pair(kind, event.sampling_probability, 1 / sigma)',
         'Pair(kind, event.sampling_probability, 0.99 / sigma)', 'One percent of the noise.',
         _ACCOUNTING),
        ('steps add up too slowly', 'count**0.5 / event.noise_multiplier',
         'count**0.49 / event.noise_multiplier', 'Unsampled steps cost sqrt(T) together.',
         'accounting/composition_test.py'),
        ('one direction', "else ('remove', 'add')", "else ('add',)",
         'Removing a record is the dearer direction.', _ACCOUNTING),
        ('who was driven out', "Pair('replace', chosen, 2 / event.noise_multiplier)",
         "Pair('replace', chosen, 1 / event.noise_multiplier)",
         'In a batch that was cut, a record takes the place of another.', _ACCOUNTING),
        ('noise that is none', "'noise_multiplier', 1) == 0", "'noise_multiplier', 1) == 1",
         'No noise would be accounted for as some.', _ACCOUNTING),
    ],
    'tfdp_adaptive/accounting/cost.py': [
        ('rounding is free', 'return (1 + (mechanism.rounding or 0)) * max(', 'return max(',
         'Discrete noise: rounding moves neighbours apart.',
         'accounting/discrete_gaussian_test.py noise/discrete_noise_test.py'),
        ('past clean data once', 'steps * sum(noise**-2', 'sum(noise**-2',
         'A clean accumulator is released at every step.', _ACCOUNTING + ' keras/classes_test.py'),
        ('draws compose', 'not (composed and isinstance(own, monte_carlo',
         'not (False and isinstance(own, monte_carlo',
         'What only draws can bound does not compose.',
         _LEDGER + ' accounting/monte_carlo_test.py'),
        ('unsampled noise doubled', 'doubled = 2 if neighbors is _RELATION.REPLACE_ONE else 1',
         'doubled = 2', 'Half of what an unsampled run costs.', _ACCOUNTING + ' ' + _LEDGER),
        ('min_sep above the sampling', 'return plan.min_sep or min_sep, max_participations',
         'return max(plan.min_sep or 0, min_sep) + 1, max_participations',
         'Records take part sooner than is accounted for.', _ACCOUNTING + ' privacy/plan_test.py'),
        ('delta of nobody', "return max(0.0, float(_renyi(dp_event, neighbors).get_epsilon(",
         "return min(1.0, float(_renyi(dp_event, neighbors).get_epsilon(",
         'Any epsilon above one would be one.', _ACCOUNTING + ' accounting/composition_test.py'),
    ],
    'tfdp_adaptive/accounting/gaussian.py': [
        ('the wrong side', 'return float(root * (1 + 1e-12))', 'return float(root * (1 - 1e-9))',
         'Epsilon below the truth.', _ACCOUNTING),
        ('half the trade-off', 'second = target_epsilon + special.log_ndtr(',
         'second = special.log_ndtr(', 'Delta of another epsilon.', _ACCOUNTING),
    ],
    'tfdp_adaptive/accounting/monte_carlo.py': [
        ('the cheaper direction', 'return max(upper_delta(mean, draws * pretended, beta)',
         'return min(upper_delta(mean, draws * pretended, beta)', 'Delta is the larger of both.',
         'accounting/monte_carlo_test.py'),
        ('the mean for the bound', 'wanted = math.log(1 / beta) / draws', 'wanted = 1e-15',
         'A mean of draws is below the truth half of the time.', 'accounting/monte_carlo_test.py'),
        ('bins of others', 'z[bins < root.shape[1]] += root.T[bins[bins < root.shape[1]]]',
         'z += root.T[0]', 'The bin is drawn for every record.', 'accounting/monte_carlo_test.py'),
    ],
    'tfdp_adaptive/accounting/scheme.py': [
        ('any noise is amplified',
         'return self.amplified and mechanism.bands is not None and mechanism.bands <= '
         'self.most_bands', 'return self.amplified',
         'Correlated noise and Poisson batches: no such theorem.', _ACCOUNTING),
        ('the same batch at every step', 'np.random.default_rng([key, step])',
         'np.random.default_rng([key, 0])', 'Steps are accounted for as independent.', _SAMPLING),
        ('batches of one size', 'rng.binomial(size, probability)', 'round(size * probability)',
         'A fixed size is another law, with another cost.', _SAMPLING),
    ],
    'tfdp_adaptive/accounting/poisson.py': [
        ('q of three digits', 'return plan.batch_size / scheme.population(plan)',
         'return round(plan.batch_size / scheme.population(plan), 3)',
         'Drawn as accounted, but not the batch size that is divided by.', _SAMPLING),
        ('the first of a cut batch', 'yield rng.permutation(batch)[:self.max_batch_size]',
         'yield np.sort(batch)[:self.max_batch_size]', 'Records at the end never take part.',
         _SAMPLING),
    ],
    'tfdp_adaptive/accounting/patterns.py': [
        ('q of all records', 'return plan.batch_size * self.cycle / scheme.population(plan)',
         'return plan.batch_size / scheme.population(plan)',
         'In its turn, a record of a group is drawn cycle times as often.',
         _ACCOUNTING + ' ' + _SAMPLING),
        ('a cycle begun', 'return self.probability(plan), -(-steps // self.cycle)',
         'return self.probability(plan), steps // self.cycle',
         'A record of the first group has taken part once more.', _ACCOUNTING),
        ('a pass begun', 'return self.cycle, -(-steps // self.cycle)',
         'return self.cycle, max(1, steps // self.cycle)', 'One participation too few.',
         _ACCOUNTING + ' ' + _SAMPLING),
    ],
    'tfdp_adaptive/privacy/ledger.py': [
        ('runs forgotten', 'else Ledger(self.entries + more.entries)', 'else Ledger(self.entries)',
         'The second training would be free.', _LEDGER),
        ('the smallest delta', 'return max((e.plan.target_delta for',
         'return min((e.plan.target_delta for', 'Epsilon at a delta that nobody asked for.',
         _LEDGER),
        ('steps undone', 'if steps < last.steps:', 'if steps < 0:', 'What is done stays done.',
         _LEDGER),
        ('clean statistics guaranteed', 'self.private and self.plan is not None and',
         'self.plan is not None and', 'A rule without noise would have a guarantee.',
         _LEDGER + ' keras/classes_test.py'),
        ('draws compose in a ledger', 'composed=len(entries) > 1)', 'composed=False)',
         'What only draws can bound does not compose.',
         _LEDGER + ' accounting/monte_carlo_test.py'),
        ('relations of others', 'if r is not _RELATION.ADD_OR_REMOVE_ONE),',
         'if r is _RELATION.ADD_OR_REMOVE_ONE),', 'Replacement accounted for as removal.', _LEDGER),
    ],
    'tfdp_adaptive/batches/coins.py': [
        ('fresh coins on resuming', 'self._read(start_step) if start_step else self._begin()',
         'self._begin()', 'Records would change their group in the middle of a run.',
         'batches/coins_test.py'),
        ('coins of any plan', 'if plan != marks.line(self._plan):', 'if False:',
         'Coins of two runs must differ.', 'batches/coins_test.py'),
    ],
    'tfdp_adaptive/batches/marks.py': [
        ('batches of any step', 'return 1 + (slope * step + pace * row + offset) % _PRIME',
         'return 1 + (pace * row + offset) % _PRIME',
         'A batch could be trained on twice.', 'batches/batches_test.py ' + _ADMISSION),
        ('padding becomes records', 'return np.where(wide == 0, 0.0, bits.view(np.float64))',
         'return bits.view(np.float64)', 'Marks are no weights: padding would be summed.',
         'batches/batches_test.py'),
    ],
    'tfdp_adaptive/batches/users.py': [
        ('always the first examples', 'own = coins.permutation(own)[:self._most]',
         'own = own[:self._most]', 'The rest of a user would never be used.',
         'batches/users_of_examples_test.py'),
        ('sums for means', "1 if self._record == 'sum' else 1 / len(own)", '1',
         'A user is the mean of its examples.', 'batches/users_of_examples_test.py'),
    ],
    'tfdp_adaptive/rules/bias_corrected.py': [
        ('noise is not subtracted', 'lambda v: v - tf.cast(bias, v.dtype), nu)',
         'lambda v: v, nu)', 'The rule is its correction.', _ORACLE),
        ('the floor of squares', 'tf.sqrt(tf.maximum(v, epsilon**2))',
         'tf.sqrt(tf.maximum(v, epsilon))', 'epsilon is the smallest root.', _ORACLE),
    ],
    'tfdp_adaptive/rules/scale_then_privatize.py': [
        ('direction in scaled units', 'mean = geometry.unscale(release.mean, asked.scale)',
         'mean = release.mean', 'Adam of another gradient.', _ORACLE),
        ('scale without root', 'lambda v: 1 / (tf.sqrt(v) + scale_epsilon)',
         'lambda v: 1 / (v + scale_epsilon)', 'Another geometry.', _ORACLE),
    ],
    'tfdp_adaptive/rules/dp2.py': [
        ('preconditioner at the wrong step', 'tf.equal(phase(state), sgd_steps - 1), sgd_steps)',
         'tf.equal(phase(state), 0), sgd_steps)', 'The delay is the algorithm.', _ORACLE),
        ('the sum is never emptied', 'trees.map(lambda a: _where(~due, a), total),', 'total,',
         'Gradients of earlier phases.', _ORACLE),
    ],
    'tfdp_adaptive/rules/moments.py': [
        ('momentum of the wrong one', 'lambda m, g: g + momentum * m, moment, gradient), moment',
         'lambda m, g: m + momentum * g, moment, gradient), moment', "Nesterov's step.",
         'rules/identities_test.py rules/rules_oracle_test.py'),
        ('sign of Yogi', 'v - (1 - beta) * tf.sign(v - q) * q',
         'v - (1 - beta) * tf.sign(q - v) * q', 'Away from the square.', _ORACLE),
    ],
    'tfdp_adaptive/rules/statistics.py': [
        ('sensitivity of the square', 'return distance * (2 - distance)',
         'return distance * (2 - distance) / 2', 'Half the noise on the squared mean.', _STATS),
        ('a mean outside of the ball', 'tf.square(tf.cast(shrink, x.dtype) * x), mean), secret',
         'tf.square(x), mean), secret', 'Large batches have squares of any size.', _STATS),
        ('the second release free', 'second / math.sqrt(1 - share) * clip_norm**2)',
         'second * clip_norm**2)', 'Mean and square share one budget.', _STATS),
        ('the joint release free', 'else math.sqrt(1 + relative_lambda)) / batch_size',
         'else 1.0) / batch_size', 'Squares are free under replace alone.', _STATS),
        ('squares of two records', "(math.sqrt(2.0) if adjacency == 'replace' else 1.0) / batch",
         '1.0 / batch', 'Under replace two squares differ.', _STATS),
    ],
    'tfdp_adaptive/rules/following_clip.py': [
        ('the count for nothing', 'return (1 - (noise_multiplier / (2 * std))**2)**-0.5, std',
         'return 1.0, std', 'The quantile would cost privacy on top.', _RIDER),
        ('away from the quantile', 'state.log_factor - learning_rate * (estimated[0] - quantile)',
         'state.log_factor + learning_rate * (estimated[0] - quantile)',
         'The clip norm runs to its bounds.', 'rules/following_clip_test.py'),
        ('slack of the whole norm', '1 - norm / zeta, tf.zeros_like(norm))',
         '1 - norm / zeta / 2, tf.zeros_like(norm))', 'More room than a record leaves.',
         'rules/following_clip_test.py'),
    ],
    'tfdp_adaptive/keras/step.py': [
        ('penalties in the wrong space', 'geometry.rescale(penalties, query.scale)', 'penalties',
         'Regularizers would pull otherwise with a geometry.', 'keras/features_test.py'),
        ('sums of one replica', 'sums = compat.sum_over_replicas(sums)', 'sums = tuple(sums)',
         'Every replica would move the weights by itself.', 'keras/distribute_test.py'),
        ('padding in the logs', 'outputs, losses = clipped.outputs, _blank(clipped.losses, '
         'batch.mask)', 'outputs, losses = clipped.outputs, clipped.losses',
         'The loss of what is no record would be NaN.', 'keras/padding_test.py '
         'keras/features_test.py keras/noise_test.py keras/diagnostics_test.py'),
    ],
    'tfdp_adaptive/keras/admission.py': [
        ('refused, and taken under XLA', 'mask = batch.mask & drawn', 'mask = batch.mask',
         'Assertions vanish there: a wrong batch would be trained on.', _ADMISSION),
        ('smaller batches', 'if static != optimizer.batch_size:',
         'if static > optimizer.batch_size:', 'Their size would tell of the data.',
         'keras/misuse_test.py keras/noise_test.py'),
        ('a fixed order from its start', 'coins and x.tfdp_start_step != optimizer.steps_done:',
         'coins and x.tfdp_start_step > optimizer.steps_done:',
         'Records would take part sooner than they are accounted for.',
         'keras/misuse_test.py keras/admission_test.py keras/same_records_test.py'),
        ('weights of users', 'tf.reduce_any(examples, 1), examples)',
         'tf.reduce_all(examples, 1), examples)', 'Users with fewer examples would be left out.',
         'keras/users_in_fit_test.py'),
    ],
    'tfdp_adaptive/keras/run.py': [
        ('checkpoints of another plan', '    if self._foreign:\n      raise errors',
         '    if False:\n      raise errors',
         'What the first steps cost follows from another plan.', 'keras/history_test.py'),
        ('steps that are done again', 'times + tf.cast(row <= last, row.dtype)',
         'times + tf.cast(row < 0, row.dtype)', 'Weights that are put back were trained twice.',
         'keras/history_test.py'),
    ],
    'tfdp_adaptive/keras/optimizer.py': [
        ('uphill', 'variable.assign_sub(tf.cast(rate', 'variable.assign_add(tf.cast(rate',
         'The sign of every step.', 'keras/formulas_test.py'),
    ],
    'tfdp_adaptive/runfolder.py': [
        ('damage unseen', 'buffer.write(hashlib.sha256(buffer.getbuffer()).digest())',
         'buffer.write(hashlib.sha256(b"").digest())',
         'A file that was cut short would be gone on from.', 'faults/runfolder_test.py'),
    ],
    'tfdp_adaptive/queries/mechanism_sum.py': [
        ('records after the last step', '(tf.where(allowed, tf.cast(total, row.dtype), 0)',
         '(tf.cast(total, row.dtype)', 'Rounds beyond the plan.', _SUM),
        ('queries under replace', 'float(noise_multiplier) * contract.mean_sensitivity(1.0, 1.0, '
         'adjacency)', 'float(noise_multiplier)', 'Half the noise.', _SUM),
        ('restarted with its past', 'noise=self._noise.restart(global_state.noise, self._specs))',
         'noise=global_state.noise)', 'Another run of the mechanism begins in the middle.', _SUM),
        ('sums that are not added up', 'result = trees.map(tf.add, global_state.released, result)',
         'result = trees.map(tf.add, result, result)', 'Cumulative sums.', _SUM),
    ],
    'tfdp_adaptive/queries/adaptive_clip.py': [
        ('a count of two', 'tf.where(within, 0.5, -0.5)', 'tf.where(within, 1.0, -1.0)',
         'Twice the sensitivity of the count.', _SUM),
        ('half the noise on the count', 'mechanism, 0.5, 2 * clipped_count_stddev',
         'mechanism, 0.5, clipped_count_stddev', 'The count costs four times as much.', _SUM),
    ],
    'tfdp_adaptive/queries/rule_query.py': [
        ('rounds at half price', 'dp_accounting.GaussianDpEvent(self._privatizer.noise_multiplier)',
         'dp_accounting.GaussianDpEvent(2 * self._privatizer.noise_multiplier)',
         "What other people's accountants are told.", 'queries/rule_query_test.py'),
    ],
    'federated/server.py': [
        ('sides for nothing', 'noise_multiplier=self._plan.noise_multiplier / math.sqrt(share)',
         'noise_multiplier=self._plan.noise_multiplier', 'Metrics would cost privacy on top.',
         _SERVER),
        ('the whole budget for the weights', '1 - sum(side.share for side in sides)', '1.0',
         'More than the plan allows.', _SERVER),
        ('metrics of any length', 'return tf.stack(parts) / math.sqrt(len(parts))',
         'return tf.stack(parts)', 'Twice the sensitivity with three metrics.', _SERVER),
        ('metrics out of their range', 'tf.clip_by_value(value, 0.0, 1.0), 0.0))',
         'value, 0.0))', 'A client could report any number.', _SERVER),
        ('uphill at the server', 'lambda w, d: w - tf.cast(rate, w.dtype)',
         'lambda w, d: w + tf.cast(rate, w.dtype)', 'The sign of every round.', _SERVER),
        ('clients without a norm', 'within = tf.where(norm <= broadcast.clips[0], [1.0], [-1.0])',
         'within = tf.where(norm > broadcast.clips[0], [1.0], [-1.0])',
         'The clip norm runs away from its quantile.', _SERVER),
    ],
}
MUTANTS = tuple(Mutant(name, file, *rest) for file, some in _BY_FILE.items()
                for name, *rest in some)
EQUIVALENT = (
    ('tfdp_adaptive/clipping/bookkeeping.py', 'finite[part.ask] &= tf.math.is_finite(norm)',
     'Without it a record counts for its other groups where the norm of one is infinite. '
     '`overflow.checked` says infinite for ALL groups where the gradient of any variable does not '
     'fit its type (`fits`), so this is left: variables that fit, of one group, whose joint norm '
     'does not. That group has weight clip / inf = 0 either way, and the others stay within clip '
     'norms whose squares add up to that of the ask: the sensitivity is the same.'),
)
