import type { Agent, BackendSpec, Memory, PreparedList } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";

const LENGTH = 48 << 20;
const BLOCK = 16_384;

/** Failures of NIXL, simulated by a fake that aborts when the addon breaks one of NIXL's rules. */
describe.skipIf(fakeMissing)(`failures of NIXL (${fakeMissing ?? "fake found"})`, () => {
  const transport = nixlTransport({ library: FAKE_NIXL });
  let [reader, owner]: Agent[] = [];
  let [target, source]: Memory[] = [];
  let [local, remote]: PreparedList[] = [];

  async function agents(backend: BackendSpec = { name: "UCX" }) {
    [reader, owner] = [
      await transport.createAgent({ backends: [backend] }),
      await transport.createAgent(),
    ];
    [target, source] = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
    source.bytes.fill(3);
    await owner.register(source);
    const registration = await reader.register(target);
    await reader.addRemote(await owner.localMetadata());
    const table = (memory: Memory) => ({
      memoryType: "DRAM" as const,
      rows: Float64Array.of(memory.address, BLOCK, 0, BLOCK, LENGTH / BLOCK),
    });
    [local, remote] = [
      await reader.prepareLocal(table(target)),
      await reader.prepareRemote(owner.name, table(source)),
    ];
    return { reader, owner, target, source, local, remote, registration };
  }
  type World = Awaited<ReturnType<typeof agents>>;
  let world: World;

  const faults = (settings: Record<string, number>) => {
    for (const name of Object.keys(process.env))
      if (name.startsWith("FAKE_NIXL_")) delete process.env[name];
    for (const [name, value] of Object.entries(settings))
      process.env[`FAKE_NIXL_${name}`] = String(value);
  };
  const all = (count = LENGTH / BLOCK) =>
    Int32Array.from({ length: count }, (_, index) => (index * 5) % count);
  const read = (ids: Int32Array, more: { notification?: Uint8Array; signal?: AbortSignal } = {}) =>
    world.reader.transfer({
      operation: "READ",
      local: world.local,
      localIds: ids,
      remote: world.remote,
      remoteIds: ids,
      ...more,
    });
  /** The next notification, after a marker was sent behind everything else. */
  const heard = async () => {
    await world.reader.notify(world.owner.name, Buffer.from("marker"));
    const inbox = world.owner.notifications();
    const texts: string[] = [];
    for await (const { payload } of inbox) {
      texts.push(Buffer.from(payload).toString());
      if (texts.at(-1) === "marker") return texts;
    }
    return texts;
  };

  beforeEach(async () => {
    faults({});
    world = await agents();
  });
  afterEach(async () => {
    faults({});
    await world.reader.close();
    await world.owner.close();
    world.target.close();
    world.source.close();
  });

  test("posts that only start the copy: several slices are in flight, the notification follows the last", async () => {
    faults({ POLLS: 3 });
    const result = await read(all(), { notification: Buffer.from("done") }).done;
    expect(result.lengthBytes).toBe(LENGTH);
    expect(world.target.bytes.every((byte) => byte === 3)).toBe(true);
    expect(await heard()).toEqual(["done", "marker"]);
  });

  /**
   * The number of NIXL requests for all blocks in an order that merges nothing: more than one
   * slice.
   */
  const requests = async (settings: Record<string, number>, notification?: Uint8Array) => {
    faults({ ...settings, FAIL_POST: 1000 });
    await read(all(), notification ? { notification } : {}).done;
    // The failure counter decreases with every post.
    return 1000 - Number(process.env.FAKE_NIXL_FAIL_POST);
  };

  test("when posts only start the copy, later transfers are one request each, with the notification attached", async () => {
    expect(await requests({ POLLS: 3 })).toBeGreaterThan(1);
    // A separate notification would fail the transfer.
    expect(await requests({ POLLS: 3, FAIL_NOTIFICATION: 1 }, Buffer.from("lost"))).toBe(1);
    expect(await requests({ POLLS: 3 }, Buffer.from("rides"))).toBe(1);
    expect(world.target.bytes.every((byte) => byte === 3)).toBe(true);
    expect(await heard()).toEqual(["rides", "marker"]);
  });

  test("with several threads a slice is four times as large for each, whatever a post returns, and NIXL divides it", async () => {
    const alone = await requests({});
    for (const [parameters, divides] of [
      [{ num_threads: "2" }, "num_threads=2 split_batch_size=32"],
      [{ num_threads: "2", split_batch_size: "7" }, "num_threads=2 split_batch_size=7"],
    ] as const) {
      await Promise.all([world.reader.close(), world.owner.close()]);
      world.target.close();
      world.source.close();
      world = await agents({ name: "UCX", parameters });
      expect(process.env.FAKE_NIXL_PARAMETERS?.trim()).toBe(divides);
      expect(await requests({ POLLS: 3 })).toBe(Math.ceil(alone / 8));
      expect(await requests({ POLLS: 3 })).toBe(Math.ceil(alone / 8));
    }
  });

  test("when a post turns out to copy, transfers are sliced again, permanently", async () => {
    await requests({ POLLS: 3 });
    expect(await requests({})).toBe(1);
    expect(await requests({ POLLS: 3 })).toBeGreaterThan(1);
    expect(await requests({ POLLS: 3 })).toBeGreaterThan(1);
  });

  test("a refused release is tried again; `released`, `done` and the list wait for it", async () => {
    faults({ REFUSE_RELEASE: 5 });
    const { done, released } = read(all(4));
    await world.local.close();
    expect(process.env.FAKE_NIXL_REFUSE_RELEASE).toBe("0");
    await done;
    await released;
    await world.registration.close();
    expect(world.reader.telemetry()).toMatchObject({
      transfersInFlight: 0,
      transfersDone: 1,
      registrations: 0,
    });
  });

  test("a slice whose post fails fails the transfer; slices in flight are awaited; no notification is sent", async () => {
    faults({ POLLS: 4, FAIL_POST: 3 });
    const { done, released } = read(all(), { notification: Buffer.from("never") });
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    await released;
    expect(await heard()).toEqual(["marker"]);
    expect(world.reader.telemetry()).toMatchObject({
      transfersInFlight: 0,
      transfersFailed: 1,
      transfersDone: 0,
    });
  });

  test("a slice that fails in flight fails the transfer", async () => {
    faults({ POLLS: 2, FAIL_STATUS: 4 });
    const { done, released } = read(all(), { notification: Buffer.from("never") });
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    await released;
    expect(await heard()).toEqual(["marker"]);
    faults({});
    await read(all()).done;
  });

  test("when the bytes landed but the notification could not be sent, the transfer fails with that reason", async () => {
    faults({ FAIL_NOTIFICATION: 1 });
    const { done, released } = read(all(), { notification: Buffer.from("lost") });
    await expect(done).rejects.toMatchObject({ code: "KV_NOTIFICATION_FAILED" });
    await released;
    await expect(world.reader.notify(world.owner.name, Buffer.from("x"))).rejects.toMatchObject({
      code: "KV_NOTIFICATION_FAILED",
    });
  });

  test("an aborted transfer posts no more slices", async () => {
    faults({ HOLD: 1, FAIL_POST: 1000 });
    const posts = () => 1000 - Number(process.env.FAKE_NIXL_FAIL_POST);
    const window = 32;
    const count = (2 * window * (8 << 20)) / BLOCK;
    const ids = Int32Array.from({ length: count }, (_, index) => index % (LENGTH / BLOCK));
    const controller = new AbortController();
    const { done, released } = read(ids, { signal: controller.signal });
    await expect.poll(posts, { timeout: 30_000 }).toBe(window);
    controller.abort();
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_ABORTED" });
    process.env.FAKE_NIXL_HOLD = "0";
    await released;
    expect(posts()).toBe(window);
  });

  test("a copy that never ends: the transfer rejects at once, its memory stays in use until the agent closes, and close does not wait for ever", async () => {
    faults({ POLLS: 2 ** 30 });
    const controller = new AbortController();
    const { done, released } = read(all(4), {
      signal: controller.signal,
      notification: Buffer.from("never"),
    });
    controller.abort();
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_ABORTED" });
    await expect(world.registration.close()).rejects.toMatchObject({ code: "KV_MEMORY_IN_USE" });
    expect(() => world.target.close()).toThrow(/registrations/);
    const other = read(all(4));
    await world.reader.close({ timeoutMs: 1 });
    await expect(other.done).rejects.toMatchObject({ code: "KV_TRANSFER_ABORTED" });
    await Promise.all([released, other.released]);
    expect(world.reader.telemetry().transfersInFlight).toBe(0);
  });
});
