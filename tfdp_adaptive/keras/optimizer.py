# SPDX-License-Identifier: Apache-2.0
"""The Keras adapter: any rule as a Keras optimizer.

It knows no algorithm: it reads the rule's state, hands the query to a clipping
engine, the sums to the privatizer, the release to the rule, and the direction
to the base class, which multiplies by the learning rate and does weight decay
and averaging.
"""

import types
from typing import Any, Dict, FrozenSet, Optional, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive import mechanisms
from tfdp_adaptive import private_rule
from tfdp_adaptive import privatizer as privatizer_lib
from tfdp_adaptive import runfolder
from tfdp_adaptive import trees
from tfdp_adaptive.batches import sources
from tfdp_adaptive.clipping import choices
from tfdp_adaptive.keras import arguments
from tfdp_adaptive.keras import run as run_lib
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import plan as plan_lib
from tfdp_adaptive.privacy import statement as statement_lib

_DIGEST, _RUN = 'digest', 'run'  # Keys in files: digest of the state, and its run.


class DPOptimizer(compat.GlobalOptimizer):
  """A differentially private optimizer with any rule.

  The model must be private, too (`tfdp.make_private(model)`, `tfdp.DPModel`), because the model
  clips the gradients per example. Ready-made gradients are refused. Settings are fixed when the
  optimizer is made. Assigning to a setting raises an error.

  Example:

  ```python
  import keras
  import numpy as np
  import tfdp_adaptive as tfdp

  x = np.random.default_rng(0).normal(size=[1000, 8]).astype('float32')
  y = x.sum(axis=1, keepdims=True)
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=3.0, target_delta=1e-5, population_size=1000,
      batch_size=100, steps=24, l2_norm_clip=1.0)
  model = tfdp.make_private(keras.Sequential([
      keras.layers.Input([8]), keras.layers.Dense(1)]))
  model.compile(
      tfdp.DPOptimizer(tfdp.rules.dp_adam(), 0.1, plan=plan), loss='mse')
  model.fit(plan.batches((x, y)))
  ```

  Args:
    rule: A `tfdp.rules` rule, e.g. `tfdp.rules.dp_adam()`.
    learning_rate: Float or `LearningRateSchedule`; a parameter moves by
      `-learning_rate * direction`.
    l2_norm_clip: Clip norm of one example's gradient (of the scaled gradient, for
      rules that scale). If neither the plan nor this argument gives a clip norm, it adapts to the
      examples, see `tfdp.clipping.Automatic`.
    noise_multiplier: Standard deviation of the noise on the sum of clipped
      gradients, in clip norms. Required without a plan.
    batch_size: The divisor of the noisy sum: the batch size, or the expected
      one under Poisson sampling. Required without a plan.
    plan: A `tfdp.PrivacyPlan`, which then gives noise multiplier, batch size,
      adjacency, mechanism and number of steps, and the clip norm unless
      `l2_norm_clip` is given as well.
    mechanism: A `tfdp.mechanisms` mechanism; independent Gaussian noise by default.
    adjacency: Which data sets are neighbors: 'zero_out' (one example against an empty one; the
      default), 'add_remove' (one example more or less) or 'replace' (one example against any
      other, which takes twice the noise).
    clipping: The clipping method: `tfdp.clipping.Hard()` (the default at a clip norm), `AutoS()`,
      `Quantile(0.5)`, `Slack()`, `PerLayer()` and the like. All have the same privacy as `Hard()`.
    performance: A `tfdp.Performance`: engine, memory and chunks. These settings do not change the
      result of a step.
    public_data: For rules that use public gradients: a tuple of arrays `(x, y)`, used
      whole at every step; a `tf.data.Dataset` of batches `(x, y)`, repeated; or a
      function that returns such a batch. It is not saved with the optimizer; set
      `optimizer.public_data` after loading. It must really be public: a part of the
      private data is not.
    own_sampler: A sentence that says how you sample records, if you have a plan and choose the
      batches yourself. The library cannot check it. The privacy statement quotes it as your own
      claim. By default a step under a plan takes the batch that the plan drew for it, and no other.
    diagnostics: Whether `fit` also reports diagnostics, which are NOT private, see
      `tfdp.diagnostics`.
    seed: Fixes the noise, for tests. Fixed noise protects nobody, and the statement says so.
    allow_non_private: Accept rules without any guarantee.
    name: Name of the optimizer; by default that of the class.
    **kwargs: `weight_decay`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency` of the
      Keras optimizer.

  Raises:
    ValueError: For missing or wrong arguments.
    PrivacyError: If the gradients do not come from a private model.
  """

  plan: Optional[plan_lib.PrivacyPlan]
  l2_norm_clip: float
  noise_multiplier: float
  batch_size: float  # The divisor B.
  mechanism: Optional[mechanisms.Mechanism]
  adjacency: str
  seed: Optional[int]
  _applying = False
  _fixed: FrozenSet[str] = frozenset()

  def __init__(
      self, rule: contract.Rule, learning_rate: Any = 0.001, *,
      l2_norm_clip: Optional[float] = None, noise_multiplier: Optional[float] = None,
      batch_size: Optional[float] = None, plan: Optional[plan_lib.PrivacyPlan] = None,
      mechanism: Optional[mechanisms.Mechanism] = None, adjacency: Optional[str] = None,
      clipping: Optional[choices.Clipping] = None,
      performance: Optional[arguments.Performance] = None,
      public_data: Any = None, own_sampler: Optional[str] = None,
      diagnostics: bool = False, seed: Optional[int] = None, allow_non_private: bool = False,
      name: Optional[str] = None, **kwargs: object) -> None:
    arguments.refuse(kwargs)
    contract.check_rule(rule)
    if l2_norm_clip is None and getattr(plan, 'l2_norm_clip', None) is None:
      clipping, l2_norm_clip = choices.followed(clipping)
    clipping, performance = choices.chosen(clipping), arguments.performance(performance)
    given: Any = dict(batch_size=batch_size, noise_multiplier=noise_multiplier)
    rule = clipping.rule(rule, **{
        name: getattr(plan, name, value) for name, value in given.items()})
    arguments.check_moving_average(rule, kwargs)
    compat.init_optimizer(self, learning_rate, name or type(self).__name__, **kwargs)
    private = privatizer_lib.settings(
        rule, plan, l2_norm_clip=l2_norm_clip, mechanism=mechanism, adjacency=adjacency, **given)
    arguments.check_own_sampler(plan, own_sampler)
    private.update(seed=seed, allow_non_private=allow_non_private)
    # Hidden from automatic tracking, which would wrap dictionaries and lists.
    self._hidden = types.SimpleNamespace(private=private, rule_config=None, public_data=None)
    self.plan = plan
    for setting in set(private) - {'steps'}:
      setattr(self, setting, private[setting])
    self.run = run_lib.Run(  # Tracked: checkpoints know whose they are.
        plan, rule, own_sampler or '', private['l2_norm_clip'], seed is not None, self.use_ema)
    self.clipping, self.performance = clipping, performance
    self.own_sampler = own_sampler
    self.diagnostics = diagnostics
    self.public_data = public_data
    if self.noise_multiplier == 0:
      errors.caution(f'{self.name}: noise_multiplier=0, so training is NOT private.')
    if choices.caution(clipping):
      errors.caution(f'{self.name}: {choices.caution(clipping)}')
    self._fixed = arguments.fixed(type(self))

  def __setattr__(self, name: str, value: object) -> None:
    setter = getattr(getattr(type(self), name, None), 'fset', None)
    if name in self._fixed and setter is None and value is not vars(self).get(name, self):
      raise AttributeError(
          f'`{name}` of {self.name} cannot be changed: it would go on as it was made. Make another '
          f'optimizer and compile the model with it, or set `learning_rate`, which may change at '
          f'any time. Received: {name}={value!r}.')
    super().__setattr__(name, value)

  @property
  def rule(self) -> contract.Rule:
    return self.run.rule

  @property
  def public_data(self) -> None:
    return self._hidden.public_data

  @public_data.setter
  def public_data(self, data: Any) -> None:
    if data is not None and self.rule.public is None:
      raise ValueError(f'The rule {self.rule.name} uses no public data. Received: public_data.')
    self.run.reads(getattr(data, 'entries', ()))
    self.run.held += weight_ledger.held_by(data) if callable(data) else []
    if isinstance(data, tf.data.Dataset):
      arguments.check_public(next(iter(data), None))
      iterator = iter(data.repeat())
      data = lambda: next(iterator)
    elif data is not None and not callable(data):
      fixed = arguments.check_public(trees.map(tf.convert_to_tensor, tuple(data)))
      data = lambda: fixed
    self._hidden.public_data = data

  def public_batch(self) -> Any:
    """Returns the next public `(x, y)`."""
    if self.public_data is None:
      raise ValueError(f'The rule {self.rule.name} needs gradients of public data. Pass '
                       '`public_data=`, or set `optimizer.public_data` after loading.')
    return arguments.check_public(self.public_data())

  # Privacy of the run.

  @property
  def ledger(self) -> ledger_lib.Ledger:
    """Returns the `tfdp.Ledger` of the model's weights, with all private runs on them so far."""
    return weight_ledger.of_run(self.run)

  def ledger_after(self, steps: int) -> ledger_lib.Ledger:
    """Returns the `tfdp.Ledger` of the weights when this run has done `steps` steps in all.

    Raises:
      ValueError: If the optimizer has no plan, because then no privacy is accounted for.
    """
    if self.plan is None:
      raise ValueError('Without a plan there is no epsilon: sampling and number of steps are '
                       'unknown. Make a `tfdp.PrivacyPlan` and pass `plan=`.')
    return weight_ledger.of_run(self.run, steps)

  def epsilon(self, steps: Optional[int] = None) -> float:
    """Returns epsilon at the plan's delta after `steps` steps (default: all planned).

    Runs of other optimizers on the same weights are added. The epsilon spent so far is
    `optimizer.ledger.epsilon()`. Raises like `ledger_after`.
    """
    steps = getattr(self.plan, 'steps', 0) if steps is None else steps
    return self.ledger_after(steps).epsilon(getattr(self.plan, 'target_delta', None))

  def statement(self, steps: Optional[int] = None) -> str:
    """Returns the privacy statement of the trained model, in plain text."""
    planned = getattr(self.plan, 'steps', self.run.steps) if steps is None else steps
    text = '' if self.plan is not None else (
        f'{self.name}: noise multiplier {self.noise_multiplier:g}, clip norm '
        f'{self.l2_norm_clip:g}, divisor {self.batch_size:g}, {self.adjacency} adjacency. There is '
        'no epsilon to state: without a tfdp.PrivacyPlan neither sampling nor steps are known.\n\n')
    entries = weight_ledger.entries_of_run(self.run, planned)
    return text + statement_lib.of(weight_ledger.card(entries, plots=False))

  # State.

  @tf.autograph.experimental.do_not_convert
  def build(self, var_list: Sequence[compat.Variable]) -> None:
    """Creates the rule's and the privatizer's variables, once."""
    if self.run.state is not None:
      return
    if not var_list:
      raise ValueError('A model must have trainable weights. Received: none. Set `trainable=True` '
                       'on a layer with weights before you compile the model.')
    empty = [getattr(v, 'path', v.name) for v in var_list if 0 in tuple(v.shape)]
    if empty:
      raise ValueError('Trainable weights must hold at least one number each. '
                       f'Received: weights without any, {empty}. Freeze them, or leave them out.')
    super().build(var_list)
    with tf.init_scope():
      self.run.rule = self.clipping.grouped(self.rule, var_list)
      specs = [tf.TensorSpec(v.shape, tf.as_dtype(v.dtype), getattr(v, 'path', v.name))
               for v in var_list]
      private = private_rule.PrivateRule(
          self.rule, specs, one_pass=True, **self._hidden.private)
      self._warn_of_regimes(private.specs)
      initial = private.init()
      key = initial.privatizer.noise.key
      # The key is saved only where it is no secret (a test's seed): a restored or
      # copied optimizer then continues with fresh noise, and never repeats any.
      fresh = self._hidden.private['seed'] is None
      state = trees.map(
          lambda t: (compat.replicated_variable(t, 'noise_key') if fresh and t is key
                     else compat.add_optimizer_variable(self, t.numpy())), initial)
      self.run.begin(private, state, var_list)
    compat.mark_built(self)

  def check_variables(self, variables: Sequence[Any]) -> None:
    """Refuses trainable variables that a built optimizer does not have."""
    keys = [[id(compat.raw_variable(v)) for v in some]
            for some in (self.run.moved, variables)]
    if self.run.moved and keys[0] != keys[1]:
      raise errors.PrivacyError(
          'The trainable weights must stay those that the optimizer was built for. Received: '
          f'{len(variables)} variables, built for {len(self.run.moved)}; layers were frozen, '
          'thawed or added since. Compile again with a new optimizer (and plan): what was spent '
          'stays in `model.ledger`, and the new run adds to it.')

  def _warn_of_regimes(self, specs: Sequence[tf.TensorSpec]) -> None:
    if isinstance(self.clipping, choices.Automatic):  # Its clip norm is not known yet.
      return
    noise_std = self.noise_multiplier * contract.mean_sensitivity(
        self.l2_norm_clip, self.batch_size, self.adjacency)
    for message in self.rule.cautions(self.l2_norm_clip, noise_std, trees.size(specs)):
      errors.caution(f'{self.name}: {message}')

  def read_state(self) -> private_rule.State:
    """Returns the state of rule and noise; SECRET."""
    return trees.map(tf.convert_to_tensor, self.run.state)

  def write_state(self, state: private_rule.State) -> None:
    trees.map(lambda variable, value: variable.assign(value), self.run.state, state)
    self.run.step_counts.record(state.privatizer.noise.row)

  @property
  def rule_state(self) -> trees.Tree:
    """Returns the rule's state after the last step. It is public: it depends on releases only."""
    return trees.map(tf.convert_to_tensor, self.run.state.rule)

  @property
  def steps_done(self) -> int:
    """Returns the number of noised steps taken so far (a Python int; eager only)."""
    return self.run.steps

  # The step, see `step.py`.

  @property
  def private(self) -> private_rule.PrivateRule:
    """Returns the `PrivateRule` of a built optimizer."""
    return self.run.private

  def move(
      self, variables: Sequence[compat.Variable], direction: trees.Tree,
      state: private_rule.State) -> None:
    """Moves the weights along a direction that the rule made of releases.

    Args:
      variables: The trainable variables.
      direction: A list like them.
      state: The state after the step, for projections.
    """
    self._applying = True  # Replicas take turns inside: no earlier value is put back.
    try:
      compat.apply_direction(
          self, [(tf.cast(d, v.dtype), v) for d, v in zip(direction, variables)])
    finally:
      self._applying = False
    if self.rule.project is not None:
      projected = self.rule.project(state.rule, [tf.convert_to_tensor(v) for v in variables])
      trees.assign((v, tf.cast(value, v.dtype)) for v, value in zip(variables, projected))

  # Entry points that take gradients which were not clipped.

  def _refuse_gradients(self) -> None:
    if not self._applying:
      raise errors.PrivacyError(
          f'{self.name} was handed gradients that were not clipped per example. {errors.FIX}')

  def apply_gradients(self, grads_and_vars: trees.Tree, *args: object, **kwargs: object) -> Any:
    self._refuse_gradients()
    return super().apply_gradients(grads_and_vars, *args, **kwargs)

  def apply(self, grads: trees.Tree,
            trainable_variables: Optional[Sequence[compat.Variable]] = None) -> Any:
    self._refuse_gradients()
    return super().apply(grads, trainable_variables)

  def compute_gradients(self, loss: trees.Tree, var_list: Sequence[compat.Variable],
                        tape: Optional[tf.GradientTape] = None) -> Any:
    raise errors.PrivacyError(f'{self.name} does not hand out gradients. {errors.FIX}')

  def minimize(self, loss: trees.Tree, *args: object, **kwargs: object) -> Any:
    """Refuses the gradient of a whole batch, which plain Keras 2 models pass."""
    del loss, args, kwargs
    raise errors.PrivacyError(f'{self.name} trains private models only. {errors.FIX}')

  def update_step(self, gradient: tf.Tensor, variable: compat.Variable,
                  learning_rate: Optional[tf.Tensor] = None) -> None:
    self._refuse_gradients()
    rate = self.learning_rate if learning_rate is None else learning_rate
    compat.descend(variable, tf.cast(rate, variable.dtype), tf.cast(gradient, variable.dtype))

  # Saving.

  def save_own_variables(self, store: Dict[str, np.ndarray]) -> None:
    if not runfolder.may_be_secret():  # A file of weights, which anybody may read.
      return
    super().save_own_variables(store)
    run = self.run.to_bytes()
    store[_RUN] = np.frombuffer(run, np.uint8)
    store[_DIGEST] = _digest(run, [v.numpy() for v in self.variables])

  def load_own_variables(self, store: Dict[str, np.ndarray]) -> None:
    saved = {name: np.asarray(store[name]) for name in store.keys()}
    if not saved:  # A file of weights.
      return
    digest, run = saved.pop(_DIGEST, None), saved.pop(_RUN, np.zeros([0], np.uint8)).tobytes()
    arrays = [saved[name] for name in sorted(saved, key=lambda name: (len(name), name))]
    if digest is not None and not np.array_equal(digest, _digest(run, arrays)):
      raise errors.PrivacyError(
          'The state of an optimizer must be what was saved, or rows of noise may be used twice. '
          'Received: a file with other numbers than were written to it. Take another copy.')
    differs = run_lib.differences(run_lib.saved_fingerprint(run), run_lib.fingerprint(self.run))
    if differs or len(saved) != len(self.variables):
      if self.run.earlier.put_beside(run):
        errors.caution(
            f'{self.name}: the state in the file is of {differs or "other variables"}, so it is '
            'left out, and a new run begins. The steps of the earlier run stay in `model.ledger`.')
      return
    super().load_own_variables(saved)
    self.run.deserialize(run)

  def _trackable_children(self, save_type: str = 'checkpoint', **kwargs: object) -> Any:
    if save_type == 'savedmodel':  # A model for serving gets nothing secret.
      return {}
    return super()._trackable_children(save_type, **kwargs)

  def get_config(self) -> Dict[str, Any]:
    raise NotImplementedError(
        'A `DPOptimizer` around a bare rule cannot be saved as part of a model, since a rule is a '
        'set of functions. Use a named class (tfdp.DPAdam, ...), save weights only, or save a '
        '`tf.train.Checkpoint(model=model, optimizer=model.optimizer)`, from which the same code '
        'goes on.')


def _digest(run: bytes, arrays: Sequence[np.ndarray]) -> np.ndarray:
  text = sources.fingerprint((np.frombuffer(run, np.uint8), *arrays))
  return np.frombuffer(bytes.fromhex(text), np.uint8)

