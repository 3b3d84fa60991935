import type { Row } from "../report.js";
import { bandwidth, limits } from "./bandwidth.js";
import { notifications, smallRead } from "./latency.js";
import { bigList, handshake } from "./lists.js";
import { idleAgent, whileMoving } from "./loop.js";
import { openStage, type Stage } from "./stage.js";

const PARTS: Readonly<Record<string, (stage: Stage) => Promise<readonly Row[]>>> = {
  bandwidth,
  limits,
  smallRead,
  notifications,
  whileMoving,
  bigList,
  handshake,
  idleAgent,
};

/** The table of what is promised of `@kv/nixl`. KV_BENCH_PARTS=smallRead,… measures some of it. */
export async function nixl(): Promise<readonly Row[]> {
  const asked = process.env["KV_BENCH_PARTS"]?.split(",") ?? Object.keys(PARTS);
  const unknown = asked.filter((name) => !(name in PARTS));
  if (unknown.length > 0)
    throw new Error(`no part ${unknown.join(", ")}; there are ${Object.keys(PARTS).join(", ")}`);
  const rows: Row[] = [];
  const stage = await openStage();
  try {
    for (const name of asked) {
      process.stderr.write(`  ${name} …\n`);
      rows.push(...((await PARTS[name]?.(stage)) ?? []));
    }
  } finally {
    await stage.close();
  }
  return rows;
}
