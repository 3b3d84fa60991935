import { describe, expect, it } from "vitest";
import { type FaultRunOptions, faultRun } from "./fault-run.js";

const REQUESTS = Number(process.env.KV_REQUESTS ?? 1000);

/** A run that differs: more or fewer of its requests succeed. */
interface Variant {
  readonly name: string;
  /** `seed` is added to that of the whole. */
  readonly options: Partial<FaultRunOptions>;
  readonly leastOk: number;
}

/**
 * Runs of a connector under faults. Most requests must succeed: a connector that refuses every one
 * would pass the other checks.
 */
export function describeFaults(
  name: "pull" | "push",
  {
    leastOk,
    variants,
    ...run
  }: Partial<FaultRunOptions> & {
    readonly leastOk: number;
    readonly variants: readonly Variant[];
  },
): void {
  // The default seed is fixed. KV_SEED=random uses a new seed for each run, and prints it.
  const asked = process.env.KV_SEED ?? name;
  const seed = asked === "random" ? `${Date.now()}` : asked;
  const replay = `replay: KV_SEED=${seed} KV_REQUESTS=${REQUESTS} npx vitest run packages/${name}/test/faults.test.ts`;
  const all: Variant = { name: "", options: {}, leastOk };

  describe(`${REQUESTS} requests under faults`, () => {
    it.each([all, ...variants])(
      `end with the correct KV or a typed error, and nothing stays held$name (KV_SEED=${seed})`,
      async (variant) => {
        const requests = variant === all ? REQUESTS : Math.ceil(REQUESTS / 4);
        const { seed: own = "", ...options } = variant.options;
        const report = await faultRun({ seed: seed + own, requests, ...run, ...options });
        console.info(JSON.stringify({ seed, ...report }));
        expect(report.violations, replay).toEqual([]);
        expect(report.left, replay).toEqual({});
        const total = Object.values(report.outcomes).reduce((sum, count) => sum + count, 0);
        expect(total, replay).toBe(requests);
        expect(report.outcomes.ok ?? 0, replay).toBeGreaterThan(requests * variant.leastOk);
      },
      1_800_000,
    );

    it("give equal reports for equal seeds", async () => {
      const first = await faultRun({ seed: "again", requests: 300, ...run });
      expect(await faultRun({ seed: "again", requests: 300, ...run })).toEqual(first);
    }, 900_000);
  });
}
