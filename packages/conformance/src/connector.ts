import { describe } from "vitest";
import { ground } from "./connector/ground.js";
import type { ConnectorSuiteOptions } from "./connector/pair.js";
import { roadTests } from "./connector/roads.js";
import { troubleTests } from "./connector/troubles.js";

export type { ConnectorEnd, ConnectorPair, ConnectorSuiteOptions } from "./connector/pair.js";

/**
 * What the doc comments of `SchedulerConnector` and `WorkerConnector` promise, as tests: a small engine on each side that
 * keeps the order of calls, poisons free blocks, and passes everything between the sides through JSON.
 *
 *     import { connectorSuite } from "@kv/conformance/connector";
 *     connectorSuite({ name: "mine on memory", createPair });
 */
export function connectorSuite(options: ConnectorSuiteOptions): void {
  describe(`connector ${options.name}`, () => {
    const stand = ground(options);
    describe("a prompt's road", () => roadTests(stand));
    describe("troubles", () => troubleTests(stand, options));
  });
}
