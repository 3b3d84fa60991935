import { z } from "zod";
import { STATUSES, VERDICTS } from "./doctor-report.js";

/**
 * The zod schemas of a doctor's `--json` output. `areas` group the checks; `exampleId` describes
 * `id`.
 */
export function doctorSchemas<const Area extends string>(
  areas: readonly Area[],
  exampleId: string,
) {
  const check = z.object({
    id: z.string().describe(`Stable name, such as ${exampleId}.`),
    area: z.enum(areas),
    title: z.string(),
    status: z
      .enum(STATUSES)
      .describe(
        "ok; note: a fact that is neither good nor bad; warn: it works, but worse than it could; fail: it does not work.",
      ),
    found: z.string().describe("What was found, for people."),
    fix: z.string().optional().describe("How to fix it."),
    details: z
      .record(z.string(), z.unknown())
      .optional()
      .describe("The finding in a form for programs."),
  });
  const report = z.object({
    version: z.literal(1),
    verdict: z.enum(VERDICTS).describe("The worst of the checks; a note counts as ok."),
    counts: z.object({ ok: z.int(), note: z.int(), warn: z.int(), fail: z.int() }),
    checks: z.array(check),
  });
  return { check, report };
}
