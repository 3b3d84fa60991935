import type { PreparedList, TransferRequest } from "@kv/interface";
import { expect, test } from "vitest";
import { expectThrown } from "../expect-error.js";
import {
  blockLists,
  blockPair,
  expectBytes,
  type Fixture,
  pattern,
  prepare,
  readOf,
} from "./fixture.js";

type Change = Partial<Record<keyof TransferRequest, unknown>>;
type Lists = Record<"local" | "remote" | "odd", PreparedList>;

const ids = (...numbers: number[]) => Int32Array.of(...numbers);
const RUNS = ids(0, 2, 3, 4, 0, 1);
const PAIRS = { localIds: ids(0, 1), remoteIds: ids(2, 3) };

/** Changes to a transfer of `PAIRS` between two lists of 8 blocks. `odd` has blocks of two sizes. */
const WRONG_PAIRS = ({ local, remote, odd }: Lists): readonly Change[] => [
  { localIds: ids(0) },
  { remoteIds: ids(2, 3, 4) },
  { localIds: ids(), remoteIds: ids() },
  { localIds: ids(0, 8) },
  { remoteIds: ids(2, 8) },
  { localIds: ids(-1, 0) },
  { remoteIds: ids(2, -2147483648) },
  { local: odd, localIds: ids(4, 5) },
  { local: remote, remote: local },
  { remote: local },
  { operation: "COPY" },
  { localIds: [0, 1] },
  { timeoutMs: Number.NaN },
  { timeoutMs: -1 },
  { notification: "text" },
];

const WRONG_RUNS = ({ odd }: Lists): readonly Change[] => [
  { runs: ids() },
  { runs: ids(0, 0) },
  { runs: ids(0, 0, 0) },
  { runs: ids(0, 0, -1) },
  { runs: ids(-1, 0, 1) },
  { runs: ids(0, -1, 2) },
  { runs: ids(0, 0, 9) },
  { runs: ids(7, 0, 2) },
  { runs: ids(0, 7, 2) },
  { runs: ids(0, 0, 1, 2, 7, 2147483647) },
  { runs: [0, 0, 1] },
  { runs: ids(0, 0, 1), localIds: ids(0), remoteIds: ids(0) },
  { runs: ids(0, 0, 5), local: odd },
  {},
];

const WRONG_OFFSETS = (): readonly Change[] => [
  { runs: RUNS, offsets: ids(0, 0, 4, 0) },
  { runs: RUNS, offsets: ids(0, 4) },
  { runs: RUNS, offsets: ids(-1, 0) },
  { runs: RUNS, offsets: ids(0, -1) },
  { runs: RUNS, offsets: ids(2 ** 31 - 1, 0) },
  { runs: RUNS, offsets: ids(0) },
  { runs: RUNS, offsets: ids() },
  { runs: RUNS, offsets: [0, 0] },
  { localIds: ids(0), remoteIds: ids(0), offsets: ids(0, 0) },
];

/** Invalid transfers, as pairs and as runs, throw synchronously. */
export function invalidTransferTests(fixture: Fixture): void {
  test.each([
    ["with invalid arguments", PAIRS, WRONG_PAIRS],
    ["with invalid runs", {}, WRONG_RUNS],
    [
      "with offsets that move a run out of its list, are no rows, or come with pairs",
      {},
      WRONG_OFFSETS,
    ],
  ] as const)("a transfer %s throws at once and moves nothing", async (_what, right, wrong) => {
    const { reader, local, remote } = await blockPair(fixture, 8192, 1024);
    const rows = [
      [0, 1024, 1024, 4],
      [4096, 512, 512, 4],
    ] as const;
    const odd = await prepare(fixture, reader.agent, reader, ...rows);
    const plain = { operation: "READ", local, remote, ...right };
    for (const change of wrong({ local, remote, odd })) {
      const request = { ...plain, ...change } as unknown as TransferRequest;
      const codes = ["KV_TRANSFER_INVALID", "KV_NOTIFICATION_INVALID"] as const;
      expectThrown(
        () => reader.agent.transfer(request),
        ...("notification" in change ? codes : codes.slice(0, 1)),
      );
    }
    await fixture.waitFor(remote.close());
    expectThrown(
      () => reader.agent.transfer({ ...readOf({ local, remote }, ids(0, 1)), ...PAIRS }),
      "KV_LIST_CLOSED",
    );
    expect(reader.agent.telemetry()).toMatchObject({ transfersPosted: 0, transfersInFlight: 0 });
    expectBytes(reader.memory.bytes, pattern(8192, 0));
  });

  test("lists of another agent are rejected", async () => {
    const reader = await fixture.side(8192, 0);
    const other = await fixture.side(8192, 0);
    const owner = await fixture.side(8192, 1);
    const own = await blockLists(fixture, reader, owner, 1024);
    const others = await blockLists(fixture, other, owner, 1024);
    for (const mixed of [{ local: others.local }, { remote: others.remote }]) {
      const request = readOf({ ...own, ...mixed }, ids(0));
      expectThrown(() => reader.agent.transfer(request), "KV_TRANSFER_INVALID");
    }
  });
}
