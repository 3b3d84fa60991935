import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { get as httpsGet } from "node:https";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import type { DiscoveredInstances } from "@kv/fleet";
import { selfSigned } from "@kv/http";
import { type LogFields, silentLog } from "@kv/interface";
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
import { startSideChannel } from "@kv/testing/http/side-channel";
import { manualClock } from "@kv/testing/manual-clock";
import { afterEach, expect, test } from "vitest";
import { errorOf, post, type RunningProxy, runProxy, upstream } from "../support/set-up.js";
import { vllmPair } from "../support/vllm-stub.js";

const HEADER = "x-prefiller-host-port";
const LOOPBACK = { allow: ["127.0.0.0/8"] };

const open: { close(): Promise<void> }[] = [];
afterEach(async () => {
  for (const one of open.splice(0)) await one.close();
});

const hostOf = ({ url }: { readonly url: string }) => new URL(url).host;
const ask = (
  url: string,
  named: string | undefined,
  body: object = { prompt: "a" },
  init: RequestInit = {},
) =>
  post(`${url}/v1/completions`, body, {
    ...init,
    headers: { ...(init.headers as object), ...(named === undefined ? {} : { [HEADER]: named }) },
  });
const requestsOf = ({ seen }: FakeUpstream) => seen.map(({ path }) => path);
/** An instance that tells its version, as pairing reads it. */
const versioned =
  (version: string, answer: Answer): Answer =>
  (seen) => {
    if (seen.method === "POST") return answer(seen);
    return sendJson(seen.response, { version }, seen.path === "/version" ? 200 : 404);
  };
const metricsOf = async ({ adminUrl }: RunningProxy) => (await fetch(`${adminUrl}/metrics`)).text();

test("a request goes to the prefill instance that its header names, then to the local decode instance with the KV", async () => {
  const [p, other, d] = [
    await upstream(prefillOk),
    await upstream(prefillOk),
    await upstream(decodeOk),
  ];
  const { url, proxy } = await runProxy({ decoders: [d.url], sidecar: LOOPBACK });
  expect(proxy.status()).toMatchObject({ flow: "sidecar, pull", prefillers: [] });
  expect(await (await ask(url, hostOf(p))).json()).toEqual(COMPLETION);
  expect([p, other, d].map(({ seen }) => seen.length)).toEqual([1, 0, 1]);
  expect(d.seen[0]?.body).toContain(KV_PARAMS_TEXT);
  // The header ends here: an instance that is a sidecar itself would go on to a third one.
  expect([p, d].map(({ seen }) => seen[0]?.headers[HEADER])).toEqual([undefined, undefined]);
  expect(proxy.status().prefillers).toMatchObject([{ url: p.url, requests: 1, in_flight: 0 }]);
});

test.each([
  { prompt: ["a", "b"], n: 2, seed: 1 },
  { prompt: "a", use_beam_search: true },
])(
  "without the header, the decode instance answers %j alone, and gets it unsplit",
  async (body) => {
    const d = await upstream(decodeOk);
    const running = await runProxy({ decoders: [d.url], sidecar: LOOPBACK, admin: { port: 0 } });
    for (const named of [undefined, "", " "])
      expect((await ask(running.url, named, body)).status).toBe(200);
    expect(d.seen.map(({ json }) => json)).toEqual([body, body, body]);
    expect(await metricsOf(running)).toContain(
      'kv_proxy_disaggregation_total{legs="1",reason="no-prefiller"} 3',
    );
  },
);

test("a request with kv_transfer_params is refused, also without the header", async () => {
  const d = await upstream(decodeOk);
  const { url } = await runProxy({ decoders: [d.url], sidecar: LOOPBACK });
  const body = { prompt: "a", kv_transfer_params: { do_remote_prefill: true } };
  expect((await ask(url, undefined, body)).status).toBe(400);
  expect(d.seen).toEqual([]);
});

