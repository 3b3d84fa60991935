import { createServer, request as httpRequest } from "node:http";
import type { AddressInfo } from "node:net";
import { expect, test } from "vitest";
import { BOUNDARY_CASES, type BoundaryCase, comparable, REFUSALS, salted, words } from "./boundary-cases.js";
import { abortWhileDecoding, abortWhilePrefilling } from "./proxy-fault-suite.js";
import { ask, type ProxyPair } from "./proxy-pair.js";

const HEADER = "x-prefiller-host-port";

/** The cases of `boundarySuite` through `kv-proxy --sidecar` beside D, behind a relay that names P in the header as a picker does. */
export function sidecarSuite(pair: ProxyPair, mode: "pull" | "push"): void {
  const behind = behindSidecar(pair, mode);

  /** Opens a sidecar that has received an answer of P, so that in push both legs leave at once. */
  async function openWarmedUp() {
    const opened = await behind.proxied();
    const body = { model: "tiny", prompt: "t11 t12", max_tokens: 1 };
    expect((await ask(`${opened.url}/v1/completions`, body)).status).toBe(200);
    return opened;
  }

  test.each(BOUNDARY_CASES)(
    "$name ($path): a sidecar answers like a single server, and P holds no blocks",
    async ({ path, body, mustContain = "" }) => {
      const { url, proxy } = await openWarmedUp();
      const ours = await comparable(await ask(url + path, salted(body)));
      expect(ours).toEqual(await comparable(await ask(pair.d.url + path, salted(body))));
      expect(ours).toMatchObject({ status: 200 });
      expect(JSON.stringify(ours)).toContain(mustContain);
      expect(proxy.status().prefillers[0]?.requests).toBeGreaterThan(1);
      await pair.freed();
    },
  );

  test.each<Omit<BoundaryCase, "path">>(REFUSALS)(
    "refused request, $name: a sidecar returns the server's status and message, and P holds no blocks",
    async ({ body }) => {
      const { url } = await openWarmedUp();
      const right = await comparable(await ask(`${pair.d.url}/v1/completions`, body));
      expect(await comparable(await ask(`${url}/v1/completions`, body))).toEqual(right);
      // Where D alone refuses, a vLLM P that pushes has no notification that says so, and keeps the blocks for a lease.
      await (mode === "push" ? pair.leaseEnded() : pair.freed());
    },
  );

  test("without the header, D computes alone, also what cannot be split", async () => {
    const { sidecarUrl, proxy } = await behind.proxied();
    for (const more of [
      { n: 2, seed: 1, temperature: 0.9 },
      { use_beam_search: true, n: 2, temperature: 0 },
    ]) {
      const body = { model: "tiny", prompt: words(40, 20), max_tokens: 4, ...more };
      const right = await comparable(await ask(`${pair.d.url}/v1/completions`, body));
      expect(await comparable(await ask(`${sidecarUrl}/v1/completions`, body))).toEqual(right);
    }
    expect(proxy.status().prefillers).toEqual([]);
  });

  test("a P that is not allowed gets 403, and a list goes on to the next P", async () => {
    const { sidecarUrl } = await behind.proxied();
    const body = { model: "tiny", prompt: words(40, 21), max_tokens: 4, temperature: 0 };
    const named = (value: string) =>
      ask(`${sidecarUrl}/v1/completions`, body, { headers: { [HEADER]: value } });
    expect((await named("10.255.255.1:8000")).status).toBe(403);
    const right = await comparable(await ask(`${pair.d.url}/v1/completions`, body));
    // Nothing listens on port 1.
    expect(await comparable(await named(`127.0.0.1:1, ${new URL(pair.p.url).host}`))).toEqual(right);
    await pair.freed();
  });

  test("D's metrics pass", async () => {
    const { sidecarUrl } = await behind.proxied();
    expect(await (await fetch(`${sidecarUrl}/metrics`)).text()).toContain("vllm:num_requests_running");
  });

  test("client aborts while D generates: D stops, and P holds no blocks", async () => {
    await abortWhileDecoding(pair, await openWarmedUp());
  });

  test("client aborts while P computes: P stops and holds no blocks", async () => {
    await abortWhilePrefilling(pair, await openWarmedUp(), mode === "push" ? 2 : 1);
  });
}

function behindSidecar(pair: ProxyPair, mode: "pull" | "push") {
  return {
    async proxied() {
      const opened = await pair.proxied({ prefillers: [], mode, sidecar: { allow: ["127.0.0.0/8"] } });
      const relay = await startNamingRelay(opened.url, new URL(pair.p.url).host);
      pair.closing(relay);
      return { ...opened, url: relay.url, sidecarUrl: opened.url };
    },
  };
}

/** Passes requests on with the header that names a P. Either side's end ends the other side. */
async function startNamingRelay(target: string, prefiller: string) {
  const server = createServer((received, response) => {
    const { method, url = "/", headers } = received;
    const sent = httpRequest(target + url, {
      method,
      headers: { ...headers, [HEADER]: prefiller },
      agent: false,
    });
    response.once("close", () => sent.destroy());
    sent.once("error", () => response.destroy());
    sent.once("response", (answer) => {
      response.writeHead(answer.statusCode ?? 502, answer.headers);
      answer.once("error", () => response.destroy()).pipe(response);
    });
    received.pipe(sent);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    async close() {
      const closed = new Promise((resolve) => server.close(resolve));
      server.closeAllConnections();
      await closed;
    },
  };
}
