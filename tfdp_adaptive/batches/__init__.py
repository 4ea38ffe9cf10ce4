# SPDX-License-Identifier: Apache-2.0
"""Draws the batches of a run from a plan and data, with their tags and the secret sampling seed."""