test("the log has no text of bodies, of an instance's answers and no credentials", async () => {
  const lines: unknown[] = [];
  const keep = (event: string, fields?: LogFields) => void lines.push(event, fields);
  const log = { debug: keep, info: keep, warn: keep, error: keep };
  const repeats: Answer = ({ response, body }) =>
    sendJson(response, { error: { message: body } }, 500);
  const unreadable: Answer = ({ response, body }) => void response.end(`{"choices":${body}`);
  const [p, broken, odd] = [
    await upstream(prefillOk),
    await upstream(repeats),
    await upstream(unreadable),
  ];
  const d = await upstream(decodeOk);
  const sidecar = { allow: ["127.0.0.1/32"] };
  const { url } = await runProxy({ decoders: [d.url], sidecar, log });
  const failing = await runProxy({ decoders: [broken.url], sidecar, log });
  const headers = { authorization: "Bearer secret", cookie: "secret", "x-api-key": "secret" };
  const prompt = { prompt: "a secret" };
  await (await ask(failing.url, hostOf(p), prompt, { headers })).text();
  for (const named of [
    hostOf(p),
    hostOf(broken),
    hostOf(odd),
    new URL(await deadUrl()).host,
    "10.0.0.1:80",
    undefined,
  ])
    await (await ask(url, named, prompt, { headers })).text();
  for (const text of ['{"prompt": my secret prompt}', '{"prompt":"a","stream":"secret"}'])
    await post(`${url}/v1/completions`, text, { headers });
  const text = JSON.stringify(lines);
  for (const event of ["request-done", "request-refused", "prefiller-refused", "leg-failed"])
    expect(text).toContain(`"${event}"`);
  expect(text).not.toContain("secret");
});

test("a prefill instance that is not allowed gets nothing, and the client 403; the log names it", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const logged: (LogFields & { event: string })[] = [];
  const log = {
    ...silentLog,
    warn: (event: string, fields = {}) => void logged.push({ event, ...fields }),
  };
  const allow = [`127.0.0.1:${Number(new URL(p.url).port) + 1}`, "10.0.0.0/8", "p.example.org"];
  const running = await runProxy({
    decoders: [d.url],
    sidecar: { allow },
    log,
    admin: { port: 0 },
  });
  const others = [
    hostOf(p),
    `10.1.2.3:8000,${hostOf(p)}`,
    "[::ffff:127.0.0.1]:80",
    "q.example.org:80",
  ];
  for (const named of others) {
    const answer = await ask(running.url, named);
    expect(answer.status).toBe(403);
    const text = await answer.text();
    expect(text).toContain("KV_REQUEST_INVALID");
    expect(text).not.toContain(hostOf(p));
  }
  // In the decimal and the hexadecimal writing of 127.0.0.1 too.
  for (const host of ["2130706433", "0x7f000001"])
    expect((await ask(running.url, `${host}:${new URL(p.url).port}`)).status).toBe(403);
  expect([p.seen, d.seen]).toEqual([[], []]);
  expect(running.proxy.status().prefillers).toEqual([]);
  const refused = logged.filter(({ event }) => event === "prefiller-refused");
  expect(refused[0]).toMatchObject({ prefiller: hostOf(p), requestId: expect.any(String) });
  expect(await metricsOf(running)).toContain('kv_proxy_refused_total{limit="sidecar.allow"} 6');
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
  const d = await upstream(decodeOk);
  const { url } = await runProxy({ decoders: [d.url], sidecar: { allow: ["*"] } });
  expect(await errorOf(await ask(url, named))).toMatchObject({
    status: 400,
    code: "KV_REQUEST_INVALID",
  });
  expect(d.seen).toEqual([]);
});

test("of several prefill instances, the first serves; the next one where it cannot be reached or fails", async () => {
  const [first, second, d] = [
    await upstream(prefillOk),
    await upstream(prefillOk),
    await upstream(decodeOk),
  ];
  const failing = await upstream(({ response }) => sendJson(response, { error: {} }, 500));
  const dead = await deadUrl();
  const { url } = await runProxy({ decoders: [d.url], sidecar: LOOPBACK });
  const both = `${hostOf(first)}, ${hostOf(second)}`;
  for (let at = 0; at < 3; at += 1) expect((await ask(url, both)).status).toBe(200);
  expect([first.seen.length, second.seen.length]).toEqual([3, 0]);
  expect((await ask(url, `${hostOf({ url: dead })},${hostOf(second)}`)).status).toBe(200);
  expect((await ask(url, `${hostOf(failing)},${hostOf(second)}`)).status).toBe(200);
  expect([first.seen.length, second.seen.length, failing.seen.length]).toEqual([3, 2, 1]);
  // An instance that only other requests name does not serve this one.
  expect((await ask(url, hostOf({ url: dead }))).status).toBe(502);
  expect([first.seen.length, second.seen.length]).toEqual([3, 2]);
});

test("push: both legs carry one id, and from the second request on leave at once", async () => {
  const p = await upstream(({ response }) => {
    const kv_transfer_params = { ...JSON.parse(KV_PARAMS_TEXT), transfer_mode: "push" };
    sendJson(response, { ...COMPLETION, kv_transfer_params });
  });
  const d = await upstream(decodeOk);
  const { url } = await runProxy({ mode: "push", decoders: [d.url], sidecar: LOOPBACK });
  for (let at = 0; at < 2; at += 1) expect((await ask(url, hostOf(p))).status).toBe(200);
  await p.request(1);
  const ids = ({ seen }: FakeUpstream) => seen.map(({ headers }) => headers["x-request-id"]);
  expect(ids(p)).toEqual(ids(d));
  expect(d.seen[0]?.json.kv_transfer_params).toHaveProperty("remote_block_ids");
  expect(d.seen[1]?.json.kv_transfer_params).not.toHaveProperty("remote_block_ids");
});

