import { KvError } from "@kv/interface";
import { held } from "@kv/testing/nothing-left";
import { recordedLog } from "@kv/testing/recorded-log";
import { describe, expect, it } from "vitest";
import { serve, tokenizer } from "../../test/support/served-instance.js";

const prompt = [5, 6, 7, 8, 9];
const greedy = { prompt, temperature: 0, max_tokens: 4, return_token_ids: true };

async function events(response: Response): Promise<unknown[]> {
  const text = await response.text();
  return text
    .split("\n\n")
    .filter(Boolean)
    .map((event) => (event === "data: [DONE]" ? "done" : JSON.parse(event.replace(/^data: /, ""))));
}

describe("completions", () => {
  it("answers in vLLM's form, with the client's request id in its own", async () => {
    const { model, post } = await serve();
    const tokens = model.generate(prompt, 4);
    const response = await post(greedy, { headers: { "x-request-id": "abc" } });
    expect(response.status).toBe(200);
    expect(await response.json()).toMatchObject({
      id: "cmpl-abc",
      object: "text_completion",
      model: "tiny",
      choices: [
        {
          index: 0,
          text: tokens.map((token) => ` ${token}`).join(""),
          token_ids: tokens,
          prompt_token_ids: prompt,
          finish_reason: "length",
          logprobs: null,
        },
      ],
      usage: { prompt_tokens: 5, completion_tokens: 4, total_tokens: 9 },
      kv_transfer_params: null,
    });
  });

  it("streams the same tokens, one by one, with the usage when asked", async () => {
    const { model, post } = await serve();
    const response = await post({
      ...greedy,
      stream: true,
      stream_options: { include_usage: true },
    });
    expect(response.headers.get("content-type")).toContain("text/event-stream");
    const all = (await events(response)) as {
      choices: { token_ids?: number[]; finish_reason: string | null }[];
      usage?: object;
    }[];
    expect(all.at(-1)).toBe("done");
    expect(all.at(-2)?.usage).toMatchObject({ completion_tokens: 4 });
    expect(all.at(-3)?.choices[0]?.finish_reason).toBe("length");
    expect(all.slice(0, 4).flatMap(({ choices }) => choices[0]?.token_ids)).toEqual(
      model.generate(prompt, 4),
    );
  });

  it("accepts text and a list of one prompt, and refuses several prompts", async () => {
    const { model, post } = await serve();
    const tokens = model.generate(prompt, 4);
    for (const form of ["5 6 7 8 9", [prompt], ["5 6 7 8 9"]]) {
      const answer = (await (await post({ ...greedy, prompt: form })).json()) as {
        choices: { token_ids: number[] }[];
      };
      expect(answer.choices[0]?.token_ids).toEqual(tokens);
    }
    const refused = await post({ ...greedy, prompt: [prompt, prompt] });
    expect(refused.status).toBe(400);
    expect(await refused.json()).toMatchObject({
      error: { param: "prompt", message: expect.stringContaining("2 prompts") },
    });
  });

  it.each([
    [{ prompt: [] }, 400, "prompt"],
    [{ max_tokens: 0 }, 400, "max_tokens"],
    [{ n: 2 }, 400, "n"],
    [{ stop: ["x"] }, 400, "stop"],
    [{ logprobs: 0 }, 400, "logprobs"],
    [{ model: "other" }, 404, "model"],
    [{ demo_zero_block: 0 }, 400, "demo_zero_block"],
  ])("refuses %j naming the field", async (fields, status, param) => {
    const { post } = await serve();
    const response = await post({ ...greedy, ...fields });
    expect(response.status).toBe(status);
    expect(await response.json()).toMatchObject({
      error: { type: "invalid_request_error", param },
    });
  });

  it("refuses /v1/responses with the reason and the route to use", async () => {
    const { post } = await serve();
    const response = await post({ model: "tiny", input: "5 6" }, { path: "/v1/responses" });
    expect(response.status).toBe(404);
    expect(await response.json()).toMatchObject({
      error: { message: expect.stringMatching(/keeps no responses.*\/v1\/chat\/completions/) },
    });
  });

  it("answers invalid JSON and unknown routes in the same error format", async () => {
    const { url } = await serve();
    const headers = { "content-type": "application/json" };
    const broken = await fetch(`${url}/v1/completions`, { method: "POST", body: "{", headers });
    const absent = await fetch(`${url}/nowhere`);
    expect([broken.status, absent.status]).toEqual([400, 404]);
    for (const answer of [broken, absent])
      expect(await answer.json()).toMatchObject({ error: { type: "invalid_request_error" } });
  });

  it("passes kv_transfer_params to the connector and back", async () => {
    const { post, connector } = await serve();
    const response = await post({ ...greedy, max_tokens: 1, kv_transfer_params: { keep: true } });
    const answer = (await response.json()) as { kv_transfer_params: { remote_request_id: string } };
    const requestId = answer.kv_transfer_params.remote_request_id;
    expect(connector.finished.get(requestId)?.reason).toBe("length");
    connector.sent(requestId);
  });

  it("answers a failed request with its code, before the first token and after", async () => {
    const { post, model } = await serve();
    const params = { kv_transfer_params: { refused: true } };
    for (const stream of [false, true]) {
      const refused = await post({ ...greedy, ...params, stream });
      expect([refused.status, await refused.json()]).toMatchObject([
        400,
        { error: { code: "KV_REQUEST_INVALID" } },
      ]);
    }
    model.before = async ({ position }) => {
      if (position > 5) throw new KvError("KV_ENGINE_FAILED", "at 10.1.2.3:5600");
    };
    const broken = await events(await post({ ...greedy, stream: true }));
    expect(broken.slice(-2)).toMatchObject([{ error: { code: "KV_ENGINE_FAILED" } }, "done"]);
    expect(JSON.stringify(broken)).not.toContain("10.1.2.3");
  });

  it.each([false, true])("aborts when the client goes away, stream %s", async (stream) => {
    const { post, connector, engine } = await serve();
    const gone = new AbortController();
    const body = { ...greedy, stream, kv_transfer_params: { remote_tokens: 5 } };
    const answer = post(body, { signal: gone.signal }).catch((error: Error) => error.name);
    await expect.poll(() => engine.outstanding().remote).toBe(1);
    gone.abort();
    expect(await answer).toBe("AbortError");
    await expect.poll(() => connector.finished.size).toBe(1);
    const [[requestId = "", { reason } = { reason: "" }] = []] = [...connector.finished];
    expect(reason).toBe("aborted");
    connector.received(requestId);
    await engine.idle();
    expect(held({ ...engine.outstanding() })).toEqual({});
  });
});

