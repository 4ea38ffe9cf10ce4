# SPDX-License-Identifier: Apache-2.0
"""Keras models whose training step clips every example before anything else."""

import contextlib
import functools
import gc
import json
import types
from typing import Any, Dict, List, Mapping, MutableSet, Optional, Sequence, Tuple
import weakref

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.accounting import stopping
from tfdp_adaptive.batches import tags
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import losses as losses_lib
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.independence import probes
from tfdp_adaptive.independence import validation
from tfdp_adaptive.keras import first_step
from tfdp_adaptive.keras import fit as fit_lib
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import step
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

keras: Any = compat.keras

# Models whose own step an audit has passed, or is looking at.
AUDITED: MutableSet[Any] = weakref.WeakSet()
# Methods that decide what a private step does with a batch.
_STEP = ('train_step', 'prepare_step', 'regularization_gradients', 'make_train_function',
         'validate_for_replicas', '_validate', '_validate_eagerly')

_UNKNOWN_WEIGHTS = (
    'Weights were set by hand (`set_weights`) before the first step of the plan. If they were '
    'trained on the same records, as in an earlier round of federated training, the epsilon of '
    'this plan leaves out what that cost.')
_USE_SILO = (
    'For a client that trains in several rounds, use `tfdp.federated.Silo(folder, plan=plan)`, '
    'which counts the steps of all rounds. If no private record was used for them, ignore this.')

_FROZEN = 'tfdp_frozen'  # Key in a compile config.
_Mixin: Any = object  # For type checkers: what a mixin finds beside it is a Keras model's.


