// A long suite: kills a process a thousand times.
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { it } from "vitest";
import { killPools } from "./kills.js";

/** CI has 90 minutes for everything. */
const KILLS = process.env["CI"] === "true" ? 100 : 1000;

it.skipIf(nixlMissing !== undefined)(
  "killed a thousand times at any moment (in CI a hundred): no acknowledged block is lost, and none is torn",
  { timeout: 3_600_000 },
  () => killPools(KILLS),
);
