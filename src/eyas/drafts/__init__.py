"""Draft models: their shape, arithmetic, first weights and files; `eagle3` is one kind."""