class DPModel(_Mixin):
  """Mixin that makes `fit` and `train_on_batch` private.

      class MyModel(tfdp.DPModel, keras.Model): ...

  The loss of an example is the compiled loss of a batch with this example alone. A loss that
  compares examples, such as a contrastive loss, has nothing to compare with. `sample_weight` may
  weight examples; weight zero marks padding, which is no record at all. Losses that depend on the
  weights only (regularizers) are public and added after the noise. The metrics that `fit` reports
  are exact numbers computed from private data. They are NOT private: do not publish them. Under a
  plan, metrics also see padding, which has `sample_weight` zero. Your own metrics must use
  `sample_weight`; a warning names a metric that does not.
  """

  example_views = 1  # Views of every example in a step, see `compile`.
  batch_kinds: Any = types.SimpleNamespace(specs=None)  # Filled once compiled.
  leaves_out_penalties = False  # As an audit does, which knows what else a release may hold.

  def compile(
      self, optimizer: compat.Optimizer = None, loss: Any = None, *args: object,
      public_penalty: Optional[str] = None, views: int = 1, compare_first_step: bool = True,
      **kwargs: object) -> None:
    """Compiles the model with a `tfdp` optimizer. Metrics do not count padded examples.

    Args:
      optimizer: A private optimizer.
      loss: As in Keras.
      *args: As in Keras.
      public_penalty: The source of arrays inside a loss, regularizer, constraint or learning-rate
        schedule, if they are public. Such arrays are refused by default. The statement repeats the
        text.
      views: The number of views of every example in a step. The model's random layers draw new
        numbers for each view. The mean gradient of the views is clipped once, so guarantee, noise
        and plan are the same as for one view.
      compare_first_step: Whether the first step checks the loss and the gradient of two made-up
        examples against the compiled loss and a plain tape.
      **kwargs: As in Keras.
    """
    checks.whole(views=views)
    kwargs = fit_lib.by_name(keras.Model.compile, 3, args, kwargs)
    metrics, weighted_metrics = kwargs.pop('metrics', None), kwargs.pop('weighted_metrics', None)
    loss_weights = fit_lib.loss_weights(kwargs.pop('loss_weights', None))
    optimizer = keras.optimizers.get(optimizer) if isinstance(optimizer, (str, dict)) else optimizer
    optimizer = compat.unwrap_loss_scaling(optimizer)
    if not isinstance(optimizer, optimizer_lib.DPOptimizer):
      raise ValueError('A private model needs a private optimizer, such as tfdp.DPAdam. '
                       f'Received: optimizer={optimizer!r}.')
    refuse_own(self, 'compute_loss')
    # The kinds of batches met since: the model may have changed before.
    self.batch_kinds = types.SimpleNamespace(
        validated=set(), compared=set(), rows={}, parts=[], specs=None)
    AUDITED.discard(self)
    self._public_penalty, self.example_views = public_penalty, views
    self._compares = compare_first_step
    # Keras would make other lists of the lists of an attribute, and reads those otherwise.
    object.__setattr__(self, '_compiled_loss_arguments', (loss, loss_weights))
    self._compiled_with_metrics = bool(metrics or weighted_metrics)
    self.has_own_metrics = any(map(
        disclosures.is_own, tf.nest.flatten((metrics, weighted_metrics))))
    if optimizer.plan is not None:
      fit_lib.warn_of_padding(self, (metrics, weighted_metrics))
    super().compile(optimizer=optimizer, loss=loss, metrics=metrics, loss_weights=loss_weights,
                    weighted_metrics=weighted_metrics, **kwargs)
    # Keras may have scaled losses. Those of single examples are not tiny: no 1/B.
    self.optimizer = optimizer
    weight_ledger.track(self)
    if public_penalty is not None:
      self.optimizer.run.note(
          'A loss, penalty or schedule holds arrays that are public in the words of whoever '
          f'trained the model: {public_penalty!r}.')
    if not compare_first_step:
      self.optimizer.run.note('Gradients of examples were not compared with those of Keras.')

  def set_weights(self, weights: trees.Tree) -> None:
    """Sets all weights, as in Keras. Warns if a plan then begins with them at zero steps."""
    super().set_weights(weights)
    self._has_unknown_weights = True
    self._warn_of_unknown_weights()

  def _warn_of_unknown_weights(self) -> None:
    plan = getattr(getattr(self, 'optimizer', None), 'plan', None)
    if plan is None or not getattr(self, '_has_unknown_weights', False) or self.ledger.entries:
      return
    self.optimizer.run.note(_UNKNOWN_WEIGHTS)
    errors.caution(f'{_UNKNOWN_WEIGHTS} {_USE_SILO}')

  def __setattr__(self, name: str, value: object) -> None:
    super().__setattr__(name, value)
    if name == 'optimizer' and isinstance(value, optimizer_lib.DPOptimizer):
      value.run.of(self)  # Covers `compile` and assignments.
      self._warn_of_unknown_weights()

  def to_json(self, **kwargs: Any) -> str:
    """Returns the model as JSON. `keras.models.model_from_json` restores a private model."""
    config = json.loads(super().to_json())
    if 'registered_name' not in config:
      config['class_name'] = keras.saving.get_registered_name(type(self))
    return json.dumps(config, **kwargs)

  def _trackable_children(self, *args: object, **kwargs: object) -> Any:
    if 'savedmodel' in (kwargs.get('save_type'), *args):
      self.reset_metrics()  # Exact sums over private data, which Keras 2 would export.
    weight_ledger.track(self)  # Before TensorFlow asks what there is to save.
    return super()._trackable_children(*args, **kwargs)

  @property
  def ledger(self) -> ledger_lib.Ledger:
    """Returns the `tfdp.Ledger` of the weights, with every private run on them so far."""
    return weight_ledger.Ledger.of(self).ledger()

  def privacy_card(
      self, *, audits: Sequence[Any] = (), words: Optional[Mapping[str, str]] = None,
      looks: Optional[stopping.Looks] = None) -> Any:
    """Returns the privacy card of the weights: a guarantee that a reviewer can check.

    `card_json.to_json`, `card_page.markdown` and `card_page.html` write it, and `tfdp verify`
    checks it. It holds no secret and nothing exact about the data.

    Args:
      audits: Reports of `tfdp.audit` on this model.
      words: Your own statements, such as `{'the data': 'one review per person'}`.
      looks: A `tfdp.privacy.Looks`, if the run may have stopped because of something released.
    """
    return weight_ledger.card_of_model(self, audits, words, looks=looks)

  @property
  def trainable_weights(self) -> List[Any]:
    return compat.unfrozen(super().trainable_weights)

  @property
  def trainable_variables(self) -> List[Any]:
    return compat.unfrozen(super().trainable_variables)

  def get_compile_config(self) -> Any:
    """Returns the config, as in Keras, with views and the places of weights that were frozen."""
    config = super().get_compile_config()
    own = {'views': self.example_views if self.example_views > 1 else None,
           _FROZEN: [i for i, v in enumerate(self.weights) if compat.is_frozen(v)]}
    return config and {**config, **{name: value for name, value in own.items() if value}}

  def compile_from_config(self, config: Dict[str, Any]) -> None:
    config = {**config}
    for place in config.pop(_FROZEN, ()):
      compat.freeze(self.weights[place])
    if (type(self).compile, super().compile.__func__) != (DPModel.compile, keras.Model.compile):
      return super().compile_from_config(config)  # Keras warns, and leaves the call to the user.
    self.compile(**keras.saving.deserialize_keras_object(config))
    if self.built and self.trainable_variables:  # A frozen one has none.
      self.optimizer.build(self.trainable_variables)

  def fit(self, x: trees.Tree = None, y: trees.Tree = None, *args: object, **kwargs: object) -> Any:
    """Trains as in Keras. With a plan, `x` must be the data set `plan.batches(data)`.

    `fit` ends with a warning if weights are no longer finite.
    """
    kwargs = fit_lib.by_name(keras.Model.fit, 3, args, kwargs)
    with fit_lib.training(self, x, y, kwargs) as data:
      return super().fit(*data, **kwargs)

  def prepare_data(self, x: trees.Tree, y: trees.Tree, kwargs: Dict[str, Any]) -> Tuple[Any, Any]:
    """Returns the arguments to pass to Keras' `fit`, once they have been checked."""
    del kwargs
    return x, y

  def _maybe_symbolic_build(self, iterator: object = None, data_batch: trees.Tree = None) -> None:
    del data_batch  # Keras 3 would read a batch, and cannot on several workers.
    compat.build_symbolically(self, iterator, self.batch_kinds.specs)

  def make_train_function(self, *args: object, **kwargs: object) -> Any:
    """Returns the training function, after it has checked the variables."""
    _private_optimizer(self).check_variables(self.trainable_variables)
    self.build_optimizer()  # A trace that creates variables is made twice.
    return super().make_train_function(*args, **kwargs)

  def build_optimizer(self) -> None:
    """Builds the optimizer of a built model, unless replicas must build it together."""
    optimizer = _private_optimizer(self)
    if self.built and self.distribute_strategy.num_replicas_in_sync == 1:
      with self.distribute_strategy.scope():
        optimizer.build(self.trainable_variables)

  def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
    fit_lib.check_strategy(self.distribute_strategy)
    batch = fit_lib.by_name(keras.Model.train_on_batch, 1, args, kwargs)
    with tags.spending(_private_optimizer(self), batch.get('x'), batch.get('sample_weight')):
      return super().train_on_batch(*args, **kwargs)

  @compat.unconverted
  def __call__(self, inputs: trees.Tree, *args: Any, **kwargs: Any) -> Any:
    return super().__call__(compat.with_optional(self, inputs), *args, **kwargs)

  @compat.unconverted
  def train_step(self, data: trees.Tree) -> Dict[str, tf.Tensor]:
    _refuse_own_step(self)
    _private_optimizer(self)
    fit_lib.check_strategy(tf.distribute.get_strategy())
    try:
      x, _, weight = keras.utils.unpack_x_y_sample_weight(data)
      with _uncollected(), tags.spending(self.optimizer, x, weight):
        return compat.logs_of_replica(step.train_step(self, step.with_shapes(self, data)))
    except Exception:
      # Half traced it is of no more use: TensorFlow lets a function make variables only once.
      self.train_function = None
      raise

  @compat.unconverted
  def test_step(self, data: trees.Tree) -> Dict[str, tf.Tensor]:
    return compat.logs_of_replica(super().test_step(data))

  def prepare_step(self, x: trees.Tree) -> losses_lib.ExampleLoss:
    """Builds and validates the model, once per kind of input; returns the loss of each example."""
    engines.remember(self, x)
    if not self.built:
      self._build_for(x)
    self._validate(x)
    loss, loss_weights = self._compiled_loss_arguments
    return losses_lib.ExampleLoss(loss, loss_weights, compat.output_names(self), functools.partial(
        validation.check_traced, self, public=self._public_penalty))

  @tf.autograph.experimental.do_not_convert
  def compare_step(self, loss: losses_lib.ExampleLoss, examples: trees.Tree) -> None:
    """Compares loss and gradients with Keras' own, once per kind of batch; see `first_step`."""
    specs = tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype),
        (examples.x, examples.y, examples.sample_weight))
    if compat.has_replicas() or not self._compares or examples.y is None or (
        str(specs) in self.batch_kinds.compared):
      return
    self.batch_kinds.compared.add(str(specs))
    validation.on_a_thread(first_step.check, self, loss, self._compiled_loss_arguments, specs,
                           self.optimizer.rule.asks, self.optimizer.performance.engine)

  @tf.autograph.experimental.do_not_convert
  def _build_for(self, x: trees.Tree) -> None:
    """Makes the weights, eagerly, though a step is traced: others are not there yet (Keras 3)."""
    if compat.has_replicas() or tf.executing_eagerly():
      self(tf.nest.map_structure(lambda t: t[:1], x), training=False)
      return
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x)
    validation.on_a_thread(validation.build, self, specs)

  def validate_for_replicas(self, specs: trees.Tree) -> None:
    """Validates the model before `fit` begins, since replicas cannot probe themselves."""
    if not self.built:
      with self.distribute_strategy.scope():
        validation.build(self, specs)
    self._validate_eagerly(specs)

  @tf.autograph.experimental.do_not_convert
  def _validate(self, x: trees.Tree) -> None:
    """Validates the model once per kind of input, while the step is traced."""
    validation.validate_structure(self)
    if compat.has_replicas():
      validation.check_probed(self)
      return
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x)
    # Code that asks an attribute of a layer is traced, or run, with its present value.
    signature = str(specs) + str(hash(frozenset(probes.python_state(self).items())))
    # A schedule, penalty or constraint may be another one by now.
    signature += str([id(one) for one in (
        compat.learning_rate_schedule(self.optimizer), *compat.penalties(self),
        *(v.constraint for v in self.trainable_variables))])
    if signature not in self.batch_kinds.validated:
      validation.on_a_thread(self._validate_eagerly, specs)
      if self.optimizer.plan is None and self.optimizer.noise_multiplier and (
          not self.batch_kinds.validated):
        errors.caution(
            f'{self.optimizer.name} trains without a plan, so nothing is accounted for and '
            '`ledger.epsilon()` is inf. Make a `tfdp.PrivacyPlan`, pass `plan=`, and train on '
            '`plan.batches(data)`.')
      self.batch_kinds.validated.add(signature)

  def _validate_eagerly(self, specs: trees.Tree) -> None:
    validation.validate_model(self, specs)
    numbers, held = self.check_held(self._public_penalty), validation.seen(self)
    disclosures.check(self, held, getattr(self.optimizer.plan, 'population_size', None))
    covered = lambda layer: disclosures.label(layer) in [
        one.rule for one in weight_ledger.Ledger([layer]).entries()]
    self.optimizer.run.note(*disclosures.sentences(self, held, numbers, covered))

  def check_held(self, public: Optional[str] = None) -> List[float]:
    """Refuses private arrays in functions of a step; see `validation.check_held`."""
    schedule = compat.learning_rate_schedule(self.optimizer)
    if disclosures.is_own(schedule) and not self.run_eagerly:  # Eager ones may ask for numbers.
      validation.check_traced(self, tf.function(schedule).get_concrete_function(
          tf.TensorSpec([], tf.int64)), public)
    return validation.check_held(self, [self._compiled_loss_arguments[0], schedule], public)

  def reads_outputs(self) -> bool:
    """Whether metrics want the outputs for the whole batch, which chunks save otherwise."""
    several = [self._compiled_loss_arguments[0], compat.output_structure(self)]
    return compat.overrides(self, 'compute_metrics') or self._compiled_with_metrics or any(
        len(tf.nest.flatten(one)) > 1 for one in several)

  def weight_penalty(self) -> Any:
    """Returns the sum of the losses on the weights alone, which `fit` reports as part of `loss`."""
    penalties = [] if self.leaves_out_penalties else compat.weight_regularization(self)
    return tf.add_n(penalties) if penalties else 0.0

  def regularization_gradients(self) -> Optional[List[tf.Tensor]]:
    """Gradients of the weight-only losses, or None."""
    with tf.GradientTape() as tape:
      total = DPModel.weight_penalty(self)  # A subclass may report another one.
    return materialized.dense_gradients(
        tape, total, self.trainable_variables) if tf.is_tensor(total) else None


