import { createServer as createTcpServer } from "node:net";
import type { ProxyOptions } from "@kv/proxy";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { expect, test } from "vitest";
import { comparable, greedyOf, words } from "./boundary-cases.js";
import { ask } from "./completion.js";
import { connectorMembersTest, type Front, frontSuite } from "./front-suite.js";
import { COMPLETIONS, type ProxyPair } from "./proxy-pair.js";

const HEADER = "x-prefiller-host-port";

/** Behind a relay that names P as a picker does. */
export function sidecarSuite(pair: ProxyPair): void {
  const { mode } = pair.kind;
  const proxied = async (more: Partial<ProxyOptions> = {}) => {
    const sidecar = { allow: ["127.0.0.0/8"] };
    const opened = await pair.proxied({ prefillers: [], mode, sidecar, ...more });
    const header = `${HEADER}: ${new URL(pair.p.url).host}`;
    const relay = await pair.tap({ header }, opened.url);
    return { ...opened, url: relay.url, sidecarUrl: opened.url };
  };
  frontSuite(pair, { name: "a sidecar", mode, open: () => proxied() });

  test("without the header, D computes alone, also what cannot be split", async () => {
    const { sidecarUrl, proxy } = await proxied();
    for (const more of [
      { n: 2, seed: 1, temperature: 0.9 },
      { use_beam_search: true, n: 2, temperature: 0 },
    ]) {
      const body = { ...greedyOf(words(40, 20), 4), ...more };
      await pair.answersAlike(sidecarUrl, body);
    }
    expect(proxy.status().prefillers).toEqual([]);
  });

  connectorMembersTest(pair, "a sidecar without its header", async () => {
    const { sidecarUrl } = await proxied();
    return { url: sidecarUrl };
  });

  test("a P that is not allowed gets 403, and a list goes on to the next P", async () => {
    const { sidecarUrl } = await proxied();
    const body = greedyOf(words(40, 21), 4);
    const named = (value: string) =>
      ask(sidecarUrl + COMPLETIONS, body, { headers: { [HEADER]: value } });
    expect((await named("10.255.255.1:8000")).status).toBe(403);
    const right = await comparable(await ask(pair.d.url + COMPLETIONS, body));
    expect(await comparable(await named(`127.0.0.1:1, ${new URL(pair.p.url).host}`))).toEqual(
      right,
    );
    await pair.freed();
  });

  test("D's metrics pass", async () => {
    const { sidecarUrl } = await proxied();
    expect(await (await fetch(`${sidecarUrl}/metrics`)).text()).toContain(
      "vllm:num_requests_running",
    );
  });

  test("client leaves between the legs: P holds no blocks", async () => {
    await leaveBetweenTheLegs(pair, (sidecar) => proxied({ sidecar }));
  });
}

export async function leaveBetweenTheLegs(
  pair: ProxyPair,
  open: (sidecar: NonNullable<ProxyOptions["sidecar"]>) => Promise<Front>,
): Promise<void> {
  const { mode } = pair.kind;
  // Not the engine that answers: the sidecar reads it again between the legs.
  const side = await startSideChannel(() => ({ engineId: "before", vllmVersion: "0.33.0", mode }));
  const { url, proxy } = await open({ allow: ["127.0.0.0/8"], kv: { port: side.port } });
  const body = greedyOf(words(60, 22), 4);
  expect((await ask(url + COMPLETIONS, { ...body, temperature: -1 })).status).toBe(400);
  await expect.poll(() => proxy.status().prefillers[0]?.pairing?.engine_id).toBe("before");
  await side.close();
  const mute = createTcpServer();
  const isRead = new Promise((resolve) => mute.once("connection", resolve));
  await new Promise<void>((resolve) => mute.listen(side.port, "127.0.0.1", resolve));
  pair.closing({ close: async () => void mute.close() });
  const before = await pair.held();
  const client = new AbortController();
  const asked = ask(url + COMPLETIONS, body, { signal: client.signal });
  await isRead;
  expect(await pair.held()).toBeGreaterThan(before);
  client.abort();
  await expect(asked).rejects.toThrow();
  // A P that pushes is not told of a refusal.
  await (mode === "push" ? pair.leaseEnded() : pair.freed());
}
