import { describe } from "vitest";
import { boundarySuite } from "./boundary-suite.js";
import { KV_EVENTS_ARGUMENTS, kvEventsSuite } from "./kv-events-suite.js";
import { proxyFaultSuite } from "./proxy-fault-suite.js";
import { proxyPair } from "./proxy-pair.js";
import { proxyShortSuite } from "./proxy-short-suite.js";
import { sidecarSuite } from "./sidecar-suite.js";

// kv-proxy in front of one vLLM P and one vLLM D, and as a sidecar beside D, pair after pair.

describe("0.33, pull", () => {
  const pair = proxyPair({ version: "0.33", mode: "pull" });
  boundarySuite(pair);
  proxyFaultSuite(pair);
  describe("through a sidecar", () => sidecarSuite(pair, "pull"));
});

describe("0.33, pull, with KV events", () => {
  kvEventsSuite(proxyPair({ version: "0.33", mode: "pull" }, {}, KV_EVENTS_ARGUMENTS));
});

describe("0.33, push", () => {
  const pair = proxyPair({ version: "0.33", mode: "push" }, { mode: "push" });
  proxyShortSuite(pair, "push");
  proxyShortSuite(pair, "auto");
  describe("through a sidecar", () => sidecarSuite(pair, "push"));
});

describe("0.32, pull", () => {
  proxyShortSuite(proxyPair({ version: "0.32", mode: "pull" }), "pull");
});
