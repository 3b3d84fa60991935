import {
  type Answer,
  COMPLETION,
  type FakeUpstream,
  prefillOk,
  STREAM,
  sendJson,
  sendStream,
} from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { legsAt } from "../support/releases.js";
import { post, runPair, runProxy, upstream } from "../support/set-up.js";

/** A prefill instance whose engine is `engineId`; it answers when `ready` resolves. */
const prefillOf =
  (engineId: () => string, ready: Promise<void> = Promise.resolve()): Answer =>
  async (seen) => {
    const { response } = seen;
    if (seen.method === "GET") return prefillOk(seen);
    await ready;
    const kv_transfer_params = {
      do_remote_prefill: true,
      remote_block_ids: [[1]],
      remote_engine_id: engineId(),
      remote_request_id: "r",
      remote_host: "10.0.0.1",
      remote_port: 5601,
      tp_size: 2,
      dcp_size: 2,
      transfer_mode: "push",
    };
    sendJson(response, { id: "x", choices: [{ text: "a" }], kv_transfer_params });
  };
const decodeOk: Answer = ({ response }) => sendJson(response, COMPLETION);
const paramsOf = (instance: FakeUpstream, at: number) =>
  instance.seen[at]?.json.kv_transfer_params as Record<string, unknown>;
const ask = (url: string, id = "mine") =>
  post(`${url}/v1/completions`, { prompt: "a" }, { headers: { "x-request-id": id } });

test("sends both legs at once, with the configured coordinates, before the prefill instance has answered", async () => {
  let go = () => {};
  const ready = new Promise<void>((resolve) => {
    go = resolve;
  });
  const p = await upstream(prefillOf(() => "engine-p", ready));
  const d = await upstream(decodeOk);
  const { url, proxy } = await runProxy({
    mode: "push",
    prefillers: [
      {
        url: p.url,
        kv: { engineId: "engine-p", host: "kv-host", port: 5700, tpSize: 4, dcpSize: 4 },
      },
    ],
    decoders: [d.url],
  });
  const asked = ask(url);
  const decode = await d.request(0);
  expect(decode.json.kv_transfer_params).toMatchObject({
    do_remote_prefill: true,
    remote_engine_id: "engine-p",
    remote_host: "kv-host",
    remote_port: 5700,
    tp_size: 4,
    dcp_size: 4,
    transfer_mode: "push",
  });
  expect(decode.json.kv_transfer_params).not.toHaveProperty("remote_block_ids");
  expect((await p.request(0)).json).toMatchObject({
    max_tokens: 1,
    kv_transfer_params: { do_remote_decode: true, transfer_mode: "push" },
  });
  expect(await (await asked).json()).toEqual(COMPLETION);
  go();
  expect(proxy.status()).toMatchObject({ flow: "push", requests: { succeeded: 1 } });
});

test("both legs carry the same unique id, also when the client repeats its own", async () => {
  const p = await upstream(prefillOf(() => "e"));
  const d = await upstream(decodeOk);
  const { url } = await runProxy({
    mode: "push",
    prefillers: [{ url: p.url, kv: { engineId: "e" } }],
    decoders: [d.url],
  });
  await Promise.all([ask(url), ask(url)]);
  await p.request(1);
  const ids = (each: FakeUpstream) =>
    each.seen.map(({ headers }) => String(headers["x-request-id"])).sort();
  expect(ids(p)).toEqual(ids(d));
  expect(new Set(ids(p)).size).toBe(2);
  for (const id of ids(p)) expect(id).toMatch(/^mine-[0-9a-f-]{36}$/);
});

test("coordinates are learned from the first answer, and again after a restart of the engine", async () => {
  let engineId = "first";
  const { d, url } = await runPair({ p: prefillOf(() => engineId) }, { mode: "push" });
  await ask(url);
  // One after the other: the decode leg has what the prefill leg answered.
  expect(paramsOf(d, 0)).toMatchObject({ remote_engine_id: "first", remote_block_ids: [[1]] });
  await ask(url);
  expect(paramsOf(d, 1)).toMatchObject({
    remote_engine_id: "first",
    remote_host: "10.0.0.1",
    remote_port: 5601,
    tp_size: 2,
    // D plans for P's share of the prompt before P has answered.
    dcp_size: 2,
  });
  expect(paramsOf(d, 1)).not.toHaveProperty("remote_block_ids");
  engineId = "second";
  await ask(url);
  await ask(url);
  expect(paramsOf(d, d.seen.length - 1)).toMatchObject({ remote_engine_id: "second" });
});

