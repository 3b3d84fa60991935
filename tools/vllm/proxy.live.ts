import { describe } from "vitest";
import { boundarySuite } from "./boundary-suite.js";
import { shortSuite } from "./front-suite.js";
import { KV_EVENTS_ARGUMENTS, kvEventsSuite } from "./kv-events-suite.js";
import { proxyFaultSuite } from "./proxy-fault-suite.js";
import { proxyPair } from "./proxy-pair.js";
import { sidecarSuite } from "./sidecar-suite.js";

// kv-proxy in front of one vLLM P and one vLLM D, and as a sidecar beside D, pair after pair.

describe("0.33, pull", () => {
  const pair = proxyPair({ version: "0.33", mode: "pull" });
  boundarySuite(pair);
  proxyFaultSuite(pair);
  describe("through a sidecar", () => sidecarSuite(pair));
});

describe("0.33, pull, with KV events", () => {
  kvEventsSuite(proxyPair({ version: "0.33", mode: "pull" }, { args: KV_EVENTS_ARGUMENTS }));
});

describe("0.33, push", () => {
  const pair = proxyPair({ version: "0.33", mode: "push" }, { base: { mode: "push" } });
  shortSuite(pair, "push");
  shortSuite(pair, "auto");
  describe("through a sidecar", () => sidecarSuite(pair));
});

describe("0.32, pull", () => {
  shortSuite(proxyPair({ version: "0.32", mode: "pull" }), "pull");
});
