import { createHash } from "node:crypto";
import type { Agent, Memory } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { listsOf } from "../support/pair.js";
import { fillPattern, scattered } from "../support/pattern.js";
import { type PeerProcess, startPeer } from "../support/peer-process.js";
import { refused } from "../support/refused.js";

const LENGTH = 48 << 20;
const hash = (bytes: Uint8Array) => createHash("sha256").update(bytes).digest("hex");

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
  afterAll(async () => {
    await transport.close();
    memory?.close();
    expect(await owner?.end()).toBe(0);
  });

  const prepare = (block: number, count = LENGTH / block) =>
    listsOf(agent, memory, owner.name, owner, block, count);
  const next = async () => {
    const { from, payload } = await owner.ask<{ from: string; payload: string }>("next");
    return { from, payload: Buffer.from(payload, "base64") };
  };
  const hears = async (text: string) =>
    expect(await next()).toEqual({ from: agent.name, payload: Buffer.from(text) });

  test("READ in many slices moves every byte, then sends exactly one notification", async () => {
    memory.bytes.fill(0);
    const { move } = await prepare(16_384);
    const notification = Buffer.from("all of it");
    const count = LENGTH / 16_384;
    const result = await move("READ", scattered(count, 1235), { notification }).done;
    expect(result).toMatchObject({ lengthBytes: LENGTH, descriptorCount: count });
    expect(hash(memory.bytes)).toBe(await owner.ask("hash"));
    await agent.notify(owner.name, Buffer.from("marker"));
    await hears("all of it");
    await hears("marker");
  });

  test("descriptors longer than a slice, of different lengths, are split and arrive complete", async () => {
    memory.bytes.fill(0);
    const table = (base: number) => ({
      memoryType: "DRAM" as const,
      rows: Float64Array.from(
        [
          [base, (20 << 20) + 5, 0, 0, 1],
          [base + (20 << 20) + 5, 11, 0, 11, 1],
          [base + (20 << 20) + 16, 8 << 20, 0, 8 << 20, 2],
          [base + (36 << 20) + 16, (12 << 20) - 16, 0, 0, 1],
        ].flat(),
      ),
    });
    const local = await agent.prepareLocal(table(memory.address));
    const remote = await agent.prepareRemote(owner.name, table(owner.address));
    expect(local.count).toBe(5);
    const ids = Int32Array.of(4, 0, 3, 1, 2);
    const lists = { local, localIds: ids, remote, remoteIds: ids };
    const result = await agent.transfer({ operation: "READ", ...lists }).done;
    expect(result).toMatchObject({ lengthBytes: LENGTH, descriptorCount: 5 });
    expect(hash(memory.bytes)).toBe(await owner.ask("hash"));
  });

  test("WRITE moves every byte to the other process", async () => {
    fillPattern(memory.bytes, 77);
    const { move } = await prepare(65_536);
    await move("WRITE", scattered(LENGTH / 65_536, 55)).done;
    expect(await owner.ask("hash")).toBe(hash(memory.bytes));
  });

  test("notifications arrive in order and once each: with a transfer, alone, empty, binary and large", async () => {
    const { move } = await prepare(4096, 4);
    for (const more of [{}, { timeoutMs: 60_000 }]) {
      await move("READ", scattered(4), { notification: Buffer.from("rider"), ...more }).done;
      await hears("rider");
    }
    const payloads = [
      Buffer.alloc(0),
      Buffer.of(0, 1, 0, 255),
      Buffer.alloc(1 << 20, 7),
      Buffer.from("end"),
    ];
    for (const payload of payloads) await agent.notify(owner.name, payload);
    for (const payload of payloads) expect(payload.equals((await next()).payload)).toBe(true);
  });

  test("small transfers pass between the slices of a large one", async () => {
    const { move } = await prepare(4096);
    const first = async () => {
      const big = move("READ", scattered(LENGTH / 4096, 2741));
      const small = move("READ", scattered(1));
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

  test("transfers with a killed peer all end and are released; others, new peers and notifications go on", async () => {
    const [block, count] = [16_384, 1024];
    const length = block * count;
    const mine = await prepare(block, count);
    const ids = scattered(count, 331);
    for (let round = 0; round < 2; round++) {
      const doomed = await startPeer(2 * length, 5, { backends: [backend] });
      await agent.addRemote(doomed.metadata);
      const behind = { address: memory.address + length };
      const { local, remote, move } = await listsOf(
        agent,
        behind,
        doomed.name,
        doomed,
        block,
        2 * count,
      );
      // LIBFABRIC waits for 60 s in the first post to a peer that dies before it has answered NIXL's
      // handshake.
      await move("READ", scattered(1)).done;
      const many = scattered(2 * count, 331);
      const lost = (["READ", "WRITE", "READ", "READ"] as const).map((each) => move(each, many));
      memory.bytes.fill(0, 0, length);
      const others = Array.from({ length: 6 }, () => mine.move("READ", ids));
      await Promise.race([lost[0]?.done.catch(() => {}), doomed.kill()]);
      others.push(mine.move("READ", ids));
      for (const { done } of others) expect((await done).lengthBytes).toBe(length);
      expect(hash(memory.bytes.subarray(0, length))).toBe(
        await owner.ask("hash", { lengthBytes: length }),
      );
      const ends = await Promise.allSettled(lost.map(({ done }) => done));
      expect(ends.some(({ status }) => status === "rejected")).toBe(true);
      await Promise.all(lost.map(({ released }) => released));

      const late = move("READ", ids, { notification: Buffer.from("never") });
      await refused(late.done, "KV_TRANSFER_FAILED");
      await late.released;
      await refused(agent.notify(doomed.name, Buffer.from("nobody")), "KV_NOTIFICATION_FAILED");
      await agent.addRemote(owner.metadata);
      await agent.notify(owner.name, Buffer.from(`round ${round}`));
      await hears(`round ${round}`);
      for (const list of [local, remote]) await list.close();
      await agent.removeRemote(doomed.name);
      expect(agent.telemetry()).toMatchObject({ transfersInFlight: 0 });
    }
  });
}
