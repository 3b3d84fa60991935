"""`openai` and `litellm` of Python. Reads lines {"url": …, "asked": …}, and answers each with the outcomes of all cases of both."""

import json
import os
import sys

# Its prices would come from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402
import openai  # noqa: E402

litellm.suppress_debug_info = True
litellm.telemetry = False


def plain(value):
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def outcome(ask):
    try:
        return {"value": plain(ask())}
    except Exception as error:
        status = getattr(error, "status_code", None)
        return {"error": {"kind": type(error).__name__, "status": status, "message": str(error)}}


def first(stream):
    piece = next(iter(stream))
    stream.close()
    return piece


def bodies(asked):
    model, schema = asked["model"], asked["schema"]
    messages = [{"role": "user", "content": asked["prompt"]}]
    image = {"type": "image_url", "image_url": {"url": asked["image"]}}
    chat = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    return {
        "chat": chat,
        "sampled": {**chat, "temperature": 0.9, "seed": 7, "n": 2},
        "logprobs": {**chat, "logprobs": True, "top_logprobs": 2},
        "calling": {**chat, "tools": tools, "tool_choice": "required", "max_tokens": 24},
        "structured": {**chat, "response_format": shape, "max_tokens": 24},
        "long answer": {**chat, "max_tokens": asked["long_answer"]},
        "image": {**chat, "messages": [{"role": "user", "content": [image]}]},
        "long": {**chat, "messages": [{"role": "user", "content": asked["long"]}]},
    }


def openai_cases(url, asked):
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    completions, of = client.chat.completions, bodies(asked)
    response = {"model": asked["model"], "input": asked["prompt"], "temperature": 0, "max_output_tokens": 8}

    def streamed(body):
        chunks = completions.create(**body, stream=True, stream_options={"include_usage": True})
        # The choices come in any order.
        return sorted(chunks, key=lambda chunk: chunk.choices[0].index if chunk.choices else 99)

    def streamed_response():
        return list(client.responses.create(**response, stream=True))[-1]

    return {
        "a chat": lambda: completions.create(**of["chat"]),
        "a chat, streamed": lambda: streamed(of["chat"]),
        "log probabilities": lambda: completions.create(**of["logprobs"]),
        "log probabilities, streamed": lambda: streamed(of["logprobs"]),
        "n 2": lambda: completions.create(**of["sampled"]),
        "n 2, streamed": lambda: streamed(of["sampled"]),
        "tools": lambda: completions.create(**of["calling"]),
        "tools, streamed": lambda: streamed(of["calling"]),
        "structured": lambda: completions.create(**of["structured"]),
        "two prompts": lambda: client.completions.create(
            model=asked["model"], prompt=[asked["prompt"], asked["other"]], temperature=0, max_tokens=4
        ),
        "a response": lambda: client.responses.create(**response),
        "a response, streamed": streamed_response,
        "models": lambda: list(client.models.list()),
        "an image: refused": lambda: completions.create(**of["image"]),
        "an unknown model: refused": lambda: completions.create(**{**of["chat"], "model": "other"}),
        "a prompt that is too long: refused": lambda: completions.create(**of["long"]),
        "an image that is passed": lambda: completions.create(**{**of["image"], "model": "vision"}),
        "after an error": lambda: completions.create(**{**of["chat"], "model": "unstable-openai"}),
        "left in the middle": lambda: first(completions.create(**{**of["long answer"], "stream": True})),
    }


def litellm_cases(url, asked):
    of = bodies(asked)

    def ask(body, model=asked["model"], provider="hosted_vllm", **more):
        return litellm.completion(
            **{**body, "model": f"{provider}/{model}"}, api_base=url + "/v1", api_key="none", **more
        )

    def streamed(body):
        chunks = list(ask(body, stream=True, stream_options={"include_usage": True}))
        return litellm.stream_chunk_builder(chunks, messages=body["messages"])

    return {
        "a chat": lambda: ask(of["chat"]),
        "a chat, streamed": lambda: streamed(of["chat"]),
        "log probabilities": lambda: ask(of["logprobs"]),
        "n 2": lambda: ask(of["sampled"]),
        "tools": lambda: ask(of["calling"]),
        "tools, streamed": lambda: streamed(of["calling"]),
        "structured": lambda: ask(of["structured"]),
        "a completion": lambda: litellm.text_completion(
            model="text-completion-openai/" + asked["model"],
            prompt=asked["prompt"],
            temperature=0,
            max_tokens=4,
            api_base=url + "/v1",
            api_key="none",
        ),
        "an image: refused": lambda: ask(of["image"]),
        "an unknown model: refused": lambda: ask(of["chat"], "other"),
        "an image that is passed": lambda: ask(of["image"], "vision"),
        "after an error": lambda: ask(of["chat"], "unstable-litellm", "openai", max_retries=2),
        "left in the middle": lambda: first(ask(of["long answer"], stream=True)),
    }


for line in sys.stdin:
    asked = json.loads(line)
    outcomes = {
        client: {name: outcome(ask) for name, ask in cases(asked["url"], asked["asked"]).items()}
        for client, cases in (("openai of Python", openai_cases), ("litellm", litellm_cases))
    }
    print(json.dumps(outcomes), flush=True)
