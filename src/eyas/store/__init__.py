"""Hidden states on disk: what a store holds, writing it from where states are computed, reading it back by sample."""
