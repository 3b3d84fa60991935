import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { it } from "vitest";
import { killPools } from "./kills.js";

it.skipIf(nixlMissing !== undefined)(
  "four kills at any moment: no acknowledged block is lost, and none is torn",
  { timeout: 60_000 },
  () => killPools(4),
);
