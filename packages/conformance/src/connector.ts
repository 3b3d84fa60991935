import { describe } from "vitest";
import type { ConnectorSuiteOptions } from "./connector/engine.js";
import { failureTests } from "./connector/failures.js";
import { createFixture } from "./connector/fixture.js";
import { happyPathTests } from "./connector/happy-paths.js";

export type { ConnectorEnd, ConnectorPair, ConnectorSuiteOptions } from "./connector/engine.js";

/**
 * Tests a connector against the contracts of `SchedulerConnector` and `WorkerConnector`. The suite
 * runs a small engine on each side that makes the calls in the contract's order, fills free blocks
 * with a poison byte, and passes all data between the sides through JSON.
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