test("P's blocks are freed when a client leaves between the legs", async () => {
  const vllm = vllmPair();
  const p = await upstream(versioned("0.33.0", vllm.prefill));
  const d = await upstream(vllm.decode);
  // The engine that the side channel names is not the one that answers, so the sidecar reads it
  // again between the legs.
  const side = await startSideChannel(() => ({ engineId: "before", vllmVersion: "0.33.0" }));
  open.push(side);
  const { url, proxy } = await runProxy({
    decoders: [d.url],
    sidecar: { ...LOOPBACK, kv: { port: side.port } },
    pairing: { mode: "lenient" },
  });
  expect((await ask(url, hostOf(p), { prompt: "a", temperature: -1 })).status).toBe(400);
  await expect.poll(() => proxy.status().prefillers[0]?.pairing?.engine_id).toBe("before");
  await side.close();
  const mute = createServer();
  const isRead = new Promise((resolve) => mute.once("connection", resolve));
  await new Promise<void>((resolve) => mute.listen(side.port, "127.0.0.1", resolve));
  open.push({ close: async () => void mute.close() });
  const client = new AbortController();
  const asked = ask(url, hostOf(p), { prompt: "a" }, { signal: client.signal });
  await isRead;
  expect(vllm.held.size).toBe(1);
  client.abort();
  await expect(asked).rejects.toThrow();
  await expect.poll(() => vllm.held.size, { timeout: 10_000 }).toBe(0);
  expect(vllm.counts).toEqual({ computedAtDecode: 0, garbage: 0, unknownFrees: 0 });
});

test("a prefill instance that does not fit is passed over for the next one named, and refused with the reason where there is none", async () => {
  const engine = async (engineId: string, vllmVersion: string) => {
    const side = await startSideChannel(() => ({ engineId, vllmVersion }));
    open.push(side);
    return side;
  };
  const other = await engine("p-other", "0.32.0");
  const own = await engine("d", "0.33.0");
  const answered = {
    ...JSON.parse(KV_PARAMS_TEXT),
    remote_engine_id: "p-other",
    remote_port: other.port,
  };
  const misfit = await upstream(
    versioned("0.32.0", ({ response }) =>
      sendJson(response, { ...COMPLETION, kv_transfer_params: answered }),
    ),
  );
  const fit = await upstream(versioned("0.33.0", prefillOk));
  const d = await upstream(versioned("0.33.0", decodeOk));
  let found = (_instances: DiscoveredInstances) => {};
  const { url, proxy } = await runProxy({
    decoders: [{ url: d.url, kv: { host: "127.0.0.1", port: own.port } }],
    sidecar: { allow: [hostOf(fit)] },
    pairing: { mode: "lenient" },
    createDiscovery: () => ({
      name: "by hand",
      watch(onChange) {
        found = onChange;
        return { close() {} };
      },
    }),
  });
  found({
    prefillers: [{ url: misfit.url, kv: { host: "127.0.0.1", port: other.port } }],
    decoders: [],
  });
  await ask(url, hostOf(misfit));
  await expect.poll(() => proxy.status().prefillers[0]?.pairing?.state).toBe("unpaired");
  const before = requestsOf(misfit).filter((path) => path === "/v1/completions").length;
  expect((await ask(url, `${hostOf(misfit)},${hostOf(fit)}`)).status).toBe(200);
  const refused = await errorOf(await ask(url, hostOf(misfit)));
  expect(refused).toMatchObject({ status: 503, code: "KV_PROXY_NO_INSTANCE" });
  expect(refused.message).toContain("vllm_version");
  expect(requestsOf(misfit).filter((path) => path === "/v1/completions")).toHaveLength(before);
});

test("prefill instances of a discovery are allowed while it finds them", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  let found = (_instances: DiscoveredInstances) => {};
  let isClosed = false;
  const { url, proxy } = await runProxy({
    decoders: [d.url],
    sidecar: {},
    createDiscovery: () => ({
      name: "by hand",
      watch(onChange) {
        found = onChange;
        return {
          close() {
            isClosed = true;
          },
        };
      },
    }),
  });
  expect((await ask(url, hostOf(p))).status).toBe(403);
  // The decode instances of a fleet are not those of this sidecar.
  found({
    prefillers: [{ url: p.url, label: "v33" }],
    decoders: [{ url: "http://10.0.0.9:8000" }],
  });
  expect((await ask(url, hostOf(p))).status).toBe(200);
  expect(proxy.status().decoders.map((one) => one.url)).toEqual([d.url]);
  found({ prefillers: [], decoders: [] });
  expect((await ask(url, hostOf(p))).status).toBe(403);
  await proxy.close();
  expect(isClosed).toBe(true);
});

