// A long suite: fault runs over the addon; npm test has those over the memory transport.
import { faultRunOn } from "@kv/testing/faults/fault-run";
import { fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { seededRandom } from "@kv/transport-memory";
import { describe, it } from "vitest";
import { fakeNixlFixture } from "./fake-nixl-fixture.js";
import { CLEAN_END, expectCleanEnd, LOADS, seed } from "./loads.js";

describe.skipIf(fakeMissing)(
  `faults over the addon with a fake NIXL library (${fakeMissing ?? "found"})`,
  () => {
    it.each([
      ["pull", "UCX"],
      ["push", "UCX"],
      ["pull", "LIBFABRIC"],
      ["push", "LIBFABRIC"],
    ] as const)(
      `%s, %s: ${CLEAN_END}`,
      async (name, backend) => {
        const fixture = await fakeNixlFixture({
          backend,
          random: seededRandom(`${seed} ${name} ${backend}`),
        });
        expectCleanEnd(await faultRunOn(fixture, LOADS[name]), LOADS[name]);
      },
      1_800_000,
    );
  },
);
