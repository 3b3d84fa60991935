import { describe, expect, it } from "vitest";
import { OWN, withdrawal, writerOn } from "./writer-alone.js";

// In addition to the counterparts of vLLM's tests: generations distinguish one use of a request id
// from the next.

describe("generations", () => {
  it("a generation below the watermark of its consumer is refused", async () => {
    const { register, finish, written, idle, notified } = writerOn();
    register("new", { kv_peer: { ...OWN, match_id: "new", generation: 9, oldest_open: 8 } });
    register("old", { kv_peer: { ...OWN, match_id: "old", generation: 7, oldest_open: 1 } });
    finish("old");
    await idle();
    expect([written, notified]).toEqual([[], ["KV1:"]]);
  });

  it("a withdrawal that arrives before its registration takes effect", async () => {
    const { register, finish, written, idle, writer, output } = writerOn();
    writer.withdraw(withdrawal("r"), "d agent");
    register("r", { kv_peer: OWN });
    finish("r");
    await idle();
    expect(written).toEqual([]);
    expect(output.take().finishedSending).toEqual(["r"]);
  });

  it("a registration for a producer's request that has ended is answered at once", async () => {
    const { register, writer, none, order, idle, notified } = writerOn();
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
    expect(notified).toEqual(["KV1:"]);
  });
});

describe("a registration is compared with the prompt of the request that it names", () => {
  const prefill = { request_id: "r", incarnation: "p-process", generation: 1 };
  const another = { prompt_digest: "0".repeat(64) };
  const same = {};

  it.each([
    ["by P's parameters", "before", { prefill, ...another }, []],
    ["by P's parameters", "after", { prefill, ...another }, []],
    ["by P's parameters", "before", { prefill, ...same }, ["r → d [7,8,9]"]],
    ["by P's parameters", "after", { prefill, ...same }, ["r → d [7,8,9]"]],
    ["by P's parameters", "before", { prefill: { ...prefill, incarnation: "before" } }, []],
    ["by P's parameters", "after", { prefill: { ...prefill, incarnation: "before" } }, []],
    ["by P's parameters", "after", { prefill: { ...prefill, capability: "c".repeat(22) } }, []],
    ["by its id", "before", { match_id: "r", ...another }, []],
    ["by its id", "after", { match_id: "r", ...another }, []],
    ["by its id", "before", { match_id: "r", ...same }, ["r → d [7,8,9]"]],
  ] as const)("%s, %s P's worker has it: %j", async (_, when, own, expected) => {
    const { register, finish, written, notified, idle } = writerOn();
    const arrives = () => register("d", { kv_peer: { ...OWN, match_id: "d", ...own } });
    if (when === "before") arrives();
    finish("r");
    if (when === "after") arrives();
    await idle();
    expect(written).toEqual(expected);
    // D is answered at once.
    expect(notified).toEqual(expected.length > 0 ? [] : ["KV1:"]);
  });
});
