"""A tiny policy really trained with GRPO, everything recorded: a dump to look at without a GPU or a download."""
