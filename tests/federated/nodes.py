# SPDX-License-Identifier: Apache-2.0
"""Nodes of Flower without its network. Whoever imports this skips where Flower is not installed."""

import types

from flwr import app as flwr_app
from flwr.supercore import task_identity
import numpy as np
import regression

from tfdp_adaptive import rules
from tfdp_adaptive.federated import flower

# Messages know the process they are made in, which Flower says where it runs a ServerApp.
task_identity.TaskIdentity.run_id = task_identity.TaskIdentity.node_id = 1
task_identity.TaskIdentity.task_id = 1
USERS = list(regression.make_users().values())


def trained(arrays, examples):
  """Returns the arrays that an honest node has after its training."""
  delta = regression.delta(np.concatenate([np.ravel(a) for a in arrays]).astype(float), examples)
  return [arrays[0] - delta[:3, None].astype('f'), arrays[1] - delta[3:].astype('f')]


class Grid:
  """Nodes 1, 2, ... that answer with what a function makes of the arrays they are sent.

  Args:
    users: Examples of each node.
    odd: {node: function(grid, message, arrays) -> replies}, of nodes that do something else.
  """

  def __init__(self, users=None, odd=None):
    self.users, self.odd = dict(enumerate(users or USERS, 1)), odd or {}
    self.replies, self.sent, self.offline = [], [], set()

  def get_nodes(self):
    return [types.SimpleNamespace(node_id=node, public_key=b'') for node in self.users
            if node not in self.offline]

  def push_messages(self, messages):
    for message in messages:
      message.metadata.__dict__['_message_id'] = f'message {len(self.sent)}'
      self.sent.append(message)
      node = message.metadata.dst_node_id
      arrays = message.content['arrays'].to_numpy_ndarrays()
      end = trained(arrays, self.users[node])
      loss = float(len(self.users[node]['x']))
      replies = (self.odd[node](self, message, end) if node in self.odd
                 else [reply(message, end, loss=loss)])
      self.replies.extend(replies)
    return [message.metadata.message_id for message in messages]

  def pull_messages(self, message_ids):
    assert message_ids
    got, self.replies = self.replies, []
    return got


def reply(message, arrays, **metrics):
  return flwr_app.Message(flwr_app.RecordDict({
      'arrays': flwr_app.ArrayRecord(list(arrays)),
      **({'metrics': flwr_app.MetricRecord(metrics)} if metrics else {})}), reply_to=message)


def run(grid, out=None, num_rounds=3, rule=None, plan=None, seed=regression.SEED, timeout=0.3,
        **kwargs):
  strategy = flower.PrivateStrategy(
      regression.model_fn(), plan=plan or regression.make_plan(), rule=rule or rules.dp_adam(),
      server_learning_rate=0.5, out=out, seed=seed, **kwargs)
  result = strategy.start(grid, num_rounds=num_rounds, timeout=timeout)
  return strategy.result, result


def flat(result):
  return np.concatenate([np.ravel(a) for a in result.arrays.to_numpy_ndarrays()])
