# SPDX-License-Identifier: Apache-2.0
"""Cards as files and pages, their verification, signatures, and the replay of batches."""
