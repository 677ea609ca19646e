"""`regenerate`: the target's own answers, token by token, resumable, with the reason why each ended."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow.parquet as pq
import pytest
from chat_templates import byte_level_tokenizer, metaspace_tokenizer, slow_byte_tokenizer

from eyas.base.errors import EngineError, FolderConflictError, InputError
from eyas.base.locks import lock_folder
from eyas.data.chat_template import ChatTemplate, MaskSettings
from eyas.data.dataset import open_dataset
from eyas.data.generators import Answer, EndpointGenerator, Sampling, TransformersGenerator, ended
from eyas.data.regeneration import RegenerateSettings, message_of, regenerate, samples_of
from eyas.target.tokenizer import bytes_of, token_lookup

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
    return lambda template: TransformersGenerator(
        model,
        sampling or Sampling(max_new_tokens=20),
        template.end_of_turn_ids(),
        batch_size=batch_size,
        dtype="float32",
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


SETTINGS = RegenerateSettings(max_seq_len=200, sampling=Sampling(max_new_tokens=20))


def test_answers_are_the_targets_own_tokens_and_alone_supervised(model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS), {"prompt": "Only a prompt"})
    report = regenerate(data, model, tmp_path / "out", by_transformers(model), settings=SETTINGS)
    assert (report.rows, report.conversations, report.answers, report.rejected) == (7, 7, 7, 0)
    assert set(report.finish_reasons) == {"stop", "length"}, "the tiny model should end some answers and not others"
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = byte_level_tokenizer("chatml")
    table = pq.read_table(tmp_path / "out" / "data-00000.parquet").to_pylist()
    for row, question in zip(table, [*QUESTIONS, "Only a prompt"], strict=True):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        start = row["loss_mask"].index(1)
        assert row["input_ids"][:start] == list(prompt)
        assert all(row["loss_mask"][start:])
        answer = row["input_ids"][start:]
        # Independent of generate(): each token is the argmax of a plain forward pass over all before it.
        with torch.inference_mode():
            logits = target(torch.tensor([row["input_ids"]])).logits[0]
        assert logits[start - 1 : -1].argmax(-1).tolist() == answer
        ends = answer[-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if ends else "length")
        assert row["truncated"] == (not ends)
        assert tokenizer.eos_token_id not in answer[:-1]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["answers_unfinished"] == report.finish_reasons["length"]
    assert manifest["regeneration"]["engine"]["name"] == "transformers"


def test_later_turns_see_the_generated_answers(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q, "And then?", "Why?") for q in QUESTIONS))
    regenerate(data, model, tmp_path / "out", by_transformers(model), settings=SETTINGS)
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
    with lock_folder(tmp_path / "out"), pytest.raises(FolderConflictError, match="by another run"):
        regenerate(data, model, tmp_path / "out", by_transformers(model), settings=SETTINGS)
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_stopped_and_resumed_gives_the_same_dataset(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q, "And then?") for q in QUESTIONS))
    regenerate(data, model, tmp_path / "whole", by_transformers(model), settings=SETTINGS)

    class Failing(TransformersGenerator):
        calls = 0

        def answer(self, prompts, limits, salt):
            Failing.calls += 1
            if Failing.calls > 3:
                raise EngineError("the machine went away")
            return super().answer(prompts, limits, salt)

    def failing(template):
        return Failing(model, SETTINGS.sampling, template.end_of_turn_ids(), dtype="float32")

    with pytest.raises(EngineError):
        regenerate(data, model, tmp_path / "out", failing, settings=SETTINGS, window=2)
    assert not (tmp_path / "out" / "manifest.json").exists()
    answers = tmp_path / "out" / "answers.jsonl"
    kept = answers.read_text().splitlines()
    assert 0 < len(kept) < 6
    answers.write_text("\n".join(kept) + "\n" + kept[0][:40])  # killed while it wrote
    report = regenerate(data, model, tmp_path / "out", by_transformers(model), settings=SETTINGS, window=2)
    assert report.resumed == len(kept)
    assert report.conversations == 6 - len(kept)
    assert sorted(open_dataset(tmp_path / "out").ids) == sorted(open_dataset(tmp_path / "whole").ids)
    with pytest.raises(FolderConflictError, match="max_new_tokens"):
        regenerate(
            data, model, tmp_path / "out", by_transformers(model),
            settings=RegenerateSettings(max_seq_len=200, sampling=Sampling(max_new_tokens=21)),
        )  # fmt: skip


def test_out_of_time_leaves_a_dataset_and_the_same_call_goes_on(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS))
    out = tmp_path / "out"
    report = regenerate(data, model, out, by_transformers(model), settings=SETTINGS, window=2, seconds=0)
    assert (report.conversations, report.out_of_time, len(open_dataset(out))) == (2, True, 2)
    assert json.loads((out / "manifest.json").read_text())["counts"]["out_of_time"] is True
    report = regenerate(data, model, out, by_transformers(model), settings=SETTINGS, window=2)
    assert (report.resumed, report.conversations, report.out_of_time) == (2, len(QUESTIONS) - 2, False)
    regenerate(data, model, tmp_path / "whole", by_transformers(model), settings=SETTINGS)
    assert open_dataset(out).hash == open_dataset(tmp_path / "whole").hash


def test_rows_that_cannot_be_answered_are_reported(model, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(
            ["broken", json.dumps(asked("word " * 300)), json.dumps(asked("Hi")), json.dumps(asked("Hi")),
             '{"input_ids": [1], "loss_mask": [1]}', '{"messages": [{"role": "system", "content": "x"}]}']
        )
    )  # fmt: skip
    report = regenerate(tmp_path / "a.jsonl", model, tmp_path / "out", by_transformers(model), settings=SETTINGS)
    assert (report.conversations, report.repeated, report.rejected) == (1, 1, 4)
    reasons = {
        one["line"]: one["reason"]
        for one in map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    }
    assert set(reasons) == {1, 2, 5, 6}
    assert "more than --max-seq-len 200" in reasons[2]
    assert "no question" in reasons[6]


def test_questions_that_no_longer_fit_are_counted(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q, "word " * 80) for q in QUESTIONS))
    report = regenerate(data, model, tmp_path / "out", by_transformers(model), settings=SETTINGS)
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert all(len(line["turns"]) == 1 for line in lines)
    whole = sum(line["turns"][0]["finish_reason"] == "stop" for line in lines)
    assert report.stopped_early == whole > 0


def test_sampling_is_reproducible_and_differs_from_greedy(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS))
    drawn = Sampling(max_new_tokens=20, temperature=1.5, seed=3)
    settings = RegenerateSettings(max_seq_len=200, sampling=drawn)
    for name in ("a", "b"):
        regenerate(data, model, tmp_path / name, by_transformers(model, drawn), settings=settings)
    regenerate(data, model, tmp_path / "greedy", settings=SETTINGS)
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


def test_ended():
    assert ended([5, 6, 2, 7, 7], [2], 10) == Answer([5, 6, 2], "stop")
    assert ended([5, 6, 7], [2], 3) == Answer([5, 6, 7], "length")
    assert ended([5, 6, 2], [2], 2) == Answer([5, 6], "length")


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
    """A small HTTP server with /v1/models and /v1/completions, answering with a real (tiny) model; can be told to misbehave."""

    def __init__(self, generator: TransformersGenerator, misbehave=(), style=None):
        self.requests: list[dict] = []
        self.style, self.tokenizer, self.stop = style, byte_level_tokenizer("chatml"), generator.stop_ids
        faults, lock = list(misbehave), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, {"data": [{"id": "tiny"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(body)
                    fault = faults.pop(0) if faults else None
                    [answer] = generator.answer([body["prompt"]], [body["max_tokens"]], 0)
                if isinstance(fault, int):
                    return self.reply(fault, {"error": "as told"})
                choice = {"finish_reason": answer.finish_reason, "text": "", "token_ids": answer.token_ids}
                if fault == "no ids" or outer.style:
                    del choice["token_ids"]
                if outer.style and body.get("logprobs"):
                    choice["logprobs"] = outer.as_logprobs(answer)
                return self.reply(200, {"choices": [choice]})

            def reply(self, code, body):
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def as_logprobs(self, answer):
        """The answer as other servers show it: token by token, without the token at which they stopped."""
        shown = [token for token in answer.token_ids if token not in self.stop]
        if self.style == "token ids as text":
            return {"tokens": [f"token_id:{token}" for token in shown]}
        if self.style == "ids":
            return {"content": [{"token": "", "id": token} for token in shown]}
        return {"content": [{"token": "?", "bytes": list(bytes_of(self.tokenizer, token))} for token in shown]}

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()


def by_endpoint(url):
    return lambda template: EndpointGenerator(
        url, None, SETTINGS.sampling, template.end_of_turn_ids(), token_of_bytes=token_lookup(template.tokenizer),
        end_id=template.end_of_turn_id(), concurrency=3, attempts=3,
    )  # fmt: skip


@pytest.mark.parametrize("style", ["token ids as text", "ids", "bytes"])
def test_an_endpoint_that_names_tokens_in_its_log_probabilities(model, tmp_path, style):
    data = write(tmp_path / "a.jsonl", *(asked(q) for q in QUESTIONS))
    regenerate(data, model, tmp_path / "direct", by_transformers(model), settings=SETTINGS)
    stop = ChatTemplate(byte_level_tokenizer("chatml")).end_of_turn_ids()
    with Server(TransformersGenerator(model, SETTINGS.sampling, stop, dtype="float32"), style=style) as server:
        report = regenerate(data, model, tmp_path / "served", by_endpoint(server.url), settings=SETTINGS)
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


def test_an_endpoint_gives_the_same_dataset(model, tmp_path):
    data = write(tmp_path / "a.jsonl", *(asked(q, "And then?") for q in QUESTIONS))
    regenerate(data, model, tmp_path / "direct", by_transformers(model), settings=SETTINGS)
    stop = ChatTemplate(byte_level_tokenizer("chatml")).end_of_turn_ids()
    with Server(
        TransformersGenerator(model, SETTINGS.sampling, stop, dtype="float32"), misbehave=[None, 500, None, 503]
    ) as server:
        report = regenerate(data, model, tmp_path / "served", by_endpoint(server.url), settings=SETTINGS)
        assert report.rejected == 0
        assert all(request["return_token_ids"] and request["model"] == "tiny" for request in server.requests)
        assert len(server.requests) == report.answers + 2  # two were repeated
    assert sorted(open_dataset(tmp_path / "served").ids) == sorted(open_dataset(tmp_path / "direct").ids)


def test_an_endpoint_that_refuses_one_prompt_or_gives_no_ids(model, tmp_path):
    data = write(tmp_path / "a.jsonl", asked("Hi"), asked("Hello"), asked("Yes?"))
    stop = ChatTemplate(byte_level_tokenizer("chatml")).end_of_turn_ids()
    generator = TransformersGenerator(model, SETTINGS.sampling, stop, dtype="float32")
    with Server(generator, misbehave=[400]) as server:
        report = regenerate(data, model, tmp_path / "a", by_endpoint(server.url), settings=SETTINGS)
        assert (report.conversations, report.rejected) == (2, 1)
        assert "400" in (tmp_path / "a" / "rejected.jsonl").read_text()
    with (
        Server(generator, misbehave=["no ids"] * 9) as server,
        pytest.raises(EngineError, match="neither token ids nor log"),
    ):
        regenerate(data, model, tmp_path / "b", by_endpoint(server.url), settings=SETTINGS)
    with Server(generator, misbehave=[404] * 3) as server, pytest.raises(EngineError, match="404"):
        regenerate(data, model, tmp_path / "c", by_endpoint(server.url), settings=SETTINGS)
    with pytest.raises(EngineError, match="failed 3 times"):
        regenerate(data, model, tmp_path / "d", by_endpoint("http://127.0.0.1:9"), settings=SETTINGS)


def test_nothing_answered_is_an_error(model, tmp_path):
    data = write(tmp_path / "a.jsonl", asked("word " * 300))
    with pytest.raises(InputError, match="no prompt was answered"):
        regenerate(data, model, tmp_path / "out", by_transformers(model), settings=SETTINGS)
