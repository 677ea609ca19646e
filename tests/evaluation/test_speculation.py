"""Speculative decoding: lossless, batch or single, equal to the simulation, true to the target's distribution when sampling."""

import numpy as np
import pytest
import torch
from tiny_models import make_vision_wrapper
from training_work import VOCAB, make_target

from eyas.base.errors import InputError
from eyas.drafts.eagle3.init import choose_vocabulary, derive_config, initialise
from eyas.drafts.eagle3.model import Draft
from eyas.drafts.packing import pack
from eyas.drafts.settings import DraftInit
from eyas.evaluation.baselines import NgramTable, lookup_then_table, prompt_lookup, replay
from eyas.evaluation.decode import Target, decode, reject
from eyas.target.loading import load_model
from eyas.target.model_files import describe_model
from eyas.target.teacher import Teacher, load_target_parts
from eyas.training.simulation import simulate

AUX = (1, 3, 5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny target and an untrained draft that starts as its lens: it accepts some, not all."""
    from transformers import AutoModelForCausalLM

    folder = make_target(tmp_path_factory.mktemp("speculation") / "target")
    info = describe_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parts = load_target_parts(info)
    counts = np.ones(VOCAB, np.int64)
    counts[::7] = 0  # some tokens the draft cannot say
    vocabulary = choose_vocabulary(counts, 82, "hash")
    draft = Draft(derive_config(info, AUX, 82))
    initialise(draft, parts, vocabulary, torch.ones(3 * 32))
    return folder, model, draft, Teacher(parts, vocabulary.ids, "cpu", torch.float32)


def prompts(count=5, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, int(n)).tolist() for n in rng.integers(3, 12, count)]


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_output_is_the_targets_own(pair, k, batch):
    _, model, draft, _ = pair
    target = Target(model, AUX)
    want = []
    for prompt in prompts():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=3, pad_token_id=0)
        want.append(out[0, len(prompt) :].tolist())
    got, emitted = [], 0
    for at in range(0, 5, batch):
        traces, _ = decode(target, draft, prompts()[at : at + batch], k=k, max_new_tokens=20, end_ids=[3])
        got += [t.tokens for t in traces]
        emitted += sum(sum(t.emitted) for t in traces)
    assert got == want
    assert emitted == sum(len(w) - 1 for w in want)
    plain, _ = decode(target, None, prompts(), k=0, max_new_tokens=20, end_ids=[3])
    assert [t.tokens for t in plain] == want


def test_a_batch_accepts_what_single_sequences_accept(pair):
    _, model, draft, _ = pair
    target = Target(model, AUX)
    together, _ = decode(target, draft, prompts(), k=4, max_new_tokens=24, end_ids=[3])
    for prompt, trace in zip(prompts(), together, strict=True):
        (alone,), _ = decode(target, draft, [prompt], k=4, max_new_tokens=24, end_ids=[3])
        assert (alone.tokens, alone.accepted, alone.emitted) == (trace.tokens, trace.accepted, trace.emitted)
    assert 0 < sum(sum(t.accepted) for t in together) < sum(4 * len(t.accepted) for t in together)


@pytest.mark.parametrize(
    "option", [{}, {"norm_before_residual": True}, {"norm_output": True}, {"norm_aux": True}, {"num_layers": 2}]
)
def test_real_acceptance_equals_the_simulated_one(pair, option):
    """Two implementations, packed training rows and cached decoding: the same rounds on the target's own replies."""
    folder, model, _, teacher = pair
    info = describe_model(folder)
    draft = Draft(derive_config(info, AUX, 82, **option))
    counts = np.ones(VOCAB, np.int64)
    counts[::7] = 0
    initialise(
        draft,
        load_target_parts(info),
        choose_vocabulary(counts, 82, "hash"),
        torch.ones(3 * 32),
        first=DraftInit(zero_down=False),
    )
    target = Target(model, (*AUX, 6))
    traces, _ = decode(Target(model, AUX), draft, prompts(12), k=3, max_new_tokens=24, end_ids=[3])
    samples = []
    for prompt, trace in zip(prompts(12), traces, strict=True):
        ids = torch.tensor([prompt + trace.tokens])
        from transformers import DynamicCache

        with torch.no_grad():
            positions = torch.arange(ids.shape[1]).unsqueeze(0)
            _, states = target(ids, positions, positions, DynamicCache())
        mask = np.array([0] * len(prompt) + [1] * len(trace.tokens), np.uint8)
        samples.append((ids[0].numpy(), mask, states[0, :, : 3 * 32], states[0, :, 3 * 32 :]))
    token_ids, masks, aux, final = zip(*samples, strict=True)
    batch = pack(token_ids, masks, aux, final, 3, skip_prompts=draft.config.num_layers == 1)
    found = simulate(draft, teacher, draft.t2d, batch, list(masks), 3)
    assert found.rounds == sum(len(t.emitted) for t in traces)
    assert found.emitted == sum(sum(t.emitted) for t in traces)
    accepted = np.array([a for t in traces for a in t.accepted])
    assert found.accepted.tolist() == [(accepted > place).sum() for place in range(3)]
    assert found.accepted[0] > 0


def test_sampling_keeps_the_targets_distribution(pair):
    """Second and third emitted tokens of many sampled replies against the exact distribution (chi-squared, 5 sigma)."""
    _, model, draft, _ = pair
    prompt = [5, 9, 17]
    generator = torch.Generator().manual_seed(0)
    temperature, runs = 0.7, 4000
    traces = []
    for _ in range(4):
        traces += decode(
            Target(model, AUX),
            draft,
            [prompt] * (runs // 4),
            k=3,
            max_new_tokens=3,
            end_ids=[],
            temperature=temperature,
            generator=generator,
        )[0]
    assert sum(sum(t.accepted) for t in traces) > 100
    with torch.no_grad():
        first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)
        after = model(torch.tensor([[*prompt, t] for t in range(VOCAB)])).logits[:, -1].double()
    exact = first @ torch.softmax(after / temperature, -1)  # of the second token
    counts = np.bincount([t.tokens[1] for t in traces], minlength=VOCAB)
    likely = (exact * runs > 5).numpy()
    expected = np.append((exact.numpy() * runs)[likely], (exact.numpy() * runs)[~likely].sum())
    observed = np.append(counts[likely], counts[~likely].sum())
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_rejection_rule_on_numbers():
    """Accept with min(1, p/q), replace from max(0, p - q): the mixture is p, whatever q is."""
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([0.5, 0.3, 0.2, 0.0]).log()
    q = torch.tensor([0.1, 0.1, 0.2, 0.6])
    n = 40000
    guesses = torch.multinomial(q, n, replacement=True, generator=generator).unsqueeze(1)
    logits = p.expand(n, 2, 4)
    answers, accepted, _ = reject(logits, guesses, q.expand(n, 1, 4), 1.0, generator)
    share = torch.bincount(answers[:, 0], minlength=4) / n
    torch.testing.assert_close(share, p.exp(), atol=0.01, rtol=0)
    assert abs(float(accepted.float().mean()) - 0.4) < 0.01  # sum of min(p, q)


def test_baselines_by_hand():
    assert prompt_lookup([1, 2, 3, 9, 1, 2, 3], 3) == [9, 1, 2]
    assert prompt_lookup([1, 2, 3], 3) == []
    assert prompt_lookup([4, 5, 4, 6, 4], 2) == [6, 4]  # the latest place wins
    table = NgramTable([(np.array([7, 1, 2, 3, 1, 2, 4, 1, 2, 3]), np.ones(10, np.uint8))])
    assert table([1, 2], 3) == [3, 1, 2]
    assert table([99], 3) == []
    found = replay(prompt_lookup, [1, 2, 3, 4], [1, 2, 3, 4, 8], 2)
    # 1 comes from the prefill; guesses 2 3 both right, then 4 as bonus; then 8 by the target alone.
    assert (found.rounds, found.emitted, found.accepted.tolist()) == (2, 4, [1, 1])
    assert lookup_then_table(table)([50, 1], 2) == [2, 3]


WRAPPERS = ("mistral3", "aya", "qwen3_vl", "llama4")


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "gemma3", "mistral_window", "deepseek_v3", "gpt2", *WRAPPERS])
def test_other_kinds_of_models_are_lossless_too(tiny_model, tmp_path, kind):
    """Windows and chunks shorter than the reply, soft caps that sdpa would drop, mixtures of experts, latent attention, vision-language wrappers; a batch of unequal prompts,
    whose caches have holes. Held to plain forward passes of the model with the attention that writes everything out."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder = make_vision_wrapper(kind, tmp_path / kind) if kind in WRAPPERS else tiny_model(kind)
    info = describe_model(folder)
    model = load_model(info, "float32", torch.device("cpu"))
    V, aux = info.vocab_size, (1, 2, 3)
    draft = Draft(derive_config(info, aux, V, plain_rope=True))
    vocabulary = choose_vocabulary(np.ones(V, np.int64), V, "hash")
    initialise(draft, load_target_parts(info), vocabulary, torch.ones(3 * info.hidden_size))
    auto = AutoModelForImageTextToText if kind in WRAPPERS else AutoModelForCausalLM
    reference = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    questions = prompts(3, seed=2)
    for batch in ([questions], [[q] for q in questions]):
        got = [decode(Target(model, aux), draft, some, k=3, max_new_tokens=40, end_ids=[])[0] for some in batch]
        traces = [trace for some in got for trace in some]
        for question, trace in zip(questions, traces, strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([question + trace.tokens])).logits[0, len(question) - 1 : -1]
            assert len(trace.tokens) == 40
            assert trace.tokens == logits.argmax(-1).tolist()
    assert sum(sum(t.accepted) for t in traces) > 0


def test_layers_that_cannot_take_guesses_back_are_refused(pair):
    _, model, _, _ = pair
    types = model.config.layer_types if hasattr(model.config, "layer_types") else None
    model.config.layer_types = ["linear_attention", "full_attention"] * 3
    try:
        with pytest.raises(InputError, match="layers of linear_attention"):
            Target(model, AUX)
    finally:
        model.config.layer_types = types
