"""`regenerate`: the target's own answers, token by token, resumable, with the reason why each ended."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow.parquet as pq
import pytest
from chat_templates import byte_level_tokenizer, metaspace_tokenizer, slow_byte_tokenizer
from safetensors.torch import load_file, save_file
from tiny_models import make_vision_wrapper

from eyas.base.errors import EngineError, FolderConflictError, InputError
from eyas.base.locks import lock_directory
from eyas.data.chat_template import ChatTemplate
from eyas.data.dataset import open_dataset
from eyas.data.generators import Answer
from eyas.data.regeneration import message_of, samples_of
from eyas.data.settings import MaskSettings, Sampling
from eyas.engines.endpoint import NEUTRAL, EndpointGenerator
from eyas.engines.generation import TransformersGenerator, cut
from eyas.engines.regenerate import regenerate
from eyas.target.tokenizer import bytes_of, stop_ids, token_lookup

QUESTIONS = ["Hi there", "What is 12 + 30?", "And now?", "Hello", "How are you?", "Is it sunny?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny random Llama with a ChatML tokenizer, whose end of turn is likely enough to come."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target")
    tokenizer = byte_level_tokenizer("chatml")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        target.lm_head.weight[tokenizer.eos_token_id] *= 2.5
    target.save_pretrained(folder)
    return str(folder)


def by_transformers(model, sampling=None, batch_size=4):
    return lambda _, stop_ids: TransformersGenerator(
        model, sampling or Sampling(max_new_tokens=20), stop_ids, batch_size=batch_size, dtype="float32"
    )


def write(path, *conversations) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    return str(path)


def asked(*questions) -> dict:
    """Questions with answers by somebody else, which the target's are to replace."""
    return {
        "messages": [
            m for q in questions for m in ({"role": "user", "content": q}, {"role": "assistant", "content": "OTHER"})
        ]
    }


SETTINGS = {"max_seq_len": 200, "sampling": Sampling(max_new_tokens=20)}


def test_answers_are_the_targets_own_tokens_and_alone_supervised(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS), {"prompt": "Only a prompt"})
    report = regenerate(data, model, tmp_path / "out", generator=by_transformers(model), **SETTINGS)
    assert (report.rows, report.conversations, report.answers, report.rejected) == (7, 7, 7, 0)
    assert set(report.finish_reasons) == {"stop", "length"}, "the tiny model should end some answers and not others"
    tokenizer = byte_level_tokenizer("chatml")
    table = pq.read_table(tmp_path / "out" / "data-00000.parquet").to_pylist()
    for row, question in zip(table, [*QUESTIONS, "Only a prompt"], strict=True):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        start = row["loss_mask"].index(1)
        assert row["input_ids"][:start] == list(prompt)
        assert all(row["loss_mask"][start:])
        ends = row["input_ids"][-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if ends else "length")
        assert row["truncated"] == (not ends)
        assert tokenizer.eos_token_id not in row["input_ids"][start:-1]
    assert_argmax(model, table)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["answers_unfinished"] == report.finish_reasons["length"]
    assert manifest["regeneration"]["engine"]["name"] == "transformers"