describe("a request that is refused before the engine has it", () => {
  const remote = { do_remote_prefill: true, remote_engine_id: "p" };

  it.each([
    ["beam search", { stream: true, use_beam_search: true }, 400],
    ["another model", { model: "other" }, 404],
    ["an invalid body", { max_tokens: 0 }, 400],
    ["a prompt that is too long", { prompt: Array.from({ length: 600 }, () => 1) }, 400],
  ])("releases its blocks at the prefill instance: %s", async (_, fields, status) => {
    const { post, connector } = await serve();
    const response = await post({ ...greedy, ...fields, kv_transfer_params: remote });
    expect(response.status).toBe(status);
    expect([...connector.finished.values()]).toEqual([{ reason: "aborted", blockIds: [] }]);
    // The workers get the order in a step.
    await expect.poll(() => connector.calls.at(-1)).toBe("applyWorkerOutput");
  });

  it("releases nothing when another instance may serve it, or when nothing is remote", async () => {
    let up = false;
    const { post, connector } = await serve({ ready: () => up });
    expect((await post({ ...greedy, kv_transfer_params: remote })).status).toBe(503);
    up = true;
    const body = { ...greedy, use_beam_search: true };
    for (const params of [null, [remote], { do_remote_decode: true }, { do_remote_prefill: 1 }])
      expect((await post({ ...body, kv_transfer_params: params })).status).toBe(400);
    expect(connector.finished.size).toBe(0);
  });
});

