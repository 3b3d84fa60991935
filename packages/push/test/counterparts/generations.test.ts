import { describe, expect, it } from "vitest";
import { OWN, withdrawal, writerOn } from "./writer-alone.js";

// Beyond the counterparts of vLLM's tests: what tells one request from the next of its name.

describe("generations", () => {
  it("what is older than the oldest that is open is refused, whatever else was forgotten", async () => {
    const { register, finish, written, idle, told } = writerOn();
    register("new", { kv_peer: { ...OWN, match_id: "new", generation: 9, oldest_open: 8 } });
    register("old", { kv_peer: { ...OWN, match_id: "old", generation: 7, oldest_open: 1 } });
    finish("old");
    await idle();
    expect([written, told]).toEqual([[], ["KV1:"]]);
  });

  it("a withdrawal that overtakes its registration holds", async () => {
    const { register, finish, written, idle, writer, outbox } = writerOn();
    writer.withdraw(withdrawal("r"), "d agent");
    register("r", { kv_peer: OWN });
    finish("r");
    await idle();
    expect(written).toEqual([]);
    expect(outbox.take().finishedSending).toEqual(["r"]);
  });

  it("a request of the producer's that has ended is not waited for", async () => {
    const { register, writer, none, order, idle, told } = writerOn();
    const { expiresAtMs: _, ...running } = order("r");
    writer.step({ ...none, inBatch: [running] });
    writer.step({ ...none, notSent: ["r"] });
    register("d", {
      kv_peer: {
        ...OWN,
        match_id: "d",
        prefill: { request_id: "r", incarnation: "p-process", generation: 1 },
      },
    });
    await idle();
    expect(told).toEqual(["KV1:"]);
  });
});
