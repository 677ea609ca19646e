"""The target: its directory read without running it, its layers and tokenizer, one loader, and its logits rebuilt from stored states."""
