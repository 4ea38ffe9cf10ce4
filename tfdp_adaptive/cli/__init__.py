# SPDX-License-Identifier: Apache-2.0
"""The command line, `tfdp`: one module per subcommand."""
