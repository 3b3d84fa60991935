import { transportSuite } from "@kv/conformance/transport";
import { nixlTransport } from "@kv/nixl";
import { describe } from "vitest";
import { nixlMissing } from "../support/nixl-available.js";

describe.skipIf(nixlMissing)(`real NIXL over UCX (${nixlMissing ?? "found"})`, () => {
  transportSuite({ name: "nixl", create: async () => nixlTransport() });
});
