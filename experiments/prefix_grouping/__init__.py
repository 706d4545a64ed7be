"""Prefix grouping for GRPO: one shared prefix a group, as an attention backend and a plan."""
