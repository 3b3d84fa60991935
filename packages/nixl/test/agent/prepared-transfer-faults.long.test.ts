// A long suite: faults of prepared transfers, one at a time.
import type { Memory } from "@kv/interface";
import { type NixlAgent, nixlTransport, type PreparedTransfer } from "@kv/nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { FAKE } from "../support/libraries.js";

const BLOCK = 65_536;
/** 16 MiB: several slices. */
const COUNT = 256;

/**
 * The fake ends the process when a request is posted again after it failed, or is not released
 * before its agent.
 */
describe.skipIf(FAKE.missing)(`prepared transfers with faults (${FAKE.missing ?? "found"})`, () => {
  const transport = nixlTransport(FAKE.options);
  let reader: NixlAgent;
  let owner: NixlAgent;
  let [here, there]: Memory[] = [];
  let transfer: PreparedTransfer;

  beforeEach(async () => {
    [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
    [here, there] = [transport.allocate(BLOCK * COUNT), transport.allocate(BLOCK * COUNT)];
    await reader.register(here);
    await owner.register(there);
    await reader.addRemote(await owner.localMetadata());
    const table = ({ address }: Memory) => ({
      memoryType: "DRAM" as const,
      rows: Float64Array.of(address, BLOCK, 0, BLOCK, COUNT),
    });
    const local = await reader.prepareLocal(table(here));
    const remote = await reader.prepareRemote(owner.name, table(there));
    transfer = await reader.prepareTransfer({
      operation: "READ",
      local,
      runs: Int32Array.of(0, 0, COUNT),
      remote,
    });
  });
  afterEach(async () => {
    for (const name of ["FAIL_POST", "FAIL_STATUS", "POLLS", "HOLD", "REFUSE_RELEASE"]) {
      delete process.env[`FAKE_NIXL_${name}`];
    }
    await reader.close();
    await owner.close();
    here?.close();
    there?.close();
  });

  const moves = async (value: number) => {
    there?.bytes.fill(value);
    await transfer.post().done;
    expect(here?.bytes.every((byte) => byte === value)).toBe(true);
  };

  test.each([
    { FAIL_POST: "1" },
    { FAIL_POST: "2" },
    { POLLS: "2", FAIL_STATUS: "1" },
    { POLLS: "2", FAIL_STATUS: "2" },
    { POLLS: "2", FAIL_STATUS: "1", REFUSE_RELEASE: "3" },
  ])("after a failure it is posted again: %j", async (faults) => {
    await moves(1);
    for (const [name, value] of Object.entries(faults)) process.env[`FAKE_NIXL_${name}`] = value;
    const failed = transfer.post();
    await expect(failed.done).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    await failed.released;
    await moves(2);
    await moves(3);
    await transfer.close();
  });

  test("closing waits for the post that is under way", async () => {
    process.env.FAKE_NIXL_HOLD = "1";
    const { done } = transfer.post();
    const order: string[] = [];
    const closed = transfer.close().then(() => order.push("closed"));
    void done.then(() => order.push("done"));
    await expect(transfer.estimateCost()).rejects.toMatchObject({ code: "KV_LIST_CLOSED" });
    process.env.FAKE_NIXL_HOLD = "0";
    await closed;
    await done;
    expect(order.sort()).toEqual(["closed", "done"]);
  });

  test("an agent closes with a prepared transfer that is idle", async () => {
    await moves(4);
    await reader.close();
    expect(() => transfer.post()).toThrow(expect.objectContaining({ code: "KV_AGENT_CLOSED" }));
    await transfer.close();
  });

  test("an agent that closes under way rejects the post, and releases its requests", async () => {
    process.env.FAKE_NIXL_HOLD = "1";
    const { done, released } = transfer.post();
    const outcome = done.catch((error: { code: string }) => error.code);
    await reader.close({ timeoutMs: 10 });
    expect(await outcome).toBe("KV_TRANSFER_ABORTED");
    await released;
  });

  test("its cost is not estimated while it is under way", async () => {
    expect(await transfer.estimateCost()).toMatchObject({
      method: "backend",
      durationUs: expect.any(Number),
    });
    process.env.FAKE_NIXL_HOLD = "1";
    const { done } = transfer.post();
    await expect(transfer.estimateCost()).rejects.toMatchObject({ code: "KV_TRANSFER_INVALID" });
    process.env.FAKE_NIXL_HOLD = "0";
    await done;
  });
});
