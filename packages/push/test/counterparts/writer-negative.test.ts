import { decodePushControl } from "@kv/protocol";
import { describe, expect, it } from "vitest";
import { OWN, offerOf, withdrawal, writerOn } from "./writer-alone.js";

// Counterparts of the unit tests of vLLM's push connector (PR 35264): what the writer is not misled by.

describe("the writer is not misled", () => {
  it("by nothing to take", () => {
    const { writer, none, outbox, clock } = writerOn();
    writer.step(none);
    expect(outbox.take().finishedSending).toEqual([]);
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

  it("by a payload that is no map, or of another's type", () => {
    expect(() => decodePushControl({ type: "push_withdraw" })).toThrow(/KV_WIRE|request_id|malformed/i);
    expect(() => decodePushControl({ type: "push_ended", request_id: 5 })).toThrow(/request_id/);
    expect(decodePushControl({ type: "of another kind" })).toBeUndefined();
  });

  it("by a request id that is no string", () => {
    expect(() => offerOf("r", { request_id: { id: "r" } })).toThrow(/request_id/);
  });

  it("by a registration that comes twice", async () => {
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

  it("evicting takes exactly one", () => {
    const { clock, finish, outbox, writer } = writerOn();
    finish("a");
    clock.advance(10_000);
    writer.step({ ...writerOn().none, schedulerClockMs: 500, leases: [] });
    writer.heartbeat(["a"]);
    finish("b");
    clock.advance(20_001);
    expect(outbox.take().finishedSending).toHaveLength(1);
    expect(writer.outstanding().leases).toBe(1);
  });

  it("a step with nothing to do goes on with what waits", async () => {
    const { writer, none, register, finish, idle, written } = writerOn();
    register("r");
    writer.step(none);
    writer.step(none);
    finish("r");
    await idle();
    expect(written.length).toBe(1);
  });

  it("by heartbeats, withdrawals and ends of what it does not know", async () => {
    const { writer, outbox, idle, clock } = writerOn();
    writer.heartbeat(["nobody", ""]);
    writer.withdraw(withdrawal("nobody"), "d agent");
    await idle();
    expect(outbox.take().finishedSending).toEqual([]);
    // What it keeps of them it keeps for a while.
    clock.advance(5001);
    expect(writer.outstanding().offers).toBe(0);
    expect(clock.pending()).toBe(0);
  });

  it("by an empty step: nothing is kept, no timer runs", () => {
    const { writer, none, clock } = writerOn();
    for (let i = 0; i < 10; i++) writer.step({ ...none, schedulerClockMs: i });
    expect(clock.pending()).toBe(0);
    expect(Object.values(writer.outstanding()).filter((count) => count !== 0)).toEqual([]);
  });

  it("by a registration for another engine, which is told so", async () => {
    const { register, finish, written, idle, told } = writerOn();
    finish("r");
    register("r", { remote_engine_id: "another", kv_peer: OWN });
    await idle();
    expect([written, told]).toEqual([[], ["KV1:"]]);
  });
});
