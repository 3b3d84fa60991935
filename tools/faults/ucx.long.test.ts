// A long suite: fault runs over the addon; npm test has those over the memory transport.
import { faultRunOn } from "@kv/testing/faults/fault-run";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, it } from "vitest";
import { CLEAN_END, expectCleanEnd, LOADS, seed } from "./loads.js";
import { multiProcessFixture } from "./multi-process-fixture.js";

describe.skipIf(nixlMissing)(
  `faults over NIXL and UCX, each engine in its own process (${nixlMissing ?? "found"})`,
  () => {
    it.each(["pull", "push"] as const)(
      `%s: ${CLEAN_END}`,
      async (name) => {
        const fixture = multiProcessFixture({ connector: name, seed: `${seed} ${name}` });
        expectCleanEnd(await faultRunOn(fixture, LOADS[name]), LOADS[name]);
      },
      1_800_000,
    );
  },
);
