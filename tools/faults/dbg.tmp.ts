import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { seededRandom } from "@kv/transport-memory";
import { faultRunOn } from "../../packages/pull/test/fault-run.js";
import { fakeGround } from "./fake-ground.js";
import { REAL_TIMES } from "./real-time.js";

for (let i = 0; i < Number(process.argv[3] ?? 4); i++) {
  const r = await faultRunOn(
    await fakeGround({ backend: process.argv[2] as any, random: seededRandom(`s${i}`) }),
    {
      requests: 600,
      seed: `s${i}`,
      clients: 24,
      times: REAL_TIMES,
      deathEvery: Number(process.argv[4] ?? 120),
      ...(process.argv[5] === "push"
        ? { connector: pushConnector, atOnce: 0.6, numBlocks: 192, layerwise: true }
        : { connector: pullConnector }),
    },
  );
  console.log(i, r.violationCount, r.violations[0], r.outcomes.ok, r.seconds, JSON.stringify(r.left));
}
