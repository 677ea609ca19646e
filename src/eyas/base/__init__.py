"""What every stage stands on: errors with exit codes, files written whole or not at all, manifests, locks, a request to stop."""
