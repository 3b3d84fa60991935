import { KvError, type Memory, type PreparedList } from "@kv/interface";
import { hostMemory, type NixlAgent, nixlTransport, sharedMemory } from "@kv/nixl";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import type { Library } from "../support/libraries.js";

const BLOCK = 4096;
const COUNT = 64;

const rowsOf = (memory: { address: number }) => ({
  memoryType: "DRAM" as const,
  rows: Float64Array.of(memory.address, BLOCK, 0, BLOCK, COUNT),
});
const codeOf = async (promise: Promise<unknown>) => {
  const error = await promise.then(
    () => undefined,
    (reason: unknown) => reason,
  );
  return KvError.is(error) ? error.code : error;
};
const first = async (agent: NixlAgent): Promise<string> => {
  for await (const { payload } of agent.notifications()) return Buffer.from(payload).toString();
  throw new Error("the agent has closed");
};

/** The parts of NIXL's agent that go beyond `Transport`, with one library. */
export function agentCases({ options, missing }: Library): void {
  describe.skipIf(missing)(`NixlAgent (${missing ?? "found"})`, () => {
    const transport = nixlTransport(options);
    let agent: NixlAgent;
    let peer: NixlAgent;
    let memory: Memory;
    let theirs: Memory;

    beforeAll(async () => {
      agent = await transport.createAgent({ captureTelemetry: true });
      peer = await transport.createAgent();
      memory = transport.allocate(BLOCK * COUNT);
      theirs = transport.allocate(BLOCK * COUNT);
      await agent.register(memory);
      await peer.register(theirs);
      await agent.addRemote(await peer.localMetadata());
      await peer.addRemote(await agent.localMetadata());
    });
    afterAll(async () => {
      await transport.close();
    });

    describe("a prepared transfer", () => {
      let local: PreparedList;
      let remote: PreparedList;
      const ids = Int32Array.of(5, 1, 2);

      beforeAll(async () => {
        local = await agent.prepareLocal(rowsOf(memory));
        remote = await agent.prepareRemote(peer.name, rowsOf(theirs));
      });

      test("is posted many times, and moves the bytes that are there at the time of the post", async () => {
        await using transfer = await agent.prepareTransfer({
          operation: "READ",
          local,
          localIds: ids,
          remote,
          remoteIds: ids,
        });
        for (const value of [1, 2, 3]) {
          theirs.bytes.fill(value);
          const { lengthBytes, descriptorCount } = await transfer.post().done;
          expect([lengthBytes, descriptorCount, memory.bytes[5 * BLOCK]]).toEqual([
            3 * BLOCK,
            3,
            value,
          ]);
        }
      });

      test("notifies the peer when a post says so, and only then", async () => {
        await using transfer = await agent.prepareTransfer({
          operation: "WRITE",
          local,
          localIds: ids,
          remote,
          remoteIds: ids,
        });
        const heard = first(peer);
        await transfer.post({ notification: Buffer.from("one") }).done;
        expect(await heard).toBe("one");
        const next = first(peer);
        await transfer.post().done;
        await transfer.post({ notification: Buffer.from("three"), timeoutMs: 5000 }).done;
        expect(await next).toBe("three");
      });

      test("throws while a post is under way, and for what is closed", async () => {
        const transfer = await agent.prepareTransfer({
          operation: "READ",
          local,
          runs: Int32Array.of(0, 0, COUNT),
          remote,
        });
        const { done } = transfer.post();
        expect(() => transfer.post()).toThrow(
          expect.objectContaining({ code: "KV_TRANSFER_INVALID" }),
        );
        await done;
        expect(await codeOf(local.close())).toBe("KV_MEMORY_IN_USE");
        const late = transfer.post();
        await Promise.all([transfer.close(), transfer.close(), late.done]);
        expect(() => transfer.post()).toThrow(expect.objectContaining({ code: "KV_LIST_CLOSED" }));
        expect(await codeOf(transfer.estimateCost())).toBe("KV_LIST_CLOSED");
      });

      test("refuses indices that its lists do not have, and lists of another agent", async () => {
        const wrong = {
          operation: "READ",
          local,
          localIds: Int32Array.of(COUNT),
          remote,
          remoteIds: ids,
        } as const;
        expect(await codeOf(agent.prepareTransfer(wrong))).toBe("KV_TRANSFER_INVALID");
        expect(await codeOf(peer.prepareTransfer({ ...wrong, localIds: ids }))).toBe(
          "KV_TRANSFER_INVALID",
        );
        const posted = { ...wrong, localIds: ids, notification: Buffer.from("of a post") };
        expect(await codeOf(agent.prepareTransfer(posted))).toBe("KV_TRANSFER_INVALID");
        // A failure leaves the lists free.
        await (await agent.prepareLocal(rowsOf(memory))).close();
      });

      test("has an estimate of its cost", async () => {
        await using transfer = await agent.prepareTransfer({
          operation: "READ",
          local,
          runs: Int32Array.of(0, 0, COUNT),
          remote,
        });
        const { durationUs, marginUs, method } = await transfer.estimateCost();
        expect([durationUs >= 0, marginUs >= 0, ["backend", "unknown"].includes(method)]).toEqual([
          true,
          true,
          true,
        ]);
      });

      test("is posted again after an abort", async () => {
        await using transfer = await agent.prepareTransfer({
          operation: "READ",
          local,
          runs: Int32Array.of(0, 0, COUNT),
          remote,
        });
        const aborting = new AbortController();
        const aborted = transfer.post({ signal: aborting.signal });
        aborting.abort();
        await aborted.done.catch(() => {});
        await aborted.released;
        theirs.bytes.fill(77);
        await transfer.post().done;
        expect(memory.bytes[BLOCK * COUNT - 1]).toBe(77);
      });
    });

    test("results have NIXL's own measurements where the agent captures them", async () => {
      const local = await agent.prepareLocal(rowsOf(memory));
      const remote = await agent.prepareRemote(peer.name, rowsOf(theirs));
      const { nixl } = await agent.transfer({
        operation: "READ",
        local,
        runs: Int32Array.of(0, 0, COUNT),
        remote,
      }).done;
      expect(nixl).toMatchObject({ lengthBytes: BLOCK * COUNT, descriptorCount: 1 });
      const back = await peer.prepareLocal(rowsOf(theirs));
      const there = await peer.prepareRemote(agent.name, rowsOf(memory));
      const result = await peer.transfer({
        operation: "READ",
        local: back,
        runs: Int32Array.of(0, 0, 1),
        remote: there,
      }).done;
      expect(result.nixl).toBeUndefined();
      for (const list of [local, remote, back, there]) await list.close();
    });

    test("copies within the agent, and notifies itself", async () => {
      const registration = await agent.register(memory);
      const local = await agent.prepareLocal(rowsOf(memory));
      const loopback = await agent.prepareRemote(agent.name, rowsOf(memory));
      memory.bytes.fill(9, 7 * BLOCK, 8 * BLOCK);
      const heard = first(agent);
      const { lengthBytes } = await agent.transfer({
        operation: "READ",
        local,
        localIds: Int32Array.of(60),
        remote: loopback,
        remoteIds: Int32Array.of(7),
        notification: Buffer.from("copied"),
      }).done;
      expect([lengthBytes, memory.bytes[60 * BLOCK]]).toEqual([BLOCK, 9]);
      expect(await heard).toBe("copied");
      const outside = {
        memoryType: "DRAM" as const,
        rows: Float64Array.of(memory.address, BLOCK, 0, BLOCK, COUNT + 1),
      };
      expect(await codeOf(agent.prepareRemote(agent.name, outside))).toBe(
        "KV_MEMORY_NOT_REGISTERED",
      );
      await local.close();
      await loopback.close();
      await registration.close();
    });

    test("partial metadata names only some memory, and further parts are added later", async () => {
      const reader = await transport.createAgent();
      const owner = await transport.createAgent();
      const allocate = () => transport.allocate(BLOCK * COUNT);
      const [mine, one, two] = [allocate(), allocate(), allocate()];
      await reader.register(mine);
      const registrations = [await owner.register(one), await owner.register(two)] as const;
      const name = await reader.addRemote(
        await owner.localMetadata({ registrations: [registrations[0]] }),
      );
      const list = await reader.prepareRemote(name, rowsOf(one));
      expect(await codeOf(reader.prepareRemote(name, rowsOf(two)))).toBe("KV_LIST_INVALID");
      await reader.addRemote(await owner.localMetadata({ registrations: [registrations[1]] }));
      two.bytes.fill(21);
      const later = await reader.prepareRemote(name, rowsOf(two));
      const local = await reader.prepareLocal(rowsOf(mine));
      await reader.transfer({
        operation: "READ",
        local,
        runs: Int32Array.of(0, 0, COUNT),
        remote: later,
      }).done;
      await reader.transfer({
        operation: "READ",
        local,
        runs: Int32Array.of(0, 0, 1),
        remote: list,
      }).done;
      expect(mine.bytes[BLOCK]).toBe(21);
      const closed = await owner.register(transport.allocate(BLOCK));
      await closed.close();
      expect(await codeOf(owner.localMetadata({ registrations: [closed] }))).toBe(
        "KV_MEMORY_NOT_REGISTERED",
      );
      expect(await codeOf(reader.localMetadata({ registrations: [registrations[0]] }))).toBe(
        "KV_MEMORY_NOT_REGISTERED",
      );
      // Connections alone: a peer can notify, and reaches no memory.
      const third = await transport.createAgent();
      const known = await third.addRemote(await owner.localMetadata({ registrations: [] }));
      await third.notify(known, Buffer.from("hello"));
      expect(await codeOf(third.prepareRemote(known, rowsOf(one)))).toBe("KV_LIST_INVALID");
      for (const agent of [reader, owner, third]) await agent.close();
    });

    test("plugins and backends state their memory types and parameters", async () => {
      const plugin = await agent.pluginParameters("UCX");
      expect(plugin.memoryTypes).toContain("DRAM");
      expect(Object.keys(plugin.parameters).length).toBeGreaterThan(0);
      expect((await agent.backendParameters("UCX")).memoryTypes).toContain("DRAM");
      expect(await codeOf(agent.pluginParameters("NONE"))).toBe("KV_BACKEND_UNAVAILABLE");
      expect(await codeOf(agent.backendParameters("POSIX"))).toBe("KV_BACKEND_UNAVAILABLE");
    });

    test("a second backend of one plugin and a wrong one are refused", async () => {
      expect(await codeOf(agent.addBackend("UCX"))).toBe("KV_BACKEND_UNAVAILABLE");
      expect(await codeOf(agent.addBackend("no such"))).toBe("KV_BACKEND_UNAVAILABLE");
      expect(agent.backends).toEqual(["UCX"]);
    });

    test("a registration with chosen backends needs backends that the agent has, and the same ones again", async () => {
      const here = transport.allocate(BLOCK);
      const registration = await agent.register(here, { backends: ["UCX"] });
      expect(await codeOf(agent.register(here))).toBe("KV_MEMORY_INVALID");
      await (await agent.register(here, { backends: ["UCX"] })).close();
      await registration.close();
      expect(await codeOf(agent.register(here, { backends: ["POSIX"] }))).toBe(
        "KV_BACKEND_UNAVAILABLE",
      );
      here.close();
    });

    test("memory of the caller is registered where it is", async () => {
      const shared = sharedMemory(new SharedArrayBuffer(BLOCK * COUNT));
      const registration = await agent.register(shared);
      theirs.bytes.fill(123);
      const local = await agent.prepareLocal(rowsOf(shared));
      const remote = await agent.prepareRemote(peer.name, rowsOf(theirs));
      await agent.transfer({ operation: "READ", local, runs: Int32Array.of(0, 0, COUNT), remote })
        .done;
      expect([shared.bytes[0], shared.view(BLOCK * COUNT - 1, 1)[0]]).toEqual([123, 123]);
      expect(() => shared.close()).toThrow(expect.objectContaining({ code: "KV_MEMORY_IN_USE" }));
      await local.close();
      await remote.close();
      await registration.close();
      shared.close();
      expect(shared.bytes.length).toBe(0);

      const backing = transport.allocate(BLOCK * COUNT, { populate: false });
      const pointer = hostMemory({
        address: BigInt(backing.address),
        lengthBytes: BLOCK * COUNT,
        owner: backing,
      });
      const borrowed = await agent.register(pointer);
      const owned = await agent.register(backing);
      // The same bytes: they stay allocated until both registrations are closed.
      expect(() => backing.close()).toThrow(expect.objectContaining({ code: "KV_MEMORY_IN_USE" }));
      await owned.close();
      await borrowed.close();
      backing.close();
      pointer.close();
      expect(await codeOf(agent.register(pointer))).toBe("KV_MEMORY_INVALID");
    });

    test("memory that is not the process's is refused", async () => {
      const here = { lengthBytes: BLOCK, owner: {} };
      // The first page is never mapped, and a range must not go on where nothing is.
      expect(await codeOf(agent.register(hostMemory({ ...here, address: BLOCK })))).toBe(
        "KV_MEMORY_INVALID",
      );
      const small = transport.allocate(BLOCK);
      const beyond = hostMemory({ address: small.address, lengthBytes: 2 ** 46, owner: small });
      expect(await codeOf(agent.register(beyond))).toBe("KV_MEMORY_INVALID");
      const code = "KV_MEMORY_INVALID";
      for (const wrong of [{ address: 0 }, { lengthBytes: 0 }, { owner: null }, { address: 1.5 }]) {
        const description = { address: small.address, ...here, ...wrong } as never;
        expect(() => hostMemory(description)).toThrow(expect.objectContaining({ code }));
      }
      for (const wrong of [new ArrayBuffer(8), new SharedArrayBuffer(0), null, {}]) {
        expect(() => sharedMemory(wrong as never)).toThrow(expect.objectContaining({ code }));
      }
      small.close();
    });
  });
}
