# SPDX-License-Identifier: Apache-2.0
"""From the terms of a run to epsilon: sampling schemes, events, losses, search. It sees no data."""
