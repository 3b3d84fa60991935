import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createProxy, type ProxyOptions } from "@kv/proxy";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { BOUNDARY_CASES, comparable, REFUSALS, words } from "./boundary-cases.js";
import { ONE_USE, plain } from "./completion.js";
import { freePorts } from "./free-ports.js";
import { handshakeTimeouts, onceMoreAfterTimeout } from "./once-more.js";
import { showLogs, startVllm, type VllmOptions, type VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { startToyProxy } from "./toy-proxy.js";
import { until } from "./until.js";

// kv-proxy in front of one vLLM P and one vLLM D: every case where prefill and decode part, and a naive proxy as the negative control.

/** Blocks that are freed before it are freed because somebody said so; after it, because nobody came. */
const LEASE_SECONDS = 45;
/** Renders the tools and the request's own arguments too, so that a server that did not get them answers something else. */
const TEMPLATE =
  "{% for m in messages %}{{ m['content'] }} {% endfor %}{% for t in tools or [] %}t{{ 500 + loop.index }} {% endfor %}{{ extra or '' }}";

const folder = mkdtempSync(join(tmpdir(), "kv-proxy-live-"));
const closing: { close(): Promise<void> }[] = [];
let p: VllmServer;
let d: VllmServer;
let unused: number;

beforeAll(async () => {
  const template = join(folder, "template.jinja");
  writeFileSync(template, TEMPLATE);
  const options: Omit<VllmOptions, "name"> = {
    kind: { version: "0.33", mode: "pull" },
    blocks: 160,
    leaseSeconds: LEASE_SECONDS,
    args: ["--chat-template", template, "--enable-request-id-headers"],
  };
  p = await startVllm({ name: "proxy-p", ...options });
  d = await startVllm({ name: "proxy-d", ...options });
  unused = await used();
  const { url, close } = await proxied();
  // The pair's first handshake, which on a busy machine may miss vLLM's five seconds.
  await onceMoreAfterTimeout(async () => {
    const answer = await ask(`${url}/v1/completions`, { model: "tiny", prompt: words(40, 9), max_tokens: 1 });
    if (answer.status !== 200) throw new Error(await answer.text());
  }, handshakeTimeouts(d));
  await close();
});
afterAll(async () => {
  await p?.stop();
  await d?.stop();
  rmSync(folder, { recursive: true, force: true });
});
beforeEach(({ onTestFailed }) => onTestFailed(() => showLogs(p, d)));
afterEach(async () => {
  for (const one of closing.splice(0)) await one.close();
});

const used = () => p.metric("vllm:kv_cache_usage_perc");

/** P looks at notifications, and at leases, when it computes something. */
function holdsNothing(what: string, timeoutMs: number): Promise<void> {
  return until(
    async () => {
      await plain(p.url, prompt(33), 1);
      return (await used()) <= unused;
    },
    what,
    { timeoutMs },
  );
}
const freed = () => holdsNothing("P has freed its blocks", (LEASE_SECONDS * 1000) / 2);
/** What a naive proxy has left at P is not to be taken for the next test's. */
const leaseEnded = () => holdsNothing("the lease has ended", 4 * LEASE_SECONDS * 1000);
const idle = (server: VllmServer) =>
  until(async () => (await server.metric("vllm:num_requests_running")) === 0, `${server.name} is idle`);

async function proxied(more: Partial<ProxyOptions> = {}) {
  const proxy = createProxy({ prefillers: [p.url], decoders: [d.url], ...more });
  const { url } = await proxy.listen({ port: 0 });
  const close = () => proxy.close({ graceMs: 0 });
  closing.push({ close });
  return { url, proxy, close };
}

function ask(url: string, body: unknown, init: RequestInit = {}): Promise<Response> {
  return fetch(url, {
    method: "POST",
    ...init,
    headers: { "content-type": "application/json", ...ONE_USE, ...(init.headers as Record<string, string>) },
    body: JSON.stringify(body),
  });
}

describe.each(BOUNDARY_CASES)("$name ($path)", ({ path, body, toyToo }) => {
  test("kv-proxy answers as one server does, and P holds nothing", async () => {
    const { url } = await proxied();
    const ours = await comparable(await ask(url + path, body));
    expect(ours).toEqual(await comparable(await ask(d.url + path, body)));
    expect(ours).toMatchObject({ status: 200 });
    await freed();
  });

  test.skipIf(toyToo === true)("a naive proxy does not", async () => {
    const toy = await startToyProxy(p.url, d.url);
    closing.push(toy);
    // A wrong prompt's parameters leave the decode worker waiting for ever.
    const answer = await ask(toy.url + path, body, { signal: AbortSignal.timeout(60_000) })
      .then(comparable)
      .catch((error: unknown) => String(error));
    const right = await comparable(await ask(d.url + path, body));
    const same = JSON.stringify(answer) === JSON.stringify(right);
    const leaks =
      same &&
      (await freed().then(
        () => false,
        () => true,
      ));
    expect(same && !leaks).toBe(false);
    await leaseEnded();
  });
});

describe.each(REFUSALS)("refused: $name", ({ body }) => {
  test("kv-proxy says what the server says, and P holds nothing; a naive proxy says 500", async () => {
    const { url } = await proxied();
    const right = await comparable(await ask(`${d.url}/v1/completions`, body));
    expect(await comparable(await ask(`${url}/v1/completions`, body))).toEqual(right);
    expect((right as { status: number }).status).toBeLessThan(500);
    await freed();
    const toy = await startToyProxy(p.url, d.url);
    closing.push(toy);
    expect((await ask(`${toy.url}/v1/completions`, body)).status).toBe(500);
  });
});

test("stop at the first token: the answer is empty of text and P holds nothing", async () => {
  const { url } = await proxied();
  const body = { model: "tiny", prompt: words(60, 7), temperature: 0, max_tokens: 8 };
  const first = (await (
    await ask(`${d.url}/v1/completions`, { ...body, max_tokens: 1, return_token_ids: true })
  ).json()) as {
    choices: { token_ids: number[] }[];
  };
  const stop = { ...body, stop_token_ids: first.choices[0]?.token_ids };
  const ours = await comparable(await ask(`${url}/v1/completions`, stop));
  expect(ours).toEqual(await comparable(await ask(`${d.url}/v1/completions`, stop)));
  expect(ours).toMatchObject({ body: { choices: [{ finish_reason: "stop" }] } });
  await freed();
});

test("the client's id comes back, and the models are D's", async () => {
  const { url } = await proxied();
  const body = { model: "tiny", prompt: "t11 t12", max_tokens: 1 };
  const answer = await ask(`${url}/v1/completions`, body, { headers: { "x-request-id": "mine" } });
  expect(answer.headers.get("x-request-id")).toBe("mine");
  expect(((await answer.json()) as { id: string }).id).toBe("cmpl-mine");
  const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
  expect(models.data.map(({ id }) => id)).toEqual(["tiny"]);
});

test("a D that cannot be reached: the other one, with the same blocks", async () => {
  const [dead = 0] = await freePorts(1);
  const { url, proxy } = await proxied({ decoders: [`http://127.0.0.1:${dead}`, d.url] });
  const body = { model: "tiny", prompt: words(60, 8), temperature: 0, max_tokens: 4 };
  const right = await comparable(await ask(`${d.url}/v1/completions`, body));
  expect(await comparable(await ask(`${url}/v1/completions`, body))).toEqual(right);
  expect(proxy.status().prefillers[0]?.requests).toBe(1);
  await freed();
  const toy = await startToyProxy(p.url, `http://127.0.0.1:${dead}`);
  closing.push(toy);
  expect((await ask(`${toy.url}/v1/completions`, body)).status).toBe(500);
  await leaseEnded();
});

const long = { model: "tiny", prompt: words(200, 10), temperature: 0, max_tokens: 700, ignore_eos: true };

test("a client that leaves while D generates: D stops, and P holds nothing", async () => {
  const { url } = await proxied();
  const client = new AbortController();
  const answer = await ask(`${url}/v1/completions`, { ...long, stream: true }, { signal: client.signal });
  await answer.body?.getReader().read();
  client.abort();
  await idle(d);
  await freed();
});

test("a client that leaves while P computes: P stops, and holds nothing", async () => {
  const { url, proxy } = await proxied();
  const client = new AbortController();
  const answer = ask(`${url}/v1/completions`, { ...long, prompt: words(900, 11) }, { signal: client.signal });
  await until(() => proxy.status().prefillers[0]?.in_flight === 1, "the prefill leg runs", { everyMs: 1 });
  client.abort();
  await expect(answer).rejects.toThrow();
  await until(() => proxy.status().requests.in_flight === 0, "the proxy has let go of it");
  await idle(p);
  await idle(d);
  await freed();
});

test("a request whose time is up ends in an error event, D stops, and P holds nothing", async () => {
  const { url } = await proxied({ timeouts: { requestMs: 3_000 } });
  const answer = await ask(`${url}/v1/completions`, { ...long, stream: true });
  const text = await answer.text().catch(() => "");
  expect(text === "" || text.includes("KV_REQUEST_TIMEOUT")).toBe(true);
  expect(text).not.toContain("[DONE]");
  await idle(d);
  await freed();
});
