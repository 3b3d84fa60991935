import { httpLimitTries } from "@kv/testing/http/http-limits";
import { postText, type RawClient, rawClient } from "@kv/testing/http/raw-client";
import { describe, expect, it } from "vitest";
import { serve, tokenizer } from "../../test/support/served-instance.js";
import { type HttpLimits, httpLimits } from "./limits.js";

const prompt = [5, 6, 7, 8, 9];
const greedy = { prompt, temperature: 0, max_tokens: 4, return_token_ids: true };
const POST = postText(JSON.stringify(greedy));
const GET = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";

/** What a client has got when `pattern` matches it. */
async function until({ received }: RawClient, pattern: RegExp): Promise<string> {
  await expect.poll(received).toMatch(pattern);
  return received();
}

type Served = Awaited<ReturnType<typeof serve>>;
const serveWith = (limits: Partial<HttpLimits>): Promise<Served> => serve({}, { limits });

/** Another client gets its answer. */
async function expectServed({ post, model }: Served): Promise<void> {
  const answer = (await (await post(greedy)).json()) as { choices: { token_ids: number[] }[] };
  expect(answer.choices[0]?.token_ids).toEqual(model.generate(prompt, 4));
}

/** Requests that the engine has. */
function inEngine({ engine }: Served): number {
  const { running = 0, waiting = 0 } = engine.outstanding();
  return running + waiting;
}

/** Opens requests that stay with the engine until `release`. */
function holdRequests(served: Served): () => void {
  let release = () => {};
  const held = new Promise<void>((resolve) => {
    release = resolve;
  });
  served.model.before = () => held;
  return release;
}

/** One try for each limit: the offender is refused, and another client is served. */
const tries: { readonly [K in keyof HttpLimits]: () => Promise<void> } = {
  ...httpLimitTries(async (limits) => {
    const served = await serveWith(limits);
    const release = holdRequests(served);
    const body = JSON.stringify(greedy);
    return { url: served.url, body, release, asked: () => inEngine(served) };
  }),
  async maxRequestsPerConnection() {
    const served = await serveWith({ maxRequestsPerConnection: 2 });
    // Else the first one can be answered before the server reads the next.
    const release = holdRequests(served);
    const { closed } = await rawClient(served.url, POST.repeat(20));
    expect((await closed).match(/HTTP\/1.1 \d+/g)).toEqual(["HTTP/1.1 503"]);
    release();
    await expectServed(served);
  },
  async maxUnreadBytes() {
    // Larger events than a socket's buffers hold.
    const decode = (tokens: ArrayLike<number>) => "x".repeat(1_000_000 * tokens.length);
    const served = await serve(
      { tokenizer: { ...tokenizer, decode } },
      { limits: { maxUnreadBytes: 20_000 } },
    );
    // As a model does, this one lets the event loop turn between tokens.
    served.model.before = () => new Promise((resolve) => setImmediate(resolve));
    const { socket } = await rawClient(served.url);
    socket.pause().write(postText(JSON.stringify({ ...greedy, max_tokens: 90, stream: true })));
    await expect.poll(() => [...served.connector.finished.values()][0]?.reason).toBe("aborted");
    socket.destroy();
    await expectServed(served);
  },
};

describe("limits of the HTTP server", () => {
  it.each(Object.entries(tries))(
    "%s: the offender is refused, and others are served",
    (_, attempt) => attempt(),
  );

  it("has a default for each limit", () => {
    expect(Object.keys(httpLimits()).sort()).toEqual(Object.keys(tries).sort());
    expect(httpLimits({ maxBodyBytes: 7 })).toMatchObject({ maxBodyBytes: 7, maxRequests: 1024 });
  });
});

describe("pipelined requests of a client that leaves", () => {
  it("are aborted and give their places back", async () => {
    const served = await serveWith({ maxRequests: 1, maxRequestsPerAddress: 1 });
    const release = holdRequests(served);
    const body = JSON.stringify({ ...greedy, max_tokens: 200 });
    const { socket } = await rawClient(served.url, postText(body).repeat(4));
    await expect.poll(() => inEngine(served)).toBe(1);
    expect((await served.post({})).status).toBe(503);
    socket.destroy();
    await expect.poll(async () => (await served.post({})).status).toBe(400);
    let steps = 0;
    release();
    served.model.before = async () => {
      steps += 1;
    };
    await expectServed(served);
    expect(inEngine(served)).toBe(0);
    expect(steps).toBeLessThan(20);
  });

  it("are counted no longer after a refusal closed their connection", async () => {
    const served = await serveWith({
      maxRequests: 4,
      maxRequestsPerAddress: 4,
      maxRequestsPerConnection: 2,
    });
    await (await rawClient(served.url, GET.repeat(20))).closed;
    await expectServed(served);
  });
});

describe("bodies that are refused at once", () => {
  it.each([
    ["a million wrong tokens", { prompt: Array.from({ length: 500_000 }, () => "x") }],
    ["a million empty messages", { messages: Array.from({ length: 500_000 }, () => 0) }],
    ["a seed of a megabyte", { seed: "x".repeat(1_000_000) }],
    ["a stop of a megabyte", { stop: "x".repeat(1_000_000) }],
    ["a prompt of a megabyte for a model of 512 tokens", { prompt: "1 ".repeat(500_000) }],
  ])("%s gives 400 and a short message", async (_, fields) => {
    const served = await serve();
    const path = "messages" in fields ? "/v1/chat/completions" : "/v1/completions";
    const response = await served.post({ ...greedy, ...fields }, { path });
    expect(response.status).toBe(400);
    expect((await response.text()).length).toBeLessThan(2000);
  });

  it("names no text of a body that is not JSON", async () => {
    const { url } = await serve();
    const client = await rawClient(url, postText('{"prompt": "a secret" oops}'));
    expect(await until(client, /^HTTP\/1.1 400 [\s\S]*\r\n\r\n.*\}/)).not.toContain("secret");
    client.socket.destroy();
  });
});