test("the request begins again when the decode leg fails because the prefill engine was restarted", async () => {
  const p = await upstream(prefillOf(() => "new"));
  const d = await upstream(({ response, json }) => {
    const { remote_engine_id } = json.kv_transfer_params as { remote_engine_id: string };
    if (remote_engine_id === "new") sendJson(response, COMPLETION);
    else sendJson(response, { error: { code: "KV_HANDSHAKE_WRONG_ENGINE", message: "m" } }, 500);
  });
  const { url } = await runProxy({
    mode: "push",
    prefillers: [{ url: p.url, kv: { engineId: "old" } }],
    decoders: [d.url],
  });
  expect(await (await ask(url)).json()).toEqual(COMPLETION);
  expect(d.seen.filter(({ json }) => json.max_tokens !== 1)).toHaveLength(2);
});

test("a prefill answer without KV while both legs are under way is an error, or decode computes by policy", async () => {
  const p = await upstream(({ response }) =>
    sendJson(response, { id: "x", choices: [{ text: "a" }] }),
  );
  const d = await upstream(({ response, json }) => {
    // A leg with the coordinates of a prefill engine waits for its blocks.
    if (json.kv_transfer_params === undefined) sendJson(response, COMPLETION);
  });
  const of = {
    prefillers: [{ url: p.url, kv: { engineId: "e" } }],
    decoders: [d.url],
    mode: "push" as const,
  };
  const strict = await runProxy(of);
  expect((await ask(strict.url)).status).toBe(502);
  const lenient = await runProxy({ ...of, policy: { missingKv: "decode-computes" } });
  expect(await (await ask(lenient.url)).json()).toEqual(COMPLETION);
});

test("auto: the first answer of each prefill instance decides between pull and push", async () => {
  const pull: Answer = ({ response }) =>
    sendJson(response, {
      id: "x",
      choices: [{ text: "a" }],
      kv_transfer_params: {
        do_remote_prefill: true,
        remote_block_ids: [[7]],
        remote_engine_id: "pulling",
        remote_request_id: "r",
        remote_host: "10.0.0.2",
        remote_port: 5600,
        transfer_mode: "pull",
      },
    });
  const [pushing, pulling] = [await upstream(prefillOf(() => "e")), await upstream(pull)];
  const d = await upstream(decodeOk);
  const { url, proxy } = await runProxy({
    mode: "auto",
    prefillers: [pushing.url, pulling.url],
    decoders: [d.url],
  });
  for (let at = 0; at < 4; at += 1) expect((await ask(url)).status).toBe(200);
  expect(proxy.status().flow).toBe("auto");
  const blocks = [0, 1, 2, 3].map((at) => paramsOf(d, at).remote_block_ids);
  expect(blocks).toEqual([[[1]], [[7]], undefined, [[7]]]);
  const ids = d.seen.map(({ headers }) => String(headers["x-request-id"]));
  for (const id of ids.slice(0, 3)) expect(id).toMatch(/^mine-[0-9a-f-]{36}$/);
  expect(ids[3]).toBe("mine");
  // Each got one call per request.
  expect([pushing.seen.length, pulling.seen.length]).toEqual([2, 2]);
  expect(proxy.status().prefillers.map(({ requests }) => requests)).toEqual([2, 2]);
});

test("a setting makes push legs sequential", async () => {
  const p = await upstream(prefillOf(() => "e"));
  const d = await upstream(decodeOk);
  const { url, proxy } = await runProxy({
    mode: "push",
    pushLegs: "prefill-first",
    prefillers: [{ url: p.url, kv: { engineId: "e" } }],
    decoders: [d.url],
  });
  await ask(url);
  expect(paramsOf(d, 0)).toMatchObject({ remote_block_ids: [[1]] });
  expect(proxy.status().flow).toBe("push, prefill first");
});

test("a refusal of the prefill instance is the answer, and the decode leg is aborted", async () => {
  const p = await upstream(({ response }) =>
    sendJson(response, { error: { message: "too long" } }, 400),
  );
  const d = await upstream(() => {});
  const { url } = await runProxy({
    mode: "push",
    prefillers: [{ url: p.url, kv: { engineId: "e" } }],
    decoders: [d.url],
  });
  const response = await ask(url);
  expect([response.status, await response.json()]).toEqual([
    400,
    { error: { message: "too long" } },
  ]);
  await (await d.request(0)).dropped;
});

test("after a prefill leg that breaks off, the request is tried on another instance", async () => {
  const bad = await upstream(({ response }) => void response.destroy());
  const good = await upstream(prefillOf(() => "g"));
  const d = await upstream(({ response, json }) => {
    const { remote_engine_id } = json.kv_transfer_params as { remote_engine_id: string };
    if (remote_engine_id === "g") sendJson(response, COMPLETION);
  });
  const { url } = await runProxy({
    mode: "push",
    prefillers: [{ url: bad.url, kv: { engineId: "b" } }, good.url],
    decoders: [d.url],
  });
  expect(await (await ask(url)).json()).toEqual(COMPLETION);
});

