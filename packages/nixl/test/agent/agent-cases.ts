import { expectThrown } from "@kv/conformance/expect-error";
import type { Memory } from "@kv/interface";
import { hostMemory, type NixlAgent, nixlTransport, sharedMemory } from "@kv/nixl";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import type { Library } from "../support/libraries.js";
import { blocksOf, listsOf, pairOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { refused } from "../support/refused.js";

const BLOCK = 4096;
const COUNT = 64;
const ALL = scattered(COUNT);

const table = (memory: Memory, count = COUNT) => blocksOf(memory, BLOCK, count);
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
    let pair: Awaited<ReturnType<typeof pairOf<NixlAgent>>>;

    beforeAll(async () => {
      pair = await pairOf(transport, BLOCK * COUNT, BLOCK, { captureTelemetry: true });
      agent = pair.reader;
      peer = pair.owner;
    });
    afterAll(() => transport.close());

    const allocate = () => transport.allocate(BLOCK * COUNT);
    /** Prepares a transfer between the blocks of both memories. */
    const prepare = (operation: "READ" | "WRITE", ids = ALL) =>
      agent.prepareTransfer({
        operation,
        local: pair.local,
        localIds: ids,
        remote: pair.remote,
        remoteIds: ids,
      });

    describe("a prepared transfer", () => {
      const ids = Int32Array.of(5, 1, 2);

      test("is posted many times, and moves the bytes that are there at the time of the post", async () => {
        await using transfer = await prepare("READ", ids);
        for (const value of [1, 2, 3]) {
          pair.source.bytes.fill(value);
          const moved = await transfer.post().done;
          expect(moved).toMatchObject({ lengthBytes: 3 * BLOCK, descriptorCount: 3 });
          expect(pair.target.bytes[5 * BLOCK]).toBe(value);
        }
      });

      test("notifies the peer when a post says so, and only then", async () => {
        await using transfer = await prepare("WRITE", ids);
        const heard = first(peer);
        await transfer.post({ notification: Buffer.from("one") }).done;
        expect(await heard).toBe("one");
        const next = first(peer);
        await transfer.post().done;
        await transfer.post({ notification: Buffer.from("three"), timeoutMs: 5000 }).done;
        expect(await next).toBe("three");
      });

      test("throws while a post is under way, and for what is closed", async () => {
        const transfer = await prepare("READ");
        const { done } = transfer.post();
        expectThrown(() => transfer.post(), "KV_TRANSFER_INVALID");
        await done;
        await refused(pair.local.close(), "KV_MEMORY_IN_USE");
        const late = transfer.post();
        await Promise.all([transfer.close(), transfer.close(), late.done]);
        expectThrown(() => transfer.post(), "KV_LIST_CLOSED");
      });

      test("refuses indices that its lists do not have, lists of another agent, and what belongs to a post", async () => {
        const { local, remote } = pair;
        const right = { operation: "READ", local, localIds: ids, remote, remoteIds: ids } as const;
        const posted = { ...right, notification: Buffer.from("of a post") };
        for (const [by, wrong] of [
          [agent, { ...right, localIds: Int32Array.of(COUNT) }],
          [peer, right],
          [agent, posted],
        ] as const)
          await refused(by.prepareTransfer(wrong), "KV_TRANSFER_INVALID");
        // A failure leaves the lists free.
        await (await agent.prepareLocal(table(pair.target))).close();
      });

      test("is posted again after an abort", async () => {
        await using transfer = await prepare("READ");
        const aborting = new AbortController();
        const aborted = transfer.post({ signal: aborting.signal });
        aborting.abort();
        await aborted.done.catch(() => {});
        await aborted.released;
        pair.source.bytes.fill(77);
        await transfer.post().done;
        expect(pair.target.bytes[BLOCK * COUNT - 1]).toBe(77);
      });
    });

    test("results have NIXL's own measurements where the agent captures them", async () => {
      const { local, remote } = pair;
      const runs = Int32Array.of(0, 0, COUNT);
      const result = await agent.transfer({ operation: "READ", local, runs, remote }).done;
      const measured = { lengthBytes: BLOCK * COUNT, descriptorCount: 1 };
      expect(result).toMatchObject({ nixl: measured });
      await peer.addRemote(await agent.localMetadata());
      const back = await listsOf(peer, pair.source, agent.name, pair.target, BLOCK, COUNT);
      expect(await back.move("READ", scattered(1)).done).not.toHaveProperty("nixl");
    });

    test("copies within the agent, and notifies itself", async () => {
      const { target } = pair;
      const { local, remote, move } = await listsOf(
        agent,
        target,
        agent.name,
        target,
        BLOCK,
        COUNT,
      );
      target.bytes.fill(9, 7 * BLOCK, 8 * BLOCK);
      const heard = first(agent);
      const { lengthBytes } = await move("READ", Int32Array.of(60), {
        remoteIds: Int32Array.of(7),
        notification: Buffer.from("copied"),
      }).done;
      expect([lengthBytes, target.bytes[60 * BLOCK]]).toEqual([BLOCK, 9]);
      expect(await heard).toBe("copied");
      await refused(
        agent.prepareRemote(agent.name, table(target, COUNT + 1)),
        "KV_MEMORY_NOT_REGISTERED",
      );
      for (const list of [local, remote]) await list.close();
    });

    test("partial metadata names only some memory, and further parts are added later", async () => {
      const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
      const [mine, one, two] = [allocate(), allocate(), allocate()];
      await reader.register(mine);
      const registrations = [await owner.register(one), await owner.register(two)];
      const part = async (index: number, connections: boolean) =>
        reader.addRemote(
          await owner.localMetadata({
            registrations: registrations.slice(index, index + 1),
            connections,
          }),
        );
      const { name } = owner;
      expect(await part(0, true)).toBe(name);
      const lists = await listsOf(reader, mine, name, one, BLOCK, COUNT);
      await refused(reader.prepareRemote(name, table(two)), "KV_LIST_INVALID");
      await part(1, false);
      two.bytes.fill(21);
      const later = await reader.prepareRemote(name, table(two));
      await lists.move("READ", ALL, { remote: later }).done;
      await lists.move("READ", scattered(1)).done;
      expect(mine.bytes[BLOCK]).toBe(21);
      const closed = await owner.register(transport.allocate(BLOCK));
      await closed.close();
      for (const [by, registration] of [
        [owner, closed],
        [reader, registrations[0] ?? closed],
      ] as const) {
        const metadata = () => by.localMetadata({ registrations: [registration] });
        await refused(metadata, "KV_MEMORY_NOT_REGISTERED");
      }
      // Connections alone: a peer can notify, and reaches no memory.
      const third = await transport.createAgent();
      await third.addRemote(await owner.localMetadata({ registrations: [] }));
      await third.notify(name, Buffer.from("hello"));
      await refused(third.prepareRemote(name, table(one)), "KV_LIST_INVALID");
      for (const each of [reader, owner, third]) await each.close();
    });

    test("F10: a peer that is added again has the memory that it states now, and no other", async () => {
      const { reader, owner, source, move, close } = await pairOf(transport, BLOCK * COUNT, BLOCK);
      const { name } = owner;
      const gone = allocate();
      const registration = await owner.register(gone);
      await reader.addRemote(await owner.localMetadata());
      const [kept, lost] = [
        await reader.prepareRemote(name, table(source)),
        await reader.prepareRemote(name, table(gone)),
      ];
      await registration.close();
      await reader.addRemote(await owner.localMetadata());
      await refused(reader.prepareRemote(name, table(gone)), "KV_LIST_INVALID");
      await refused(move("READ", ALL, { remote: lost }).done, "KV_TRANSFER_FAILED");
      await move("READ", ALL, { remote: kept }).done;
      await close();
    });

    test("a second backend of one plugin and a wrong one are refused", async () => {
      for (const name of ["UCX", "no such"])
        await refused(agent.addBackend(name), "KV_BACKEND_UNAVAILABLE");
      expect(agent.backends).toEqual(["UCX"]);
    });

    test("a registration with chosen backends needs backends that the agent has, and the same ones again", async () => {
      const here = transport.allocate(BLOCK);
      const registers = (backends?: string[]) => agent.register(here, { backends });
      const registration = await registers(["UCX"]);
      await refused(registers(), "KV_MEMORY_INVALID");
      await (await registers(["UCX"])).close();
      await registration.close();
      await refused(registers(["POSIX"]), "KV_BACKEND_UNAVAILABLE");
      here.close();
    });

    test("memory of the caller is registered where it is", async () => {
      const shared = sharedMemory(new SharedArrayBuffer(BLOCK * COUNT));
      const registration = await agent.register(shared);
      pair.source.bytes.fill(123);
      const local = await agent.prepareLocal(table(shared));
      await pair.move("READ", ALL, { local }).done;
      expect([shared.bytes[0], shared.view(BLOCK * COUNT - 1, 1)[0]]).toEqual([123, 123]);
      expectThrown(() => shared.close(), "KV_MEMORY_IN_USE");
      await local.close();
      await registration.close();
      shared.close();
      expect(shared.bytes.length).toBe(0);

      const lengthBytes = BLOCK * COUNT;
      const backing = transport.allocate(lengthBytes, { populate: false });
      const address = BigInt(backing.address);
      const pointer = hostMemory({ address, lengthBytes, owner: backing });
      const [borrowed, owned] = [await agent.register(pointer), await agent.register(backing)];
      // The same bytes: they stay allocated until both registrations are closed.
      expectThrown(() => backing.close(), "KV_MEMORY_IN_USE");
      await owned.close();
      await borrowed.close();
      backing.close();
      pointer.close();
      await refused(agent.register(pointer), "KV_MEMORY_INVALID");
    });

    test("memory that is not the process's is refused", async () => {
      using small = transport.allocate(BLOCK);
      const { address, lengthBytes } = small;
      const right = { address, lengthBytes, owner: small };
      // The first page is never mapped, and a range must not go on where nothing is.
      for (const wrong of [{ address: BLOCK }, { lengthBytes: 2 ** 46 }])
        await refused(agent.register(hostMemory({ ...right, ...wrong })), "KV_MEMORY_INVALID");
      for (const wrong of [{ address: 0 }, { lengthBytes: 0 }, { owner: null }, { address: 1.5 }])
        expectThrown(() => hostMemory({ ...right, ...wrong } as never), "KV_MEMORY_INVALID");
      for (const wrong of [new ArrayBuffer(8), new SharedArrayBuffer(0), null, {}])
        expectThrown(() => sharedMemory(wrong as never), "KV_MEMORY_INVALID");
    });
  });
}
