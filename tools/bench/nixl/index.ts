import type { Run } from "../run.js";
import { bandwidth, gpu, libfabric, ownMemory, threads } from "./bandwidth.js";
import { openFixture } from "./fixture.js";
import { notifications, smallRead, whileMoving } from "./latency.js";
import { bigList, handshake } from "./lists.js";

const PARTS = {
  bandwidth,
  ownMemory,
  libfabric,
  gpu,
  threads,
  smallRead,
  notifications,
  whileMoving,
  bigList,
  handshake,
};
/** A median of fewer rounds means little on a machine that runs other work. */
const ROUNDS = Math.max(7, Number(process.env["KV_BENCH_ROUNDS"] ?? 9));

export async function nixl(run: Run) {
  const fixture = await openFixture(run.rounds(ROUNDS));
  try {
    return await run.parts(PARTS, fixture);
  } finally {
    await fixture.close();
  }
}
