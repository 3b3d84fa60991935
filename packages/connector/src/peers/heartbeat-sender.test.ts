import { type Agent, silentLog } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, it } from "vitest";
import { HeartbeatSender, NotificationSender } from "./messages.js";
import type { EngineReference, RemoteEngine } from "./remote-engine.js";
import { TaskTracker } from "./transfers.js";

const engineAt = (engineId: string) => ({
  engineId,
  host: "p",
  port: 5600,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
});
const named = (ids: readonly string[]) => ids.map((requestId) => ({ requestId }));
const change = (engineId: string, begin: readonly string[], end: readonly string[] = []) => ({
  ...engineAt(engineId),
  begin: named(begin),
  end: named(end),
});

function setUp({ notify = async () => {} }: { notify?: () => Promise<void> } = {}) {
  const clock = manualClock();
  const beats: [number, string, string][] = [];
  const tasks = new TaskTracker();
  const agent = {
    async notify(name: string, payload: Uint8Array) {
      beats.push([clock.now(), name, new TextDecoder().decode(payload).slice("HB:".length)]);
      await notify();
    },
  } as Partial<Agent> as Agent;
  const heartbeats = new HeartbeatSender({
    clock,
    intervalMs: 5000,
    engines: {
      peek: (address) =>
        ({
          address,
          agents: new Map([["pp0tp0", address.engineId]]),
          features: new Set<string>(),
        }) as Partial<RemoteEngine> as RemoteEngine,
      open: () => Promise.reject<EngineReference<RemoteEngine>>(new Error("not asked for")),
    },
    notifications: new NotificationSender({ agent, log: silentLog }),
    tasks,
  });
  return { clock, beats, heartbeats, tasks };
}

describe("heartbeats", () => {
  it("are sent to every engine at once, then once per interval", () => {
    const { clock, beats, heartbeats } = setUp();
    heartbeats.change([change("p0", ["a", "b"]), change("p1", ["c"])]);
    clock.advance(10_000);
    expect(beats).toEqual([
      [0, "p0", "a,b"],
      [0, "p1", "c"],
      [5000, "p0", "a,b"],
      [5000, "p1", "c"],
      [10_000, "p0", "a,b"],
      [10_000, "p1", "c"],
    ]);
  });

  it("are not sent more often when the set changes often", () => {
    const { clock, beats, heartbeats } = setUp();
    heartbeats.change([change("p", ["a"])]);
    clock.advance(1000);
    heartbeats.change([change("p", ["b"])]);
    heartbeats.change([change("p", [], ["a", "b"])]);
    clock.advance(1000);
    heartbeats.change([change("p", ["b"])]);
    clock.advance(3000);
    expect(beats).toEqual([
      [0, "p", "a"],
      [5000, "p", "b"],
    ]);
  });

  it("leave no timer after an empty set or close", () => {
    const { clock, beats, heartbeats } = setUp();
    heartbeats.change([change("p", ["a"])]);
    expect(clock.pending()).toBe(1);
    heartbeats.change([change("p", [], ["a"])]);
    expect(clock.pending()).toBe(0);
    clock.advance(60_000);
    heartbeats.change([change("p", ["a"])]);
    heartbeats.close();
    clock.advance(60_000);
    expect(beats).toEqual([
      [0, "p", "a"],
      [60_000, "p", "a"],
    ]);
    expect(clock.pending()).toBe(0);
    expect(heartbeats.size).toBe(0);
  });

  it("leave out a request id that a peer would misparse, and do not record it as sent", async () => {
    const { beats, heartbeats, tasks } = setUp();
    heartbeats.change([change("p", ["a,b", "HB:x", "ok"])]);
    await tasks.idle();
    expect(beats).toEqual([[0, "p", "ok"]]);
    expect(heartbeats.takenAtMs({ ...engineAt("p"), requestId: "ok" })).toEqual([0]);
    expect(heartbeats.takenAtMs({ ...engineAt("p"), requestId: "a,b" })).toEqual([]);
    expect(heartbeats.takenAtMs({ ...engineAt("p"), requestId: "HB:x" })).toEqual([]);
  });

  it("are not recorded as sent when the transport rejects them", async () => {
    const { heartbeats, tasks } = setUp({ notify: () => Promise.reject(new Error("gone")) });
    heartbeats.change([change("p", ["a"])]);
    await tasks.idle();
    expect(heartbeats.takenAtMs({ ...engineAt("p"), requestId: "a" })).toEqual([]);
  });
});
