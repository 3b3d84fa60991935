// A long suite: many agents in worker threads.
import { transportSuite } from "@kv/conformance/transport";
import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe } from "vitest";

describe.skipIf(nixlMissing)(`UCX with several threads (${nixlMissing ?? "found"})`, () => {
  const backends = [{ name: "UCX", parameters: { num_threads: "2" } }];
  transportSuite({ name: "nixl (2 threads)", create: async () => nixlTransport({ backends }) });
});
