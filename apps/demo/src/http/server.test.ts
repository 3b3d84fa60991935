import { KvError } from "@kv/interface";
import { afterEach, describe, expect, it } from "vitest";
import { arithmeticModel } from "../../test/support/arithmetic-model.js";
import { heapTransport } from "../../test/support/heap-memory.js";
import { scriptedConnector } from "../../test/support/scripted-connector.js";
import { BlockPool } from "../engine/cache/block-pool.js";
import { KvPool } from "../engine/cache/kv-pool.js";
import { Engine } from "../engine/engine.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import type { ServedInstance } from "./generation.js";
import { InstanceServer } from "./server.js";

/** A tokenizer whose words are token ids. */
const tokenizer: Tokenizer = {
  encode: (text) => Int32Array.from(text.split(" ").filter(Boolean), Number),
  decode: (tokens) => Array.from(tokens, (token) => ` ${token}`).join(""),
  encodeChat: (messages) =>
    Int32Array.from(messages.flatMap(({ content }) => content.split(" ").map(Number))),
};

const open: (() => Promise<void>)[] = [];
afterEach(async () => {
  for (const close of open.splice(0)) await close();
});

async function serve(given: Partial<ServedInstance> = {}) {
  const model = arithmeticModel();
  const connector = scriptedConnector();
  const pool = new KvPool({
    transport: heapTransport(),
    geometry: model.config,
    numBlocks: 64,
    blockSize: 4,
    tp: 1,
  });
  const engine = new Engine({ model, pool, blocks: new BlockPool({ numBlocks: 64 }), connector });
  const instance: ServedInstance = {
    engine,
    tokenizer,
    modelNames: ["tiny", "/models/tiny"],
    maxModelLen: 512,
    maxOutputTokens: 100,
    debug: false,
    zeroBlockOf() {},
    ready: () => true,
    status: () => ({ outstanding: engine.outstanding() }),
    metrics: () => "kv_test 1\n",
    kvTransfers: () => ({ records: [] }),
    ...given,
  };
  const server = new InstanceServer(instance);
  const { url } = await server.listen({ host: "127.0.0.1", port: 0 });
  open.push(async () => {
    await engine.close();
    await server.close();
  });
  const post = (
    body: object,
    {
      path = "/v1/completions",
      headers = {},
      signal,
    }: { path?: string; headers?: Record<string, string>; signal?: AbortSignal } = {},
  ) =>
    fetch(url + path, {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "content-type": "application/json", ...headers },
      ...(signal === undefined ? {} : { signal }),
    });
  return { model, engine, connector, url, post };
}

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
    const response = await post({ ...greedy, logprobs: 2 }, { headers: { "x-request-id": "abc" } });
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
          logprobs: { token_logprobs: [0, 0, 0, 0] },
        },
      ],
      usage: { prompt_tokens: 5, completion_tokens: 4, total_tokens: 9 },
      kv_transfer_params: null,
    });
  });

  it("streams the same tokens, one by one, with the usage when asked", async () => {
    const { model, post } = await serve();
    const response = await post({ ...greedy, stream: true, stream_options: { include_usage: true } });
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
    [{ model: "other" }, 404, "model"],
    [{ kv_demo_zero_block: 0 }, 400, "kv_demo_zero_block"],
  ])("refuses %j naming the field", async (fields, status, param) => {
    const { post } = await serve();
    const response = await post({ ...greedy, ...fields });
    expect(response.status).toBe(status);
    expect(await response.json()).toMatchObject({ error: { type: "invalid_request_error", param } });
  });

  it("answers invalid JSON and unknown routes in the same error format", async () => {
    const { url } = await serve();
    const headers = { "content-type": "application/json" };
    const broken = await fetch(`${url}/v1/completions`, { method: "POST", body: "{", headers });
    expect([broken.status, await broken.json()]).toMatchObject([
      400,
      { error: { type: "invalid_request_error" } },
    ]);
    const absent = await fetch(`${url}/nowhere`);
    expect([absent.status, await absent.json()]).toMatchObject([
      404,
      { error: { type: "invalid_request_error" } },
    ]);
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
      if (position > 5) throw new KvError("KV_ENGINE_FAILED", "scripted");
    };
    const broken = await events(await post({ ...greedy, stream: true }));
    expect(broken.slice(-2)).toMatchObject([{ error: { code: "KV_ENGINE_FAILED" } }, "done"]);
  });

  it.each([false, true])("aborts when the client goes away, stream %s", async (stream) => {
    const { post, connector, engine } = await serve();
    const gone = new AbortController();
    const body = { ...greedy, stream, kv_transfer_params: { remote_tokens: 5 } };
    const answer = post(body, { signal: gone.signal }).catch((error: Error) => error.name);
    while (engine.outstanding().remote === 0) await new Promise((resolve) => setImmediate(resolve));
    gone.abort();
    expect(await answer).toBe("AbortError");
    while (connector.finished.size === 0) await new Promise((resolve) => setImmediate(resolve));
    const [[requestId = "", { reason } = { reason: "" }] = []] = [...connector.finished];
    expect(reason).toBe("aborted");
    connector.received(requestId);
    await engine.idle();
    expect(Object.values(engine.outstanding()).every((count) => count === 0)).toBe(true);
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
        { message: { role: "assistant", content: text }, token_ids: tokens, finish_reason: "length" },
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
    expect(await (await fetch(`${url}/status`)).json()).toMatchObject({ outstanding: { blocks: 0 } });
    expect(await (await fetch(`${url}/metrics`)).text()).toBe("kv_test 1\n");
    up = false;
    expect((await fetch(`${url}/health`)).status).toBe(503);
    expect((await post(greedy)).status).toBe(503);
  });
});
