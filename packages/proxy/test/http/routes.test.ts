import { DECODE_ROUTES, ENDPOINTS, REFUSED_ROUTES, SIDECAR_ROUTES } from "@kv/fleet/front-end";
import { decodeOk, prefillOk } from "@kv/testing/http/fake-upstream";
import { rawClient } from "@kv/testing/http/raw-client";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import {
  errorOf,
  post,
  type RunningProxy,
  runFleet,
  runPair,
  runProxy,
  sends,
  upstream,
  upstreams,
} from "../support/set-up.js";
import { VLLM_APIS } from "../support/vllm-apis.js";

const start = (options: ProxyOptions = {}) =>
  runPair(
    {
      d: (seen) => (seen.path.startsWith("/v1/models") ? models(seen) : decodeOk(seen)),
    },
    options,
  );
const models = sends(200, { object: "list", data: [{ id: "org/m", object: "model" }, null] });

test.each([
  ["GET", "/v1/chat/completions", "POST"],
  ["OPTIONS", "/v1/messages", "POST"],
  ["POST", "/v1/models", "GET"],
  ["DELETE", "/v1/models/m", "GET"],
  ["PUT", "/health", "GET"],
])("%s %s is answered with 405, and Allow names %s", async (method, path, allow) => {
  const { url } = await start();
  const response = await fetch(url + path, { method });
  expect([response.status, response.headers.get("allow")]).toEqual([405, allow]);
  expect(await errorOf(response)).toMatchObject({ type: "invalid_request_error" });
});

test("/v1/models/ID is the model of the list; another one is a 404", async () => {
  const { url, proxy } = await start();
  for (const path of ["org/m", "org%2Fm"]) {
    const response = await fetch(`${url}/v1/models/${path}`);
    expect([response.status, await response.json()]).toEqual([
      200,
      { id: "org/m", object: "model" },
    ]);
  }
  for (const path of ["other", "", "%zz", "../../metrics%00"])
    expect((await fetch(`${url}/v1/models/${path}`)).status, path).toBe(404);
  expect(proxy.status().decoders[0]).toMatchObject({ failures: 0 });
});

test("with cors.origins, pages of these origins may read answers and errors; of others they may not", async () => {
  const origin = "https://chat.example";
  const { url } = await start({ cors: { origins: [origin] } });
  const ask = (from: string, method: string, headers: Record<string, string> = {}) =>
    fetch(`${url}/v1/models`, { method, headers: { origin: from, ...headers } });
  const allowed = (response: Response) => response.headers.get("access-control-allow-origin");
  const preflight = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
  };
  const asked = await ask(origin, "OPTIONS", preflight);
  expect([asked.status, allowed(asked), asked.headers.get("access-control-allow-headers")]).toEqual(
    [204, origin, "authorization, content-type"],
  );
  for (const method of ["GET", "POST"]) expect(allowed(await ask(origin, method))).toBe(origin);
  const other = await ask("https://evil.example", "OPTIONS", preflight);
  expect([other.status, allowed(other)]).toEqual([403, null]);
  expect(allowed(await ask("https://evil.example", "GET"))).toBeNull();
  expect((await ask(origin, "GET")).headers.get("vary")).toBe("origin");
});

test("without cors no answer has its headers; with * all origins are allowed", async () => {
  const headers = { origin: "https://chat.example" };
  const [closed, all] = [await start(), await start({ cors: { origins: ["*"] } })];
  const origins = [closed, all].map(async ({ url }) =>
    (await fetch(`${url}/v1/models`, { headers })).headers.get("access-control-allow-origin"),
  );
  expect(await Promise.all(origins)).toEqual([null, "*"]);
  await expect(start({ cors: { origins: ["chat.example"] } })).rejects.toThrow("scheme://host");
});

test("with instanceRoutes, instances are added and removed on the clients' port, with role or type", async () => {
  const { log, logged } = recordedLog();
  const { url, proxy } = await start({ instanceRoutes: {}, log });
  expect(logged("instance-routes-without-token")).toHaveLength(1);
  const [p2, d2] = await upstreams(prefillOk, decodeOk);
  const urls = () =>
    [...proxy.status().prefillers, ...proxy.status().decoders].map((one) => one.url);
  const before = urls();
  const change = async (what: string, body: unknown) =>
    (await post(`${url}/instances/${what}`, body)).status;
  const [prefill, decode] = [
    { type: "prefill", instance: p2.url },
    { role: "decode", instance: d2.url },
  ];
  expect([await change("add", prefill), await change("add", decode)]).toEqual([200, 200]);
  expect(urls()).toHaveLength(4);
  expect(await change("drain", decode)).toBe(200);
  expect(proxy.status().decoders[1]?.state).toBe("draining");
  expect(await change("remove", { type: "decode", instance: d2.url })).toBe(200);
  await change("remove", prefill);
  await expect.poll(urls).toEqual(before);
  expect((await fetch(`${url}/instances/add`)).status).toBe(405);
  for (const body of [
    { instance: "d2:1" },
    { role: "decode", type: "decode", instance: "d2:1" },
    { role: "both", instance: "x" },
    "no JSON",
  ])
    expect(await change("add", body)).toBe(400);
  expect(await change("drain", { role: "decode", instance: "nobody:1" })).toBe(404);
});

