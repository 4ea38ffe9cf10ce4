# SPDX-License-Identifier: Apache-2.0
"""Builds the signature and docstring of named optimizers.

Its arguments come from two places, the rule's factory and `DPOptimizer`; here they
are put together, so that neither is written twice.
"""

import inspect
import re
from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Tuple

from tfdp_adaptive import optimizers

# Documentation of the argument, for classes whose weights decay by default.
_DECAY = {
    'weight_decay': 'A step also subtracts `learning_rate * weight_decay` times each weight; '
                    'None turns this off.'}
_ELSEWHERE = re.compile(r'The arguments are those of `(\w+)`\.[ \n]?')
_CALL = 'tfdp.DPOptimizer(tfdp.rules.dp_adam(), 0.1, plan=plan)'  # As in its docstring.
_NEXT = ',\n' + 8 * ' '
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def signature(
    factory: Callable[..., Any], base: Callable[..., Any],
    defaults: Mapping[str, Any]) -> inspect.Signature:
  """Returns `learning_rate`, then the rule's arguments and the optimizer's, all by name.

  Args:
    factory: Makes the rule.
    base: Constructor of the optimizer, which takes `self`, `rule` and the rest.
    defaults: The defaults of arguments that the class has besides, by name.
  """
  theirs = inspect.signature(base).parameters
  parameters: Dict[str, inspect.Parameter] = {'learning_rate': theirs['learning_rate']}
  for name, parameter in inspect.signature(factory).parameters.items():
    parameters[name] = parameter.replace(kind=_KEYWORD)
  for name, default in defaults.items():
    parameters[name] = inspect.Parameter(name, _KEYWORD, default=default)
  for name, parameter in theirs.items():
    if name not in ('self', 'rule'):
      parameters.setdefault(name, parameter)
  return inspect.Signature(list(parameters.values()))


def check_given(name: str, factory: Callable[..., Any], given: Mapping[str, Any]) -> None:
  """Raises ValueError for missing required arguments, and names them."""
  missing = [key for key, parameter in inspect.signature(factory).parameters.items()
             if parameter.default is inspect.Parameter.empty and key not in given
             and parameter.kind is not inspect.Parameter.VAR_KEYWORD]
  if missing:
    described = _sections(inspect.getdoc(factory))[1]
    texts = [' '.join(described.get(key, key).split()) for key in missing]
    raise ValueError(f'`{name}` has no default for {missing}. ' + ' '.join(texts))


def docstring(
    name: str, row: optimizers.Optimizer, base: type, factories: Mapping[str, Any]) -> str:
  """Returns the rule's docstring with the arguments of both, in the format of a Google docstring.

  Args:
    name: Name of the optimizer.
    row: Its row of the table.
    base: The optimizer's class.
    factories: Factories by name: the rule's, and those that a sentence "The arguments are those of
      `name`." refers to.
  """
  init = base.__init__  # type: ignore[misc]
  taken = signature(factories[row.rule], init, row.defaults).parameters
  return assemble(name, row, inspect.getdoc(base) or '', taken,
                  lambda name: inspect.getdoc(factories[name]) or '')


def assemble(name: str, row: optimizers.Optimizer, base: str, taken: Iterable[str],
             other: Callable[[str], str]) -> str:
  """Returns the docstring, made of docstrings alone: the pages need no TensorFlow.

  Args:
    name: Name of the optimizer.
    row: Its row of the table.
    base: Docstring of the optimizer's class.
    taken: Names of all arguments, in their order.
    other: `name -> ` docstring of a factory.
  """
  text = other(row.rule)
  named = _ELSEWHERE.search(text)
  head, rule_arguments, _ = _sections(text)
  if named:
    head = _ELSEWHERE.sub('', head)
    rule_arguments = {**_sections(other(named.group(1)))[1], **rule_arguments}
  common, arguments, raises = _sections(base)
  if 'Example:\n' not in head:
    head = f'{head.strip()}\n\n{_example(name, row, common)}'
  entries = {**arguments, **rule_arguments,
             **{name: f'  {name}: {text}\n' for name, text in _DECAY.items()}}
  return '\n'.join([
      head.strip(), '', f'The Keras optimizer of `tfdp.rules.{row.rule}`.', '', 'Args:',
      *(entries[name].rstrip() for name in taken if name in entries), '', raises.strip()])


def _example(name: str, row: optimizers.Optimizer, common: str) -> str:
  """Returns the example in the docstring of `DPOptimizer` with another optimizer."""
  given = ['0.1', *(f'{key}={value!r}' for key, value in row.audit.items()),
           *['public_data=(np.eye(8), np.ones([8, 1]))'] * row.public]
  enabled = f"tfdp.experimental('{row.rule}')\n" if row.missing else ''
  text = common[common.index('Example:'):].strip().replace('model.comp', f'{enabled}model.comp')
  return text.replace(_CALL, f'tfdp.{name}({_NEXT.join(given)}, plan=plan)')


def _sections(text: Optional[str]) -> Tuple[str, Dict[str, str], str]:
  """Returns `(head, {argument: its lines}, what is raised)` of a docstring."""
  parts = re.split(r'^(Args|Returns|Raises|Yields):\n', text or '', flags=re.M)
  sections = dict(zip(parts[1::2], parts[2::2]))
  entries: Dict[str, str] = {}
  for entry in re.split(r'^(?=  \S)', sections.get('Args', ''), flags=re.M):
    names, colon, rest = entry.partition(':')
    for name in names.split(',') if colon else ():
      entries[name.strip(' *')] = f'  {name.strip()}:{rest}'
  raises = f'Raises:\n{sections["Raises"]}' if 'Raises' in sections else ''
  return parts[0], entries, raises
