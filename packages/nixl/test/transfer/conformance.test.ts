import { transportSuite } from "@kv/conformance/transport";
import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe } from "vitest";

describe.skipIf(nixlMissing)(`real NIXL over UCX (${nixlMissing ?? "found"})`, () => {
  transportSuite({ name: "nixl", create: async () => nixlTransport() });
});
