import { AdminServer } from "@kv/fleet/front-end";
import { systemClock } from "@kv/interface";
import type { Pool } from "@kv/pool";
import { poolOperations } from "../../packages/pool/src/program/pool-operations.js";

/** The pool's routes for routers, as its program serves them. */
export async function servePool(pool: Pool) {
  const admin = new AdminServer({
    settings: { host: "127.0.0.1", port: 0 },
    clock: systemClock(),
    operations: poolOperations(pool),
  });
  return { admin, url: await admin.listen() };
}
