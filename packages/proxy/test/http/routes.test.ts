import { readFileSync } from "node:fs";
import { DECODE_ROUTES, ENDPOINTS, REFUSED_ROUTES, SIDECAR_ROUTES } from "@kv/fleet/front-end";
import { silentLog } from "@kv/interface";
import { decodeOk, prefillOk, sendJson } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { errorOf, post, runProxy, upstream } from "../support/set-up.js";

async function start(options: ProxyOptions = {}) {
  const p = await upstream(prefillOk);
  const d = await upstream((seen) =>
    seen.path.startsWith("/v1/models")
      ? sendJson(seen.response, { object: "list", data: [{ id: "org/m", object: "model" }, null] })
      : decodeOk(seen),
  );
  return { p, d, ...(await runProxy({ prefillers: [p.url], decoders: [d.url], ...options })) };
}

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
  expect((await response.json()) as object).toMatchObject({
    error: { type: "invalid_request_error" },
  });
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
  for (const path of ["other", "", "%zz", "../../metrics%00"]) {
    const response = await fetch(`${url}/v1/models/${path}`);
    expect([path, response.status]).toEqual([path, 404]);
  }
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
  const events: string[] = [];
  const { url, proxy } = await start({
    instanceRoutes: {},
    log: { ...silentLog, warn: (event) => void events.push(event) },
  });
  expect(events).toContain("instance-routes-without-token");
  const [p2, d2] = [await upstream(prefillOk), await upstream(decodeOk)];
  const urls = () =>
    [...proxy.status().prefillers, ...proxy.status().decoders].map((one) => one.url);
  const before = urls();
  expect((await post(`${url}/instances/add`, { type: "prefill", instance: p2.url })).status).toBe(
    200,
  );
  expect((await post(`${url}/instances/add`, { role: "decode", instance: d2.url })).status).toBe(
    200,
  );
  expect(urls()).toHaveLength(4);
  expect((await post(`${url}/instances/drain`, { role: "decode", instance: d2.url })).status).toBe(
    200,
  );
  expect(proxy.status().decoders[1]?.state).toBe("draining");
  expect((await post(`${url}/instances/remove`, { type: "decode", instance: d2.url })).status).toBe(
    200,
  );
  await post(`${url}/instances/remove`, { type: "prefill", instance: p2.url });
  await expect.poll(urls).toEqual(before);
  expect((await fetch(`${url}/instances/add`)).status).toBe(405);
  for (const body of [
    { instance: "d2:1" },
    { role: "decode", type: "decode", instance: "d2:1" },
    { role: "both", instance: "x" },
    "no JSON",
  ])
    expect((await post(`${url}/instances/add`, body)).status).toBe(400);
  expect(
    (await errorOf(await post(`${url}/instances/drain`, { role: "decode", instance: "nobody:1" })))
      .status,
  ).toBe(404);
});

test("the instance routes require their token, and refuse web pages without one", async () => {
  const change = { role: "decode", instance: (await upstream(decodeOk)).url };
  const open = await start({ instanceRoutes: {} });
  const headers = { origin: "https://evil.example" };
  expect((await post(`${open.url}/instances/add`, change, { headers })).status).toBe(403);
  const token = "a token of length";
  const closed = await start({ instanceRoutes: { token } });
  expect((await post(`${closed.url}/instances/add`, change)).status).toBe(401);
  const authorization = `Bearer ${token}`;
  expect(
    (await post(`${closed.url}/instances/add`, change, { headers: { authorization } })).status,
  ).toBe(200);
  // As vLLM's demo proxy takes it.
  const key = { headers: { "x-api-key": token } };
  expect((await post(`${closed.url}/instances/drain`, change, key)).status).toBe(200);
  const { error } = (await (await post(`${(await start()).url}/instances/add`, change)).json()) as {
    error: { hint: string };
  };
  expect(error.hint).toContain("--instance-routes");
});

test("the status has the names of vLLM's demo proxies too, and addresses only where instances are exposed", async () => {
  const kv = { engineId: "e", host: "10.0.0.1", port: 5601, tpSize: 2, ppSize: 1 };
  const options = {
    mode: "push",
    prefillers: [{ url: "p:1", kv }],
    decoders: ["d:1", "d:2"],
  } as const;
  const statusOf = async (exposeInstances: boolean) => {
    const { url } = await runProxy({
      ...options,
      prefillers: [...options.prefillers],
      decoders: [...options.decoders],
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
  });
  const hidden = await statusOf(false);
  expect(hidden).toMatchObject(counts);
  expect(JSON.stringify(hidden)).not.toMatch(/10\.0\.0\.1|"[pd]:1"/);
});

interface Api {
  readonly routes: readonly string[];
}
/** `tools/vllm/read_api.py` reads it from vLLM's sources. */
const API = Object.entries(
  JSON.parse(
    readFileSync(new URL("../../fixtures/vllm-api.json", import.meta.url), "utf8"),
  ) as Readonly<Record<string, Api>>,
);
const OWN = ["GET /v1/models", "GET /health"];
const SERVED = [
  ...OWN,
  ...[...ENDPOINTS, ...DECODE_ROUTES].map((path) => `POST ${path}`),
  ...SIDECAR_ROUTES.map((path) => `GET ${path}`),
];

test.each(API)(
  "field.md R9: each route of vLLM %s is served or refused with the reason",
  (_release, { routes }) => {
    expect(routes.length).toBeGreaterThan(70);
    expect(routes.filter((route) => SERVED.includes(route) === REFUSED_ROUTES.has(route))).toEqual(
      [],
    );
  },
);

test("field.md R9: each route of the table is one of some vLLM", () => {
  const known = new Set(API.flatMap(([, { routes }]) => routes));
  expect([...SERVED, ...REFUSED_ROUTES.keys()].filter((route) => !known.has(route))).toEqual([]);
});

test("field.md R9: what needs no KV goes to D as it is, at a router and at a sidecar; the rest is refused with the reason", async () => {
  const router = await start();
  const sidecar = await start({ prefillers: [], sidecar: { allow: ["127.0.0.0/8"] } });
  for (const { url, d, p } of [router, sidecar]) {
    for (const path of DECODE_ROUTES)
      expect([path, (await post(`${url}${path}`, { input: "a", n: 1 })).status]).toEqual([
        path,
        200,
      ]);
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
    upstream(({ response }) =>
      sendJson(response, { object: "list", data: ids.map((id) => ({ id })) }),
    );
  const [p, d1, d2] = [await upstream(prefillOk), await models("m", "lora"), await models("m")];
  const broken = await upstream(({ response }) => sendJson(response, {}, 500));
  const { url } = await runProxy({ prefillers: [p.url], decoders: [d1.url, d2.url, broken.url] });
  for (let i = 0; i < 3; i += 1)
    expect(await (await fetch(`${url}/v1/models`)).json()).toEqual({
      object: "list",
      data: [{ id: "m" }, { id: "lora", note: "1 of 2 decode instances have it" }],
    });
  expect(await (await fetch(`${url}/v1/models/lora`)).json()).toMatchObject({ id: "lora" });
  const none = await runProxy({ prefillers: [p.url], decoders: [broken.url, `${broken.url}/x`] });
  expect((await fetch(`${none.url}/v1/models`)).status).toBe(502);
});
