# SPDX-License-Identifier: Apache-2.0
"""Files keep their ledger in a process of their own, whatever is imported first."""

import subprocess
import sys

import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger

keras, layers = compat.keras, compat.keras.layers
READ = '''
plain = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
plain.load_weights("m.weights.h5")
for model in (plain, keras.models.load_model("plain.keras"), keras.models.load_model("m.keras")):
  print(tfdp.make_private(model).ledger.epsilon())
'''


@pytest.mark.thorough(but=['import tfdp_adaptive as tfdp; import keras*'])
@pytest.mark.pitfall(
    'Another process imports the library before Keras, reads the weights of a private run '
    'into a plain model, and trains them again.',
    severity='critical', stops="Keras' loaders read the ledger once both libraries are imported")
@pytest.mark.parametrize('imports', [
    'import tfdp_adaptive as tfdp; import keras',
    'import tfdp_adaptive as tfdp; import tensorflow as tf; keras = tf.keras',
    'import tfdp_adaptive as tfdp; from tfdp_adaptive import rules; import keras'])
def test_the_ledger_is_read_in_another_process(imports, tmp_path):
  plan = tfdp.PrivacyPlan(
      batch_size=8, steps=4, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
      population_size=64)
  plain = keras.Sequential([layers.Input([2]), layers.Dense(1)])
  model = tfdp.make_private(plain)
  weight_ledger.Ledger(model.variables).attach([
      ledger.Entry(plan, 4, rule='dp_sgd', run=ledger.new_run())])
  model.save_weights(str(tmp_path / 'm.weights.h5'))
  model.save(str(tmp_path / 'm.keras'))
  plain.save(str(tmp_path / 'plain.keras'))
  said = subprocess.run([sys.executable, '-c', f'{imports}\n{READ}'], cwd=tmp_path, text=True,
                        stdout=subprocess.PIPE, check=True).stdout.split()
  assert [float(one) for one in said] == pytest.approx([plan.epsilon()] * 3)