test("the instance routes require their token, and refuse web pages without one", async () => {
  const change = { role: "decode", instance: (await upstream(decodeOk)).url };
  const add = async ({ url }: RunningProxy, headers: Record<string, string> = {}) =>
    (await post(`${url}/instances/add`, change, { headers })).status;
  const open = await start({ instanceRoutes: {} });
  expect(await add(open, { origin: "https://evil.example" })).toBe(403);
  const token = "a token of length";
  const closed = await start({ instanceRoutes: { token } });
  expect(await add(closed)).toBe(401);
  expect(await add(closed, { authorization: `Bearer ${token}` })).toBe(200);
  // As vLLM's demo proxy takes it; it is known already.
  expect(await add(closed, { "x-api-key": token })).toBe(409);
  const { hint } = await errorOf(await post(`${(await start()).url}/instances/add`, change));
  expect(hint).toContain("--instance-routes");
});

test("the status has the names of vLLM's demo proxies too, and addresses only where instances are exposed", async () => {
  const kv = { engineId: "e", host: "10.0.0.1", port: 5601, tpSize: 2, ppSize: 1 };
  const statusOf = async (exposeInstances: boolean) => {
    const { url } = await runProxy({
      mode: "push",
      prefillers: [{ url: "p:1", kv }],
      decoders: ["d:1", "d:2"],
      exposeInstances,
    });
    return (await (await fetch(`${url}/status`)).json()) as Record<string, unknown>;
  };
  const counts = { mode: "push", prefill_node_count: 1, decode_node_count: 2 };
  expect(await statusOf(true)).toMatchObject({
    ...counts,
    prefill_nodes: ["p:1"],
    decode_nodes: ["d:1", "d:2"],
    prefill_engine_id: "e",
    prefill_kv_host: "10.0.0.1",
    prefill_side_channel_port: 5601,
    prefill_tp_size: 2,
    prefill_pp_size: 1,
    decoders: [{ url: "http://d:1", requests: 0, available: true }, { url: "http://d:2" }],
  });
  const hidden = await statusOf(false);
  expect(hidden).toMatchObject({
    ...counts,
    flow: "push",
    routing: "round-robin",
    draining: false,
    prefillers: { count: 1, available: 1 },
    decoders: { count: 2, available: 2 },
  });
  expect(JSON.stringify(hidden)).not.toMatch(/10\.0\.0\.1|"[pd]:1"/);
});

const OWN = ["GET /v1/models", "GET /health"];
const SERVED = [
  ...OWN,
  ...[...ENDPOINTS, ...DECODE_ROUTES].map((path) => `POST ${path}`),
  ...SIDECAR_ROUTES.map((path) => `GET ${path}`),
];

test.each(VLLM_APIS)(
  "field.md R9: each route of vLLM %s is served or refused with the reason",
  (_release, { routes }) => {
    expect(routes.length).toBeGreaterThan(70);
    expect(routes.filter((route) => SERVED.includes(route) === REFUSED_ROUTES.has(route))).toEqual(
      [],
    );
  },
);

test("field.md R9: each route of the table is one of some vLLM", () => {
  const known = new Set(VLLM_APIS.flatMap(([, { routes }]) => routes));
  expect([...SERVED, ...REFUSED_ROUTES.keys()].filter((route) => !known.has(route))).toEqual([]);
});

