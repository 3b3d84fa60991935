import { describe } from "vitest";
import { envoySuite } from "./envoy-suite.js";
import { proxyPair } from "./proxy-pair.js";

// Clients in front of Envoy, which asks kv-epp and sends requests to a sidecar beside one vLLM D,
// which reads from one vLLM P.

describe.each(["pull", "push"] as const)("0.33, %s, through Envoy", (mode) => {
  envoySuite(proxyPair({ version: "0.33", mode }));
});
