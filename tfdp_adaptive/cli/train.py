"""`tfdp train`: one private model, saved with what may be said of it.

A run that was interrupted goes on when the command is given again with the same
--out. What it keeps there for that (`train.state/`) is secret and is removed at the end.
"""

import tensorflow as tf

from tfdp_adaptive.cli import compare
from tfdp_adaptive.cli import language_model
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import report as report_lib
from tfdp_adaptive.cli import settings as settings_lib
from tfdp_adaptive.cli import tasks
from tfdp_adaptive.cli import training


def add_parser(subparsers):
  parser = subparsers.add_parser('train', description=__doc__)
  compare.add_arguments(parser)
  parser.add_argument('--save-every', type=options.positive_int, default=100, metavar='N',
                      help='steps between two saved states (default: %(default)s)')
  options.add_data_arguments(parser)
  options.add_privacy_arguments(parser, f'{compare.EPSILON:g}')
  options.add_one_method_arguments(parser, settings_lib.CENTRALIZED)
  parser.set_defaults(tune=False)
  return parser


def run(arguments):
  method = settings_lib.CENTRALIZED[arguments.method]
  settings = options.settings(method, arguments.set)
  task = tasks.load(arguments)
  report = report_lib.Report(arguments.out, report_lib.about(task, arguments), 'train')
  model, _, optimizer = compare.prepare(
      task, method, settings, compare.make_plan(arguments, task))
  report.begin({'plan': optimizer.plan.to_json(), 'method': arguments.method,
                'settings': settings, **task.identity()})
  state = _State(report.unfinished, model)
  done, plan = state.restore(), optimizer.plan
  report.state(*report_lib.preamble(task, arguments))
  evaluate = language_model.Evaluator(model, task.test)
  measured = training.Run(((0, *evaluate()),), 0.0)
  if done < plan.steps:
    measured = training.fit(
        model, plan.batches(task.train, start_step=done), plan.steps - done, evaluate,
        method.label, callbacks=[_Saver(state, arguments.save_every)])
    state.save()
  _publish(model, task.vocabulary, report)
  report.state(optimizer.statement())
  report.add(report_lib.Row('word frequencies, not private', compare.PART, *task.baseline))
  report.add(report_lib.Row(
      method.label, compare.PART, measured.loss, measured.accuracy, steps=plan.steps,
      seconds_per_step=measured.seconds_per_step, settings=settings,
      curve=tuple((done + step, *values) for step, *values in measured.curve),
      epsilon=optimizer.epsilon(), delta=plan.target_delta, unit='sentence'))
  report.finish(arguments.json)


class _State:
  """Weights and optimizer of an unfinished run; SECRET, as the optimizer's state is.

  Args:
    folder: Where.
    model: Compiled and private.
  """

  def __init__(self, folder, model):
    self._folder = folder
    self._optimizer = model.optimizer
    self._optimizer.build(model.trainable_variables)
    self._checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    self._manager = None

  def restore(self):
    """Number of steps done; 0 without a saved state."""
    try:
      self._manager = tf.train.CheckpointManager(
          self._checkpoint, str(self._folder), max_to_keep=2)
      if self._manager.latest_checkpoint is None:
        if any(self._folder.glob('ckpt-*')):
          raise ValueError('its list of checkpoints names none')
        return 0
      self._manager.restore_or_initialize()
    except (OSError, ValueError, tf.errors.OpError) as error:
      raise options.unreadable(self._folder, error) from error
    return self._optimizer.steps_done

  def save(self):
    self._manager.save()


class _Saver(tf.keras.callbacks.Callback):
  """Saves the state every so many steps."""

  def __init__(self, state, every):
    super().__init__()
    self._state, self._every = state, every

  def on_train_batch_end(self, batch, logs=None):
    if (batch + 1) % self._every == 0:
      self._state.save()


def _publish(model, vocabulary, report):
  """Saves the weights in a plain model: no optimizer, so nothing secret."""
  plain = language_model.build(model.output_shape[-1])
  plain.set_weights(model.get_weights())
  plain.save(report.file('model.keras'))
  report.file('vocabulary.txt').write_text('\n'.join(vocabulary) + '\n', encoding='utf-8')
