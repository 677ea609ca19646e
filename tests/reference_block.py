"""The losses of DFlash and DSpark written as slowly and obviously as possible: fp64, one sample, one anchor, one slot, one head, one key at a time.

Nothing here is shared with eyas but the weights. `w`: dict of fp64 weights.
"""

import math

import torch
from reference_draft import norm, rope


def block_outputs(w, config, token_ids, aux, anchor):
    """norm(stream) of every slot of one block."""
    heads, kv_heads, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps, B = config.rms_norm_eps, config.block_size
    inv_freq = torch.tensor([config.rope["rope_theta"] ** (-2 * d / D) for d in range(D // 2)]).double()
    context = [norm(w["fc.weight"] @ (aux[t] * w["aux_scale"]), w["hidden_norm.weight"], eps) for t in range(anchor)]
    ids = [int(token_ids[anchor])] + [config.mask_token_id] * (B - 1)
    stream = [w["embed_tokens.weight"][i] for i in ids]
    for n in range(config.num_layers):

        def layer(name, n=n):
            return w[f"layers.{n}.{name}.weight"]

        def head_of(x, projection, head):
            return layer(f"self_attn.{projection}")[head * D : head * D + D] @ x

        attended = []
        entering = [norm(x, layer("input_layernorm"), eps) for x in stream]
        for j in range(B):
            outs = []
            for head in range(heads):
                kv = head // (heads // kv_heads)
                q = rope(
                    norm(head_of(entering[j], "q_proj", head), layer("self_attn.q_norm"), eps), anchor + j, inv_freq
                )
                scores, values = [], []
                columns = [(t, context[t]) for t in range(anchor)] + [(anchor + m, entering[m]) for m in range(B)]
                for position, x in columns:
                    if config.sliding_window is not None and anchor + j - position >= config.sliding_window:
                        continue
                    k = rope(norm(head_of(x, "k_proj", kv), layer("self_attn.k_norm"), eps), position, inv_freq)
                    scores.append(q @ k / math.sqrt(D))
                    values.append(head_of(x, "v_proj", kv))
                share = torch.softmax(torch.stack(scores), 0)
                outs.append(sum(share[c] * v for c, v in enumerate(values)))
            attended.append(torch.cat(outs))
        for j in range(B):
            u = stream[j] + layer("self_attn.o_proj") @ attended[j]
            y = norm(u, layer("post_attention_layernorm"), eps)
            gate = layer("mlp.gate_proj") @ y
            stream[j] = u + layer("mlp.down_proj") @ (gate / (1 + torch.exp(-gate)) * (layer("mlp.up_proj") @ y))
    return [norm(x, w["norm.weight"], eps) for x in stream]


def sample_losses(w, config, token_ids, mask, aux, target_logits, anchors, vocabulary, loss="ce"):
    """Per draft token of a block: the sum of losses over the sample's anchors, and how many were supervised.

    target_logits: [T, D]. vocabulary: target ids of the draft vocabulary, in order.
    """
    fill_in = config.kind == "dflash"
    n = config.block_size - 1 if fill_in else config.block_size
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(n)], [0] * n
    for a in anchors:
        said = block_outputs(w, config, token_ids, aux, a)
        found = []
        for j, x in enumerate(said):
            if fill_in and j == 0:
                continue  # the anchor's own slot
            place = a + j if fill_in else a + 1 + j  # of the token that the slot predicts
            if place >= len(token_ids) or not mask[place]:
                break  # nor anything behind it
            logits = w["lm_head.weight"] @ x
            if config.markov_rank:
                before = w["markov_head.markov_w1.weight"][token_ids[place - 1]]
                logits = logits + w["markov_head.markov_w2.weight"] @ before
            q = torch.softmax(logits, 0)
            label = vocabulary.index(int(token_ids[place])) if int(token_ids[place]) in vocabulary else None
            ce = -torch.log(q[label]) if label is not None else 0.0 * q.sum()
            if fill_in:
                found.append((ce, 0.0 if label is None else float(q[label].detach())))
                continue
            p = torch.softmax(target_logits[place - 1], 0)
            total = 0.1 * ce + 0.9 * (p - q).abs().sum()
            if config.confidence_head:
                accepted = torch.minimum(p, q).sum().detach()
                features = torch.cat([x, before])
                chance = torch.sigmoid(
                    w["confidence_head.proj.weight"][0] @ features + w["confidence_head.proj.bias"][0]
                )
                total = total - accepted * torch.log(chance) - (1 - accepted) * torch.log(1 - chance)
            found.append((total, 0.0))
        for i, (one, _) in enumerate(found):
            weight = 1.0
            if loss == "dpace":
                weight = sum(math.prod((1 + chance) / 2 for _, chance in found[: m + 1]) for m in range(i, len(found)))
            sums[i] = sums[i] + weight * one
            counts[i] += 1
    return sums, counts
