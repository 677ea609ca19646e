"""The distributed engine: vLLM, started with workers of ours that capture states where they are computed."""
