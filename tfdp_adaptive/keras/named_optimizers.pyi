# SPDX-License-Identifier: Apache-2.0
# Written by `python tests/named_optimizers_stub_test.py`.

from typing import Any, Optional, Sequence

import numpy.typing as npt
from typing_extensions import TypedDict
from typing_extensions import Unpack

from tfdp_adaptive import mechanisms
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import choices
from tfdp_adaptive.keras import arguments
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.privacy import plan as plan_lib
from tfdp_adaptive.rules import constraints

class _Undecayed(TypedDict, total=False):
  l2_norm_clip: Optional[float]
  noise_multiplier: Optional[float]
  batch_size: Optional[float]
  plan: Optional[plan_lib.PrivacyPlan]
  mechanism: Optional[mechanisms.Mechanism]
  adjacency: Optional[str]
  clipping: Optional[choices.Clipping]
  performance: Optional[arguments.Performance]
  public_data: Any
  own_sampler: Optional[str]
  diagnostics: bool
  seed: Optional[int]
  allow_non_private: bool
  name: Optional[str]
  use_ema: bool
  ema_momentum: float
  ema_overwrite_frequency: Optional[int]
class _Common(_Undecayed, total=False):
  weight_decay: Optional[float]
class NamedOptimizer(optimizer_lib.DPOptimizer):
  factory: Any
  def __init__(self, learning_rate: Any = 0.001, **kwargs: Any) -> None: ...
class DPSGD(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, momentum: float = 0.0, nesterov: bool = False,
               **kwargs: Unpack[_Common]) -> None: ...
class DPAdam(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 1e-08, amsgrad: bool = False,
               **kwargs: Unpack[_Common]) -> None: ...
class DPAdamW(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 1e-08, amsgrad: bool = False, weight_decay: Optional[float] = 0.004,
               **kwargs: Unpack[_Undecayed]) -> None: ...
class DPAdaGrad(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, initial_accumulator_value: float = 0.0,
               epsilon: float = 1e-08, **kwargs: Unpack[_Common]) -> None: ...
class DPRMSprop(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, rho: float = 0.9, epsilon: float = 1e-08,
               momentum: float = 0.0, centered: bool = False,
               **kwargs: Unpack[_Common]) -> None: ...
class DPYogi(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 0.001, initial_accumulator_value: float = 1e-06,
               **kwargs: Unpack[_Common]) -> None: ...
class DPMuon(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, momentum: float = 0.95, nesterov: bool = True,
               steps: int = 5, edge: bool = False, exclude: Sequence[str] = (), beta_1: float = 0.9,
               beta_2: float = 0.999, epsilon: float = 1e-08,
               relative_adam_learning_rate: float = 1.0, **kwargs: Unpack[_Common]) -> None: ...
class DPAdamBC(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 0.0001, **kwargs: Unpack[_Common]) -> None: ...
class DPAdaGradBC(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, initial_accumulator_value: float = 0.0,
               epsilon: float = 0.0001, **kwargs: Unpack[_Common]) -> None: ...
class DPRMSpropBC(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, rho: float = 0.9, epsilon: float = 0.0001,
               **kwargs: Unpack[_Common]) -> None: ...
class DPAdamIME(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 0.0001, floor: bool = False, share: float = 0.5,
               square_then_average: bool = False, printed_2B_plus_1: bool = False,
               update_clip: Optional[float] = None, **kwargs: Unpack[_Common]) -> None: ...
class DPAdaGradIME(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, initial_accumulator_value: float = 0.0,
               epsilon: float = 0.0001, floor: bool = False, share: float = 0.5,
               square_then_average: bool = False, printed_2B_plus_1: bool = False,
               update_clip: Optional[float] = None, **kwargs: Unpack[_Common]) -> None: ...
class DPAdamSTP(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 1e-08, scale_epsilon: float = 0.01,
               **kwargs: Unpack[_Common]) -> None: ...
class DPAdaGradSTP(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, initial_accumulator_value: float = 0.0,
               epsilon: float = 1e-08, scale_epsilon: float = 0.01,
               **kwargs: Unpack[_Common]) -> None: ...
