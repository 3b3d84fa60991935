import { once } from "node:events";
import { writeFileSync } from "node:fs";
import { get as httpsGet } from "node:https";
import { connect, createServer } from "node:net";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { selfSigned } from "@kv/http";
import {
  type Answer,
  COMPLETION,
  deadUrl,
  decodeOk,
  type FakeUpstream,
  KV_PARAMS_TEXT,
  prefillOk,
  sendJson,
} from "@kv/testing/http/fake-upstream";
import { listening } from "@kv/testing/http/listening";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { manualClock } from "@kv/testing/manual-clock";
import { recordedLog } from "@kv/testing/recorded-log";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { discoveryByHand } from "../support/discovery-by-hand.js";
import { legsAt } from "../support/releases.js";
import { errorOf, post, runProxy, sends, upstream, upstreams } from "../support/set-up.js";
import { vllmPair } from "../support/vllm-stub.js";

const HEADER = "x-prefiller-host-port";
const LOOPBACK = { allow: ["127.0.0.0/8"] };

const hostOf = ({ url }: { readonly url: string }) => new URL(url).host;
/** A sidecar beside a decode instance. `ask` names prefill instances in the header. */
async function runSidecar(answer: Answer = decodeOk, options: ProxyOptions = {}) {
  const d = await upstream(answer);
  const running = await runProxy({ decoders: [d.url], sidecar: LOOPBACK, ...options });
  const ask = (named?: string, body: object | string = {}, init: RequestInit = {}) =>
    running.ask(body, {
      ...init,
      headers: { ...(init.headers as object), ...(named !== undefined && { [HEADER]: named }) },
    });
  const statusOf = async (...asked: Parameters<typeof ask>) => (await ask(...asked)).status;
  return { ...running, d, ask, statusOf };
}
/** The side channel of an engine. */
async function engine(engineId: string, vllmVersion: string) {
  const side = await startSideChannel(() => ({ engineId, vllmVersion }));
  onTestFinished(side.close);
  return side;
}
/** An instance that tells its version, as pairing reads it. */
const versioned =
  (version: string, answer: Answer): Answer =>
  (seen) => {
    if (seen.method === "POST") return answer(seen);
    return sendJson(seen.response, { version }, seen.path === "/version" ? 200 : 404);
  };

test("a request goes to the prefill instance that its header names, then to the local decode instance with the KV", async () => {
  const [p, other] = await upstreams(prefillOk, prefillOk);
  const { ask, d, proxy } = await runSidecar();
  expect(proxy.status()).toMatchObject({ flow: "sidecar, pull", prefillers: [] });
  expect(await (await ask(hostOf(p))).json()).toEqual(COMPLETION);
  expect([p, other, d].map(({ seen }) => seen.length)).toEqual([1, 0, 1]);
  expect(d.seen[0]?.body).toContain(KV_PARAMS_TEXT);
  // The header ends here: an instance that is a sidecar itself would go on to a third one.
  expect([p, d].map(({ seen }) => seen[0]?.headers[HEADER])).toEqual([undefined, undefined]);
  expect(proxy.status().prefillers).toMatchObject([{ url: p.url, requests: 1, in_flight: 0 }]);
});

const SOURCE_HEADER = "x-kv-cache-source-host-port";
const sourceIn = ({ json }: { readonly json: unknown }) =>
  (json as { kv_transfer_params?: { remote_kv_source?: { kv_request_id: string } } })
    .kv_transfer_params?.remote_kv_source;

