"""`eyas extract`, from a token dataset to a state store: `plan` (gate 1), `rehearse` (gate 2), `bulk` (load, parity, capture), `extract` all of it."""
