import { describe } from "vitest";
import { failureTests } from "./connector/failures.js";
import { createFixture } from "./connector/fixture.js";
import { happyPathTests } from "./connector/happy-paths.js";
import type { ConnectorSuiteOptions } from "./connector/pair.js";

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
    const fixture = createFixture(options);
    describe("happy paths", () => happyPathTests(fixture));
    describe("failures", () => failureTests(fixture, options));
  });
}
