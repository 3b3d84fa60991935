// A long suite: each end of a request in each way, some 10,000 cases. CI runs every seventh: besides
// the fault no axis has a multiple of seven values.
import { expect, test } from "vitest";
import { AXES, all } from "./cases.js";
import { runCases } from "./run-case.js";

const EACH = process.env["KV_LONG"] === "1" ? 1 : 7;

test.each(AXES.fault)(
  "however a request ends (%s), its client has the truth, nothing is held, and nobody else is blamed",
  { timeout: 600_000 },
  async (fault) => {
    const cases = all().filter((one) => one.fault === fault);
    expect(await runCases(cases.filter((_, at) => at % EACH === 0))).toEqual([]);
  },
);
