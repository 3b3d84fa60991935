import { createServer, request as httpRequest } from "node:http";
import { createServer as createTcpServer } from "node:net";
import type { ProxyOptions } from "@kv/proxy";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { expect, test } from "vitest";
import {
  BOUNDARY_CASES,
  type BoundaryCase,
  comparable,
  REFUSALS,
  salted,
  words,
} from "./boundary-cases.js";
import { connectorMembersSuite } from "./connector-members-suite.js";
import { abortWhileDecoding, abortWhilePrefilling } from "./proxy-fault-suite.js";
import { ask, type OpenProxy, type ProxyPair } from "./proxy-pair.js";
import { listening } from "./toy-proxy.js";

const HEADER = "x-prefiller-host-port";

/** A sidecar beside D, and what clients send their requests to. */
export type SidecarFront = Pick<OpenProxy, "url" | "proxy">;

/**
 * The cases of `boundarySuite`, refusals, and clients that leave, through a sidecar beside D that
 * is behind something that names P in the header. `open` is called in each test.
 */
export function throughSidecarSuite(
  pair: ProxyPair,
  mode: "pull" | "push",
  open: () => Promise<SidecarFront>,
): void {
  const requestsAtP = ({ proxy }: SidecarFront) => proxy.status().prefillers[0]?.requests ?? 0;

  /** Opens a sidecar that has received an answer of P, so that in push both legs leave at once. */
  async function openWarmedUp(): Promise<SidecarFront> {
    const opened = await open();
    const body = { model: "tiny", prompt: "t11 t12", max_tokens: 1 };
    expect((await ask(`${opened.url}/v1/completions`, body)).status).toBe(200);
    return opened;
  }

  test.each(BOUNDARY_CASES)(
    "$name ($path): a sidecar answers like a single server, and P holds no blocks",
    async ({ path, body, mustContain = "" }) => {
      const opened = await openWarmedUp();
      const before = requestsAtP(opened);
      const ours = await comparable(await ask(opened.url + path, salted(body)));
      expect(ours).toEqual(await comparable(await ask(pair.d.url + path, salted(body))));
      expect(ours).toMatchObject({ status: 200 });
      expect(JSON.stringify(ours)).toContain(mustContain);
      expect(requestsAtP(opened)).toBeGreaterThan(before);
      await pair.freed();
    },
  );

  test.each<Omit<BoundaryCase, "path">>(REFUSALS)(
    "refused request, $name: a sidecar returns the server's status and message, and P holds no blocks",
    async ({ body }) => {
      const { url } = await openWarmedUp();
      const right = await comparable(await ask(`${pair.d.url}/v1/completions`, body));
      expect(await comparable(await ask(`${url}/v1/completions`, body))).toEqual(right);
      // Where D alone refuses, a vLLM P that pushes has no notification that says so, and keeps the
      // blocks for a lease.
      await (mode === "push" ? pair.leaseEnded() : pair.freed());
    },
  );

  connectorMembersSuite(pair, "a sidecar behind something that names P", openWarmedUp);

  test("client aborts while D generates: D stops, and P holds no blocks", async () => {
    await abortWhileDecoding(pair, await openWarmedUp());
  });

  test("client aborts while P computes: P stops and holds no blocks", async () => {
    await abortWhilePrefilling(pair, await openWarmedUp(), mode === "push" ? 2 : 1);
  });
}

/**
 * The same through `kv-proxy --sidecar` behind a relay that names P in the header as a picker does,
 * and what only a sidecar does.
 */
export function sidecarSuite(pair: ProxyPair, mode: "pull" | "push"): void {
  const behind = behindSidecar(pair, mode);
  throughSidecarSuite(pair, mode, () => behind.proxied());

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

  connectorMembersSuite(pair, "a sidecar without its header", async () => {
    const { sidecarUrl } = await behind.proxied();
    return { url: sidecarUrl };
  });

  test("a P that is not allowed gets 403, and a list goes on to the next P", async () => {
    const { sidecarUrl } = await behind.proxied();
    const body = { model: "tiny", prompt: words(40, 21), max_tokens: 4, temperature: 0 };
    const named = (value: string) =>
      ask(`${sidecarUrl}/v1/completions`, body, { headers: { [HEADER]: value } });
    expect((await named("10.255.255.1:8000")).status).toBe(403);
    const right = await comparable(await ask(`${pair.d.url}/v1/completions`, body));
    // Nothing listens on port 1.
    expect(await comparable(await named(`127.0.0.1:1, ${new URL(pair.p.url).host}`))).toEqual(
      right,
    );
    await pair.freed();
  });

  test("D's metrics pass", async () => {
    const { sidecarUrl } = await behind.proxied();
    expect(await (await fetch(`${sidecarUrl}/metrics`)).text()).toContain(
      "vllm:num_requests_running",
    );
  });

  test("client leaves between the legs: P holds no blocks", async () => {
    await leaveBetweenTheLegs(pair, mode, (sidecar) => behind.proxied({ sidecar }));
  });
}

/** `open` opens a sidecar with these settings behind something that names P in the header. */
export async function leaveBetweenTheLegs(
  pair: ProxyPair,
  mode: "pull" | "push",
  open: (sidecar: NonNullable<ProxyOptions["sidecar"]>) => Promise<SidecarFront>,
): Promise<void> {
  // The engine that this side channel names is not the one that answers, so the sidecar reads it
  // again between the legs.
  const side = await startSideChannel(() => ({ engineId: "before", vllmVersion: "0.33.0", mode }));
  const { url, proxy } = await open({ allow: ["127.0.0.0/8"], kv: { port: side.port } });
  const body = { model: "tiny", prompt: words(60, 22), max_tokens: 4 };
  expect((await ask(`${url}/v1/completions`, { ...body, temperature: -1 })).status).toBe(400);
  await expect.poll(() => proxy.status().prefillers[0]?.pairing?.engine_id).toBe("before");
  await side.close();
  const mute = createTcpServer();
  const isRead = new Promise((resolve) => mute.once("connection", resolve));
  await new Promise<void>((resolve) => mute.listen(side.port, "127.0.0.1", resolve));
  pair.closing({ close: async () => void mute.close() });
  const before = await pair.held();
  const client = new AbortController();
  const asked = ask(`${url}/v1/completions`, body, { signal: client.signal });
  await isRead;
  expect(await pair.held()).toBeGreaterThan(before);
  client.abort();
  await expect(asked).rejects.toThrow();
  // A P that pushes has no notification of a refusal, and keeps the blocks for a lease.
  await (mode === "push" ? pair.leaseEnded() : pair.freed());
}

function behindSidecar(pair: ProxyPair, mode: "pull" | "push") {
  return {
    async proxied(more: Partial<ProxyOptions> = {}) {
      const sidecar = { allow: ["127.0.0.0/8"] };
      const opened = await pair.proxied({ prefillers: [], mode, sidecar, ...more });
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
  return listening(server);
}
