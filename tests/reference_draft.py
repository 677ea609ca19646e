"""The EAGLE-3 loss written as slowly and obviously as possible: fp64, one sample, one row, one head, one key at a time.

Nothing here is shared with eyas but the weights. It follows the definition line by line:

    h_i^0 = fc(g_i);  e = Embed(x_{i+1+k});  z = [input_layernorm(e) ; hidden_norm(h)]
    u = h + Attn(z, rope position i+1+k);  u = u + MLP(post_attention_layernorm(u));  logits = lm_head(norm(u));  h^{k+1} = u
    p = softmax over the draft vocabulary of target_head(final_norm(y_{i+1+k})), for a supervised token x_{i+2+k}

Attention of row i at step k: the step-0 keys j <= i of the same sample, and its own column i of the steps 1..k. EAGLE-3.1's variants: each
auxiliary state is normed before `fc`; the residual starts from hidden_norm(h); h^{k+1} = norm(u). Further layers are ordinary ones.
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


def sample_losses(w, config, token_ids, mask, aux, target_logits, steps, loss, rotate=None):
    """Per step, the sum of row losses and the count of supervised rows of one sample. `w`: dict of fp64 weights.

    rotate: x [D], position -> x rotated; default plain rope.
    """
    T, heads, kv_heads, D = len(token_ids), config.num_attention_heads, config.num_key_value_heads, config.head_dim
    H, eps = config.hidden_size, config.rms_norm_eps
    if rotate is None:
        inv_freq = torch.tensor([config.rope["rope_theta"] ** (-2 * d / D) for d in range(D // 2)]).double()
        rotate = lambda x, position: rope(x, position, inv_freq)  # noqa: E731

    def layer(number, name):
        return w[f"layers.{number}.{name}.weight"]

    def combined(i):
        states = aux[i] * w["aux_scale"]
        if config.norm_aux:
            thirds = [states[n * H : n * H + H] for n in range(len(states) // H)]
            states = torch.cat([norm(x, w[f"aux_norms.{n}.weight"], eps) for n, x in enumerate(thirds)])
        return w["fc.weight"] @ states

    h = [combined(i) for i in range(T)]
    keys, values = {}, {}  # (layer, step, row, kv head) -> [D]
    sums, counts = [], []
    for k in range(steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        usable = [i for i in range(T) if i + 1 + k < T]  # the others have no token to read in this sample
        x = {i: h[i] for i in usable}
        for n in range(config.num_layers):
            queries = {}
            for i in usable:
                if n == 0:
                    e = w["embed_tokens.weight"][token_ids[i + 1 + k]]
                    z = torch.cat([norm(e, layer(n, "input_layernorm"), eps), norm(x[i], layer(n, "hidden_norm"), eps)])
                else:
                    z = norm(x[i], layer(n, "input_layernorm"), eps)
                for head in range(heads):
                    rows = slice(head * D, head * D + D)
                    queries[i, head] = rotate(layer(n, "self_attn.q_proj")[rows] @ z, i + 1 + k)
                for head in range(kv_heads):
                    rows = slice(head * D, head * D + D)
                    keys[n, k, i, head] = rotate(layer(n, "self_attn.k_proj")[rows] @ z, i + 1 + k)
                    values[n, k, i, head] = layer(n, "self_attn.v_proj")[rows] @ z
            for i in usable:
                outs = []
                for head in range(heads):
                    kv = head // (heads // kv_heads)
                    columns = [(0, j) for j in range(i + 1)] + [(m, i) for m in range(1, k + 1)]
                    scores = torch.stack([queries[i, head] @ keys[n, m, j, kv] / math.sqrt(D) for m, j in columns])
                    weights = torch.softmax(scores, 0)
                    outs.append(sum(weights[c] * values[n, m, j, kv] for c, (m, j) in enumerate(columns)))
                before = norm(x[i], layer(n, "hidden_norm"), eps) if n == 0 and config.norm_before_residual else x[i]
                u = before + layer(n, "self_attn.o_proj") @ torch.cat(outs)
                y = norm(u, layer(n, "post_attention_layernorm"), eps)
                gate = layer(n, "mlp.gate_proj") @ y
                silu = gate / (1 + torch.exp(-gate))
                x[i] = u + layer(n, "mlp.down_proj") @ (silu * (layer(n, "mlp.up_proj") @ y))
        for i in usable:
            said = norm(x[i], w["norm.weight"], eps)
            h[i] = said if config.norm_output else x[i]
            if i + 2 + k < T and mask[i + 2 + k]:
                q = torch.softmax(w["lm_head.weight"] @ said, 0)
                p = torch.softmax(target_logits[i + 1 + k], 0)
                total = total + row_loss(loss, p, q)
                count += 1
        sums.append(total)
        counts.append(count)
    return sums, counts
