# SPDX-License-Identifier: Apache-2.0
"""What a run may ask for: rules on flags, files that give flags, and what is changed of Megatron's own arguments."""
