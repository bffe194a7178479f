# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests."""

from hypothesis import settings

# Cores are often shared, so how long one example takes says nothing.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")
