# SPDX-License-Identifier: Apache-2.0
"""Who holds what, who sees whom, what is computed where, what crosses a link. Pure: numpy only."""
