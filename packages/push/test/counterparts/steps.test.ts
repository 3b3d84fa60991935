import { describe, expect, it } from "vitest";
import { fixedClock } from "../../../pull/test/fixed-clock.js";
import { createWordTable } from "../../src/decode/push-replies.js";
import { writerOn } from "./writer-alone.js";

// Counterparts of the unit tests of vLLM's push connector (PR 35264): steps, notifications, leases.

describe("a step", () => {
  it("finished blocks meet a registration that waits", async () => {
    const { finish, register, written, idle, writer } = writerOn();
    register("r");
    expect(writer.outstanding().offers).toBe(1);
    finish("r");
    await idle();
    expect([written.length, writer.outstanding().offers]).toEqual([1, 0]);
  });

  it("only hands work over: no WRITE begins within it", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r");
    finish("r");
    // The handshake, known or not, is never waited for in a step.
    expect(written).toEqual([]);
    await idle();
    expect(written.length).toBe(1);
  });
});

describe("notifications and leases", () => {
  it("a request whose WRITE has ended is reported as sent, once", async () => {
    const { finish, register, idle, outbox, writer } = writerOn();
    finish("r");
    register("r");
    register("r");
    await idle();
    expect(outbox.take().finishedSending).toEqual(["r"]);
    register("r");
    await idle();
    expect(outbox.take().finishedSending).toEqual([]);
    expect(writer.outstanding()).toMatchObject({ batch: 0, leases: 0, offers: 0, writes: 0 });
  });

  it("the word that a rank's share has arrived is taken, once from each rank, and an early one is kept", async () => {
    const words = createWordTable({ clock: fixedClock() });
    expect(words.done("r~1", "p agent 1")).toBe(false);
    const about = words.open("r~1");
    expect([...about.done]).toEqual(["p agent 1"]);
    const next = about.next();
    expect([words.done("r~1", "p agent 0"), words.done("r~1", "p agent 0")]).toEqual([true, true]);
    await next;
    expect([...about.done]).toEqual(["p agent 1", "p agent 0"]);
    words.close("r~1");
    expect(words.done("r~1", "p agent 0")).toBe(false);
  });

  it("a lease that ends evicts the request, and the engine is woken for it", async () => {
    const { finish, clock, outbox, writer } = writerOn();
    let woken = 0;
    outbox.onProgress(() => woken++);
    finish("r");
    clock.advance(30_001);
    expect(outbox.take().finishedSending).toEqual(["r"]);
    expect([woken, writer.outstanding().leases]).toEqual([1, 0]);
  });
});
