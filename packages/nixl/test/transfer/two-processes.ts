import { createHash } from "node:crypto";
import type { Agent, Memory, PreparedList } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { afterAll, afterEach, beforeAll, describe, expect, test } from "vitest";
import { fillPattern, scattered } from "../support/pattern.js";
import { type PeerProcess, startPeer } from "../support/peer-process.js";

const LENGTH = 48 << 20;
const hash = (bytes: Uint8Array) => createHash("sha256").update(bytes).digest("hex");
const text = (payload: string) => Buffer.from(payload, "base64").toString();

/**
 * Tests of two processes that every backend must pass. `missing` is the reason why the backend is
 * not available.
 */
export function twoProcessTests(backend: "UCX" | "LIBFABRIC", missing: string | undefined): void {
  describe.skipIf(missing)(`two processes over ${backend} (${missing ?? "found"})`, () =>
    between(backend),
  );
}

function between(backend: string): void {
  const transport = nixlTransport({ backends: [backend] });
  const lists: PreparedList[] = [];
  let owner: PeerProcess;
  let agent: Agent;
  let memory: Memory;

  beforeAll(async () => {
    owner = await startPeer(LENGTH, 1, { backends: [backend] });
    agent = await transport.createAgent();
    memory = transport.allocate(LENGTH);
    await agent.register(memory);
    expect(await agent.addRemote(owner.metadata)).toBe(owner.name);
  });
  afterEach(async () => {
    for (const list of lists.splice(0)) await list.close();
  });
  afterAll(async () => {
    await transport.close();
    memory?.close();
    expect(await owner?.end()).toBe(0);
  });

  async function prepare(
    ...rows: [offset: number, length: number, stride: number, count: number][]
  ) {
    const table = (base: number) => ({
      memoryType: "DRAM" as const,
      rows: Float64Array.from(
        rows.flatMap(([offset, ...rest]) => [base + offset, rest[0], 0, rest[1], rest[2]]),
      ),
    });
    const local = await agent.prepareLocal(table(memory.address));
    const remote = await agent.prepareRemote(owner.name, table(owner.address));
    lists.push(local, remote);
    return { local, remote };
  }
  const all = (count: number) => Int32Array.from({ length: count }, (_, index) => index);
  const next = async () => {
    const { from, payload } = await owner.ask<{ from: string; payload: string }>("next");
    return { from, text: text(payload) };
  };

  test("READ in many slices moves every byte, then sends exactly one notification", async () => {
    memory.bytes.fill(0);
    const { local, remote } = await prepare([0, 16_384, 16_384, LENGTH / 16_384]);
    const ids = scattered(LENGTH / 16_384, 1235);
    const notification = Buffer.from("all of it");
    const request = {
      operation: "READ",
      local,
      localIds: ids,
      remote,
      remoteIds: ids,
      notification,
    } as const;
    const result = await agent.transfer(request).done;
    expect(result).toMatchObject({ lengthBytes: LENGTH, descriptorCount: LENGTH / 16_384 });
    expect(hash(memory.bytes)).toBe(await owner.ask("hash"));
    await agent.notify(owner.name, Buffer.from("marker"));
    expect(await next()).toEqual({ from: agent.name, text: "all of it" });
    expect(await next()).toEqual({ from: agent.name, text: "marker" });
  });

  test("descriptors longer than a slice, of different lengths, are split and arrive complete", async () => {
    memory.bytes.fill(0);
    const { local, remote } = await prepare(
      [0, (20 << 20) + 5, 0, 1],
      [(20 << 20) + 5, 11, 11, 1],
      [(20 << 20) + 16, 8 << 20, 8 << 20, 2],
      [(36 << 20) + 16, (12 << 20) - 16, 0, 1],
    );
    expect(local.count).toBe(5);
    const ids = Int32Array.of(4, 0, 3, 1, 2);
    const result = await agent.transfer({
      operation: "READ",
      local,
      localIds: ids,
      remote,
      remoteIds: ids,
    }).done;
    expect(result).toMatchObject({ lengthBytes: LENGTH, descriptorCount: 5 });
    expect(hash(memory.bytes)).toBe(await owner.ask("hash"));
  });

  test("WRITE moves every byte to the other process", async () => {
    fillPattern(memory.bytes, 77);
    const { local, remote } = await prepare([0, 65_536, 65_536, LENGTH / 65_536]);
    const ids = scattered(LENGTH / 65_536, 55);
    await agent.transfer({ operation: "WRITE", local, localIds: ids, remote, remoteIds: ids }).done;
    expect(await owner.ask("hash")).toBe(hash(memory.bytes));
  });

  test("only the blocks of the given id pairs move", async () => {
    fillPattern(memory.bytes, 5);
    const { local, remote } = await prepare([0, 4096, 8192, 16]);
    const before = memory.bytes.slice(0, 1 << 20);
    const request = { operation: "READ", local, localIds: Int32Array.of(3, 9), remote } as const;
    await agent.transfer({ ...request, remoteIds: Int32Array.of(9, 0) }).done;
    const moved = (index: number) => memory.bytes.subarray(index * 8192, index * 8192 + 4096);
    const kept = memory.bytes.slice(0, 1 << 20);
    for (const index of [3, 9])
      kept.set(before.subarray(index * 8192, index * 8192 + 4096), index * 8192);
    expect(hash(kept)).toBe(hash(before));
    expect(hash(moved(3))).not.toBe(hash(before.subarray(3 * 8192, 3 * 8192 + 4096)));
    // Read again to other places: the bytes are what the other process holds.
    const [three, nine] = [hash(moved(3)), hash(moved(9))];
    await agent.transfer({
      ...request,
      localIds: Int32Array.of(0, 1),
      remoteIds: Int32Array.of(9, 0),
    }).done;
    expect([hash(moved(0)), hash(moved(1))]).toEqual([three, nine]);
  });

  test("notifications arrive in order and once each: with a transfer, alone, empty, binary and large", async () => {
    const { local, remote } = await prepare([0, 4096, 4096, 4]);
    const request = {
      operation: "READ",
      local,
      localIds: all(4),
      remote,
      remoteIds: all(4),
    } as const;
    await agent.transfer({ ...request, notification: Buffer.from("rider") }).done;
    expect(await next()).toEqual({ from: agent.name, text: "rider" });
    await agent.transfer({ ...request, notification: Buffer.from("revocable"), timeoutMs: 60_000 })
      .done;
    expect(await next()).toEqual({ from: agent.name, text: "revocable" });
    const payloads = [
      new Uint8Array(0),
      Uint8Array.of(0, 1, 0, 255),
      new Uint8Array(1 << 20).fill(7),
      Buffer.from("end"),
    ];
    for (const payload of payloads) await agent.notify(owner.name, payload);
    for (const payload of payloads) {
      const got = await owner.ask<{ payload: string }>("next");
      expect(Buffer.compare(Buffer.from(got.payload, "base64"), payload)).toBe(0);
    }
  });

  test("an idle agent receives a notification", async () => {
    await owner.ask("addRemote", {
      text: Buffer.from(await agent.localMetadata()).toString("base64"),
    });
    const inbox = agent.notifications();
    const waiting = inbox.next();
    await owner.ask("notify", { to: agent.name, text: "hello" });
    const { value } = await waiting;
    expect(value.from).toBe(owner.name);
    expect(Buffer.from(value.payload).toString()).toBe("hello");
    await inbox.return?.();
  });

  test("small transfers pass between the slices of a large one", async () => {
    const { local, remote } = await prepare([0, 4096, 4096, LENGTH / 4096]);
    const ids = scattered(LENGTH / 4096, 2741);
    const first = async () => {
      const big = agent.transfer({
        operation: "READ",
        local,
        localIds: ids,
        remote,
        remoteIds: ids,
      });
      const small = agent.transfer({
        operation: "READ",
        local,
        localIds: all(1),
        remote,
        remoteIds: all(1),
      });
      const ends = [big.done.then(() => "big"), small.done.then(() => "small")];
      const winner = await Promise.race(ends);
      await Promise.all(ends);
      return winner;
    };
    // On a busy machine this thread may be paused between the two calls for as long as the large
    // transfer takes, but not every time.
    const winners: string[] = [];
    while (winners.length < 10 && winners.at(-1) !== "small") winners.push(await first());
    expect(winners.at(-1)).toBe("small");
  });

  test("transfers with a killed peer fail, and others continue", async () => {
    const doomed = await startPeer(1 << 20, 3, { backends: [backend] });
    await agent.addRemote(doomed.metadata);
    const rows = (base: number) => Float64Array.of(base, 4096, 0, 4096, 256);
    const local = await agent.prepareLocal({ memoryType: "DRAM", rows: rows(memory.address) });
    const remote = await agent.prepareRemote(doomed.name, {
      memoryType: "DRAM",
      rows: rows(doomed.address),
    });
    const request = {
      operation: "READ",
      local,
      localIds: all(256),
      remote,
      remoteIds: all(256),
    } as const;
    await agent.transfer(request).done;
    await doomed.kill();
    const { done, released } = agent.transfer({ ...request, notification: Buffer.from("never") });
    await expect(done).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    await released;
    await expect(agent.notify(doomed.name, Buffer.from("nobody"))).rejects.toMatchObject({
      code: "KV_NOTIFICATION_FAILED",
    });
    await local.close();
    await remote.close();
    await agent.removeRemote(doomed.name);
    const alive = await prepare([0, 4096, 4096, 4]);
    const ids = all(4);
    await agent.transfer({ operation: "READ", ...alive, localIds: ids, remoteIds: ids }).done;
    expect(agent.telemetry()).toMatchObject({ transfersInFlight: 0 });
  });

  /**
   * A READ of one block. LIBFABRIC waits for 60 s in the first post to a peer that dies before it
   * has answered NIXL's handshake.
   */
  const connect = async (local: PreparedList, remote: PreparedList) =>
    void (await agent.transfer({
      operation: "READ",
      local,
      localIds: Int32Array.of(0),
      remote,
      remoteIds: Int32Array.of(0),
    }).done);

  test("a killed peer does not affect other transfers, new peers and notifications", async () => {
    const [block, count] = [16_384, 1024];
    const mine = await prepare([0, block, block, count]);
    const ids = scattered(count, 331);
    for (let round = 0; round < 2; round++) {
      const doomed = await startPeer(block * count, 5, { backends: [backend] });
      await agent.addRemote(doomed.metadata);
      const rows = (base: number) => Float64Array.of(base, block, 0, block, count);
      const local = await agent.prepareLocal({
        memoryType: "DRAM",
        rows: rows(memory.address + block * count),
      });
      const remote = await agent.prepareRemote(doomed.name, {
        memoryType: "DRAM",
        rows: rows(doomed.address),
      });
      await connect(local, remote);
      const lost = Array.from({ length: 4 }, () =>
        agent.transfer({ operation: "READ", local, localIds: ids, remote, remoteIds: ids }),
      );
      memory.bytes.fill(0, 0, block * count);
      const others = Array.from({ length: 6 }, () =>
        agent.transfer({ operation: "READ", ...mine, localIds: ids, remoteIds: ids }),
      );
      await Promise.race([lost[0]?.done.catch(() => {}), doomed.kill()]);
      const after = agent.transfer({ operation: "READ", ...mine, localIds: ids, remoteIds: ids });
      for (const { lengthBytes } of await Promise.all([...others, after].map(({ done }) => done))) {
        expect(lengthBytes).toBe(block * count);
      }
      expect(hash(memory.bytes.subarray(0, block * count))).toBe(
        await owner.ask("hash", { lengthBytes: block * count }),
      );
      await doomed.kill();
      await Promise.all(lost.map(({ released }) => released));
      await agent.addRemote(owner.metadata);
      await agent.notify(owner.name, Buffer.from(`round ${round}`));
      expect(await next()).toEqual({ from: agent.name, text: `round ${round}` });
      await local.close();
      await remote.close();
      await agent.removeRemote(doomed.name);
    }
  });

  test("transfers with a peer that is killed meanwhile all end and are released", async () => {
    const doomed = await startPeer(LENGTH, 4, { backends: [backend] });
    await agent.addRemote(doomed.metadata);
    const rows = (base: number) => Float64Array.of(base, 4096, 0, 4096, LENGTH / 4096);
    const local = await agent.prepareLocal({ memoryType: "DRAM", rows: rows(memory.address) });
    const remote = await agent.prepareRemote(doomed.name, {
      memoryType: "DRAM",
      rows: rows(doomed.address),
    });
    const ids = scattered(LENGTH / 4096, 2741);
    await connect(local, remote);
    const transfers = (["READ", "WRITE", "READ"] as const).map((operation) =>
      agent.transfer({ operation, local, localIds: ids, remote, remoteIds: ids }),
    );
    await Promise.race([transfers[0]?.done.catch(() => {}), doomed.kill()]);
    const ends = await Promise.allSettled(transfers.map(({ done }) => done));
    expect(ends.some(({ status }) => status === "rejected")).toBe(true);
    await Promise.all(transfers.map(({ released }) => released));
    await local.close();
    await remote.close();
    await agent.removeRemote(doomed.name);
    await doomed.kill();
  });
}
