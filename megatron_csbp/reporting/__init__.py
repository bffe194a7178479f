# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself: start summary, traffic, time, FLOPs; and what a layer would move and allocate."""
