import { setTimeout as delay } from "node:timers/promises";
import type { TransferOrder } from "@kv/interface";
import { type NixlAgent, nixlTransport } from "@kv/nixl";
import { FAKE_NIXL } from "@kv/testing/nixl/fake-nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { faults, faultsLeft } from "../support/fake-faults.js";
import { FAKE } from "../support/libraries.js";
import { pairOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { refused } from "../support/refused.js";
import { runChild } from "../support/run-child.js";

const BLOCK = 4096;

/** What ends with a call: a transfer's `done`, or its promise. */
const endOf = (result: unknown): unknown =>
  (result as { done?: unknown } | undefined)?.done ?? result;

/**
 * The fake counts the calls that another thread than the agent's makes, and ends the process when
 * two threads call it for one agent at once.
 */
describe.skipIf(FAKE.missing)(
  `short calls on the JavaScript thread (${FAKE.missing ?? "found"})`,
  () => {
    const transport = nixlTransport(FAKE.options);
    let world: Awaited<ReturnType<typeof pairOf<NixlAgent>>>;

    const visits = () => faultsLeft("VISITS");
    /**
     * Repeats `call`, each time after the agent's thread has had time to fall asleep, until it makes
     * a call of NIXL on this thread.
     */
    const onThisThread = async <T>(call: () => T): Promise<T> => {
      for (let attempt = 0; attempt < 100; attempt++) {
        await delay(3);
        const before = visits();
        const result = call();
        if (visits() > before) return result;
        // What the agent's thread holds would never end.
        process.env["FAKE_NIXL_HOLD"] = "0";
        await Promise.resolve(endOf(result)).catch(() => {});
      }
      throw new Error("no call was made on the JavaScript thread");
    };
    /** A READ that the fake holds. */
    const heldRead = (more: Partial<TransferOrder> = {}) =>
      onThisThread(() => {
        process.env["FAKE_NIXL_HOLD"] = "1";
        return read(1, more);
      });

    beforeEach(async () => {
      faults();
      world = await pairOf(transport, 64 * BLOCK, BLOCK);
      world.source.bytes.fill(3);
      // The agent's thread makes the first call of each kind.
      await read(1).done;
      await note();
    });
    afterEach(async () => {
      faults();
      await world.close();
    });
    const read = (count: number, more: Partial<TransferOrder> = {}) =>
      world.move("READ", scattered(count), more);
    /** A list of as many rows of the owner's memory. */
    const prepare = (rows: number) => {
      const row = [world.source.address, BLOCK, 0, BLOCK, 1];
      const table = Float64Array.from(Array<number[]>(rows).fill(row).flat());
      return world.reader.prepareRemote(world.owner.name, { memoryType: "DRAM", rows: table });
    };
    const note = () => world.reader.notify(world.owner.name, Buffer.from("note"));

    test("a small READ, with its notification, is made at once; its promises resolve", async () => {
      const { done, released } = await onThisThread(() =>
        read(2, { notification: Buffer.from("read") }),
      );
      expect(await done).toMatchObject({ lengthBytes: 2 * BLOCK, descriptorCount: 2 });
      await released;
      const { reader, owner, target } = world;
      expect(target.bytes.subarray(0, 2 * BLOCK).every((byte) => byte === 3)).toBe(true);
      const inbox = owner.notifications();
      await inbox.next();
      const { value } = await inbox.next();
      expect(Buffer.from(value.payload).toString()).toBe("read");
      expect(reader.telemetry()).toMatchObject({ transfersInFlight: 0, transfersFailed: 0 });
    });

    test("a notification, a small list and a peer's small metadata are sent, prepared and added at once", async () => {
      const { reader, owner } = world;
      await onThisThread(note);
      expect((await onThisThread(() => prepare(4))).count).toBe(4);
      const metadata = await owner.localMetadata();
      expect(await onThisThread(() => reader.addRemote(metadata))).toBe(owner.name);
    });

    test("errors reject the promise as ever, and what is released is released", async () => {
      faults({ FAIL_NOTIFICATION: 1 });
      await refused(onThisThread(note), "KV_NOTIFICATION_FAILED");
      const { done, released } = await onThisThread(() => {
        // A post of the agent's thread would take the fault.
        faults({ FAIL_POST: 1 });
        return read(1);
      });
      await refused(done, "KV_TRANSFER_FAILED");
      await released;
      expect(world.reader.telemetry().transfersInFlight).toBe(0);
    });

    test("large ones are left to the agent's thread: many bytes, many descriptors, long notifications, long lists", async () => {
      await onThisThread(note);
      faults();
      for (let attempt = 0; attempt < 5; attempt++) {
        await delay(5);
        await read(17).done;
        await delay(5);
        await world.reader.notify(world.owner.name, new Uint8Array(65_537));
        await delay(5);
        await (await prepare(65)).close();
        expect(visits()).toBe(0);
      }
    });

    test("a command that waits is not overtaken", async () => {
      await onThisThread(note);
      faults({ STALL_METADATA: 50 });
      await Promise.all([world.reader.localMetadata(), note(), read(1).done, prepare(1)]);
      expect(visits()).toBe(0);
    });

    test("after two calls that took long, the agent's thread makes the next ones", async () => {
      faults({ STALL_CALLS: 20 });
      await onThisThread(note);
      await onThisThread(note);
      const before = visits();
      for (let attempt = 0; attempt < 5; attempt++) {
        await delay(5);
        await note();
        await read(1).done;
      }
      expect(visits()).toBe(before);
    });

    test("a small READ that is not complete at once goes on, and may be aborted", async () => {
      faults({ POLLS: 5 });
      expect(await (await onThisThread(() => read(1))).done).toMatchObject({ lengthBytes: BLOCK });
      faults();
      const controller = new AbortController();
      const { done, released } = await heldRead({ signal: controller.signal });
      controller.abort();
      await refused(done, "KV_TRANSFER_ABORTED");
      process.env["FAKE_NIXL_HOLD"] = "0";
      await released;
    });

    test("an agent closes while a small READ is held", async () => {
      const { done, released } = await heldRead();
      await world.reader.close({ timeoutMs: 10 });
      await refused(done, "KV_TRANSFER_ABORTED");
      await released;
    });

    test.each(["terminate", "exit"])(
      "%s while a worker is within a call: the process ends in order",
      async (ending) => {
        const env = { FAKE_NIXL, FAKE_NIXL_STALL_CALLS: "300" };
        const end = await runChild("call-in-worker.ts", [ending], { env });
        expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "within a call\n" });
      },
    );
  },
);