def assert_argmax(model, table) -> None:
    """Independent of generate(): each supervised token is the argmax of a plain forward pass over all before it."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in table:
        start = row["loss_mask"].index(1)
        with torch.inference_mode():
            logits = target(torch.tensor([row["input_ids"]])).logits[0]
        assert logits[start - 1 : -1].argmax(-1).tolist() == row["input_ids"][start:]


#: Everything by which a generation config can move a token or an end.
MEDDLING = {
    "do_sample": True, "temperature": 1.7, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.8,
    "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.3, "min_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2,
    "bad_words_ids": [[40], [50]], "suppress_tokens": [41, 42], "begin_suppress_tokens": [43], "forced_eos_token_id": 7,
    "sequence_bias": [[[60], 9.0]], "exponential_decay_length_penalty": [2, 1.5], "guidance_scale": 2.0, "max_length": 9,
    "prompt_lookup_num_tokens": 3, "stop_strings": ["a", "e"], "max_time": 0.001, "watermarking_config": {"bias": 9.0},
}  # fmt: skip


def test_greedy_is_the_argmax_whatever_the_generation_config_says(model, tmp_path):
    """Qwen2.5 ships a repetition penalty: an answer under it is not what a draft has to guess."""
    folder = tmp_path / "meddling"
    shutil.copytree(model, folder)
    own = json.loads((folder / "generation_config.json").read_text())
    other_end = 65
    ends = [own["eos_token_id"], other_end]
    (folder / "generation_config.json").write_text(json.dumps(own | MEDDLING | {"eos_token_id": ends}))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        "def generate(model, **_):\n    raise SystemExit('asked')\n"
    )
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS))
    regenerate(
        data, str(folder), tmp_path / "out",
        generator=lambda _, stop: TransformersGenerator(str(folder), SETTINGS["sampling"], stop, dtype="float32", trust_remote_code=True),
        **SETTINGS,
    )  # fmt: skip
    table = pq.read_table(tmp_path / "out" / "data-00000.parquet").to_pylist()
    assert_argmax(model, table)
    for row in table:  # its ends are the target's all the same
        answer = row["input_ids"][row["loss_mask"].index(1) :]
        assert (answer[-1] in ends) == (row["finish_reason"] == "stop") == (len(answer) < 20 or answer[-1] in ends)
        assert not set(ends) & set(answer[:-1])


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl", "gemma2"])
def test_what_extract_takes_answers_too_with_the_attention_that_is_the_models(kind, tiny_model, tmp_path):
    """Vision-language wrappers, and soft caps of the attention, which sdpa drops."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    text = kind == "gemma2"
    folder = tiny_model(kind) if text else make_vision_wrapper(kind, tmp_path / kind)
    generator = TransformersGenerator(str(folder), Sampling(max_new_tokens=12), [2], dtype="float32")
    prompts = [[5, 9, 17], [30, 31, 32, 33, 34], [7]]
    answers = generator.answer(prompts, [12] * 3, 0)
    auto = AutoModelForCausalLM if text else AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids


def test_weights_that_are_in_no_file_are_refused(model, tmp_path):
    """transformers fills them with random numbers and only logs it."""
    folder = tmp_path / "lacking"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    data = write(tmp_path / "a.jsonl", asked("Hi"))
    with pytest.raises(EngineError, match=r"1 weights are in no file, among them model\.layers\.1\.mlp\.up_proj"):
        regenerate(data, str(folder), tmp_path / "out", generator=by_transformers(str(folder)), **SETTINGS)


def test_later_turns_see_the_generated_answers(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q, "And then?", "Why?") for q in QUESTIONS))
    regenerate(data, model, tmp_path / "out", generator=by_transformers(model), **SETTINGS)
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    template = ChatTemplate(byte_level_tokenizer("chatml"))
    assert any(len(line["turns"]) > 1 for line in lines)
    for line in lines:
        said = line["messages"]
        assert "OTHER" not in json.dumps(said)
        answered = [i for i, message in enumerate(said) if message["role"] == "assistant"]
        for turn, at in zip(line["turns"], answered, strict=True):
            assert turn["prompt"] == template.prompt_ids(said[:at])
        if line["turns"][-1]["finish_reason"] == "length":  # a cut answer ends its conversation
            assert said[-1]["finish_reason"] == "length"
        for turn in line["turns"][:-1]:
            assert turn["finish_reason"] == "stop"


