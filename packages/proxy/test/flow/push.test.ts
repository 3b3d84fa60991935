import {
  type Answer,
  COMPLETION,
  decodeOk,
  type FakeUpstream,
  KV_PARAMS_TEXT,
  prefillOk,
  STREAM,
  sendJson,
  sendStream,
} from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { post, runFleet, runPair, sends, upstream, upstreams } from "../support/set-up.js";

const params = {
  ...JSON.parse(KV_PARAMS_TEXT),
  remote_host: "10.0.0.1",
  tp_size: 2,
  dcp_size: 2,
  transfer_mode: "push",
};
/** A prefill instance with these parameters; it answers when `ready` resolves. */
const prefillOf =
  (own: () => object = () => ({}), ready?: Promise<void>): Answer =>
  async (seen) => {
    if (seen.method === "GET") return prefillOk(seen);
    await ready;
    const kv_transfer_params = { ...params, ...own() };
    sendJson(seen.response, { id: "x", choices: [{ text: "a" }], output: [], kv_transfer_params });
  };
const paramsOf = (instance: FakeUpstream, at: number) =>
  instance.seen[at]?.json.kv_transfer_params as Record<string, unknown>;
const idsOf = (instance: FakeUpstream) =>
  instance.seen.map(({ headers }) => String(headers["x-request-id"]));
const push = { mode: "push" } as const;
const MINE = { headers: { "x-request-id": "mine" } };
const UNIQUE = /^mine-[0-9a-f-]{36}$/;