test("with TLS, the instances of a discovery and of the header are reached by HTTPS", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const { url, proxy } = await runProxy({
    decoders: [d.url],
    sidecar: { prefillTls: true },
    createDiscovery: () => ({
      name: "by hand",
      watch(onChange) {
        onChange({ prefillers: [{ url: p.url }], decoders: [] });
        return { close() {} };
      },
    }),
  });
  // The fake instance has no TLS.
  expect((await ask(url, hostOf(p))).status).toBe(502);
  expect(proxy.status().prefillers.map((one) => one.url)).toEqual([
    p.url.replace("http:", "https:"),
  ]);
});

test("instances that no request names for ten minutes are forgotten, and one that is drained by hand stays so", async () => {
  const clock = manualClock();
  const [p, q, d] = [
    await upstream(prefillOk),
    await upstream(prefillOk),
    await upstream(decodeOk),
  ];
  const { url, proxy } = await runProxy({ decoders: [d.url], sidecar: LOOPBACK, clock });
  await ask(url, hostOf(p));
  clock.advance(600_000);
  await ask(url, hostOf(q));
  await expect.poll(() => proxy.status().prefillers.map((one) => one.url)).toEqual([q.url]);
  expect((await ask(url, hostOf(p))).status).toBe(200);
  await proxy.instances.prefill.drain({ url: p.url });
  expect((await ask(url, hostOf(p))).status).toBe(503);
});

test("health needs the decode instance only; metrics and further routes are the decode instance's", async () => {
  const d = await upstream(({ path, response }) => {
    if (path === "/metrics?x=1") response.end("vllm:num_requests_running 0\n");
    else sendJson(response, { path });
  });
  const { url } = await runProxy({
    decoders: [d.url],
    sidecar: LOOPBACK,
    health: { intervalMs: 1000 },
  });
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
  const [p, d] = [await upstream(() => {}), await upstream(() => {})];
  /** Waits at the prefill instance for `ms`, or without one at the decode instance, and leaves. */
  const leave = async (url: string, user: string, ms: number, named: string | undefined) => {
    const at = named === undefined ? d : p;
    const client = new AbortController();
    const before = at.seen.length;
    const init = { signal: client.signal, headers: { "x-user": user } };
    const asked = ask(url, named, undefined, init);
    const { dropped } = await at.request(before);
    await sleep(ms);
    client.abort();
    await expect(asked).rejects.toThrow();
    await dropped;
  };
  /** 400 for a client that may send requests: this one is malformed. */
  const status = async (url: string, user: string) => {
    const headers = { "x-user": user, "x-request-id": "," };
    return (await ask(url, hostOf(p), undefined, { headers })).status;
  };
  const shared = await runProxy({ decoders: [d.url], sidecar: LOOPBACK });
  await leave(shared.url, "one", 150, hostOf(p));
  expect(await status(shared.url, "one")).toBe(400);
  const limits = { abandonedPrefillMs: 100, clientHeader: "x-user" };
  const apart = await runProxy({ decoders: [d.url], sidecar: LOOPBACK, limits });
  // No prefill instance has worked for it.
  await leave(apart.url, "one", 150, undefined);
  expect(await status(apart.url, "one")).toBe(400);
  await leave(apart.url, "one", 150, hostOf(p));
  await expect.poll(() => status(apart.url, "one")).toBe(429);
  expect(await status(apart.url, "two")).toBe(400);
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
  const folder = mkdtempSync(join(tmpdir(), "kv-proxy-tls-"));
  open.push({ close: async () => rmSync(folder, { recursive: true }) });
  const [certFile, keyFile] = [join(folder, "tls.crt"), join(folder, "tls.key")];
  const first = await selfSigned("test", Date.now());
  const second = await selfSigned("test", Date.now());
  const write = (pair: typeof first) => {
    writeFileSync(certFile, pair.certificate);
    writeFileSync(keyFile, pair.privateKey);
  };
  write(first);
  const clock = manualClock();
  const d = await upstream(decodeOk);
  const { url } = await runProxy({
    decoders: [d.url],
    sidecar: { ...LOOPBACK, tls: { certFile, keyFile } },
    clock,
  });
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
  const d = await upstream(decodeOk);
  const { url } = await runProxy({
    decoders: [d.url],
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
