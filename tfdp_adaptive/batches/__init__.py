# SPDX-License-Identifier: Apache-2.0
"""From a plan and data to the batches of a run, their marks and their secret coins."""
