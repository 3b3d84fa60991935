// A long suite: faults of prepared transfers, one at a time.
import { expectThrown } from "@kv/conformance/expect-error";
import { type NixlAgent, nixlTransport, type PreparedTransfer } from "@kv/nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { faults } from "../support/fake-faults.js";
import { FAKE } from "../support/libraries.js";
import { pairOf } from "../support/pair.js";
import { refused } from "../support/refused.js";

const BLOCK = 65_536;
/** 16 MiB: several slices. */
const COUNT = 256;

/**
 * The fake ends the process when a request is posted again after it failed, or is not released
 * before its agent.
 */
describe.skipIf(FAKE.missing)(`prepared transfers with faults (${FAKE.missing ?? "found"})`, () => {
  const transport = nixlTransport(FAKE.options);
  let world: Awaited<ReturnType<typeof pairOf<NixlAgent>>>;
  let transfer: PreparedTransfer;

  beforeEach(async () => {
    world = await pairOf(transport, BLOCK * COUNT, BLOCK);
    const { reader, local, remote } = world;
    const runs = Int32Array.of(0, 0, COUNT);
    transfer = await reader.prepareTransfer({ operation: "READ", local, runs, remote });
  });
  afterEach(async () => {
    faults();
    await world.close();
  });

  const moves = async (value: number) => {
    world.source.bytes.fill(value);
    await transfer.post().done;
    expect(world.target.bytes.every((byte) => byte === value)).toBe(true);
  };

  test.each<Record<string, string>>([
    { FAIL_POST: "1" },
    { FAIL_POST: "2" },
    { POLLS: "2", FAIL_STATUS: "1" },
    { POLLS: "2", FAIL_STATUS: "2" },
    { POLLS: "2", FAIL_STATUS: "1", REFUSE_RELEASE: "3" },
  ])("after a failure it is posted again: %j", async (settings) => {
    await moves(1);
    faults(settings);
    const { done, released } = transfer.post();
    await refused(done, "KV_TRANSFER_FAILED");
    await released;
    await moves(2);
    await moves(3);
    await transfer.close();
  });

  test("closing waits for the post that is under way", async () => {
    faults({ HOLD: 1 });
    const { done } = transfer.post();
    const order: string[] = [];
    const closed = transfer.close().then(() => order.push("closed"));
    void done.then(() => order.push("done"));
    process.env.FAKE_NIXL_HOLD = "0";
    await closed;
    await done;
    expect(order.sort()).toEqual(["closed", "done"]);
  });

  test("an agent closes with a prepared transfer that is idle", async () => {
    await moves(4);
    await world.reader.close();
    expectThrown(() => transfer.post(), "KV_AGENT_CLOSED");
    await transfer.close();
  });

  test("an agent that closes under way rejects the post, and releases its requests", async () => {
    faults({ HOLD: 1 });
    const { done, released } = transfer.post();
    await world.reader.close({ timeoutMs: 10 });
    await refused(done, "KV_TRANSFER_ABORTED");
    await released;
  });
});