const breaks: Answer = ({ response }) => void response.destroy();
const failed = { error: { message: "dead", code: 500 } };
const fails: Answer = ({ response }) => sendJson(response, failed, 500);
const idsOf = (...instances: FakeUpstream[]) =>
  new Set(instances.flatMap(({ seen }) => seen.map(({ headers }) => headers["x-request-id"])));

test.each([
  ["breaks off", breaks],
  ["fails", fails],
])(
  "after a decode instance that %s, the request begins again with another, under a new id",
  async (_what, how) => {
    const p = await upstream(prefillOf(() => "e"));
    const [bad, good] = [await upstream(how), await upstream(decodeOk)];
    const { url, proxy } = await runProxy({
      mode: "push",
      // The same first choice for each request, so that what failed must be avoided by name.
      createRouting: () => ({ name: "first", choose: (candidates) => candidates[0] }),
      prefillers: [{ url: p.url, kv: { engineId: "e" } }],
      decoders: [bad.url, good.url],
    });
    expect(await (await ask(url)).json()).toEqual(COMPLETION);
    expect([bad, good].map(legsAt)).toEqual([1, 1]);
    // The prompt was computed again: no decode leg uses the blocks of the first prefill leg.
    expect(good.seen[0]?.headers["x-request-id"]).not.toBe(bad.seen[0]?.headers["x-request-id"]);
    expect(paramsOf(good, 0)).toMatchObject({ remote_block_ids: [[1]] });
    expect(proxy.status().decoders[0]).toMatchObject({ failures: 1, in_flight: 0 });
    await expect.poll(() => proxy.status().prefillers[0]?.in_flight).toBe(0);
  },
);

test.each([
  ["break off", breaks, 502],
  ["fail", fails, 500],
])(
  "when all decode instances %s, two are tried, and the prefill leg is aborted",
  async (_what, how, status) => {
    let asked = 0;
    // The first prefill leg is under way when its decode leg ends.
    const p = await upstream((seen) => (asked++ === 0 ? undefined : prefillOf(() => "e")(seen)));
    const ds = await Promise.all([0, 1, 2].map(() => upstream(how)));
    const { url } = await runProxy({
      mode: "push",
      prefillers: [{ url: p.url, kv: { engineId: "e" } }],
      decoders: ds.map((d) => d.url),
    });
    const response = await ask(url);
    expect(response.status).toBe(status);
    if (how === fails) expect(await response.json()).toEqual(failed);
    expect(ds.map(({ seen }) => seen.length).sort()).toEqual([0, 1, 1]);
    expect(idsOf(...ds).size).toBe(2);
    await (await p.request(0)).dropped;
  },
);

test("the only decode instance fails with the KV of a prefill instance that ended: the request begins again with another one's", async () => {
  const [ended, p] = [
    await upstream(prefillOf(() => "gone")),
    await upstream(prefillOf(() => "e")),
  ];
  const d = await upstream((seen) =>
    JSON.stringify(seen.json.kv_transfer_params).includes("gone") ? fails(seen) : decodeOk(seen),
  );
  const { url } = await runProxy({
    mode: "push",
    createRouting: () => ({ name: "first", choose: (candidates) => candidates[0] }),
    prefillers: [
      { url: ended.url, kv: { engineId: "gone" } },
      { url: p.url, kv: { engineId: "e" } },
    ],
    decoders: [d.url],
  });
  expect(await (await ask(url)).json()).toEqual(COMPLETION);
  expect([ended, p, d].map(legsAt)).toEqual([1, 1, 2]);
});

test.each([
  [500, 2],
  [503, 1],
])("a %i of the only decode instance is the answer, after %i tries", async (status, tries) => {
  const p = await upstream(prefillOf(() => "e"));
  const d = await upstream(({ response }) => sendJson(response, failed, status));
  const { url } = await runProxy({
    mode: "push",
    prefillers: [{ url: p.url, kv: { engineId: "e" } }],
    decoders: [d.url],
  });
  const response = await ask(url);
  expect([response.status, await response.json()]).toEqual([status, failed]);
  expect([p, d].map(legsAt)).toEqual([tries, tries]);
});