@contextlib.contextmanager
def _uncollected() -> Any:
  """Keeps Python from looking for garbage among all that TensorFlow holds, again and again.

  Tracing a step and checking its model make so many objects that it took a tenth of their time.
  """
  was_on = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_on:
      gc.enable()


def _private_optimizer(model: compat.Model) -> optimizer_lib.DPOptimizer:
  """Returns the model's optimizer, which an assignment may have replaced since `compile`."""
  optimizer = getattr(model, 'optimizer', None)
  if not isinstance(optimizer, optimizer_lib.DPOptimizer):
    raise errors.PrivacyError(
        f'A private model trains by a private optimizer only. Received: {optimizer!r}. Compile it '
        'with one, such as tfdp.DPAdam.')
  return optimizer


def refuse_own(model: compat.Model, *methods: str) -> None:
  """Refuses a model with methods that a private step would not call."""
  for method in methods:
    if compat.overrides(model, method):
      raise errors.PrivacyError(
          f'A private step computes the compiled loss of every single example itself. Received: a '
          f'model with a `{method}` of its own, {type(model).__name__}. Put what it computes into '
          '`call` and the compiled `loss`.')


def _refuse_own_step(model: compat.Model) -> None:
  """Refuses a subclass that replaces a part of the private step, until an audit has passed it."""
  own = [name for name in _STEP if any(
      name in vars(one) for one in type(model).__mro__[:type(model).__mro__.index(DPModel)]
      if not one.__module__.startswith(__name__.split('.', maxsplit=1)[0]))
         or name in vars(model)]
  if own and model not in AUDITED:
    raise errors.PrivacyError(
        f'{type(model).__name__} replaces a part of the private step, {own}: it may mix examples, '
        'or write data into weights, which nothing here can see. Compile a new model, pass it to '
        '`tfdp.audit.white_box(model, data=(x, y))`, and train once the audit passes; or put the '
        'code into `call`, the `loss` or `plan.batches(data)`.')
