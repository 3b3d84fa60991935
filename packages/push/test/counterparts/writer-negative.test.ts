import { decodePushControl } from "@kv/protocol";
import { describe, expect, it } from "vitest";
import { OWN, registrationOf, withdrawal, writerOn } from "./writer-alone.js";

// Counterparts of the unit tests of vLLM's push connector (PR 35264): input that the writer ignores
// or refuses.

describe("the writer is not misled", () => {
  it("by a step with nothing to take", () => {
    const { writer, none, output, clock } = writerOn();
    writer.step(none);
    expect(output.take().finishedSending).toEqual([]);
    expect(clock.pending()).toBe(0);
  });

  it("by base ids that differ", async () => {
    const { finish, register, written, idle } = writerOn();
    finish("r-0000aaaa");
    register("q-0000aaaa");
    register("r-zzzzzzzz");
    register("r-0000aaa");
    await idle();
    expect(written).toEqual([]);
  });

  it("by a payload that is not a map, or has an unknown type", () => {
    expect(() => decodePushControl({ type: "push_withdraw" })).toThrow(
      /KV_WIRE|request_id|malformed/i,
    );
    expect(() => decodePushControl({ type: "push_ended", request_id: 5 })).toThrow(/request_id/);
    expect(decodePushControl({ type: "unknown type" })).toBeUndefined();
  });

  it("by a request id that is not a string", () => {
    expect(() => registrationOf("r", { request_id: { id: "r" } })).toThrow(/request_id/);
  });

  it("by a registration that arrives twice", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r");
    register("r");
    finish("r");
    register("r");
    await idle();
    register("r");
    finish("other");
    await idle();
    expect(written.length).toBe(1);
  });

  it("by an eviction, which removes exactly one request", () => {
    const { clock, finish, output, writer } = writerOn();
    finish("a");
    clock.advance(10_000);
    writer.step({ ...writerOn().none, schedulerClockMs: 500, leases: [] });
    writer.heartbeat([{ requestId: "a" }], "d agent");
    finish("b");
    clock.advance(20_001);
    expect(output.take().finishedSending).toHaveLength(1);
    expect(writer.outstanding().leases).toBe(1);
  });

  // vLLM's writer sleeps until collectFinished wakes it, also when nothing has finished. This one
  // acts on the notification itself.
  it("by an engine that takes no further step: a registration alone starts the WRITE", async () => {
    const { writer, none, register, finish, idle, written } = writerOn();
    finish("r");
    writer.step(none);
    writer.step(none);
    register("r");
    await idle();
    expect(written.length).toBe(1);
  });

  it("by heartbeats and withdrawals of unknown requests", async () => {
    const { writer, output, idle, clock } = writerOn();
    writer.heartbeat([{ requestId: "unknown" }, { requestId: "" }], "d agent");
    writer.withdraw(withdrawal("unknown"), "d agent");
    await idle();
    expect(output.take().finishedSending).toEqual([]);
    // A withdrawal waits for its prompt as long as a registration does.
    clock.advance(5001);
    expect(writer.outstanding().registrations).toBe(0);
    expect(clock.pending()).toBe(0);
  });

  it("by many empty steps: nothing is kept and no timer runs", () => {
    const { writer, none, clock } = writerOn();
    for (let i = 0; i < 10; i++) writer.step({ ...none, schedulerClockMs: i });
    expect(clock.pending()).toBe(0);
    expect(Object.values(writer.outstanding()).filter((count) => count !== 0)).toEqual([]);
  });

  it("by a registration for another engine, which gets an ended notice", async () => {
    const { register, finish, written, idle, notified } = writerOn();
    finish("r");
    register("r", { remote_engine_id: "another", kv_peer: OWN });
    await idle();
    expect([written, notified]).toEqual([[], ["KV1:"]]);
  });
});
