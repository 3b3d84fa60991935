import type { Row } from "../report.js";
import { bandwidth, libfabric, limits } from "./bandwidth.js";
import { notifications, smallRead } from "./latency.js";
import { bigList, handshake } from "./lists.js";
import { idleAgent, whileMoving } from "./loop.js";
import { openStage, type Stage } from "./stage.js";

const PARTS: Readonly<Record<string, (stage: Stage) => Promise<readonly Row[]>>> = {
  bandwidth,
  libfabric,
  limits,
  smallRead,
  notifications,
  whileMoving,
  bigList,
  handshake,
  idleAgent,
};

/** The table of what is promised of `@kv/nixl`, or some parts of it. */
export async function nixl(only: readonly string[] = Object.keys(PARTS)): Promise<readonly Row[]> {
  const unknown = only.filter((name) => !(name in PARTS));
  if (unknown.length > 0)
    throw new Error(`no part ${unknown.join(", ")}; there are ${Object.keys(PARTS).join(", ")}`);
  const rows: Row[] = [];
  const stage = await openStage();
  try {
    for (const name of only) {
      process.stderr.write(`  ${name} …\n`);
      rows.push(...((await PARTS[name]?.(stage)) ?? []));
    }
  } finally {
    await stage.close();
  }
  return rows;
}