describe("what clients learn", () => {
  it.each([false, true])(
    "of a failure inside: its code, and its message with exposeErrors (%s)",
    async (exposeErrors) => {
      const { post, model } = await serve({}, { exposeErrors });
      model.before = async () => {
        throw new KvError("KV_SIDE_CHANNEL_UNREACHABLE", "no answer at 10.1.2.3:5600");
      };
      const response = await post(greedy);
      const text = await response.text();
      expect([response.status, JSON.parse(text)]).toMatchObject([
        500,
        { error: { code: "KV_SIDE_CHANNEL_UNREACHABLE" } },
      ]);
      expect(text.includes("10.1.2.3")).toBe(exposeErrors);
    },
  );
});

describe("X-Request-Id", () => {
  it("may be as long as what the proxy makes of a client's 200 characters, and not longer", async () => {
    const { post } = await serve();
    const ask = (length: number) =>
      post(greedy, { headers: { "x-request-id": "x".repeat(length) } });
    expect((await ask(400)).status).toBe(200);
    expect((await ask(401)).status).toBe(400);
  });
});

describe("chat", () => {
  const messages = [
    { role: "user", content: [{ type: "text", text: "5 6 7" }] },
    { role: "user", content: "8 9" },
  ];
  const path = "/v1/chat/completions";

  it("answers and streams in vLLM's form", async () => {
    const { model, post } = await serve();
    const body = { messages, temperature: 0, max_completion_tokens: 3, return_token_ids: true };
    const tokens = model.generate(prompt, 3);
    const text = tokens.map((token) => ` ${token}`).join("");
    expect(await (await post(body, { path })).json()).toMatchObject({
      object: "chat.completion",
      prompt_token_ids: prompt,
      choices: [
        {
          message: { role: "assistant", content: text },
          token_ids: tokens,
          finish_reason: "length",
        },
      ],
    });
    const all = (await events(await post({ ...body, stream: true }, { path }))) as {
      choices: { delta: { content: string } }[];
    }[];
    expect(
      all
        .slice(0, -1)
        .map(({ choices }) => choices[0]?.delta.content)
        .join(""),
    ).toBe(text);
  });
});

describe("other routes", () => {
  it("serves models, health, status and metrics, and answers 503 while it drains", async () => {
    let up = true;
    const { url, post } = await serve({ ready: () => up });
    expect((await fetch(`${url}/health`)).status).toBe(200);
    expect(await (await fetch(`${url}/v1/models`)).json()).toMatchObject({
      data: [{ id: "tiny", max_model_len: 512 }],
    });
    expect(await (await fetch(`${url}/status`)).json()).toMatchObject({
      outstanding: { blocks: 0 },
    });
    expect(await (await fetch(`${url}/metrics`)).text()).toBe("kv_test 1\n");
    up = false;
    expect((await fetch(`${url}/health`)).status).toBe(503);
    expect((await post(greedy)).status).toBe(503);
  });
});

describe("the log", () => {
  it("has no text of bodies and no credentials", async () => {
    const { log, events: lines } = recordedLog();
    const failing = { ...tokenizer, encode: () => expect.fail("no encoder") };
    const headers = { authorization: "Bearer secret", cookie: "secret", "x-api-key": "secret" };
    const served = await serve({}, { log });
    for (const fields of [
      { ...greedy, user: "secret" },
      { ...greedy, n: "secret" },
      { prompt: { secret: 1 } },
    ])
      await (await served.post(fields, { headers })).text();
    const broken = await serve({ tokenizer: failing }, { log });
    expect((await broken.post({ ...greedy, prompt: "a secret" }, { headers })).status).toBe(500);
    expect(JSON.stringify(lines)).toContain("request-failed");
    expect(JSON.stringify(lines)).not.toContain("secret");
  });
});
