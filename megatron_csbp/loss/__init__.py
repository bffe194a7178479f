# SPDX-License-Identifier: Apache-2.0
"""Losses: noise schedules and training objectives."""
