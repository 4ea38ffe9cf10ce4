# SPDX-License-Identifier: Apache-2.0
"""Makes private models from Keras models and KerasHub tasks, with shared weights.

A private task takes strings, and generates, as the task does: what is not found here is asked of
the task, which still does everything but training.
"""

import os
import types
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import layers as layers  # Loaders of Keras know them then.
from tfdp_adaptive import trees
from tfdp_adaptive.batches import tags
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.independence import validation
from tfdp_adaptive.keras import fit as fit_lib
from tfdp_adaptive.keras import model as model_lib
from tfdp_adaptive.keras import step
from tfdp_adaptive.keras import weight_ledger

keras: Any = compat.keras
# Methods of Keras that a private model has from its own class.
_DROPPED = ('compute_metrics', 'test_step', 'predict_step', 'fit', 'evaluate', 'train_on_batch',
            'test_on_batch', 'predict_on_batch')


@compat.serializable
class DPSequential(model_lib.DPModel, keras.Sequential):
  """A private `keras.Sequential`."""


@compat.serializable
class DPFunctional(model_lib.DPModel, keras.Model):
  """A private functional model: `DPFunctional(inputs, outputs)`."""


@compat.serializable
class DPWrapper(model_lib.DPModel, keras.Model):
  """A private model around a subclassed one, whose layers and weights it shares."""

  def __init__(self, model: compat.Model, **kwargs: object) -> None:
    super().__init__(**kwargs)
    self.model = model

  @compat.unconverted
  def call(self, inputs: trees.Tree, training: Optional[bool] = None) -> Any:
    return self.model(inputs, training=training)

  def predict(self, *args: object, **kwargs: object) -> Any:
    """Calls the `predict` of the wrapped model, if its class defines one."""
    predicts: Any = self.model if compat.overrides(self.model, 'predict') else super()
    return predicts.predict(*args, **kwargs)

  def get_config(self) -> Dict[str, Any]:
    return {'model': keras.saving.serialize_keras_object(self.model), 'name': self.name}

  @classmethod
  def from_config(cls, config: Dict[str, Any]) -> 'DPWrapper':
    model = keras.saving.deserialize_keras_object(config.pop('model'))
    return cls(model, **config)


class DPTask(DPFunctional):
  """A private `keras_hub.models.Task`; `task` is what it was made of."""

  def __init__(self, task: compat.Model, **kwargs: object):
    super().__init__(
        compat.input_structure(task), compat.output_structure(task), name=task.name, **kwargs)
    self._of_task = types.SimpleNamespace(task=task)  # No layer of this one.

  @property
  def task(self) -> Any:
    return self._of_task.task

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_'):
      raise AttributeError(name)
    return getattr(self._of_task.task, name)

  def get_config(self) -> Dict[str, Any]:
    raise NotImplementedError(
        'A private task is saved as the task that it was made of, with which it shares all '
        'weights: `model.save_to_preset(folder)`, to be read with `from_preset(folder)`. To '
        "train on with what was spent, also `model.save_weights('name.weights.h5')`, and load "
        'these into `tfdp.make_private` of what was read.')

  def save_to_preset(self, preset_dir: str) -> None:
    """Saves the task's preset, and the ledger of the weights in `tfdp_ledger.json`."""
    self.task.save_to_preset(preset_dir)
    with open(os.path.join(preset_dir, 'tfdp_ledger.json'), 'w', encoding='utf-8') as file:
      file.write(self.ledger.to_json())

  def prepare_data(self, x: trees.Tree, y: trees.Tree, kwargs: Dict[str, Any]) -> Tuple[Any, Any]:
    kwargs['validation_data'] = self._held_out(kwargs.get('validation_data'))
    return self._prepared(x, y, kwargs, self._preprocess_records)

  def evaluate(self, x: trees.Tree = None, y: trees.Tree = None, *args: object,
               **kwargs: object) -> Any:
    kwargs = fit_lib.by_name(keras.Model.evaluate, 3, args, kwargs)
    if not kwargs.get('_use_cached_eval_dataset'):  # From `fit`, which has prepared them.
      x, y = self._prepared(x, y, kwargs)
    return super().evaluate(x, y, **kwargs)

  def predict(self, x: trees.Tree, *args: object, **kwargs: object) -> Any:
    """Predicts as the task does."""
    return self.task.predict(x, *args, **kwargs)

  def predict_on_batch(self, x: trees.Tree) -> Any:
    """Predicts as the task does."""
    return self.task.predict_on_batch(x)

  def test_on_batch(self, x: trees.Tree, y: trees.Tree = None, sample_weight: trees.Tree = None,
                    **kwargs: object) -> Any:
    if self.task.preprocessor is not None:
      x, y, sample_weight = self._preprocess(x, y, sample_weight)
    return super().test_on_batch(x, y, sample_weight, **kwargs)

  def train_on_batch(self, x: trees.Tree, y: trees.Tree = None, sample_weight: trees.Tree = None,
                     **kwargs: object) -> Any:
    if self.task.preprocessor is None:
      return super().train_on_batch(x, y, sample_weight, **kwargs)
    with tags.spending(self.optimizer, x, sample_weight):
      x, y, sample_weight = self._preprocess_records(x, y, sample_weight)
      return super().train_on_batch(x, y, sample_weight, **kwargs)

  def _held_out(self, data: trees.Tree) -> Any:
    if data is None or self.task.preprocessor is None:
      return data
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return self._prepared(x, y, dict(sample_weight=sample_weight))[0]

  def _prepared(self, x: trees.Tree, y: trees.Tree, kwargs: Dict[str, Any],
                preprocess: Optional[Callable[..., Any]] = None) -> Tuple[Any, Any]:
    """Returns `(x, y)` for Keras; strings and the like become batches of the model's inputs."""
    if self.task.preprocessor is None:
      return x, y
    if not isinstance(x, tf.data.Dataset):
      parts = keras.utils.pack_x_y_sample_weight(x, y, kwargs.pop('sample_weight', None))
      x = tf.data.Dataset.from_tensor_slices(parts)
      if kwargs.get('shuffle', True):
        x = x.shuffle(x.cardinality())
      x = x.batch(kwargs.pop('batch_size', None) or 32)
    return x.map(preprocess or self._preprocess, num_parallel_calls=tf.data.AUTOTUNE), None

  def _preprocess_records(self, x: trees.Tree, y: trees.Tree = None,
                          sample_weight: trees.Tree = None) -> Any:
    """Preprocesses a batch of records: examples, or users with several examples."""
    plan, (weight, tag) = self.optimizer.plan, tags.split(sample_weight)
    if plan is not None and plan.whole_users or tag is not None and tag.shape.rank == 2:
      records, _, _ = step.unpack((x, y, tags.Tagged(weight, tag)), plan)
      examples, _ = interface.joined(records)
      batch = tf.nest.map_structure(
          lambda t: None if t is None else interface.divided(t, records),
          self._preprocess(examples.x, examples.y, examples.sample_weight))
    else:
      batch = self._preprocess(x, y, weight)
    return batch if tag is None else (*batch[:2], tags.Tagged(batch[2], tag))

  def _preprocess(self, x: trees.Tree, y: trees.Tree = None, sample_weight: trees.Tree = None
                  ) -> Tuple[Any, Any, Any]:
    """Preprocesses a batch. Multiplies the weights of the task by those of the caller."""
    x = tf.nest.map_structure(  # Tokenizers do not take arrays of strings.
        lambda t: tf.convert_to_tensor(t) if isinstance(t, np.ndarray) else t, x)
    x, y, own = keras.utils.unpack_x_y_sample_weight(self.task.preprocess_samples(x, y))
    if own is not None:
      own = tf.cast(own, tf.float32)
      sample_weight = own if sample_weight is None else trees.scaled(sample_weight, own)
    return x, y, sample_weight


