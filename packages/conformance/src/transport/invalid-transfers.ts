import type { TransferRequest } from "@kv/interface";
import { expect, test } from "vitest";
import { expectThrown } from "../expect-error.js";
import { blockLists, blockPair, type Fixture, pattern, prepare, readOf } from "./fixture.js";

/** Invalid transfers, as pairs and as runs, throw synchronously. */
export function invalidTransferTests(fixture: Fixture): void {
  const { waitFor } = fixture;

  test("a transfer with invalid arguments throws at once and moves nothing", async () => {
    const { reader, local, remote } = await blockPair(fixture, 8192, 1024);
    const big = await prepare(fixture, reader.agent, reader, [0, 2048, 2048, 4]);
    const right = {
      ...readOf({ local, remote }, Int32Array.of(0, 1)),
      remoteIds: Int32Array.of(2, 3),
    };
    const wrong: Partial<Record<keyof TransferRequest, unknown>>[] = [
      { localIds: Int32Array.of(0) },
      { remoteIds: Int32Array.of(2, 3, 4) },
      { localIds: Int32Array.of(), remoteIds: Int32Array.of() },
      { localIds: Int32Array.of(0, 8) },
      { remoteIds: Int32Array.of(2, 8) },
      { localIds: Int32Array.of(-1, 0) },
      { remoteIds: Int32Array.of(2, -2147483648) },
      { local: big },
      { local: remote, remote: local },
      { remote: local },
      { operation: "COPY" },
      { localIds: [0, 1] },
      { timeoutMs: Number.NaN },
      { timeoutMs: -1 },
      { notification: "text" },
    ];
    for (const change of wrong) {
      const request = { ...right, ...change } as unknown as TransferRequest;
      expectThrown(
        () => reader.agent.transfer(request),
        "KV_TRANSFER_INVALID",
        "KV_NOTIFICATION_INVALID",
      );
    }
    await waitFor(remote.close());
    expectThrown(() => reader.agent.transfer(right), "KV_LIST_CLOSED");
    expect(reader.agent.telemetry()).toMatchObject({ transfersPosted: 0, transfersInFlight: 0 });
    expect(Buffer.compare(reader.memory.bytes, pattern(8192, 0))).toBe(0);
  });

  test("offsets that move a run out of its list, are no rows, or come with pairs are rejected", async () => {
    const { reader, local, remote } = await blockPair(fixture, 16_384, 1024, 2);
    const runs = Int32Array.of(0, 2, 3, 4, 0, 1);
    const refused = [
      { runs, offsets: Int32Array.of(0, 0, 12, 0) },
      { runs, offsets: Int32Array.of(0, 12) },
      { runs, offsets: Int32Array.of(-1, 0) },
      { runs, offsets: Int32Array.of(0, -1) },
      { runs, offsets: Int32Array.of(2 ** 31 - 1, 0) },
      { runs, offsets: Int32Array.of(0) },
      { runs, offsets: new Int32Array(0) },
      { runs, offsets: [0, 0] as unknown as Int32Array },
      {
        localIds: Int32Array.of(0),
        remoteIds: Int32Array.of(0),
        offsets: Int32Array.of(0, 0) as unknown as undefined,
      },
    ];
    for (const descriptors of refused) {
      expect(() =>
        reader.agent.transfer({ operation: "READ", local, remote, ...descriptors }),
      ).toThrow(expect.objectContaining({ code: "KV_TRANSFER_INVALID" }));
    }
  });

  test("invalid runs throw at once and move nothing", async () => {
    const { reader, local, remote } = await blockPair(fixture, 8192, 1024);
    const mixed = await prepare(
      fixture,
      reader.agent,
      reader,
      [0, 1024, 1024, 4],
      [4096, 512, 512, 4],
    );
    const wrong: Record<string, unknown>[] = [
      { runs: Int32Array.of() },
      { runs: Int32Array.of(0, 0) },
      { runs: Int32Array.of(0, 0, 0) },
      { runs: Int32Array.of(0, 0, -1) },
      { runs: Int32Array.of(-1, 0, 1) },
      { runs: Int32Array.of(0, -1, 2) },
      { runs: Int32Array.of(0, 0, 9) },
      { runs: Int32Array.of(7, 0, 2) },
      { runs: Int32Array.of(0, 7, 2) },
      { runs: Int32Array.of(0, 0, 1, 2, 7, 2147483647) },
      { runs: [0, 0, 1] },
      { runs: Int32Array.of(0, 0, 1), localIds: Int32Array.of(0), remoteIds: Int32Array.of(0) },
      { runs: Int32Array.of(0, 0, 5), local: mixed },
      {},
    ];
    for (const change of wrong) {
      const request = { operation: "READ", local, remote, ...change } as unknown as TransferRequest;
      expectThrown(() => reader.agent.transfer(request), "KV_TRANSFER_INVALID");
    }
    expect(reader.agent.telemetry()).toMatchObject({ transfersPosted: 0, transfersInFlight: 0 });
    expect(Buffer.compare(reader.memory.bytes, pattern(8192, 0))).toBe(0);
  });

  test("lists of another agent are rejected", async () => {
    const reader = await fixture.side(8192, 0);
    const other = await fixture.side(8192, 0);
    const owner = await fixture.side(8192, 1);
    const own = await blockLists(fixture, reader, owner, 1024);
    const others = await blockLists(fixture, other, owner, 1024);
    for (const mixed of [{ local: others.local }, { remote: others.remote }]) {
      const request = readOf({ ...own, ...mixed }, Int32Array.of(0));
      expectThrown(() => reader.agent.transfer(request), "KV_TRANSFER_INVALID");
    }
  });
}
