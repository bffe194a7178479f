# SPDX-License-Identifier: Apache-2.0
"""Unit tests, mirroring the package."""