def is_task(model: compat.Model) -> bool:
  """Whether a model is a functional task of KerasHub."""
  return compat.input_structure(model) is not None and any(
      one.__name__ == 'Task' and one.__module__.partition('.')[0] == 'keras_hub'
      for one in type(model).__mro__)


def make_private(model: compat.Model) -> compat.Model:
  """Returns a private model that shares layers and weights with `model`; compile it again.

  Do not train `model` itself afterwards. It shares its weights with the private model, and the
  statement would not mention these steps without privacy.

  Args:
    model: Any Keras model, which is left as it is. The first step of the private model validates
      it, see `validate_model`.

  Returns:
    A `DPModel` of the matching kind.

  Raises:
    PrivacyError: If a layer is known to mix the examples of a batch, or if the model has a
      `train_step` or `compute_loss` of its own.
  """
  if isinstance(model, model_lib.DPModel):
    return model
  checks.instance(keras.Model, 'a Keras model', model=model)
  weight_ledger.track(model)
  model_lib.refuse_own(model, 'compute_loss', 'train_step', 'make_train_function')
  ignored = [method for method in _DROPPED if compat.overrides(model, method)]
  wraps = compat.input_structure(model) is None and not isinstance(model, keras.Sequential)
  ignored += ['predict'] * (compat.overrides(model, 'predict') and not wraps)
  if ignored and not is_task(model):
    errors.caution(
        f'The private model has the `call` of {type(model).__name__}, not its {ignored}. '
        'To keep them, derive your class from tfdp.DPModel and keras.Model.')
  if model.built:
    validation.validate_structure(model)
    validation.refuse_data_losses(model)
  private = _around(model)
  if not wraps:
    compat.copy_penalties(model, private)
  validation.remember(private, model)
  return private


def _around(model: compat.Model) -> Any:
  """Returns the private model of the matching kind."""
  if is_task(model):
    return DPTask(model)
  if isinstance(model, keras.Sequential):
    private = DPSequential(compat.sequential_layers(model), name=model.name)
    if model.built and not private.built:
      private.build(model.input_shape)
    return private
  if getattr(model, '_is_graph_network', False) or type(model).__name__ == 'Functional':
    return DPFunctional(
        compat.input_structure(model), compat.output_structure(model), name=model.name)
  return DPWrapper(model, name=model.name)


def _clone(own: Callable[..., Any], model: compat.Model, *args: Any, **kwargs: Any) -> Any:
  """Returns a private copy of a private Sequential, compiled if Keras compiles copies."""
  if not isinstance(model, model_lib.DPModel):
    return own(model, *args, **kwargs)
  compiled = getattr(model, 'compiled', False)
  with compat.swapped(model, compiled=False):  # A plain copy knows no settings of a private one.
    private = _around(own(model, *args, **kwargs))
  if compiled:
    private.compile_from_config(model.get_compile_config())
  return private


compat.on_clones(_clone)
