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
  expect((await response.json()) as object).toMatchObject({ error: { type: "invalid_request_error" } });
});

test("/v1/models/ID is the model of the list; another one is a 404", async () => {
  const { url, proxy } = await start();
  for (const path of ["org/m", "org%2Fm"]) {
    const response = await fetch(`${url}/v1/models/${path}`);
    expect([response.status, await response.json()]).toEqual([200, { id: "org/m", object: "model" }]);
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
  expect([asked.status, allowed(asked), asked.headers.get("access-control-allow-headers")]).toEqual([
    204,
    origin,
    "authorization, content-type",
  ]);
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
  const urls = () => [...proxy.status().prefillers, ...proxy.status().decoders].map((one) => one.url);
  const before = urls();
  expect((await post(`${url}/instances/add`, { type: "prefill", instance: "p2:1" })).status).toBe(200);
  expect((await post(`${url}/instances/add`, { role: "decode", instance: "d2:1" })).status).toBe(200);
  expect(urls()).toHaveLength(4);
  expect((await post(`${url}/instances/drain`, { role: "decode", instance: "d2:1" })).status).toBe(200);
  expect(proxy.status().decoders[1]?.state).toBe("draining");
  expect((await post(`${url}/instances/remove`, { type: "decode", instance: "d2:1" })).status).toBe(200);
  await post(`${url}/instances/remove`, { type: "prefill", instance: "p2:1" });
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
    (await errorOf(await post(`${url}/instances/drain`, { role: "decode", instance: "nobody:1" }))).status,
  ).toBe(404);
});

test("the instance routes require their token, and refuse web pages without one", async () => {
  const change = { role: "decode", instance: "d2:1" };
  const open = await start({ instanceRoutes: {} });
  const headers = { origin: "https://evil.example" };
  expect((await post(`${open.url}/instances/add`, change, { headers })).status).toBe(403);
  const token = "a token of length";
  const closed = await start({ instanceRoutes: { token } });
  expect((await post(`${closed.url}/instances/add`, change)).status).toBe(401);
  const authorization = `Bearer ${token}`;
  expect((await post(`${closed.url}/instances/add`, change, { headers: { authorization } })).status).toBe(
    200,
  );
  expect((await post(`${(await start()).url}/instances/add`, change)).status).toBe(404);
});
