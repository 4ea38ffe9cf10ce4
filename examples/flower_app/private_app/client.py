# SPDX-License-Identifier: Apache-2.0
"""The client: it trains as usual where nodes are protected, and privately where records are."""

import pathlib

from flwr.app import ArrayRecord
from flwr.app import Message
from flwr.app import MetricRecord
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
import keras

from private_app import task

app = ClientApp()


@app.train()
def train(message, context):
  arrays = message.content['arrays'].to_numpy_ndarrays()
  number = int(message.content['config']['server-round'])
  partition = context.node_config['partition-id']
  config = context.run_config
  if config['protect'] == 'record':
    end, metrics = train_silo(arrays, number, partition, config)
  else:
    end, metrics = train_node(arrays, partition)
  return Message(RecordDict({'arrays': ArrayRecord(end), 'metrics': MetricRecord(metrics)}),
                 reply_to=message)


def train_node(arrays, partition):
  """Trains without noise: the server clips the answer and adds the noise."""
  x, y = task.load(partition)
  model = task.build_model()
  model.set_weights(arrays)
  model.compile(keras.optimizers.SGD(0.05), 'mse')
  history = model.fit(x, y, batch_size=16, verbose=0)
  return model.get_weights(), {'loss': history.history['loss'][-1]}


def train_silo(arrays, number, partition, config):
  """Takes the steps of one round with noise, and counts them in the silo's ledger."""
  import tfdp_adaptive as tfdp
  steps = config['steps-per-round']
  plan = tfdp.PrivacyPlan.calibrate(  # The plan of ALL rounds, the same in every one.
      target_epsilon=config['target-epsilon'], target_delta=1e-5, population_size=task.RECORDS,
      batch_size=20, steps=steps * config['rounds'], l2_norm_clip=1.0)
  model = tfdp.make_private(task.build_model())
  model.compile(tfdp.DPAdam(0.1, plan=plan), 'mse')
  silo = tfdp.federated.Silo(pathlib.Path(config['silos']) / f'silo-{partition}', plan=plan)
  end = silo.train(model, arrays, task.load(partition), steps=steps, server_round=number)
  # Every number that is sent must be private or public: no loss, and the public number of records.
  return end, {'num-examples': task.RECORDS, 'epsilon': silo.ledger.epsilon()}
