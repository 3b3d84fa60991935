import { once } from "node:events";
import { type AddressInfo, createServer, type Server } from "node:net";
import type { Agent, Memory, PreparedList } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";

const LENGTH = 12 << 20;
const BLOCK = 16_384;
const IDS = Int32Array.from(
  { length: LENGTH / BLOCK },
  (_, index) => (index * 5) % (LENGTH / BLOCK),
);
/** Few enough for one NIXL request. */
const FEW = IDS.subarray(0, 256);
const ARRIVED = Buffer.alloc(BLOCK, 3);

/**
 * A backend that reports the errors of a dead peer in the next call, as libfabric does over TCP.
 */
describe.skipIf(fakeMissing)(`errors of another peer (${fakeMissing ?? "fake found"})`, () => {
  let endpoints: Server[] = [];
  let world: Awaited<ReturnType<typeof agents>>;

  /** An endpoint that shows whether a peer is alive: it listens as long as the peer lives. */
  async function endpoint(): Promise<{ port: number; end(): Promise<void> }> {
    const server = createServer((socket) => socket.on("error", () => {})).listen(0, "127.0.0.1");
    endpoints.push(server);
    await once(server, "listening");
    const sockets = new Set<{ destroy(): void }>();
    server.on("connection", (socket) => sockets.add(socket));
    return {
      port: (server.address() as AddressInfo).port,
      async end() {
        for (const socket of sockets) socket.destroy();
        server.close();
        await once(server, "close");
      },
    };
  }

  async function metadataAt(agent: Agent, port: number): Promise<Uint8Array> {
    process.env.FAKE_NIXL_ENDPOINT = String(port);
    const metadata = await agent.localMetadata();
    delete process.env.FAKE_NIXL_ENDPOINT;
    return metadata;
  }

  async function agents() {
    const transport = nixlTransport({ library: FAKE_NIXL, backends: ["LIBFABRIC"] });
    const [reader, owner, doomed] = [
      await transport.createAgent(),
      await transport.createAgent(),
      await transport.createAgent(),
    ];
    const [mine, theirs] = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
    await reader.register(mine);
    await owner.register(theirs);
    const [alive, dying] = [await endpoint(), await endpoint()];
    await reader.addRemote(await metadataAt(owner, alive.port));
    await reader.addRemote(await metadataAt(doomed, dying.port));
    const table = (memory: Memory) => ({
      memoryType: "DRAM" as const,
      rows: Float64Array.of(memory.address, BLOCK, 0, BLOCK, LENGTH / BLOCK),
    });
    const local: PreparedList = await reader.prepareLocal(table(mine));
    const prepareRemote = () => reader.prepareRemote(owner.name, table(theirs));
    const remote: PreparedList = await prepareRemote();
    return { transport, reader, owner, mine, theirs, local, remote, prepareRemote, alive, dying };
  }

  const errors = (count: number) => {
    process.env.FAKE_NIXL_STRAY_ERRORS = String(count);
  };
  const move = (
    operation: "READ" | "WRITE",
    ids: Int32Array,
    { remote = world.remote, ...more }: { remote?: PreparedList; signal?: AbortSignal } = {},
  ) =>
    world.reader.transfer({
      operation,
      local: world.local,
      localIds: ids,
      remote,
      remoteIds: ids,
      notification: Buffer.from("moved"),
      ...more,
    });
  const arrived = (memory: Memory, ids: Int32Array) =>
    ids.every((id) => ARRIVED.equals(memory.bytes.subarray(id * BLOCK, (id + 1) * BLOCK)));
  /** The notifications that the peer received before a marker. */
  const heard = async () => {
    await world.reader.notify(world.owner.name, Buffer.from("marker"));
    const texts: string[] = [];
    for await (const { payload } of world.owner.notifications()) {
      texts.push(Buffer.from(payload).toString());
      if (texts.at(-1) === "marker") break;
    }
    return texts;
  };

  beforeEach(async () => {
    world = await agents();
    process.env.FAKE_NIXL_POLLS = "2";
  });
  afterEach(async () => {
    for (const name of Object.keys(process.env))
      if (name.startsWith("FAKE_NIXL_")) delete process.env[name];
    await world.transport.close();
    for (const memory of [world.mine, world.theirs]) memory.close();
    for (const server of endpoints) server.close();
    endpoints = [];
  });

  test.each(["READ", "WRITE"] as const)(
    "a %s with another peer succeeds, and notifies once",
    async (operation) => {
      const [source, target] =
        operation === "READ" ? [world.theirs, world.mine] : [world.mine, world.theirs];
      source.bytes.fill(3);
      await world.dying.end();
      errors(3);
      const result = await move(operation, IDS).done;
      expect(result.lengthBytes).toBe(LENGTH);
      expect(process.env.FAKE_NIXL_STRAY_ERRORS).toBe("0");
      expect(arrived(target, IDS)).toBe(true);
      expect(await heard()).toEqual(["moved", "marker"]);
      expect(world.reader.telemetry()).toMatchObject({ transfersInFlight: 0, transfersFailed: 0 });
    },
  );

  test("metadata of another peer is accepted", async () => {
    await world.dying.end();
    errors(2);
    await world.reader.addRemote(await metadataAt(world.owner, world.alive.port));
    expect(process.env.FAKE_NIXL_STRAY_ERRORS).toBe("0");
  });

  test.each([
    { name: "no peer died: refused, then accepted when it is added again", died: false },
    { name: "another peer died: accepted at the second attempt", died: true },
  ])(
    "metadata of a known peer, $name; lists of a peer that NIXL dropped move nothing",
    async ({ died }) => {
      const dropped = async () => {
        for (const operation of ["READ", "WRITE"] as const) {
          const { done, released } = move(operation, FEW);
          await expect(done).rejects.toMatchObject({
            code: "KV_TRANSFER_FAILED",
            message: expect.stringContaining("dropped"),
          });
          await released;
        }
      };
      // From now on requests by index use this list.
      await move("READ", FEW).done;
      const other = await world.prepareRemote();
      const metadata = await metadataAt(world.owner, world.alive.port);
      if (died) await world.dying.end();
      errors(1);
      if (!died) {
        await expect(world.reader.addRemote(metadata)).rejects.toMatchObject({
          code: "KV_AGENT_METADATA_INVALID",
        });
        await dropped();
        await other.close();
      }
      await world.reader.addRemote(metadata);
      expect(process.env.FAKE_NIXL_STRAY_ERRORS).toBe("0");
      await dropped();
      const remote = await world.prepareRemote();
      await world.remote.close();
      world.theirs.bytes.fill(3);
      await move("READ", FEW, { remote }).done;
      expect(arrived(world.mine, FEW)).toBe(true);
      await expect(world.reader.removeRemote(world.owner.name)).rejects.toMatchObject({
        code: "KV_MEMORY_IN_USE",
      });
      await remote.close();
      await world.reader.removeRemote(world.owner.name);
    },
  );

  test("when no peer died, the error is the transfer's own: it fails, and is released when all bytes have landed", async () => {
    world.theirs.bytes.fill(3);
    errors(1);
    const { done, released } = move("READ", FEW);
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    await released;
    expect(arrived(world.mine, FEW)).toBe(true);
    expect(await heard()).toEqual(["marker"]);
  });

  test("aborted while the error is ambiguous, it is released when all bytes have landed", async () => {
    world.theirs.bytes.fill(3);
    await world.dying.end();
    process.env.FAKE_NIXL_HOLD = "1";
    const controller = new AbortController();
    errors(1);
    const { done, released } = move("READ", FEW, { signal: controller.signal });
    await expect.poll(() => process.env.FAKE_NIXL_STRAY_ERRORS).toBe("0");
    controller.abort();
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_ABORTED" });
    process.env.FAKE_NIXL_HOLD = "0";
    await released;
    expect(arrived(world.mine, FEW)).toBe(true);
  });

  test("endless errors fail the transfer", async () => {
    await world.dying.end();
    errors(1_000_000);
    const { done, released } = move("READ", IDS);
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    await released;
    expect(world.reader.telemetry()).toMatchObject({ transfersInFlight: 0, transfersFailed: 1 });
  });
});
