import { AdminServer } from "@kv/fleet/front-end";
import { systemClock } from "@kv/interface";
import type { Pool } from "@kv/pool";

/** The pool's routes for routers, as its program serves them. */
export async function servePool(pool: Pool) {
  const admin = new AdminServer({
    settings: { host: "127.0.0.1", port: 0 },
    clock: systemClock(),
    operations: {
      status: () => pool.status(),
      metrics: { contentType: "text/plain", text: async () => "" },
      further: {
        "GET /blocks": (query) =>
          pool.content(query.get("epoch") ?? "", Number(query.get("after") ?? 0)),
        "POST /copies": async (_, body) => ({
          copied: await pool.copyFrom((body as { peer: string }).peer, 20_000),
        }),
      },
    },
  });
  return { admin, url: await admin.listen() };
}
