import { once } from "node:events";
import { type AddressInfo, createServer, type Server } from "node:net";
import type { Agent, Memory } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { faults, faultsLeft } from "../support/fake-faults.js";
import { listsOf, textsUntilMarker } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { refused } from "../support/refused.js";

const LENGTH = 12 << 20;
const BLOCK = 16_384;
const COUNT = LENGTH / BLOCK;
const IDS = scattered(COUNT, 5);
/** Few enough for one NIXL request. */
const FEW = IDS.subarray(0, 256);
const ARRIVED = Buffer.alloc(BLOCK, 3);
const MOVED = { notification: Buffer.from("moved") };

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
    const prepare = () => listsOf(reader, mine, owner.name, theirs, BLOCK, COUNT);
    return { transport, reader, owner, mine, theirs, prepare, ...(await prepare()), alive, dying };
  }

  const arrived = (memory: Memory, ids: Int32Array) =>
    ids.every((id) => ARRIVED.equals(memory.bytes.subarray(id * BLOCK, (id + 1) * BLOCK)));
  const heard = () => textsUntilMarker(world.reader, world.owner);
  const fails = async ({ done, released }: ReturnType<typeof world.move>) => {
    const error = await refused(done, "KV_TRANSFER_FAILED");
    await released;
    return error;
  };

  beforeEach(async () => {
    world = await agents();
    faults({ POLLS: 2 });
  });
  afterEach(async () => {
    faults();
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
      faults({ POLLS: 2, STRAY_ERRORS: 3 });
      const result = await world.move(operation, IDS, MOVED).done;
      expect(result.lengthBytes).toBe(LENGTH);
      expect(faultsLeft("STRAY_ERRORS")).toBe(0);
      expect(arrived(target, IDS)).toBe(true);
      expect(await heard()).toEqual(["moved", "marker"]);
      expect(world.reader.telemetry()).toMatchObject({ transfersInFlight: 0, transfersFailed: 0 });
    },
  );

  test("metadata of another peer is accepted", async () => {
    await world.dying.end();
    faults({ STRAY_ERRORS: 2 });
    await world.reader.addRemote(await metadataAt(world.owner, world.alive.port));
    expect(faultsLeft("STRAY_ERRORS")).toBe(0);
  });

  test.each([
    { name: "no peer died: refused, then accepted when it is added again", died: false },
    { name: "another peer died: accepted at the second attempt", died: true },
  ])(
    "metadata of a known peer, $name; lists of a peer that NIXL dropped move nothing",
    async ({ died }) => {
      const { reader, owner, move } = world;
      const dropped = async () => {
        for (const operation of ["READ", "WRITE"] as const)
          expect((await fails(move(operation, FEW))).message).toContain("dropped");
      };
      // From now on requests by index use this list.
      await move("READ", FEW).done;
      const other = await world.prepare();
      const metadata = await metadataAt(owner, world.alive.port);
      if (died) await world.dying.end();
      faults({ POLLS: 2, STRAY_ERRORS: 1 });
      if (!died) {
        await refused(reader.addRemote(metadata), "KV_AGENT_METADATA_INVALID");
        await dropped();
        await other.remote.close();
      }
      await reader.addRemote(metadata);
      expect(faultsLeft("STRAY_ERRORS")).toBe(0);
      await dropped();
      const { remote } = await world.prepare();
      await world.remote.close();
      world.theirs.bytes.fill(3);
      await move("READ", FEW, { remote }).done;
      expect(arrived(world.mine, FEW)).toBe(true);
      await refused(reader.removeRemote(owner.name), "KV_MEMORY_IN_USE");
      await remote.close();
      await reader.removeRemote(owner.name);
    },
  );

  test("when no peer died, the error is the transfer's own: it fails, and is released when all bytes have landed", async () => {
    world.theirs.bytes.fill(3);
    faults({ POLLS: 2, STRAY_ERRORS: 1 });
    await fails(world.move("READ", FEW, MOVED));
    expect(arrived(world.mine, FEW)).toBe(true);
    expect(await heard()).toEqual(["marker"]);
  });

  test("aborted while the error is ambiguous, it is released when all bytes have landed", async () => {
    world.theirs.bytes.fill(3);
    await world.dying.end();
    faults({ POLLS: 2, HOLD: 1, STRAY_ERRORS: 1 });
    const controller = new AbortController();
    const { done, released } = world.move("READ", FEW, { signal: controller.signal, ...MOVED });
    await expect.poll(() => faultsLeft("STRAY_ERRORS")).toBe(0);
    controller.abort();
    await refused(done, "KV_TRANSFER_ABORTED");
    process.env.FAKE_NIXL_HOLD = "0";
    await released;
    expect(arrived(world.mine, FEW)).toBe(true);
  });

  test("endless errors fail the transfer", async () => {
    await world.dying.end();
    faults({ POLLS: 2, STRAY_ERRORS: 1_000_000 });
    await fails(world.move("READ", IDS, MOVED));
    expect(world.reader.telemetry()).toMatchObject({ transfersInFlight: 0, transfersFailed: 1 });
  });
});
