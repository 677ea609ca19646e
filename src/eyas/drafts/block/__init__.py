"""Block drafts: DFlash and DSpark draft a whole block of tokens in one pass."""