test("sends both legs at once, with the configured coordinates, before the prefill instance has answered", async () => {
  let go = () => {};
  const ready = new Promise<void>((resolve) => {
    go = resolve;
  });
  const p = await upstream(prefillOf(() => ({}), ready));
  const kv = { engineId: "e", host: "kv-host", port: 5700, tpSize: 4, dcpSize: 4 };
  const { ask, d, proxy } = await runPair({}, { ...push, prefillers: [{ url: p.url, kv }] });
  const asked = ask();
  const decode = await d.request(0);
  expect(decode.json.kv_transfer_params).toMatchObject({
    do_remote_prefill: true,
    remote_engine_id: "e",
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
  const { ask, p, d } = await runFleet([prefillOf()], [decodeOk], push);
  await Promise.all([ask({}, MINE), ask({}, MINE)]);
  await p[0].request(1);
  const ids = idsOf(p[0]).sort();
  expect(ids).toEqual(idsOf(d[0]).sort());
  expect(new Set(ids).size).toBe(2);
  for (const id of ids) expect(id).toMatch(UNIQUE);
});

test("coordinates are learned from the first answer, and again after a restart of the engine", async () => {
  let engine = "first";
  const { ask, d } = await runPair({ p: prefillOf(() => ({ remote_engine_id: engine })) }, push);
  await ask();
  // One after the other: the decode leg has what the prefill leg answered.
  expect(paramsOf(d, 0)).toMatchObject({ remote_engine_id: "first", remote_block_ids: [[1, 2]] });
  await ask();
  expect(paramsOf(d, 1)).toMatchObject({
    remote_engine_id: "first",
    remote_host: "10.0.0.1",
    remote_port: 5600,
    tp_size: 2,
    // D plans for P's share of the prompt before P has answered.
    dcp_size: 2,
  });
  expect(paramsOf(d, 1)).not.toHaveProperty("remote_block_ids");
  engine = "second";
  await ask();
  await ask();
  expect(paramsOf(d, d.seen.length - 1)).toMatchObject({ remote_engine_id: "second" });
});

test("a prefill answer without KV while both legs are under way is an error, or decode computes by policy", async () => {
  const noKv = sends(200, { id: "x", choices: [{ text: "a" }] });
  // A leg with the coordinates of a prefill engine waits for its blocks.
  const waits: Answer = (seen) =>
    seen.json.kv_transfer_params === undefined ? decodeOk(seen) : undefined;
  const strict = await runFleet([noKv], [waits], push);
  expect((await strict.ask()).status).toBe(502);
  const policy = { missingKv: "decode-computes" } as const;
  const lenient = await runFleet([noKv], [waits], { ...push, policy });
  expect(await (await lenient.ask()).json()).toEqual(COMPLETION);
});

test("auto: the first answer of each prefill instance decides between pull and push", async () => {
  const pull = () => ({ remote_block_ids: [[7]], transfer_mode: "pull" });
  const [pushing, pulling] = await upstreams(prefillOf(), prefillOf(pull));
  const prefillers = [pushing.url, pulling.url];
  const { ask, d, proxy } = await runPair({}, { mode: "auto", prefillers });
  for (let at = 0; at < 4; at += 1) expect((await ask({}, MINE)).status).toBe(200);
  expect(proxy.status().flow).toBe("auto");
  const blocks = [0, 1, 2, 3].map((at) => paramsOf(d, at).remote_block_ids);
  expect(blocks).toEqual([[[1, 2]], [[7]], undefined, [[7]]]);
  const ids = idsOf(d);
  for (const id of ids.slice(0, 3)) expect(id).toMatch(UNIQUE);
  expect(ids[3]).toBe("mine");
  // Each got one call per request.
  expect([pushing.seen.length, pulling.seen.length]).toEqual([2, 2]);
  expect(proxy.status().prefillers.map(({ requests }) => requests)).toEqual([2, 2]);
});

test("a setting makes push legs sequential", async () => {
  const options = { ...push, pushLegs: "prefill-first" } as const;
  const { ask, d, proxy } = await runFleet([prefillOf()], [decodeOk], options);
  await ask();
  expect(paramsOf(d[0], 0)).toMatchObject({ remote_block_ids: [[1, 2]] });
  expect(proxy.status().flow).toBe("push, prefill first");
});

test("a prefill leg that is under way when its decode leg fails is aborted", async () => {
  let asked = 0;
  const works = prefillOf();
  const { ask, p } = await runFleet(
    [(seen) => (asked++ === 0 ? undefined : works(seen))],
    [sends(500)],
    push,
  );
  expect((await ask()).status).toBe(500);
  await (await p[0].request(0)).dropped;
});

test("the answer carries the client's id, whatever ids the legs had", async () => {
  const d: Answer = (seen) => {
    const { response, headers, json } = seen;
    response.setHeader("x-request-id", String(headers["x-request-id"]));
    return json.stream === true ? sendStream(response, STREAM) : decodeOk(seen);
  };
  for (const mode of ["push", "auto"] as const) {
    const running = await runPair({ p: prefillOf(), d }, { mode });
    for (const stream of [false, true]) {
      const response = await running.ask({ stream }, MINE);
      expect([response.status, response.headers.get("x-request-id")]).toEqual([200, "mine"]);
      await response.text();
    }
    for (const id of idsOf(running.d)) expect(id).toMatch(/^mine-/);
  }
});

test("instances with coordinates are added and removed at run time", async () => {
  const q = await upstream(prefillOf(() => ({ remote_engine_id: "q" })));
  const { ask, adminUrl, p, d } = await runFleet([prefillOf()], [decodeOk], push);
  const change = async (what: string, instance: unknown) =>
    (await post(`${adminUrl}/instances/${what}`, { role: "prefill", instance })).status;
  const kv = { engineId: "q", port: 5800, ppSize: 2 };
  expect(await change("add", { url: q.url, kv })).toBe(200);
  expect(await change("remove", p[0].url)).toBe(200);
  await ask();
  expect(paramsOf(d[0], 0)).toMatchObject({
    remote_engine_id: "q",
    remote_port: 5800,
    remote_host: "127.0.0.1",
    // D waits for the notifications of each stage.
    pp_size: 2,
  });
});

test("in push, two responses with one request_id of the client's have ids of their own, as the engines match the legs by them", async () => {
  for (const mode of ["push", "auto"] as const) {
    const { url, p, d } = await runPair(
      { p: prefillOf(), d: sends(200, { id: "resp_x", output: [], status: "completed" }) },
      { mode },
    );
    // The first request learns P's engine one leg after the other; the second one sends both legs
    // at once.
    for (let at = 0; at < 2; at += 1) {
      const body = { input: "a", request_id: "own" };
      expect((await post(`${url}/v1/responses`, body)).status).toBe(200);
      await p.request(at);
    }
    const ids = ({ seen }: FakeUpstream) => seen.map(({ json }) => json.request_id);
    expect(new Set(ids(p)).size).toBe(2);
    expect(ids(p)).not.toContain("own");
    expect(ids(d)).toEqual(ids(p));
  }
});
