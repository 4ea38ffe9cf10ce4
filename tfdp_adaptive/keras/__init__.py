# SPDX-License-Identifier: Apache-2.0
"""Any rule as a Keras optimizer, and the models whose step it is private in.

`step.py` is the line that a batch walks, `model.py` leads to it, and `private.py` makes models.
"""