def test_two_at_once_into_one_folder_would_answer_twice(model, tmp_path):
    data = write(tmp_path / "a.jsonl", asked("Hi there"))
    (tmp_path / "out").mkdir()
    with lock_directory(tmp_path / "out"), pytest.raises(FolderConflictError, match="by another run"):
        regenerate(data, model, tmp_path / "out", generator=by_transformers(model), **SETTINGS)
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_stopped_and_resumed_gives_the_same_dataset(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q, "And then?") for q in QUESTIONS))
    regenerate(data, model, tmp_path / "whole", generator=by_transformers(model), **SETTINGS)

    class Failing(TransformersGenerator):
        calls = 0

        def answer(self, prompts, limits, salt):
            Failing.calls += 1
            if Failing.calls > 3:
                raise EngineError("the machine went away")
            return super().answer(prompts, limits, salt)

    def failing(_, stop_ids):
        return Failing(model, SETTINGS["sampling"], stop_ids, dtype="float32")

    with pytest.raises(EngineError):
        regenerate(data, model, tmp_path / "out", generator=failing, **SETTINGS, window=2)
    assert not (tmp_path / "out" / "manifest.json").exists()
    answers = tmp_path / "out" / "answers.jsonl"
    kept = answers.read_text().splitlines()
    assert 0 < len(kept) < 6
    answers.write_text("\n".join(kept) + "\n" + kept[0][:40])  # killed while it wrote
    report = regenerate(data, model, tmp_path / "out", generator=by_transformers(model), **SETTINGS, window=2)
    assert report.resumed == len(kept)
    assert report.conversations == 6 - len(kept)
    assert sorted(open_dataset(tmp_path / "out").ids) == sorted(open_dataset(tmp_path / "whole").ids)
    with pytest.raises(FolderConflictError, match="max_new_tokens"):
        regenerate(
            data, model, tmp_path / "out", generator=by_transformers(model),
            max_seq_len=200, sampling=Sampling(max_new_tokens=21),
        )  # fmt: skip


def test_out_of_time_leaves_a_dataset_and_the_same_call_goes_on(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS))
    out = tmp_path / "out"
    report = regenerate(data, model, out, generator=by_transformers(model), **SETTINGS, window=2, seconds=0)
    assert (report.conversations, report.out_of_time, len(open_dataset(out))) == (2, True, 2)
    assert json.loads((out / "manifest.json").read_text())["counts"]["out_of_time"] is True
    report = regenerate(data, model, out, generator=by_transformers(model), **SETTINGS, window=2)
    assert (report.resumed, report.conversations, report.out_of_time) == (2, len(QUESTIONS) - 2, False)
    regenerate(data, model, tmp_path / "whole", generator=by_transformers(model), **SETTINGS)
    assert open_dataset(out).hash == open_dataset(tmp_path / "whole").hash


def test_rows_that_cannot_be_answered_are_reported(model, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(
            ["broken", '{"prompt": "half a character: \\ud83d"}', '{"prompt": "x", "n": ' + "9" * 5000 + "}", json.dumps(asked("word " * 300)), json.dumps(asked("Hi")), json.dumps(asked("Hi")),
             '{"input_ids": [1], "loss_mask": [1]}', '{"messages": [{"role": "system", "content": "x"}]}']
        )
    )  # fmt: skip
    report = regenerate(tmp_path / "a.jsonl", model, tmp_path / "out", generator=by_transformers(model), **SETTINGS)
    assert (report.conversations, report.repeated, report.rejected) == (1, 1, 6)
    reasons = {
        one["line"]: one["reason"]
        for one in map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    }
    assert set(reasons) == {1, 2, 3, 4, 7, 8}
    assert "more than --max-seq-len 200" in reasons[4]
    assert "no question" in reasons[8]


def test_questions_that_no_longer_fit_are_counted(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q, "word " * 80) for q in QUESTIONS))
    report = regenerate(data, model, tmp_path / "out", generator=by_transformers(model), **SETTINGS)
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert all(len(line["turns"]) == 1 for line in lines)
    whole = sum(line["turns"][0]["finish_reason"] == "stop" for line in lines)
    assert report.stopped_early == whole > 0


