import type { AgentOptions } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { faults, faultsLeft } from "../support/fake-faults.js";
import { pairOf, textsUntilMarker } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { refused } from "../support/refused.js";

const LENGTH = 48 << 20;
const BLOCK = 16_384;
const ALL = scattered(LENGTH / BLOCK, 5);
const FEW = scattered(4);

/** Failures of NIXL, simulated by a fake that aborts when the addon breaks one of NIXL's rules. */
describe.skipIf(fakeMissing)(`failures of NIXL (${fakeMissing ?? "fake found"})`, () => {
  const transport = nixlTransport({ library: FAKE_NIXL });

  async function agents(options?: AgentOptions) {
    const pair = await pairOf(transport, LENGTH, BLOCK, options);
    pair.source.bytes.fill(3);
    return pair;
  }
  let world: Awaited<ReturnType<typeof agents>>;

  const text = (word: string) => ({ notification: Buffer.from(word) });
  const hasArrived = () => world.target.bytes.every((byte) => byte === 3);
  const heard = () => textsUntilMarker(world.reader, world.owner);

  beforeEach(async () => {
    faults();
    world = await agents();
  });
  afterEach(async () => {
    faults();
    await world.close();
  });

  test("posts that only start the copy: several slices are in flight, the notification follows the last", async () => {
    faults({ POLLS: 3 });
    const result = await world.move("READ", ALL, text("done")).done;
    expect(result.lengthBytes).toBe(LENGTH);
    expect(hasArrived()).toBe(true);
    expect(await heard()).toEqual(["done", "marker"]);
  });

  /**
   * The number of NIXL requests for all blocks in an order that merges nothing: more than one
   * slice.
   */
  const requests = async (settings: Record<string, number>, more = {}) => {
    faults({ ...settings, FAIL_POST: 1000 });
    await world.move("READ", ALL, more).done;
    // The failure counter decreases with every post.
    return 1000 - faultsLeft("FAIL_POST");
  };

  test("when posts only start the copy, later transfers are one request each, with the notification attached", async () => {
    expect(await requests({ POLLS: 3 })).toBeGreaterThan(1);
    // A separate notification would fail the transfer.
    expect(await requests({ POLLS: 3, FAIL_NOTIFICATION: 1 }, text("lost"))).toBe(1);
    expect(await requests({ POLLS: 3 }, text("rides"))).toBe(1);
    expect(hasArrived()).toBe(true);
    expect(await heard()).toEqual(["rides", "marker"]);
  });

  test("with several threads a slice is four times as large for each, whatever a post returns, and NIXL divides it", async () => {
    const alone = await requests({});
    for (const [parameters, divides] of [
      [{ num_threads: "2" }, "num_threads=2 split_batch_size=32"],
      [{ num_threads: "2", split_batch_size: "7" }, "num_threads=2 split_batch_size=7"],
    ] as const) {
      await world.close();
      world = await agents({ backends: [{ name: "UCX", parameters }] });
      expect(process.env.FAKE_NIXL_PARAMETERS?.trim()).toBe(divides);
      for (let round = 0; round < 2; round++)
        expect(await requests({ POLLS: 3 })).toBe(Math.ceil(alone / 8));
    }
  });

  test("when a post turns out to copy, transfers are sliced again, permanently", async () => {
    await requests({ POLLS: 3 });
    expect(await requests({})).toBe(1);
    for (let round = 0; round < 2; round++) expect(await requests({ POLLS: 3 })).toBeGreaterThan(1);
  });

  test("a refused release is tried again; `released`, `done` and the list wait for it", async () => {
    faults({ REFUSE_RELEASE: 5 });
    const { done, released } = world.move("READ", FEW);
    await world.local.close();
    expect(faultsLeft("REFUSE_RELEASE")).toBe(0);
    await Promise.all([done, released]);
    await world.registration.close();
    expect(world.reader.telemetry()).toMatchObject({
      transfersInFlight: 0,
      transfersDone: 1,
      registrations: 0,
    });
  });

  test.each([
    ["a slice whose post fails", { POLLS: 4, FAIL_POST: 3 }],
    ["a slice that fails in flight", { POLLS: 2, FAIL_STATUS: 4 }],
  ])(
    "%s fails the transfer; slices in flight are awaited; no notification is sent",
    async (_, settings) => {
      faults(settings);
      const { done, released } = world.move("READ", ALL, text("never"));
      await refused(done, "KV_TRANSFER_FAILED");
      await released;
      expect(await heard()).toEqual(["marker"]);
      expect(world.reader.telemetry()).toMatchObject({
        transfersInFlight: 0,
        transfersFailed: 1,
        transfersDone: 0,
      });
      faults();
      await world.move("READ", ALL).done;
    },
  );

  test("when the bytes landed but the notification could not be sent, the transfer fails with that reason", async () => {
    faults({ FAIL_NOTIFICATION: 1 });
    const { done, released } = world.move("READ", ALL, text("lost"));
    await refused(done, "KV_NOTIFICATION_FAILED");
    await released;
    const alone = () => world.reader.notify(world.owner.name, Buffer.from("x"));
    await refused(alone, "KV_NOTIFICATION_FAILED");
  });

  test("an aborted transfer posts no more slices", async () => {
    faults({ HOLD: 1, FAIL_POST: 1000 });
    const posts = () => 1000 - faultsLeft("FAIL_POST");
    const window = 32;
    const count = (2 * window * (8 << 20)) / BLOCK;
    const ids = Int32Array.from({ length: count }, (_, index) => index % (LENGTH / BLOCK));
    const controller = new AbortController();
    const { done, released } = world.move("READ", ids, { signal: controller.signal });
    await expect.poll(posts, { timeout: 30_000 }).toBe(window);
    controller.abort();
    await refused(done, "KV_TRANSFER_ABORTED");
    process.env.FAKE_NIXL_HOLD = "0";
    await released;
    expect(posts()).toBe(window);
  });

  test("a copy that never ends: the transfer rejects at once, its memory stays in use until the agent closes, and close does not wait for ever", async () => {
    faults({ POLLS: 2 ** 30 });
    const { reader, target, registration, move } = world;
    const controller = new AbortController();
    const { done, released } = move("READ", FEW, { signal: controller.signal, ...text("never") });
    controller.abort();
    await refused(done, "KV_TRANSFER_ABORTED");
    await refused(registration.close(), "KV_MEMORY_IN_USE");
    expect(() => target.close()).toThrow("registrations");
    const other = move("READ", FEW);
    await reader.close({ timeoutMs: 1 });
    await refused(other.done, "KV_TRANSFER_ABORTED");
    await Promise.all([released, other.released]);
    expect(reader.telemetry().transfersInFlight).toBe(0);
  });
});
