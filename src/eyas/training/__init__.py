"""The stage `eyas train`: from a verified state store to a draft, on one device or many."""
