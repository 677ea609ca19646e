"""What SGLang does with the layer ids of a draft's config, written down from its source."""


def sglang_captures(named, architecture, num_layers):
    """The layers that SGLang 0.5.23 marks for these ids, by the rules of its model classes, in the order in which it hands them over."""
    if architecture.startswith(("Deepseek", "KimiK25", "Glm4MoeLite")):
        marked = [j + 1 for j in named] if named[0] == 1 else list(named)
    elif architecture == "GptOssForCausalLM":
        marked = list(named) if max(named) == num_layers else [j + 1 for j in named]
    else:
        marked = [j + 1 for j in named]
    return [i for i in range(num_layers) if i in marked]
