# SPDX-License-Identifier: Apache-2.0
"""The stub from which editors know the arguments of the named optimizers.

Their classes are made at run time, from the factories of rules; type checkers and editors
read `named_optimizers.pyi` instead. `python tests/named_optimizers_stub_test.py` writes it.
"""

import ast
import inspect
import pathlib
import re
import textwrap

from tfdp_adaptive import optimizers

PACKAGE = pathlib.Path(__file__).parent.parent / 'tfdp_adaptive'
ADAPTER = PACKAGE / 'keras'
STUB = ADAPTER / 'named_optimizers.pyi'
IMPORTS = {  # The names that annotations may use.
    'npt': 'import numpy.typing as npt',
    'mechanisms': 'from tfdp_adaptive import mechanisms',
    'trees': 'from tfdp_adaptive import trees',
    'choices': 'from tfdp_adaptive.clipping import choices',
    'arguments': 'from tfdp_adaptive.keras import arguments',
    'optimizer_lib': 'from tfdp_adaptive.keras import optimizer as optimizer_lib',
    'plan_lib': 'from tfdp_adaptive.privacy import plan as plan_lib',
    'constraints': 'from tfdp_adaptive.rules import constraints',
}
OPENING = '''# SPDX-License-Identifier: Apache-2.0
# Written by `python tests/named_optimizers_stub_test.py`.

'''
BASE = '''class NamedOptimizer(optimizer_lib.DPOptimizer):
  factory: Any
  def __init__(self, learning_rate: Any = 0.001, **kwargs: Any) -> None: ...'''
KERAS = {  # Arguments of Keras' optimizers.
    'use_ema': 'bool', 'ema_momentum': 'float', 'ema_overwrite_frequency': 'Optional[int]'}
WEIGHT_DECAY = {'weight_decay': 'Optional[float]'}


def functions(path):
  return {node.name: node for node in ast.walk(ast.parse(path.read_text(encoding='utf-8')))
          if isinstance(node, ast.FunctionDef)}


def parameters(function):
  """{name: as it is written there, with type and default}."""
  arguments = function.args
  positional = arguments.args
  defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
  pairs = [*zip(positional, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
  texts = {}
  for argument, default in pairs:
    if argument.arg not in ('self', 'rule'):
      text = ast.unparse(argument)
      texts[argument.arg] = text if default is None else f'{text} = {ast.unparse(default)}'
  return texts


def typed_dict(name, base, types):
  return '\n'.join([f'class {name}({base}, total=False):', *(
      f'  {key}: {kind}' for key, kind in types.items())])


def wrapped(texts):
  """A constructor of these arguments; no line ends inside one."""
  text = ', '.join(text.replace(' ', '\0') for text in texts)
  return textwrap.fill(
      f'def\0__init__({text})\0->\0None:\0...', 100, initial_indent='  ',
      subsequent_indent='               ', break_long_words=False,
      break_on_hyphens=False).replace('\0', ' ')


def stub():
  """What all classes take is said once, in a TypedDict; each says what its rule takes."""
  factories = {}
  for path in sorted((PACKAGE / 'rules').glob('*.py')):
    factories.update(functions(path))
  own = parameters(functions(ADAPTER / 'optimizer.py')['__init__'])
  rate = own.pop('learning_rate')
  common = {name: text.partition(': ')[2].partition(' = ')[0] for name, text in own.items()}
  parts = [typed_dict('_Undecayed', 'TypedDict', {**common, **KERAS}),
           typed_dict('_Common', '_Undecayed', WEIGHT_DECAY), BASE]
  for name, row in optimizers.OPTIMIZERS.items():
    extra = {each: f'{each}: Optional[float] = {default}'
             for each, default in row.defaults.items()}
    mine = {**parameters(factories[row.rule]), **extra}
    shared = '_Undecayed' if 'weight_decay' in mine else '_Common'
    mine = {key: text for key, text in mine.items() if key not in common}
    texts = ['self', rate, *['*'] * bool(mine), *mine.values(),
             f'**kwargs: Unpack[{shared}]']
    parts.append(f'class {name}(NamedOptimizer):\n'
                 + wrapped(texts))
  text = '\n'.join(parts)
  types = [name for name in ('Any', 'Dict', 'Optional', 'Sequence', 'Tuple', 'Union')
           if re.search(rf'\b{name}\b', text)]
  used = [line for name, line in IMPORTS.items() if re.search(rf'\b{name}\.', text)]
  extensions = [f'from typing_extensions import {name}' for name in ('TypedDict', 'Unpack')]
  blocks = (f'from typing import {", ".join(types)}', '\n'.join([*used[:1], *extensions]),
            '\n'.join(used[1:]), text)
  return OPENING + '\n\n'.join(blocks) + '\n'


def test_the_stub_is_what_the_sources_say():
  assert STUB.read_text(encoding='utf-8') == stub(), (
      'Run `python tests/named_optimizers_stub_test.py`.')


def keys(name, nodes):
  """Of a TypedDict of the stub, and of those that it extends."""
  if name not in nodes:
    return []
  return [*keys(ast.unparse(nodes[name].bases[0]), nodes), *(
      line.target.id for line in nodes[name].body)]


def test_the_stub_shows_the_arguments_that_there_are():
  import tfdp_adaptive as tfdp
  nodes = {node.name: node for node in ast.parse(stub()).body if isinstance(node, ast.ClassDef)}
  constructors = {name: node.body[0].args for name, node in nodes.items()
                  if ast.unparse(node.bases[0]) == 'NamedOptimizer'}
  assert set(constructors) == set(optimizers.OPTIMIZERS) and len(constructors) > 20
  for name, arguments in constructors.items():
    shown = [a.arg for a in arguments.args[1:] + arguments.kwonlyargs]
    shown += keys(ast.unparse(arguments.kwarg.annotation.slice), nodes)
    taken = {*inspect.signature(getattr(tfdp, name)).parameters} - {'kwargs'}
    assert len(shown) == len(set(shown)) and set(shown) == taken | {*KERAS, *WEIGHT_DECAY}, name


if __name__ == '__main__':
  STUB.write_text(stub(), encoding='utf-8')
