"""A tiny policy really trained with GRPO, everything recorded: input for every other room, without a GPU or a download."""