test("F8: P takes cached KV from the instance of llm-d's header, D alone too; each leg under an id of its own", async () => {
  const p = await upstream(prefillOk);
  const sidecar = { ...LOOPBACK, p2pPull: true, ranks: { firstPort: 9000, count: 2 } };
  const { statusOf, d } = await runSidecar(decodeOk, { sidecar });
  const headers = { [SOURCE_HEADER]: "127.0.0.1:9001" };
  expect(await statusOf(hostOf(p), { n: 2 }, { headers })).toBe(200);
  expect(await statusOf(undefined, {}, { headers })).toBe(200);
  const [first, second, ...more] = p.seen.map(sourceIn);
  const [withKv, withKvToo, alone] = d.seen.map(sourceIn);
  expect([more, withKv, withKvToo]).toEqual([[], undefined, undefined]);
  const source = {
    kv_request_id: expect.stringMatching(/^[0-9a-f-]{36}$/),
    remote_host: "127.0.0.1",
    remote_port: 7778,
  };
  expect([first, second, alone]).toEqual([source, source, source]);
  const ids = [first, second, alone].map((one) => one?.kv_request_id);
  expect(new Set(ids).size).toBe(3);
  // What makes P keep the KV is there as without.
  expect(p.seen[0]?.json).toMatchObject({ kv_transfer_params: { do_remote_decode: true } });
  expect([...p.seen, ...d.seen].map((one) => one.headers[SOURCE_HEADER])).toEqual(
    Array(5).fill(undefined),
  );
});

test("the header may name a pool that the settings name, at the pool's own port", async () => {
  const p = await upstream(prefillOk);
  const sidecar = { ...LOOPBACK, p2pPull: true, kvPools: ["10.0.0.9:5710"] };
  const { statusOf } = await runSidecar(decodeOk, { sidecar });
  for (const source of ["10.0.0.9:5710", "10.0.0.9:5711"])
    expect(await statusOf(hostOf(p), {}, { headers: { [SOURCE_HEADER]: source } })).toBe(200);
  expect(p.seen.map(sourceIn)).toMatchObject([
    { remote_host: "10.0.0.9", remote_port: 5710 },
    undefined,
  ]);
});

test("F8: a source that cannot be used is left out, with its reason in the log", async () => {
  const p = await upstream(prefillOk);
  const { log, logged } = recordedLog();
  const on = await runSidecar(decodeOk, { sidecar: { ...LOOPBACK, p2pPull: true }, log });
  const off = await runSidecar(decodeOk, { log });
  for (const [{ statusOf }, source, named] of [
    [on, "10.0.0.1:8000", hostOf(p)],
    [on, "127.0.0.1", hostOf(p)],
    [on, "user@127.0.0.1:80", hostOf(p)],
    [off, "127.0.0.1:1", hostOf(p)],
    [off, "127.0.0.1:1", hostOf(p)],
    // Nobody takes KV from itself.
    [on, hostOf(p), hostOf(p)],
    [on, hostOf(on), undefined],
  ] as const)
    expect(await statusOf(named, {}, { headers: { [SOURCE_HEADER]: source } })).toBe(200);
  const legs = [p, on.d, off.d].flatMap(({ seen }) => seen);
  expect(legs.map(sourceIn)).toEqual(Array(13).fill(undefined));
  const notHostPort = "it is not host:port";
  expect(logged("kv-source-ignored").map(({ why }) => why)).toEqual([
    "it is not allowed here",
    notHostPort,
    notHostPort,
    "--enable-p2p-pull is not given",
  ]);
});

test.each([
  { prompt: ["a", "b"], n: 2, seed: 1 },
  { prompt: "a", use_beam_search: true },
])(
  "without the header, the decode instance answers %j alone, and gets it unsplit",
  async (body) => {
    const { statusOf, d, metrics } = await runSidecar();
    for (const named of [undefined, "", " "]) expect(await statusOf(named, body)).toBe(200);
    expect(d.seen.map(({ json }) => json)).toEqual([body, body, body]);
    expect(await metrics()).toContain(
      'kv_proxy_disaggregation_total{legs="1",reason="no-prefiller"} 3',
    );
  },
);

