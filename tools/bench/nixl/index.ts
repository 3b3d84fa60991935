import type { Row } from "../report.js";
import { bandwidth, gpu, libfabric, limits, ownMemory, threads } from "./bandwidth.js";
import { idleAgent, whileMoving } from "./event-loop.js";
import { type BenchFixture, openFixture } from "./fixture.js";
import { notifications, queuedReads, smallRead } from "./latency.js";
import { bigList, handshake } from "./lists.js";

const PARTS: Readonly<Record<string, (fixture: BenchFixture) => Promise<readonly Row[]>>> = {
  bandwidth,
  ownMemory,
  libfabric,
  gpu,
  threads,
  limits,
  smallRead,
  queuedReads,
  notifications,
  whileMoving,
  bigList,
  handshake,
  idleAgent,
};

/** Measures every part, or those in `only`; returns the rows of the table. */
export async function nixl(only: readonly string[] = Object.keys(PARTS)): Promise<readonly Row[]> {
  const unknown = only.filter((name) => !(name in PARTS));
  if (unknown.length > 0)
    throw new Error(`no part ${unknown.join(", ")}; there are ${Object.keys(PARTS).join(", ")}`);
  const rows: Row[] = [];
  const fixture = await openFixture();
  try {
    for (const name of only) {
      process.stderr.write(`  ${name} …\n`);
      rows.push(...((await PARTS[name]?.(fixture)) ?? []));
    }
  } finally {
    await fixture.close();
  }
  return rows;
}
