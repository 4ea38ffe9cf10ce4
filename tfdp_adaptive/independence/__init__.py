# SPDX-License-Identifier: Apache-2.0
"""Whether an example's loss depends on that example alone, and whether a step keeps data."""