test("the log has no text of bodies, of an instance's answers and no credentials", async () => {
  const { log, events } = recordedLog();
  const repeats: Answer = ({ response, body }) =>
    sendJson(response, { error: { message: body } }, 500);
  const unreadable: Answer = ({ response, body }) => void response.end(`{"choices":${body}`);
  const [p, broken, odd] = await upstreams(prefillOk, repeats, unreadable);
  const options = { sidecar: { allow: ["127.0.0.1/32"] }, log };
  const { ask } = await runSidecar(decodeOk, options);
  const failing = await runSidecar(repeats, options);
  const headers = { authorization: "Bearer secret", cookie: "secret", "x-api-key": "secret" };
  const prompt = { prompt: "a secret" };
  await (await failing.ask(hostOf(p), prompt, { headers })).text();
  const named = [p, broken, odd, { url: await deadUrl() }, { url: "http://10.0.0.1:81" }];
  for (const one of [...named.map(hostOf), undefined])
    await (await ask(one, prompt, { headers })).text();
  for (const text of ['{"prompt": my secret prompt}', '{"prompt":"a","stream":"secret"}'])
    await ask(undefined, text, { headers });
  const text = JSON.stringify(events);
  for (const event of ["request-done", "request-refused", "prefiller-refused", "leg-failed"])
    expect(text).toContain(`"${event}"`);
  expect(text).not.toContain("secret");
});

test("a prefill instance that is not allowed gets nothing, and the client 403; the log names it", async () => {
  const p = await upstream(prefillOk);
  const { log, logged } = recordedLog();
  const allow = [`127.0.0.1:${Number(new URL(p.url).port) + 1}`, "10.0.0.0/8", "p.example.org"];
  const { ask, d, metrics, proxy } = await runSidecar(decodeOk, { sidecar: { allow }, log });
  for (const named of [
    hostOf(p),
    `10.1.2.3:8000,${hostOf(p)}`,
    "[::ffff:127.0.0.1]:80",
    "q.example.org:80",
    // The decimal and the hexadecimal writing of 127.0.0.1.
    hostOf(p).replace("127.0.0.1", "2130706433"),
    hostOf(p).replace("127.0.0.1", "0x7f000001"),
  ]) {
    const error = await errorOf(await ask(named));
    expect(error).toMatchObject({ status: 403, code: "KV_REQUEST_INVALID" });
    expect(JSON.stringify(error)).not.toContain(hostOf(p));
  }
  expect([p.seen, d.seen]).toEqual([[], []]);
  expect(proxy.status().prefillers).toEqual([]);
  const line = { prefiller: hostOf(p), requestId: expect.any(String) };
  expect(logged("prefiller-refused")[0]).toMatchObject(line);
  expect(await metrics()).toContain('kv_proxy_refused_total{limit="sidecar.allow"} 6');
});

test.each([
  "10.0.0.1",
  "http://10.0.0.1:8000",
  "10.0.0.1:8000/path",
  "10.0.0.1:99999",
  "user@10.0.0.1:8000",
  "10.0.0.1:8000,",
  "fd00::1:8000",
])("the header %s is refused with 400", async (named) => {
  const { ask, d } = await runSidecar(decodeOk, { sidecar: { allow: ["*"] } });
  expect(await errorOf(await ask(named))).toMatchObject({
    status: 400,
    code: "KV_REQUEST_INVALID",
  });
  expect(d.seen).toEqual([]);
});

test("of several prefill instances, the first serves; the next one where it cannot be reached or fails", async () => {
  const [first, second, failing] = await upstreams(prefillOk, prefillOk, sends(500));
  const dead = hostOf({ url: await deadUrl() });
  const { statusOf } = await runSidecar();
  const legs = () => [first, second, failing].map(legsAt);
  const both = `${hostOf(first)}, ${hostOf(second)}`;
  for (let at = 0; at < 3; at += 1) expect(await statusOf(both)).toBe(200);
  expect(legs()).toEqual([3, 0, 0]);
  expect(await statusOf(`${dead},${hostOf(second)}`)).toBe(200);
  expect(await statusOf(`${hostOf(failing)},${hostOf(second)}`)).toBe(200);
  // An instance that only other requests name does not serve this one.
  expect(await statusOf(dead)).toBe(502);
  expect(legs()).toEqual([3, 2, 1]);
});