def test_sampling_is_reproducible_and_differs_from_greedy(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS))
    drawn = Sampling(max_new_tokens=20, temperature=1.5, seed=3)
    settings = {"max_seq_len": 200, "sampling": drawn}
    for name in ("a", "b"):
        regenerate(data, model, tmp_path / name, generator=by_transformers(model, drawn), **settings)
    regenerate(data, model, tmp_path / "greedy", generator=by_transformers(model), **SETTINGS)
    assert open_dataset(tmp_path / "a").hash == open_dataset(tmp_path / "b").hash
    assert open_dataset(tmp_path / "a").hash != open_dataset(tmp_path / "greedy").hash


def test_turns_share_a_sample_only_where_their_tokens_continue():
    one = {"prompt": [1, 2], "answer": [3, 9], "finish_reason": "stop"}
    assert samples_of([one, {"prompt": [1, 2, 3, 9, 4], "answer": [5, 9], "finish_reason": "length"}]) == [
        ([1, 2, 3, 9, 4, 5, 9], [0, 0, 1, 1, 0, 1, 1], "length")
    ]
    # The second prompt tokenises the first answer otherwise: joining would put tokens there that were never generated.
    assert samples_of([one, {"prompt": [1, 2, 7, 9, 4], "answer": [5, 9], "finish_reason": "stop"}]) == [
        ([1, 2, 3, 9], [0, 0, 1, 1], "stop"),
        ([1, 2, 7, 9, 4, 5, 9], [0, 0, 0, 0, 0, 1, 1], "stop"),
    ]


def test_answers_are_cut_behind_their_end():
    assert cut([5, 6, 2, 7, 7], [2], 10) == Answer([5, 6, 2], "stop")
    assert cut([5, 6, 7], [2], 3) == Answer([5, 6, 7], "length")
    assert cut([5, 6, 2], [2], 2) == Answer([5, 6], "length")


def test_reasoning_of_an_answer_is_told_from_its_text():
    qwen = byte_level_tokenizer("qwen3")
    template = ChatTemplate(qwen)
    ids = qwen.encode("<think>\nI add.\n</think>\n\nFour.<|im_end|>", add_special_tokens=False)
    assert message_of(ids, [], template) == {"role": "assistant", "content": "Four.", "reasoning_content": "I add."}
    kimi = slow_byte_tokenizer("kimi-k2.5")
    template = ChatTemplate(kimi, MaskSettings(chat_template_kwargs={"thinking": True}))
    prompt = template.prompt_ids([{"role": "user", "content": "Hi"}])
    ids = kimi.encode("I add.</think>Four.<|im_end|>", add_special_tokens=False)
    assert message_of(ids, prompt, template) == {"role": "assistant", "content": "Four.", "reasoning_content": "I add."}
    oss = byte_level_tokenizer("gpt-oss")
    ids = oss.encode(
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    )
    assert message_of(ids, [], ChatTemplate(oss)) == {
        "role": "assistant",
        "content": "Four.",
        "reasoning_content": "I add.",
    }


def test_end_of_turn_ids_hold_the_templates_own():
    for kind, token in (
        ("llama3", "<|eot_id|>"),
        ("chatml", "<|im_end|>"),
        ("gpt-oss", "<|return|>"),
        ("kimi-k2.5", "<|im_end|>"),
    ):
        tokenizer = slow_byte_tokenizer(kind) if kind == "kimi-k2.5" else byte_level_tokenizer(kind)
        ids = ChatTemplate(tokenizer).end_of_turn_ids()
        assert tokenizer.convert_tokens_to_ids(token) in ids, kind
        assert tokenizer.eos_token_id in ids


# ---------------------------------------------------------------- a server


