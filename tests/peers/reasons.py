# SPDX-License-Identifier: Apache-2.0
"""Tests of Keras that private models fail in another way than a refusal in words, and why."""

DIFFERS = {}
