import { setTimeout as delay } from "node:timers/promises";
import type { Memory, PreparedList } from "@kv/interface";
import { type NixlAgent, nixlTransport } from "@kv/nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { bundledChild } from "../support/bundled-child.js";
import { FAKE } from "../support/libraries.js";

const child = await bundledChild("call-in-worker.ts");
const BLOCK = 4096;
const COUNT = 64;

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
    let reader: NixlAgent;
    let owner: NixlAgent;
    let [here, there]: Memory[] = [];
    let [local, remote]: PreparedList[] = [];

    const faults = (settings: Record<string, number>) => {
      for (const name of Object.keys(process.env))
        if (name.startsWith("FAKE_NIXL_")) delete process.env[name];
      for (const [name, value] of Object.entries(settings))
        process.env[`FAKE_NIXL_${name}`] = String(value);
    };
    const visits = () => Number(process.env["FAKE_NIXL_VISITS"] ?? 0);
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

    beforeEach(async () => {
      faults({});
      [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
      [here, there] = [transport.allocate(BLOCK * COUNT), transport.allocate(BLOCK * COUNT)];
      there.bytes.fill(3);
      await reader.register(here);
      await owner.register(there);
      await reader.addRemote(await owner.localMetadata());
      const table = ({ address }: Memory) => ({
        memoryType: "DRAM" as const,
        rows: Float64Array.of(address, BLOCK, 0, BLOCK, COUNT),
      });
      [local, remote] = [
        await reader.prepareLocal(table(here)),
        await reader.prepareRemote(owner.name, table(there)),
      ];
      // The agent's thread makes the first call of each kind.
      await read(1).done;
      await note();
    });
    const read = (
      count: number,
      more: { signal?: AbortSignal; notification?: Uint8Array } = {},
    ) => {
      if (local === undefined || remote === undefined) throw new Error("no lists");
      const ids = Int32Array.from({ length: count }, (_, index) => index);
      return reader.transfer({
        operation: "READ",
        local,
        localIds: ids,
        remote,
        remoteIds: ids,
        ...more,
      });
    };
    /** A list of as many rows of the owner's memory. */
    const prepare = (rows: number) => {
      const row = [there?.address ?? 0, BLOCK, 0, BLOCK, 1];
      const table = Array.from({ length: rows }, () => row).flat();
      return reader.prepareRemote(owner.name, {
        memoryType: "DRAM",
        rows: Float64Array.from(table),
      });
    };
    const note = () => reader.notify(owner.name, Buffer.from("note"));

    afterEach(async () => {
      faults({});
      await reader.close();
      await owner.close();
      here?.close();
      there?.close();
    });

    test("a small READ, with its notification, is made at once; its promises resolve", async () => {
      const { done, released } = await onThisThread(() =>
        read(2, { notification: Buffer.from("read") }),
      );
      expect(await done).toMatchObject({ lengthBytes: 2 * BLOCK, descriptorCount: 2 });
      await released;
      expect(here?.bytes.subarray(0, 2 * BLOCK).every((byte) => byte === 3)).toBe(true);
      const inbox = owner.notifications();
      await inbox.next();
      const { value } = await inbox.next();
      expect(Buffer.from(value.payload).toString()).toBe("read");
      expect(reader.telemetry()).toMatchObject({ transfersInFlight: 0, transfersFailed: 0 });
    });

    test("a notification, a small list and a peer's small metadata are sent, prepared and added at once", async () => {
      await onThisThread(note);
      expect((await onThisThread(() => prepare(4))).count).toBe(4);
      const metadata = await owner.localMetadata();
      expect(await onThisThread(() => reader.addRemote(metadata))).toBe(owner.name);
    });

    test("errors reject the promise as ever, and what is released is released", async () => {
      faults({ FAIL_NOTIFICATION: 1 });
      await expect(onThisThread(note)).rejects.toMatchObject({ code: "KV_NOTIFICATION_FAILED" });
      const { done, released } = await onThisThread(() => {
        // A post of the agent's thread would take the fault.
        faults({ FAIL_POST: 1 });
        return read(1);
      });
      await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
      await released;
      expect(reader.telemetry().transfersInFlight).toBe(0);
    });

    test("large ones are left to the agent's thread: many bytes, many descriptors, long notifications, long lists", async () => {
      await onThisThread(note);
      faults({});
      for (let attempt = 0; attempt < 5; attempt++) {
        await delay(5);
        await read(17).done;
        await delay(5);
        await reader.notify(owner.name, new Uint8Array(65_537));
        await delay(5);
        await (await prepare(65)).close();
        expect(visits()).toBe(0);
      }
    });

    test("a command that waits is not overtaken", async () => {
      await onThisThread(note);
      faults({ STALL_METADATA: 50 });
      await Promise.all([reader.localMetadata(), note(), read(1).done, prepare(1)]);
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
      faults({});
      const controller = new AbortController();
      const { done, released } = await onThisThread(() => {
        process.env["FAKE_NIXL_HOLD"] = "1";
        return read(1, { signal: controller.signal });
      });
      controller.abort();
      await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_ABORTED" });
      process.env["FAKE_NIXL_HOLD"] = "0";
      await released;
    });

    test("an agent closes while a small READ is held", async () => {
      const { done, released } = await onThisThread(() => {
        process.env["FAKE_NIXL_HOLD"] = "1";
        return read(1);
      });
      const outcome = done.catch((error: { code: string }) => error.code);
      await reader.close({ timeoutMs: 10 });
      expect(await outcome).toBe("KV_TRANSFER_ABORTED");
      await released;
    });

    test.each(["terminate", "exit"])(
      "%s while a worker is within a call: the process ends in order",
      async (ending) => {
        const end = await child([ending], {
          FAKE_NIXL: FAKE.options.library ?? "",
          FAKE_NIXL_STALL_CALLS: "300",
        });
        expect(end, end.stderr).toMatchObject({ code: 0, signal: null, stdout: "within a call\n" });
      },
    );
  },
);