test("field.md R9: what needs no KV goes to D as it is, at a router and at a sidecar; the rest is refused with the reason", async () => {
  const router = await start();
  const sidecar = await start({ prefillers: [], sidecar: { allow: ["127.0.0.0/8"] } });
  for (const { url, d, p } of [router, sidecar]) {
    for (const path of DECODE_ROUTES)
      expect((await post(`${url}${path}`, { input: "a", n: 1 })).status, path).toBe(200);
    expect(d.seen.map(({ method, path, json }) => [method, path, json])).toEqual(
      DECODE_ROUTES.map((path) => ["POST", path, { input: "a", n: 1 }]),
    );
    expect(p.seen).toEqual([]);
  }
  for (const path of [
    "/sleep",
    "/v1/load_lora_adapter",
    "/inference/v1/generate",
    "/v1/responses/resp_1/cancel",
  ]) {
    const { status, message } = await errorOf(await post(router.url + path, {}));
    expect([status, message]).toEqual([404, expect.stringMatching(/is not served here: ./)]);
  }
  const upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n";
  const realtime = `GET /v1/realtime HTTP/1.1\r\nhost: x\r\n${upgrade}\r\n`;
  const { received, socket } = await rawClient(router.url, realtime);
  await expect.poll(received).toMatch(/^HTTP\/1\.1 404 .*send sound to a server of that model/s);
  socket.destroy();
  expect((await errorOf(await fetch(`${router.url}/metrics`))).message).toContain(
    "the state of one server",
  );
  expect((await fetch(`${sidecar.url}/metrics`)).status).toBe(200);
});

test("field.md R13: HEAD is answered as GET, without a body", async () => {
  const { url } = await start();
  for (const path of ["/health", "/v1/models", "/v1/models/org/m"]) {
    const response = await fetch(url + path, { method: "HEAD" });
    expect([path, response.status, await response.text()]).toEqual([path, 200, ""]);
  }
  expect((await fetch(`${url}/v1/completions`, { method: "HEAD" })).status).toBe(405);
});

test("field.md R13: a model that one of two D has is listed each time, with a note", async () => {
  const models = (...ids: string[]) =>
    sends(200, { object: "list", data: ids.map((id) => ({ id })) });
  const { url, p, d } = await runFleet([prefillOk], [models("m", "lora"), models("m"), sends(500)]);
  for (let i = 0; i < 3; i += 1)
    expect(await (await fetch(`${url}/v1/models`)).json()).toEqual({
      object: "list",
      data: [{ id: "m" }, { id: "lora", note: "1 of 2 decode instances have it" }],
    });
  expect(await (await fetch(`${url}/v1/models/lora`)).json()).toMatchObject({ id: "lora" });
  const broken = d[2].url;
  const none = await runProxy({ prefillers: [p[0].url], decoders: [broken, `${broken}/x`] });
  expect((await fetch(`${none.url}/v1/models`)).status).toBe(502);
});

test.each<[string, ProxyOptions]>([
  ["a proxy", {}],
  ["with instance routes", { instanceRoutes: {} }],
  ["a sidecar", { sidecar: { allow: ["*"] }, prefillers: [] }],
] as const)(
  "GET /openapi.json of %s has each route that is answered, and no other",
  async (_name, options) => {
    const { url } = await start(options);
    const response = await fetch(`${url}/openapi.json`);
    const document = (await response.json()) as {
      readonly openapi: string;
      readonly paths: Record<string, Record<string, { readonly summary: string }>>;
      readonly "x-refused": Record<string, string>;
    };
    expect([response.status, document.openapi]).toEqual([200, "3.1.0"]);
    const status = async (method: string, path: string) =>
      (await fetch(url + path.replace("{id}", "org/m"), { method })).status;
    for (const [path, operations] of Object.entries(document.paths)) {
      const [method = "", ...more] = Object.keys(operations);
      expect(more, path).toEqual([]);
      expect([404, 405]).not.toContain(await status(method.toUpperCase(), path));
      expect(await status(method === "get" ? "POST" : "GET", path)).toBe(405);
    }

    const known = [...ENDPOINTS, ...DECODE_ROUTES, ...SIDECAR_ROUTES];
    const other = ["/instances/add", "/instances/drain", "/health", "/healthcheck", "/docs"];
    for (const path of [...known, ...other, "/", "/v1", "/openapi"])
      expect((await status("GET", path)) === 404, path).toBe(!(path in document.paths));
    for (const route of Object.keys(document["x-refused"])) {
      const [method = "", path = ""] = route.split(" ");
      if (method !== "WEBSOCKET") expect(await status(method, path)).toBe(404);
    }
  },
);

test("GET /docs is a page with the same routes, without scripts and without anything from elsewhere", async () => {
  const { url } = await start();
  const response = await fetch(`${url}/docs`);
  expect(response.headers.get("content-type")).toBe("text/html; charset=utf-8");
  const page = await response.text();
  const { paths } = (await (await fetch(`${url}/openapi.json`)).json()) as {
    readonly paths: object;
  };
  for (const path of Object.keys(paths)) expect(page).toContain(`<code>${path}</code>`);
  expect(page).not.toMatch(/<script|<link|src=|https?:/);
});
