# SPDX-License-Identifier: Apache-2.0
"""The planner: what a job would hold, move and compute, and how long it would take, without a GPU."""
