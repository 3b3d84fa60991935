import { decodeRegistration } from "@kv/protocol";
import { describe, expect, it } from "vitest";
import { REGISTRATION, writerOn } from "./writer-alone.js";

// Counterparts of the unit tests of vLLM's push connector (PR 35264): registrations are matched
// with finished requests.

describe("matching", () => {
  it("prefill finishes first", async () => {
    const { finish, register, written, idle, output } = writerOn();
    finish("r");
    expect(written).toEqual([]);
    register("r");
    await idle();
    expect(written).toEqual(["r → r [7,8,9]"]);
    expect(output.take().finishedSending).toEqual(["r"]);
  });

  it("decode registers first", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r");
    await idle();
    expect(written).toEqual([]);
    finish("r");
    await idle();
    expect(written).toEqual(["r → r [7,8,9]"]);
  });

  it("prefers the exact id over the base id", async () => {
    const { finish, register, written, idle } = writerOn();
    register("r-0000aaaa");
    register("r-0000bbbb");
    finish("r-0000BBBB", "r-0000cccc");
    finish("s-11111111");
    register("s-11111111");
    await idle();
    expect(written).toEqual([
      "r-0000BBBB → r-0000aaaa [7,8,9]",
      "r-0000cccc → r-0000bbbb [7,8,9]",
      "s-11111111 → s-11111111 [7,8,9]",
    ]);
    const exact = writerOn();
    exact.register("r-0000aaaa");
    exact.register("r-0000bbbb");
    exact.finish("r-0000bbbb");
    await exact.idle();
    expect(exact.written).toEqual(["r-0000bbbb → r-0000bbbb [7,8,9]"]);
  });

  it("prefers the exact id over the base id, also when the registrations come after several requests have finished", async () => {
    const { finish, register, written, idle } = writerOn();
    finish("r-0000aaaa", "r-0000bbbb", "r-0000cccc");
    for (const id of ["r-0000cccc", "r-0000bbbb", "r-0000dddd"]) register(id);
    await idle();
    expect(written).toEqual([
      "r-0000cccc → r-0000cccc [7,8,9]",
      "r-0000bbbb → r-0000bbbb [7,8,9]",
      "r-0000aaaa → r-0000dddd [7,8,9]",
    ]);
  });

  it.each([
    [{ request_id: 7 }],
    [{ local_block_ids: "all" }],
    [{ local_block_ids: [[]] }],
    [{ local_block_ids: [[-1]] }],
    [{ decode_host: "d:1;x" }],
    [{ decode_port: 0 }],
    [{ decode_tp_size: 0 }],
    [{ decode_engine_id: null }],
    [{ kv_peer: "x" }],
    [{ kv_peer: { rank: -1 } }],
  ])("a malformed registration is refused: %j", (change) => {
    expect(() => decodeRegistration({ ...REGISTRATION, request_id: "r", ...change })).toThrow(
      expect.objectContaining({ code: "KV_WIRE_MALFORMED" }) as Error,
    );
  });
});
