# SPDX-License-Identifier: Apache-2.0
"""What measures or checks and does not train: GPU check, plan report, FLOPs, memory."""
