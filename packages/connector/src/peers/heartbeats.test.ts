import { describe, expect, it } from "vitest";
import { manualClock } from "../clock-manual.test-support.js";
import { createHeartbeats, type HeartbeatTarget } from "./heartbeats.js";

function setUp() {
  const clock = manualClock();
  const beats: [number, string, string][] = [];
  const heartbeats = createHeartbeats<HeartbeatTarget>({
    clock,
    intervalMs: 5000,
    beat: ({ engineId, remoteRequestIds }) =>
      void beats.push([clock.now(), engineId, remoteRequestIds.join(",")]),
  });
  return { clock, beats, heartbeats };
}

describe("heartbeats", () => {
  it("beats at once, then each interval, to every engine of the set", () => {
    const { clock, beats, heartbeats } = setUp();
    heartbeats.replace([
      { engineId: "p0", remoteRequestIds: ["a", "b"] },
      { engineId: "p1", remoteRequestIds: ["c"] },
    ]);
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

  it("is not made faster by sets that change often", () => {
    const { clock, beats, heartbeats } = setUp();
    heartbeats.replace([{ engineId: "p", remoteRequestIds: ["a"] }]);
    clock.advance(1000);
    heartbeats.replace([{ engineId: "p", remoteRequestIds: ["a", "b"] }]);
    heartbeats.replace([]);
    clock.advance(1000);
    heartbeats.replace([{ engineId: "p", remoteRequestIds: ["b"] }]);
    clock.advance(3000);
    expect(beats).toEqual([
      [0, "p", "a"],
      [5000, "p", "b"],
    ]);
  });

  it("an empty set, or close, leaves no timer", () => {
    const { clock, beats, heartbeats } = setUp();
    heartbeats.replace([{ engineId: "p", remoteRequestIds: ["a"] }]);
    expect(clock.pending()).toBe(1);
    heartbeats.replace([{ engineId: "p", remoteRequestIds: [] }]);
    expect(clock.pending()).toBe(0);
    clock.advance(60_000);
    heartbeats.replace([{ engineId: "p", remoteRequestIds: ["a"] }]);
    heartbeats.close();
    clock.advance(60_000);
    expect(beats).toEqual([
      [0, "p", "a"],
      [60_000, "p", "a"],
    ]);
    expect(clock.pending()).toBe(0);
    expect(heartbeats.size).toBe(0);
  });
});
