# SPDX-License-Identifier: Apache-2.0
"""Text for the main job: corpora of sentences by client, and next-word examples."""
