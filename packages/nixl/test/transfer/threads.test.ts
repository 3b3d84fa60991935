import { transportSuite } from "@kv/conformance/transport";
import { nixlTransport } from "@kv/nixl";
import { describe } from "vitest";
import { nixlMissing } from "../support/nixl-available.js";

describe.skipIf(nixlMissing)(`UCX with several threads (${nixlMissing ?? "found"})`, () => {
  const backends = [{ name: "UCX", parameters: { num_threads: "2" } }];
  transportSuite({ name: "nixl (2 threads)", create: async () => nixlTransport({ backends }) });
});
