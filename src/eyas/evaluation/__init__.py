"""The stage `eyas eval`: speculative decoding with a draft, its acceptance beside baselines, and its store held against the target."""
