import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, it } from "vitest";
import { PushReplies } from "../../src/receive.js";
import { writerOn } from "./writer-alone.js";

// Counterparts of the unit tests of vLLM's push connector (PR 35264): steps, notifications, leases.

describe("a step", () => {
  it("writes finished blocks to a registration that waits", async () => {
    const { finish, register, written, idle, writer } = writerOn();
    register("r");
    expect(writer.outstanding().registrations).toBe(1);
    finish("r");
    await idle();
    expect([written.length, writer.outstanding().registrations]).toEqual([1, 0]);
  });

  it("only queues the work: no WRITE begins within it", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r");
    finish("r");
    // A step never waits for a handshake.
    expect(written).toEqual([]);
    await idle();
    expect(written.length).toBe(1);
  });
});

describe("notifications and leases", () => {
  it("a request whose WRITE has ended is reported as sent once", async () => {
    const { finish, register, idle, output, writer } = writerOn();
    finish("r");
    register("r");
    register("r");
    await idle();
    expect(output.take().finishedSending).toEqual(["r"]);
    register("r");
    await idle();
    expect(output.take().finishedSending).toEqual([]);
    expect(writer.outstanding()).toMatchObject({
      batch: 0,
      leases: 0,
      registrations: 0,
      writes: 0,
    });
  });

  it("a done notification counts once for each rank, and one that arrives early is kept", async () => {
    const replies = new PushReplies({ clock: manualClock() });
    expect(replies.add("done", "r~1", "p agent 1")).toBe(false);
    const registration = replies.open("r~1");
    expect([...registration.done]).toEqual(["p agent 1"]);
    const next = registration.next();
    expect([
      replies.add("done", "r~1", "p agent 0"),
      replies.add("done", "r~1", "p agent 0"),
    ]).toEqual([true, true]);
    await next;
    expect([...registration.done]).toEqual(["p agent 1", "p agent 0"]);
    replies.close("r~1");
    expect(replies.add("done", "r~1", "p agent 0")).toBe(false);
  });

  it("a lease that expires evicts the request and wakes the engine", async () => {
    const { finish, clock, output, writer } = writerOn();
    let woken = 0;
    output.onProgress(() => woken++);
    finish("r");
    clock.advance(30_001);
    expect(output.take().finishedSending).toEqual(["r"]);
    expect([woken, writer.outstanding().leases]).toEqual([1, 0]);
  });
});
