"""Drafts as engines load them: written by `eyas export`, read by `eyas import` and `eyas train --init-from`."""
