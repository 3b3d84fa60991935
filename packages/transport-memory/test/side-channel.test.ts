import type { SideChannelRequest } from "@kv/interface";
import { leavesNothing } from "@kv/testing/nothing-left";
import {
  type FaultRule,
  memoryNetwork,
  memorySideChannel,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { expect, test } from "vitest";
import { bytes, codeOf, text } from "./pair.js";

function ground(faults: readonly FaultRule[] = []) {
  const clock = virtualClock();
  const network = memoryNetwork({
    clock,
    random: seededRandom(3),
    latency: { latencyMs: 5 },
    faults,
  });
  const server = memorySideChannel({ network, host: network.host("p", { skewMs: 1000 }) });
  const client = memorySideChannel({ network, host: "d" });
  leavesNothing(
    () => ({ ...network.outstanding(), timers: clock.pendingTimers }),
    async () => {
      await Promise.all([server.close(), client.close()]);
      await clock.runUntilIdle();
    },
  );
  const ask = (more: Partial<SideChannelRequest> = {}) =>
    client.request({ host: "p", port: 5600, frames: [bytes("ping")], timeoutMs: 5000, ...more });
  const ended = (work: Promise<unknown> | undefined) => clock.settle(codeOf(Promise.resolve(work)));
  const listen = (answer: Parameters<typeof server.listen>[0]["answer"] = () => []) =>
    server.listen({ host: "p", port: 5600, answer });
  return { clock, network, server, client, ask, ended, listen };
}

test("a request of frames gets a reply of frames, with the requester's timestamps", async () => {
  const { clock, server, ask, network } = ground();
  const asked: string[][] = [];
  const answer = async (frames: readonly Uint8Array[]) => {
    asked.push(frames.map(text));
    return [bytes("pong"), bytes("1")];
  };
  const listener = await server.listen({ host: "0.0.0.0", port: 5600, answer });
  const reply = await clock.settle(ask({ frames: [bytes("a"), bytes("b")] }));
  expect(asked).toEqual([["a", "b"]]);
  expect(reply.frames.map(text)).toEqual(["pong", "1"]);
  expect([reply.sentAtMs, reply.receivedAtMs]).toEqual([0, 10]);
  await listener.close();
  expect(network.outstanding()).toMatchObject({ listeners: 0, requests: 0 });
});

test("the listener survives errors of answer, and the requester times out", async () => {
  const { clock, listen, ask, ended } = ground();
  let round = 0;
  await listen(() => {
    round += 1;
    if (round === 1) throw new Error("bad frames");
    if (round === 2) return undefined;
    return round === 3 ? Promise.reject(new Error("later")) : [bytes("pong")];
  });
  for (let failing = 0; failing < 3; failing++)
    expect(await ended(ask())).toBe("KV_SIDE_CHANNEL_TIMEOUT");
  expect(clock.now()).toBe(15_000);
  expect(await ended(ask())).toBe("KV_OK");
});

test("no listener, a dead host and a cut link are unreachable; a killed listener's port is free again", async () => {
  const { network, server, listen, ask, ended } = ground();
  expect(await ended(ask())).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  expect(await ended(ask({ host: "nowhere" }))).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  await listen();
  expect(await ended(ask())).toBe("KV_OK");
  network.disconnect("d", "p", { forMs: 100 });
  expect(await ended(ask())).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  const process = network.restart("p");
  expect(await ended(ask())).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  expect(await ended(server.listen({ host: "p", port: 5601, answer: () => [] }))).toBe(
    "KV_SIDE_CHANNEL_CLOSED",
  );
  const again = memorySideChannel({ network, host: process });
  await again.listen({ host: "p", port: 5600, answer: () => [] });
  expect(network.outstanding().listeners).toBe(1);
  await again.close();
});

test("a host that is killed while it answers sends no reply", async () => {
  const { clock, network, listen, ask, ended } = ground();
  await listen(
    () => new Promise((resolve) => void clock.setTimer(() => resolve([bytes("late")]), 50)),
  );
  const asked = ended(ask());
  clock.setTimer(() => network.host("p").kill(), 20);
  expect(await asked).toBe("KV_SIDE_CHANNEL_TIMEOUT");
});

test("ports in use, of another host and out of range are rejected; port 0 takes a free one; hosts have separate ports", async () => {
  const { server, client, ended, network } = ground();
  const answer = () => [];
  const first = await server.listen({ host: "localhost", port: 0, answer });
  expect(first.port).toBeGreaterThan(1023);
  expect(await ended(server.listen({ host: "p", port: first.port, answer }))).toBe(
    "KV_SIDE_CHANNEL_BIND_FAILED",
  );
  for (const [host, port] of [
    ["d", 1],
    ["p", -1],
    ["p", 65_536],
    ["p", 1.5],
  ] as const) {
    expect(await ended(server.listen({ host, port, answer }))).toBe("KV_SIDE_CHANNEL_BIND_FAILED");
  }
  await client.listen({ host: "d", port: first.port, answer });
  await first.close();
  await server.listen({ host: "p", port: first.port, answer });
  await server.close();
  await client.close();
  expect(network.outstanding().listeners).toBe(0);
});

test("faults: drop, delay, fail, garbage", async () => {
  const { clock, listen, ask, ended } = ground([
    { fault: "drop", operation: "REQUEST", nth: 1 },
    { fault: "delay", operation: "REQUEST", nth: 1, delayMs: 40 },
    { fault: "fail", operation: "REQUEST", nth: 1 },
    { fault: "garbage", nth: 1 },
    { fault: "disconnect", operation: "REQUEST", nth: 2, forMs: 10 },
  ]);
  await listen(() => [bytes("a reply of some length")]);
  expect(await ended(ask())).toBe("KV_SIDE_CHANNEL_TIMEOUT");
  const late = await clock.settle(ask());
  expect(late.receivedAtMs - late.sentAtMs).toBe(50);
  expect(await ended(ask())).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  const [noise] = (await clock.settle(ask())).frames;
  expect(noise?.length).toBe(22);
  expect(text(noise ?? new Uint8Array())).not.toBe("a reply of some length");
  expect(text((await clock.settle(ask())).frames[0] ?? new Uint8Array())).toBe(
    "a reply of some length",
  );
  expect(await ended(ask())).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  await clock.advance(10);
  expect(await ended(ask())).toBe("KV_OK");
});

test("requests end when their signal aborts and when the side channel closes", async () => {
  const { client, ask, ended, network, clock } = ground();
  expect(await ended(ask({ signal: AbortSignal.abort() }))).toBe("KV_REQUEST_ABORTED");
  const controller = new AbortController();
  const asked = ask({ signal: controller.signal });
  controller.abort();
  expect(await ended(asked)).toBe("KV_REQUEST_ABORTED");
  const pending = ask();
  await client.close();
  expect(await ended(pending)).toBe("KV_SIDE_CHANNEL_CLOSED");
  expect(await ended(ask())).toBe("KV_SIDE_CHANNEL_CLOSED");
  expect(network.outstanding().requests).toBe(0);
  expect(clock.pendingTimers).toBe(0);
});

test("with keys, a listener and a request that do not have one in common refuse each other", async () => {
  const { server, client, ask, ended } = ground();
  const [one, other] = [() => [bytes("one")], () => [bytes("other")]];
  const answer = () => [bytes("pong")];
  const secret = server.withEncryption?.(() => [bytes("one"), bytes("two")]);
  await secret?.listen({ host: "p", port: 5600, answer });
  await server.listen({ host: "p", port: 5601, answer });
  const asked = { host: "p", port: 5600, frames: [bytes("ping")], timeoutMs: 5000 };
  expect(await ended(ask())).toBe("KV_HANDSHAKE_UNTRUSTED");
  expect(await ended(client.withEncryption?.(other).request(asked))).toBe("KV_HANDSHAKE_UNTRUSTED");
  const first = client.withEncryption?.(one);
  expect(await ended(first?.request({ ...asked, port: 5601 }))).toBe("KV_HANDSHAKE_UNTRUSTED");
  expect(await ended(first?.request(asked))).toBe("KV_OK");
});
