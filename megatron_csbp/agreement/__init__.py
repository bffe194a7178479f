# SPDX-License-Identifier: Apache-2.0
"""All ranks of a job start from the same: versions, arguments, plan, noise and data."""
