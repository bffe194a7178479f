# SPDX-License-Identifier: Apache-2.0
"""Gated delta net layers under block diffusion: state maps, scan, states at block starts."""
