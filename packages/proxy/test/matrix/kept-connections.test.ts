import { subscribe, unsubscribe } from "node:diagnostics_channel";
import { Agent, request } from "node:http";
import type { Socket } from "node:net";
import { expect, test } from "vitest";
import { createProxy } from "../../src/index.js";
import { AXES, type Case, faultyLegs } from "./cases.js";
import { FaultyPair } from "./faulty-pair.js";
import { until } from "./until.js";

const CHANNELS = ["net.client.socket", "net.server.socket"];

test("however requests of one connection end, sockets have as many listeners afterwards", async () => {
  const sockets = new Set<Socket>();
  const opened = (message: unknown) =>
    void sockets.add((message as { readonly socket: Socket }).socket);
  for (const channel of CHANNELS) subscribe(channel, opened);
  const clients = await Promise.all(AXES.fault.map(startClient));
  const most = async (requests: number) => {
    await Promise.all(clients.map(({ ask }) => ask(requests)));
    const open = [...sockets].filter(({ destroyed }) => !destroyed);
    return Math.max(...open.map(listenersOf));
  };
  try {
    const few = await most(2);
    expect(await most(6)).toBeLessThanOrEqual(few);
  } finally {
    for (const channel of CHANNELS) unsubscribe(channel, opened);
    await Promise.all(clients.map(({ close }) => close()));
  }
});

/** A client with one kept connection to a proxy whose D has the fault. */
async function startClient(fault: Case["fault"]) {
  const one: Case = {
    fault,
    leg: "D",
    strategy: "push",
    stream: true,
    n: 1,
    client: "stays",
    others: 0,
    frontEnd: "proxy",
  };
  const pair = new FaultyPair(one, faultyLegs(one));
  const agent = new Agent({ keepAlive: true, maxSockets: 1 });
  const proxy = createProxy({
    mode: "push",
    prefillers: await pair.start("P"),
    decoders: await pair.start("D"),
    health: { intervalMs: 0 },
    pairing: { mode: "off" },
    timeouts: { firstByteMs: fault === "silence" ? 20 : 20_000, coolDownMs: 1, maxCoolDownMs: 1 },
  });
  const { url } = await proxy.listen({ port: 0 });
  return {
    async ask(requests: number): Promise<void> {
      for (let at = 0; at < requests; at += 1) await askOnce(`${url}/v1/completions`, agent);
      await until(() => proxy.status().requests.in_flight === 0);
    },
    async close(): Promise<void> {
      agent.destroy();
      await proxy.close({ graceMs: 0 });
      await pair.close();
    },
  };
}

function listenersOf(socket: Socket): number {
  return socket.eventNames().reduce((sum, name) => sum + socket.listenerCount(name), 0);
}

function askOnce(url: string, agent: Agent): Promise<void> {
  const headers = { "content-type": "application/json" };
  return new Promise((resolve) => {
    const asked = request(url, { method: "POST", agent, headers }, (response) => {
      response.resume().once("close", resolve);
    });
    asked.once("error", () => resolve());
    asked.end(JSON.stringify({ prompt: "a", stream: true, max_tokens: 5 }));
  });
}