test("push: both legs carry one id, and from the second request on leave at once", async () => {
  const p = await upstream(({ response }) => {
    const kv_transfer_params = { ...JSON.parse(KV_PARAMS_TEXT), transfer_mode: "push" };
    sendJson(response, { ...COMPLETION, kv_transfer_params });
  });
  const { statusOf, d } = await runSidecar(decodeOk, { mode: "push" });
  for (let at = 0; at < 2; at += 1) expect(await statusOf(hostOf(p))).toBe(200);
  await p.request(1);
  const ids = ({ seen }: FakeUpstream) => seen.map(({ headers }) => headers["x-request-id"]);
  expect(ids(p)).toEqual(ids(d));
  expect(d.seen[0]?.json.kv_transfer_params).toHaveProperty("remote_block_ids");
  expect(d.seen[1]?.json.kv_transfer_params).not.toHaveProperty("remote_block_ids");
});

test("P's blocks are freed when a client leaves between the legs", async () => {
  const vllm = vllmPair();
  const p = await upstream(versioned("0.33.0", vllm.prefill));
  // The engine that the side channel names is not the one that answers, so the sidecar reads it
  // again between the legs.
  const side = await engine("before", "0.33.0");
  const { ask, statusOf, proxy } = await runSidecar(vllm.decode, {
    sidecar: { ...LOOPBACK, kv: { port: side.port } },
    pairing: { mode: "lenient" },
  });
  expect(await statusOf(hostOf(p), { temperature: -1 })).toBe(400);
  await expect.poll(() => proxy.status().prefillers[0]?.pairing?.engine_id).toBe("before");
  await side.close();
  const mute = createServer();
  const isRead = once(mute, "connection");
  await listening(mute, side.port);
  onTestFinished(() => void mute.close());
  const client = new AbortController();
  const asked = ask(hostOf(p), {}, { signal: client.signal });
  await isRead;
  expect(vllm.held.size).toBe(1);
  client.abort();
  await expect(asked).rejects.toThrow();
  await expect.poll(() => vllm.held.size, { timeout: 10_000 }).toBe(0);
  expect(vllm.counts).toEqual({ computedAtDecode: 0, garbage: 0, unknownFrees: 0 });
});

test("a prefill instance that does not fit is passed over for the next one named, and refused with the reason where there is none", async () => {
  const other = await engine("p-other", "0.32.0");
  const own = await engine("d", "0.33.0");
  const answered = {
    ...JSON.parse(KV_PARAMS_TEXT),
    remote_engine_id: "p-other",
    remote_port: other.port,
  };
  const [misfit, fit, d] = await upstreams(
    versioned("0.32.0", sends(200, { ...COMPLETION, kv_transfer_params: answered })),
    versioned("0.33.0", prefillOk),
    versioned("0.33.0", decodeOk),
  );
  const discovery = discoveryByHand();
  const { ask, statusOf, proxy } = await runSidecar(decodeOk, {
    decoders: [{ url: d.url, kv: { host: "127.0.0.1", port: own.port } }],
    sidecar: { allow: [hostOf(fit)] },
    pairing: { mode: "lenient" },
    createDiscovery: discovery.create,
  });
  discovery.found({
    prefillers: [{ url: misfit.url, kv: { host: "127.0.0.1", port: other.port } }],
    decoders: [],
  });
  await ask(hostOf(misfit));
  await expect.poll(() => proxy.status().prefillers[0]?.pairing?.state).toBe("unpaired");
  const legs = () => misfit.seen.filter(({ path }) => path === "/v1/completions").length;
  const before = legs();
  expect(await statusOf(`${hostOf(misfit)},${hostOf(fit)}`)).toBe(200);
  const refused = await errorOf(await ask(hostOf(misfit)));
  expect(refused).toMatchObject({ status: 503, code: "KV_PROXY_NO_INSTANCE" });
  expect(refused.message).toContain("vllm_version");
  expect(legs()).toBe(before);
});

