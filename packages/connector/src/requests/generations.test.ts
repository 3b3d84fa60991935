import { decodeNotification, encodeNotification, isWireSafeRequestId } from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, it } from "vitest";
import { Generations } from "./references.js";

describe("generations", () => {
  it("uses the request id as wire id at its first use, as vLLM does", () => {
    const generations = new Generations({ clock: manualClock() });
    const first = generations.begin("cmpl-1");
    expect(first).toMatchObject({ requestId: "cmpl-1", wireId: "cmpl-1", generation: 1 });
    expect(first.capability).toMatch(/^[\w-]{22}$/);
    expect(generations.begin("cmpl-1")).toBe(first);
    expect(generations.byWireId("cmpl-1")).toBe(first);
  });

  it("gives a reused request id a new wire id, so that late notifications for the first use match nothing", () => {
    const clock = manualClock();
    const generations = new Generations({ clock, rememberMs: 1000 });
    generations.begin("r");
    generations.end("r");
    expect(generations.byWireId("r")).toBeUndefined();
    const second = generations.begin("r");
    expect(second.wireId).not.toBe("r");
    expect(second.generation).toBe(2);
    expect(generations.byWireId("r")).toBeUndefined();
    generations.end("r");
    clock.advance(1001);
    expect(generations.begin("r").wireId).toBe("r");
  });

  it("gives another wire id to a request id that a peer would misparse because of a comma or a notification prefix", () => {
    const generations = new Generations({ clock: manualClock() });
    const ids = ["a,b", "a%2Cb", "", ",", "HB:x", "KV1:x", "PUSH_REG:x", "a b:c"];
    const wire = ids.map((id) => generations.begin(id).wireId);
    expect(wire.every(isWireSafeRequestId)).toBe(true);
    expect(new Set(wire).size).toBe(ids.length);
    expect(wire.at(-1)).toBe("a b:c");
    for (const requestId of wire) {
      const done = encodeNotification({ kind: "done", requestId, readers: 1 });
      expect(decodeNotification(done)).toEqual({ kind: "done", requestId, readers: 1 });
    }
  });

  it("forgets an ended request after rememberMs", () => {
    const clock = manualClock();
    const generations = new Generations({ clock, rememberMs: 10 });
    for (let i = 0; i < 100; i++) {
      generations.begin(`r${i}`);
      generations.end(`r${i}`);
      clock.advance(1);
    }
    expect(generations.size).toBe(0);
  });
});