class Server:
    """A small HTTP server with /v1/models and /v1/completions that answers with a (tiny) model, greedily under a repetition penalty.

    default_penalty: taken where the request names none, as servers take it from generation_config.json. obeys: whether the request's
    counts at all. faults: what the next requests get, None for an answer. style: the form of the tokens, None for ids.
    """

    def __init__(
        self, model, faults=(), style=None, *, default_penalty=1.0, obeys=True, logprobs=True, most_tokens=10**6
    ):
        import torch
        from transformers import AutoModelForCausalLM

        self.requests: list[dict] = []
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.style, self.tokenizer = style, byte_level_tokenizer("chatml")
        self.penalty, self.obeys, self.logprobs, self.most_tokens = default_penalty, obeys, logprobs, most_tokens
        faults, lock = list(faults), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, {"data": [{"id": "tiny"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(body)
                    fault = faults.pop(0) if faults else None
                    choice = outer.choice(body)
                if isinstance(fault, int):
                    return self.reply(fault, {"error": "as told"})
                if fault == "no ids":
                    choice = {"text": "", "finish_reason": choice["finish_reason"]}
                return self.reply(200, {"choices": [choice]})

            def reply(self, code, body):
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def choice(self, body):
        import torch

        penalty = body.get("repetition_penalty", self.penalty) if self.obeys else self.penalty
        ids, steps, reason = list(body["prompt"]), [], "length"
        for _ in range(min(body["max_tokens"], self.most_tokens)):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1]
            raw, seen = logits.log_softmax(-1), torch.tensor(sorted(set(ids)))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
            token, best = int(logits.argmax()), int(raw.argmax())
            steps.append((token, float(raw[token]), best, float(raw[best])))
            ids.append(token)
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
        found = {"index": 0, "text": "", "finish_reason": reason}
        if self.style is None:
            found["token_ids"] = [token for token, *_ in steps]
        elif reason == "stop":  # these servers keep the token to themselves at which they stopped
            steps.pop()
        if self.logprobs and body.get("logprobs"):
            found["logprobs"] = self.as_logprobs(steps)
        return found

    def as_logprobs(self, steps):
        """A choice's log-probabilities, in the forms that servers give them."""
        if self.style in (None, "token ids as text"):
            return {
                "tokens": [f"token_id:{token}" for token, *_ in steps],
                "token_logprobs": [own for _, own, _, _ in steps],
                "top_logprobs": [
                    {f"token_id:{token}": own, f"token_id:{best}": top} for token, own, best, top in steps
                ],
            }
        entries = []
        for token, own, _, top in steps:
            name = {"id": token} if self.style == "ids" else {"bytes": list(bytes_of(self.tokenizer, token))}
            entries.append({"token": "?", **name, "logprob": own, "top_logprobs": [{"token": "?", "logprob": top}]})
        return {"content": entries}

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()


def by_endpoint(url, sampling=SETTINGS["sampling"]):
    return lambda template, stop_ids: EndpointGenerator(
        url, None, sampling, stop_ids, token_of_bytes=token_lookup(template.tokenizer),
        end_id=template.end_of_turn_id(), concurrency=3, attempts=3,
    )  # fmt: skip


@pytest.mark.parametrize("style", ["token ids as text", "ids", "bytes"])
def test_an_endpoint_that_names_tokens_in_its_log_probabilities(model, tmp_path, style):
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS))
    regenerate(data, model, tmp_path / "direct", generator=by_transformers(model), **SETTINGS)
    with Server(model, style=style) as server:
        report = regenerate(data, model, tmp_path / "served", generator=by_endpoint(server.url), **SETTINGS)
    assert report.rejected == 0
    assert sorted(open_dataset(tmp_path / "served").ids) == sorted(open_dataset(tmp_path / "direct").ids)


@pytest.mark.parametrize("make", [byte_level_tokenizer, slow_byte_tokenizer, metaspace_tokenizer])
def test_every_token_is_found_by_its_bytes_or_not_at_all(make):
    kind = {slow_byte_tokenizer: "kimi-k2.5", metaspace_tokenizer: "mistral"}.get(make, "qwen3")
    tokenizer = make(kind)
    look_up = token_lookup(tokenizer)
    found = [look_up(bytes_of(tokenizer, i) or b"?!?") for i in range(len(tokenizer))]
    assert sum(token is not None for token in found) > 0.4 * len(tokenizer)
    assert all(token in (i, None) for i, token in enumerate(found))
    assert look_up(b"no such token") is None


