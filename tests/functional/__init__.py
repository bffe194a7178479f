# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the real entries."""
