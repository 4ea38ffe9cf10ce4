# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a language model, tags and two showcases, which `tfdp demo` and others run.

Installed as `tfdp_adaptive.examples`. Nothing of the library imports it but the command line.
"""