test("after a prefill failure another instance is tried; when both fail, the second failure is the answer", async () => {
  const [b1, b2] = [await upstream(fails), await upstream(fails)];
  const [good, third] = [
    await upstream(prefillOf(() => "g")),
    await upstream(prefillOf(() => "g")),
  ];
  const d = await upstream(({ response, json }) => {
    const { remote_engine_id } = json.kv_transfer_params as { remote_engine_id: string };
    if (remote_engine_id === "g") sendJson(response, COMPLETION);
  });
  const of = (...prefillers: FakeUpstream[]) =>
    runProxy({
      mode: "push",
      createRouting: () => ({ name: "first", choose: (candidates) => candidates[0] }),
      prefillers: prefillers.map((p) => ({ url: p.url, kv: { engineId: "b" } })),
      decoders: [d.url],
    });
  const saved = await of(b1, good);
  expect(await (await ask(saved.url)).json()).toEqual(COMPLETION);
  const lost = await of(b1, b2, third);
  const response = await ask(lost.url);
  expect([response.status, await response.json()]).toEqual([500, failed]);
  expect([b1.seen.length, b2.seen.length, good.seen.length, third.seen.length]).toEqual([
    2, 1, 1, 0,
  ]);
  expect(lost.proxy.status().decoders[0]?.in_flight).toBe(0);
});

test("a decode leg whose stream has begun is never retried", async () => {
  const p = await upstream(prefillOf(() => "e"));
  const bad = await upstream(({ response }) => {
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.write('data: {"choices":[{}]}\n\n', () => setImmediate(() => response.destroy()));
  });
  const good = await upstream(decodeOk);
  const { url } = await runProxy({
    mode: "push",
    prefillers: [{ url: p.url, kv: { engineId: "e" } }],
    decoders: [bad.url, good.url],
  });
  const response = await post(`${url}/v1/completions`, { prompt: "a", stream: true });
  await expect(response.text()).rejects.toThrow();
  expect(good.seen).toHaveLength(0);
});

test("the answer carries the client's id, whatever ids the legs had", async () => {
  const p = await upstream(prefillOf(() => "e"));
  const d = await upstream(({ response, headers, json }) => {
    response.setHeader("x-request-id", String(headers["x-request-id"]));
    if (json.stream === true) sendStream(response, STREAM);
    else sendJson(response, COMPLETION);
  });
  for (const mode of ["push", "auto"] as const) {
    const { url } = await runProxy({ mode, prefillers: [p.url], decoders: [d.url] });
    for (const stream of [false, true]) {
      const headers = { "x-request-id": "mine" };
      const response = await post(`${url}/v1/completions`, { prompt: "a", stream }, { headers });
      expect([response.status, response.headers.get("x-request-id")]).toEqual([200, "mine"]);
      await response.text();
    }
  }
  for (const id of idsOf(d)) expect(id).toMatch(/^mine-/);
});

test("instances with coordinates are added and removed at run time", async () => {
  const [p, q] = [await upstream(prefillOf(() => "p")), await upstream(prefillOf(() => "q"))];
  const d = await upstream(decodeOk);
  const { url, adminUrl } = await runProxy({
    mode: "push",
    prefillers: [{ url: p.url, kv: { engineId: "p" } }],
    decoders: [d.url],
    admin: { port: 0 },
  });
  const change = (what: string, instance: unknown) =>
    post(`${adminUrl}/instances/${what}`, { role: "prefill", instance });
  expect(
    (await change("add", { url: q.url, kv: { engineId: "q", port: 5800, ppSize: 2 } })).status,
  ).toBe(200);
  expect((await change("remove", p.url)).status).toBe(200);
  await ask(url);
  expect(paramsOf(d, 0)).toMatchObject({
    remote_engine_id: "q",
    remote_port: 5800,
    remote_host: "127.0.0.1",
    // D waits for the notifications of each stage.
    pp_size: 2,
  });
});

test("in push, two responses with one request_id of the client's have ids of their own, as the engines match the legs by them", async () => {
  const p = await upstream(({ response }) => {
    const kv_transfer_params = {
      do_remote_prefill: true,
      remote_block_ids: [[1]],
      remote_engine_id: "e",
      remote_request_id: "r",
      remote_host: "10.0.0.1",
      remote_port: 5601,
      tp_size: 1,
      transfer_mode: "push",
    };
    sendJson(response, { id: "resp_x", output: [], status: "incomplete", kv_transfer_params });
  });
  const d = await upstream(({ response }) =>
    sendJson(response, { id: "resp_x", output: [], status: "completed" }),
  );
  for (const mode of ["push", "auto"] as const) {
    const { url } = await runProxy({ mode, prefillers: [p.url], decoders: [d.url] });
    const before = p.seen.length;
    // The first request learns P's engine one leg after the other; the second one sends both legs
    // at once.
    for (let at = 0; at < 2; at += 1) {
      const body = { input: "a", request_id: "own" };
      expect((await post(`${url}/v1/responses`, body)).status).toBe(200);
      await p.request(before + at);
    }
    const ids = ({ seen }: FakeUpstream) => seen.slice(before).map(({ json }) => json.request_id);
    expect(new Set(ids(p)).size).toBe(2);
    expect(ids(p)).not.toContain("own");
    expect(ids(d)).toEqual(ids(p));
  }
});