test("prefill instances of a discovery are allowed while it finds them", async () => {
  const p = await upstream(prefillOk);
  const discovery = discoveryByHand();
  const options = { sidecar: {}, createDiscovery: discovery.create };
  const { statusOf, d, proxy } = await runSidecar(decodeOk, options);
  expect(await statusOf(hostOf(p))).toBe(403);
  // The decode instances of a fleet are not those of this sidecar.
  discovery.found({
    prefillers: [{ url: p.url, label: "v33" }],
    decoders: [{ url: "http://10.0.0.9:8000" }],
  });
  expect(await statusOf(hostOf(p))).toBe(200);
  expect(proxy.status().decoders.map((one) => one.url)).toEqual([d.url]);
  discovery.found({ prefillers: [], decoders: [] });
  expect(await statusOf(hostOf(p))).toBe(403);
  await proxy.close();
  expect(discovery.isClosed).toBe(true);
});

test("with TLS, the instances of a discovery and of the header are reached by HTTPS", async () => {
  const p = await upstream(prefillOk);
  const discovery = discoveryByHand();
  const options = { sidecar: { prefillTls: true }, createDiscovery: discovery.create };
  const { statusOf, proxy } = await runSidecar(decodeOk, options);
  discovery.found({ prefillers: [{ url: p.url }], decoders: [] });
  // The fake instance has no TLS.
  expect(await statusOf(hostOf(p))).toBe(502);
  expect(proxy.status().prefillers.map((one) => one.url)).toEqual([
    p.url.replace("http:", "https:"),
  ]);
});

test("instances that no request names for ten minutes are forgotten, and one that is drained by hand stays so", async () => {
  const clock = manualClock();
  const [p, q] = await upstreams(prefillOk, prefillOk);
  const { ask, statusOf, proxy } = await runSidecar(decodeOk, { clock });
  await ask(hostOf(p));
  clock.advance(600_000);
  await ask(hostOf(q));
  await expect.poll(() => proxy.status().prefillers.map((one) => one.url)).toEqual([q.url]);
  expect(await statusOf(hostOf(p))).toBe(200);
  await proxy.instances.prefill.drain({ url: p.url });
  expect(await statusOf(hostOf(p))).toBe(503);
});

test("health needs the decode instance only; metrics and further routes are the decode instance's", async () => {
  const { d, url } = await runSidecar(
    ({ path, response }) => {
      if (path === "/metrics?x=1") response.end("vllm:num_requests_running 0\n");
      else sendJson(response, { path });
    },
    { health: { intervalMs: 1000 } },
  );
  expect((await fetch(`${url}/health`)).status).toBe(200);
  expect(await (await fetch(`${url}/metrics?x=1`)).text()).toBe("vllm:num_requests_running 0\n");
  expect(await (await post(`${url}/tokenize`, { prompt: "a" })).json()).toEqual({
    path: "/tokenize",
  });
  expect(d.seen.at(-1)?.json).toEqual({ prompt: "a" });
  // Not everything that vLLM serves is for clients.
  for (const path of ["/reset_prefix_cache", "/inference/v1/generate"])
    expect((await post(url + path, {})).status).toBe(404);
});

