"""The EAGLE-3 loss written as slowly and obviously as possible: fp64, one sample, one row, one head, one key at a time.

Nothing here is shared with eyas but the weights. It follows the definition line by line:

    h_i^0 = fc(g_i);  e = Embed(x_{i+1+k});  z = [input_layernorm(e) ; hidden_norm(h)]
    u = h + Attn(z, rope position i+1+k);  u = u + MLP(post_attention_layernorm(u));  logits = lm_head(norm(u));  h^{k+1} = u
    p = softmax over the draft vocabulary of target_head(final_norm(y_{i+1+k})), for a supervised token x_{i+2+k}

Attention of row i at step k: the step-0 keys j <= i of the same sample, and its own column i of the steps 1..k.
"""

import math

import torch


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(x, position, inv_freq):
    half = len(x) // 2
    cos, sin = torch.cos(position * inv_freq), torch.sin(position * inv_freq)
    first, second = x[:half], x[half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def row_loss(name, p, q):
    alpha = torch.minimum(p, q).sum()
    kl = (p * (torch.log(p) - torch.log(q))).sum()
    if name == "kl":
        return kl
    if name == "tv":
        return 1 - alpha
    share = torch.exp(-3 * alpha.detach())
    return share * kl + (1 - share) * (1 - alpha)


def sample_losses(w, config, token_ids, mask, aux, target_logits, steps, loss):
    """Per step, the sum of row losses and the count of supervised rows of one sample. `w`: dict of fp64 weights."""
    T, heads, kv_heads, D = len(token_ids), config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps = config.rms_norm_eps
    layer = {k.removeprefix("layers.0."): v for k, v in w.items() if k.startswith("layers.0.")}
    inv_freq = torch.tensor([config.rope["rope_theta"] ** (-2 * d / D) for d in range(D // 2)]).double()
    h = [w["fc.weight"] @ (aux[i] * w["aux_scale"]) for i in range(T)]
    keys, values = {}, {}  # (step, row, kv head) -> [D]
    sums, counts = [], []
    for k in range(steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        usable = [i for i in range(T) if i + 1 + k < T]  # the others have no token to read in this sample
        queries = {}
        for i in usable:
            e = w["embed_tokens.weight"][token_ids[i + 1 + k]]
            z = torch.cat([norm(e, layer["input_layernorm.weight"], eps), norm(h[i], layer["hidden_norm.weight"], eps)])
            for head in range(heads):
                rows = slice(head * D, head * D + D)
                queries[i, head] = rope(layer["self_attn.q_proj.weight"][rows] @ z, i + 1 + k, inv_freq)
            for head in range(kv_heads):
                rows = slice(head * D, head * D + D)
                keys[k, i, head] = rope(layer["self_attn.k_proj.weight"][rows] @ z, i + 1 + k, inv_freq)
                values[k, i, head] = layer["self_attn.v_proj.weight"][rows] @ z
        for i in usable:
            outs = []
            for head in range(heads):
                kv = head // (heads // kv_heads)
                columns = [(0, j) for j in range(i + 1)] + [(m, i) for m in range(1, k + 1)]
                scores = torch.stack([queries[i, head] @ keys[m, j, kv] / math.sqrt(D) for m, j in columns])
                weights = torch.softmax(scores, 0)
                outs.append(sum(weights[n] * values[m, j, kv] for n, (m, j) in enumerate(columns)))
            u = h[i] + layer["self_attn.o_proj.weight"] @ torch.cat(outs)
            n = norm(u, layer["post_attention_layernorm.weight"], eps)
            gate = layer["mlp.gate_proj.weight"] @ n
            u = u + layer["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * (layer["mlp.up_proj.weight"] @ n))
            h[i] = u
            if i + 2 + k < T and mask[i + 2 + k]:
                q = torch.softmax(w["lm_head.weight"] @ norm(u, w["norm.weight"], eps), 0)
                p = torch.softmax(target_logits[i + 1 + k], 0)
                total = total + row_loss(loss, p, q)
                count += 1
        sums.append(total)
        counts.append(count)
    return sums, counts
