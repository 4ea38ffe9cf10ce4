# SPDX-License-Identifier: Apache-2.0
"""Cards in formats of others, signatures, and batches that are drawn again for an auditor."""