def test_an_endpoint_gives_the_same_dataset_whatever_its_defaults(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q, "And then?") for q in QUESTIONS))
    regenerate(data, model, tmp_path / "direct", generator=by_transformers(model), **SETTINGS)
    with Server(model, [None, None, 500, None, 503], default_penalty=1.8) as server:
        report = regenerate(data, model, tmp_path / "served", generator=by_endpoint(server.url), **SETTINGS)
        assert report.rejected == 0
        for request in server.requests:
            assert NEUTRAL.items() <= request.items()
            assert (request["model"], request["temperature"], request["top_p"]) == ("tiny", 0.0, 1.0)
        assert len(server.requests) == report.answers + 3  # the first shows what the server does, two were repeated
    assert sorted(open_dataset(tmp_path / "served").ids) == sorted(open_dataset(tmp_path / "direct").ids)


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ({"faults": [400]}, "refuses what it must be asked"),  # a parameter is unknown to it
        ({"default_penalty": 1.8, "obeys": False}, "is not the most likely one"),
        ({"logprobs": False}, "nothing shows that its greedy answers are the argmax"),
        ({"faults": ["no ids"] * 9}, "neither token ids nor log"),
        ({"faults": [404]}, "answers 404"),
        ({"faults": [500] * 3}, "failed 3 times: 500"),
        ({"most_tokens": 9}, "cut an answer at 9 tokens where 20 were asked for"),
    ],
)
def test_a_server_that_does_not_do_what_it_is_asked_is_refused(model, tmp_path, server, error):
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS))
    with Server(model, **server) as one, pytest.raises(EngineError, match=error):
        regenerate(data, model, tmp_path / "out", generator=by_endpoint(one.url), **SETTINGS)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_where_answers_end_is_read_from_either_config(model, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(model, folder)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 65]}))
    assert stop_ids(str(folder)) == [end, 65]
    (folder / "generation_config.json").unlink()
    assert stop_ids(str(folder)) == [end]


def test_a_prompt_that_the_server_refuses_is_that_rows(model, tmp_path):
    data = write(tmp_path / "a.jsonl", asked("Hi"), asked("Hello"), asked("Yes?"))
    with Server(model, [None, 400]) as server:
        report = regenerate(data, model, tmp_path / "a", generator=by_endpoint(server.url), **SETTINGS)
    assert (report.conversations, report.rejected) == (2, 1)
    assert "400" in (tmp_path / "a" / "rejected.jsonl").read_text()
    with pytest.raises(EngineError, match="failed 3 times"):
        regenerate(data, model, tmp_path / "d", generator=by_endpoint("http://127.0.0.1:9"), **SETTINGS)


def test_a_server_that_samples_needs_no_log_probabilities(model, tmp_path):
    data = write(tmp_path / "a.jsonl", asked("Hi"))
    drawn = Sampling(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=5)
    with Server(model, logprobs=False) as server:
        settings = {"max_seq_len": 200, "sampling": drawn}
        assert (
            regenerate(data, model, tmp_path / "a", generator=by_endpoint(server.url, drawn), **settings).answers == 1
        )
    assert [request["seed"] for request in server.requests] == [5, 5]
    assert all("logprobs" not in request and request["top_p"] == 0.9 for request in server.requests)


def test_nothing_answered_is_an_error(model, tmp_path):
    data = write(tmp_path / "a.jsonl", asked("word " * 300))
    with pytest.raises(InputError, match="no prompt was answered"):
        regenerate(data, model, tmp_path / "out", generator=by_transformers(model), **SETTINGS)
