# SPDX-License-Identifier: Apache-2.0
"""Shows the reference the named optimizers, which are made from a table and not by `class`.

Each has the arguments of its rule; those of every optimizer are described once.
From the sources alone: building the pages needs no TensorFlow.
"""

import inspect

import griffe

from tfdp_adaptive import optimizers
from tfdp_adaptive.keras import signatures

_COMMON = """
  **common: Arguments of `tfdp.DPOptimizer`, such as `plan`.
"""


class NamedOptimizers(griffe.Extension):
  """Adds a class with its docstring for every row of the table."""

  def on_package(self, *, pkg, **kwargs):
    del kwargs
    if pkg.path != 'tfdp_adaptive':
      return
    module = pkg['keras.named_optimizers']
    base = pkg['keras.optimizer.DPOptimizer']
    theirs = {p.name: p for p in base['__init__'].parameters if p.name not in ('self', 'rule')}
    for name, row in optimizers.OPTIMIZERS.items():
      rule = _factory(pkg, row.rule)
      extra = [griffe.Parameter(word, annotation='Optional[float]',
                                kind=griffe.ParameterKind.keyword_only, default=repr(value))
               for word, value in row.defaults.items()]
      common = griffe.Parameter('common', kind=griffe.ParameterKind.var_keyword)
      parameters = {p.name: p for p in [theirs['learning_rate'], *rule.parameters, *extra, common]}
      text = signatures.assemble(
          name, row, _text(base), parameters, lambda key: _text(_factory(pkg, key)))
      text = text.partition('\nRaises:\n')[0] + _COMMON
      kind = griffe.Class(
          name, lineno=1, endlineno=1, parent=module, docstring=griffe.Docstring(text, lineno=1))
      kind.docstring.parent = kind
      module.set_member(name, kind)
      kind.set_member('__init__', griffe.Function(
          '__init__', lineno=1, endlineno=1, parent=kind,
          parameters=griffe.Parameters(
              griffe.Parameter('self', kind=griffe.ParameterKind.positional_or_keyword),
              *(_by_name(p) for p in parameters.values()))))


def _factory(pkg, name):
  """By where it is imported from: some modules have the name of their function."""
  return pkg[pkg['rules'].imports[name].partition('.')[2]]


def _text(thing):
  return inspect.cleandoc(thing.docstring.value)


def _by_name(parameter):
  kind = parameter.kind
  if parameter.name != 'learning_rate' and kind != griffe.ParameterKind.var_keyword:
    kind = griffe.ParameterKind.keyword_only
  return griffe.Parameter(
      parameter.name, annotation=parameter.annotation, kind=kind, default=parameter.default)
