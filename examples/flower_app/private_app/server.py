# SPDX-License-Identifier: Apache-2.0
"""The server: a private strategy where nodes are protected, and Flower's own where records are."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp import strategy as strategies

from private_app import task

app = ServerApp()


@app.main()
def main(grid, context):
  config = context.run_config
  model = task.build_model()
  if config['protect'] == 'record':
    strategy = strategies.FedAvg(fraction_train=1.0, fraction_evaluate=0.0,
                                 min_train_nodes=config['nodes'],
                                 min_available_nodes=config['nodes'])
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.get_weights()),
                   num_rounds=config['rounds'])
    return
  import tfdp_adaptive as tfdp
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=config['target-epsilon'], target_delta=1e-6, unit='user',
      population_size=config['nodes'], batch_size=config['nodes'], steps=config['rounds'],
      l2_norm_clip=0.5)
  strategy = tfdp.federated.flower.PrivateStrategy(
      model, plan=plan, rule=tfdp.rules.dp_adam(), server_learning_rate=0.1,
      private_metrics=tfdp.federated.PrivateMetrics({'loss': (0.0, 10.0)}),
      min_nodes=config['nodes'], out=config['out'])
  strategy.start(grid, timeout=600)
