# SPDX-License-Identifier: Apache-2.0
"""The models of `evidence.py` in NumPy: losses and records' gradients of R copies at once."""

from typing import Any, List, Tuple

import evidence_tasks
import numpy as np


def start(task: evidence_tasks.Task, copies: int) -> List[np.ndarray]:
  inputs = task.parts[0][0].shape[1]
  if not task.hidden:
    return [np.zeros([copies, inputs, task.outputs], np.float32)]
  rng = np.random.default_rng(3)
  shapes = (inputs, task.hidden), (task.hidden, task.outputs)
  return [np.repeat((rng.normal(size=s) / np.sqrt(s[0]))[None], copies, 0).astype(np.float32)
          for s in shapes]


def through(x: np.ndarray, w: np.ndarray) -> np.ndarray:
  """[R, B, out]: inputs [B, in], which all copies share, or [R, B, in]."""
  if x.ndim == 3:
    return x @ w
  r, d, k = w.shape
  return (x @ w.transpose(1, 0, 2).reshape(d, r * k)).reshape(len(x), r, k).transpose(1, 0, 2)


def collected(x: np.ndarray, delta: np.ndarray) -> np.ndarray:
  """[R, in, out]: the sum over records of inputs times `delta` [R, B, out]."""
  if x.ndim == 3:
    return x.transpose(0, 2, 1) @ delta
  r, b, k = delta.shape
  return (x.T @ delta.transpose(1, 0, 2).reshape(b, r * k)).reshape(-1, r, k).transpose(1, 0, 2)


def losses(task: evidence_tasks.Task, logits: np.ndarray, y: np.ndarray) -> Tuple[Any, Any]:
  """([R, B] losses, [R, B, outputs] derivatives)."""
  logits = logits + np.asarray(task.offset, np.float32)
  if task.loss == 'softmax':
    logits = logits - logits.max(-1, keepdims=True)
    exp = np.exp(logits)
    total = exp.sum(-1)
    at = np.arange(len(y))
    value = np.log(total) - logits[:, at, y]
    delta = exp / total[..., None]
    delta[:, at, y] -= 1
    return value, delta
  z, y = logits[..., 0], y.astype(np.float32)
  if task.loss == 'squares':
    return .5 * np.square(z - y), (z - y)[..., None]
  value = np.logaddexp(0, z) - y * z
  return value, (1 / (1 + np.exp(-np.clip(z, -60, 60))) - y)[..., None]


def outputs(weights: List[np.ndarray], x: np.ndarray) -> np.ndarray:
  for w in weights[:-1]:
    x = np.tanh(through(x, w))
  return through(x, weights[-1])


def evaluate(task: evidence_tasks.Task, weights: List[np.ndarray], part: int) -> np.ndarray:
  """[R] mean losses."""
  x, y = task.parts[part]
  mean = losses(task, outputs(weights, x), y)[0].mean(-1)
  return np.where(np.isfinite(mean), mean, np.inf)


def accuracy(task: evidence_tasks.Task, weights: List[np.ndarray], part: int) -> np.ndarray:
  """[R] shares of right answers of a classification."""
  x, y = task.parts[part]
  logits = outputs(weights, x) + np.asarray(task.offset, np.float32)
  found = logits.argmax(-1) if task.loss == 'softmax' else logits[..., 0] > 0
  return (found == y).mean(-1)


def square_roots(task: evidence_tasks.Task, x: np.ndarray, y: np.ndarray, rate: float = .1,
                 batch_size: int = 256) -> List[np.ndarray]:
  """Root mean squares of gradients of PUBLIC records, over an epoch of SGD without privacy."""
  weights = start(task, 1)
  totals = [np.zeros(w.shape[1:]) for w in weights]
  for at in range(0, len(x), batch_size):
    rows = slice(at, at + batch_size)
    for i, (inputs, delta) in enumerate(records(task, weights, x[rows], y[rows])):
      totals[i] += collected(np.square(inputs), np.square(delta))[0]
      weights[i] = weights[i] - rate * collected(inputs, delta) / len(x[rows])
  return [np.sqrt(total / len(x)) for total in totals]


def records(task: evidence_tasks.Task, weights: List[np.ndarray], x: np.ndarray, y: np.ndarray
            ) -> List[Tuple[np.ndarray, np.ndarray]]:
  """Per layer (inputs, derivatives): the gradient of a record is their outer product."""
  layers = [x]
  for w in weights[:-1]:
    layers.append(np.tanh(through(layers[-1], w)))
  delta = losses(task, through(layers[-1], weights[-1]), y)[1]
  result = [(layers[-1], delta)]
  for inputs, w in zip(layers[-2::-1], weights[:0:-1]):
    delta = (delta @ w.transpose(0, 2, 1)) * (1 - np.square(result[0][0]))
    result.insert(0, (inputs, delta))
  return result


def norms(layers: Any, scales: Any = None) -> np.ndarray:
  """[R, B] norms of the records' gradients, scaled or not."""
  total: Any = 0.0
  for i, (inputs, delta) in enumerate(layers):
    if scales is None:
      total = total + np.square(inputs).sum(-1) * np.square(delta).sum(-1)
    else:
      total = total + (through(np.square(inputs), np.square(scales[i])) * np.square(delta)).sum(-1)
  return np.sqrt(total)