test("R8: clients behind one gateway are not taken for one client, unless a header tells them apart, and only what a prefill instance worked counts", async () => {
  const p = await upstream(() => {});
  type Sidecar = Awaited<ReturnType<typeof runSidecar>>;
  /** Waits at the prefill instance, or without one at the decode instance, and leaves. */
  const leave = async ({ ask, d }: Sidecar, named: string | undefined) => {
    const at = named === undefined ? d : p;
    const client = new AbortController();
    const before = at.seen.length;
    const asked = ask(named, {}, { signal: client.signal, headers: { "x-user": "one" } });
    const { dropped } = await at.request(before);
    await sleep(150);
    client.abort();
    await expect(asked).rejects.toThrow();
    await dropped;
  };
  /** 400 for a client that may send requests: this one is malformed. */
  const status = ({ statusOf }: Sidecar, user: string) =>
    statusOf(hostOf(p), {}, { headers: { "x-user": user, "x-request-id": "," } });
  const shared = await runSidecar(() => {});
  await leave(shared, hostOf(p));
  expect(await status(shared, "one")).toBe(400);
  const limits = { abandonedPrefillMs: 100, clientHeader: "x-user" };
  const apart = await runSidecar(() => {}, { limits });
  // No prefill instance has worked for it.
  await leave(apart, undefined);
  expect(await status(apart, "one")).toBe(400);
  await leave(apart, hostOf(p));
  await expect.poll(() => status(apart, "one")).toBe(429);
  expect(await status(apart, "two")).toBe(400);
});

test.each([
  [{ sidecar: { allow: [] }, decoders: ["d:1"] }, "sidecar.allow is empty"],
  [{ sidecar: LOOPBACK, decoders: ["d:1", "d:2"] }, "one decode instance"],
  [{ sidecar: LOOPBACK, decoders: [] }, "one decode instance"],
  [{ sidecar: LOOPBACK, decoders: ["d:1"], prefillers: ["p:1"] }, "takes no prefillers"],
  [{ sidecar: { allow: ["10.0.0.0/33"] }, decoders: ["d:1"] }, "10.0.0.0/33"],
])("settings %j are refused", async (settings, message) => {
  await expect(runProxy(settings)).rejects.toThrow(message);
});

/** The status of a GET over TLS that trusts only `ca`; the code of the error where it fails. */
function getOverTls(url: string, ca: Buffer): Promise<number | string | undefined> {
  return new Promise((resolve) => {
    const sent = httpsGet(url, { ca, agent: false }, (answer) =>
      resolve(answer.resume().statusCode),
    );
    sent.once("error", (error: NodeJS.ErrnoException) => resolve(error.code));
  });
}

test("with TLS it serves its port by the certificate of its files, read again when they change, and no plain HTTP", async () => {
  const folder = scratchFolder(onTestFinished);
  const [certFile, keyFile] = [join(folder, "tls.crt"), join(folder, "tls.key")];
  const [first, second] = [
    await selfSigned("test", Date.now()),
    await selfSigned("test", Date.now()),
  ];
  const write = (pair: typeof first) => {
    writeFileSync(certFile, pair.certificate);
    writeFileSync(keyFile, pair.privateKey);
  };
  write(first);
  const clock = manualClock();
  const sidecar = { ...LOOPBACK, tls: { certFile, keyFile } };
  const { url } = await runSidecar(decodeOk, { sidecar, clock });
  expect(url).toMatch(/^https:/);
  expect(await getOverTls(`${url}/v1/models`, first.certificate)).toBe(200);
  expect(await getOverTls(`${url}/v1/models`, second.certificate)).toBe(
    "DEPTH_ZERO_SELF_SIGNED_CERT",
  );
  await expect(fetch(`${url.replace("https:", "http:")}/v1/models`)).rejects.toThrow();
  write(second);
  clock.advance(10_000);
  expect(await getOverTls(`${url}/v1/models`, second.certificate)).toBe(200);
});

test("with TLS, connections above the limit are refused, also those whose handshake does not begin", async () => {
  const { url } = await runSidecar(decodeOk, {
    sidecar: { ...LOOPBACK, tls: true },
    limits: { connections: 2, connectionsPerAddress: 2 },
  });
  const sockets = Array.from({ length: 8 }, () => connect(Number(new URL(url).port), "127.0.0.1"));
  let closed = 0;
  for (const socket of sockets)
    socket
      .on("error", () => {})
      .on("close", () => {
        closed += 1;
      });
  await expect.poll(() => closed).toBe(4);
  for (const socket of sockets) socket.destroy();
});
