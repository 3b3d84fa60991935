// A long suite: the suite of transports over LIBFABRIC; conformance.test.ts has it over UCX.
import { transportSuite } from "@kv/conformance/transport";
import { nixlTransport } from "@kv/nixl";
import { describe } from "vitest";
import { libfabricMissing } from "../support/libfabric-available.js";

describe.skipIf(libfabricMissing)(
  `real NIXL over LIBFABRIC (${libfabricMissing ?? "found"})`,
  () => {
    transportSuite({
      name: "nixl (LIBFABRIC)",
      create: async () => nixlTransport({ backends: ["LIBFABRIC"] }),
    });
  },
);
