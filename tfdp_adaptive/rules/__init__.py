"""Private optimizers as pure update rules, one factory each."""

from tfdp_adaptive.rules.base import Ask as Ask
from tfdp_adaptive.rules.base import Query as Query
from tfdp_adaptive.rules.base import Release as Release
from tfdp_adaptive.rules.base import Rule as Rule
from tfdp_adaptive.rules.base import Statistic as Statistic
from tfdp_adaptive.rules.base import Sums as Sums
from tfdp_adaptive.rules.bias_corrected import dp_adagrad_bc as dp_adagrad_bc
from tfdp_adaptive.rules.bias_corrected import dp_adam_bc as dp_adam_bc
from tfdp_adaptive.rules.bias_corrected import dp_rmsprop_bc as dp_rmsprop_bc
from tfdp_adaptive.rules.independent_moments import dp_adagrad_ime as dp_adagrad_ime
from tfdp_adaptive.rules.independent_moments import dp_adam_ime as dp_adam_ime
from tfdp_adaptive.rules.post_processing import dp_adagrad as dp_adagrad
from tfdp_adaptive.rules.post_processing import dp_adam as dp_adam
from tfdp_adaptive.rules.post_processing import dp_rmsprop as dp_rmsprop
from tfdp_adaptive.rules.post_processing import dp_yogi as dp_yogi
from tfdp_adaptive.rules.scale_then_privatize import dp_adagrad_stp as dp_adagrad_stp
from tfdp_adaptive.rules.scale_then_privatize import dp_rmsprop_stp as dp_rmsprop_stp
from tfdp_adaptive.rules.scale_then_privatize import scale_then_privatize as scale_then_privatize
from tfdp_adaptive.rules.sgd import dp_sgd as dp_sgd