class DPRMSpropSTP(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, rho: float = 0.9, epsilon: float = 1e-08,
               scale_epsilon: float = 0.01, **kwargs: Unpack[_Common]) -> None: ...
class DPShampoo(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 0.0001, scale_epsilon: float = 0.01, refresh_every: int = 50,
               max_size: int = 512, **kwargs: Unpack[_Common]) -> None: ...
class DPSOAP(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 0.0001, scale_epsilon: float = 0.01, refresh_every: int = 50,
               max_size: int = 512, **kwargs: Unpack[_Common]) -> None: ...
class DPKFC(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, momentum: float = 0.0, power: float = 0.5,
               scale_epsilon: float = 0.01, decay: float = 0.9, refresh_every: int = 20,
               frame: str = 'scaled', **kwargs: Unpack[_Common]) -> None: ...
class DPAdamJME(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 0.0001, floor: bool = False, square_then_average: bool = True,
               relative_lambda: float = 0.5, update_clip: Optional[float] = None,
               **kwargs: Unpack[_Common]) -> None: ...
class SideInformationAdam(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 1e-08, second_moment: trees.Tree = None,
               **kwargs: Unpack[_Common]) -> None: ...
class AdaDPS(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, preconditioner: str = 'rmsprop',
               rho: float = 0.9, epsilon: float = 0.001, epsilon_inside: bool = False,
               **kwargs: Unpack[_Common]) -> None: ...
class PDADPMD(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, steps: int,
               **kwargs: Unpack[_Common]) -> None: ...
class PDPSGD(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, dimension: Optional[int] = None,
               basis: Optional[npt.ArrayLike] = None, project_after: int = 0,
               **kwargs: Unpack[_Common]) -> None: ...
class PASAN(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, ellipsoid: trees.Tree = None,
               projection: str = 'euclidean', box: Optional[constraints.Box] = None,
               radius: Optional[float] = None, **kwargs: Unpack[_Common]) -> None: ...
class PAGAN(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, ellipsoid: trees.Tree = None,
               projection: str = 'euclidean', box: Optional[constraints.Box] = None,
               radius: Optional[float] = None, **kwargs: Unpack[_Common]) -> None: ...
class NoisyAdaGrad(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, participations: int,
               dimension: Optional[int] = None, basis: Optional[npt.ArrayLike] = None,
               diagonal: bool = False, mode: str = 'truncate', epsilon: float = 1e-08,
               relative_noise: float = 1.0, box: Optional[constraints.Box] = None,
               radius: Optional[float] = None, **kwargs: Unpack[_Common]) -> None: ...
class NonPrivateNoiselessAdam(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, beta_1: float = 0.9, beta_2: float = 0.999,
               epsilon: float = 1e-08, scale_epsilon: Optional[float] = None,
               **kwargs: Unpack[_Common]) -> None: ...
class DP2RMSprop(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, sgd_steps: int, adaptive_steps: int,
               relative_adaptive_clip: float = 1.0, relative_adaptive_learning_rate: float = 1.0,
               rho: float = 0.9, epsilon: float = 1e-07, ablation: Optional[str] = None,
               subtract_bias: bool = False, **kwargs: Unpack[_Common]) -> None: ...
class DP2AdaGrad(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, sgd_steps: int, adaptive_steps: int,
               relative_adaptive_clip: float = 1.0, relative_adaptive_learning_rate: float = 1.0,
               epsilon: float = 1e-07, ablation: Optional[str] = None, subtract_bias: bool = False,
               **kwargs: Unpack[_Common]) -> None: ...
class DP2Yogi(NamedOptimizer):
  def __init__(self, learning_rate: Any = 0.001, *, sgd_steps: int, adaptive_steps: int,
               relative_adaptive_clip: float = 1.0, relative_adaptive_learning_rate: float = 1.0,
               rho: float = 0.9, epsilon: float = 1e-07, ablation: Optional[str] = None,
               subtract_bias: bool = False, **kwargs: Unpack[_Common]) -> None: ...
