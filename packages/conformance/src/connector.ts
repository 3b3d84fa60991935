import { describe } from "vitest";
import type { ConnectorSuiteOptions } from "./connector/engine.js";
import { failureTests } from "./connector/failures.js";
import { Fixture } from "./connector/fixture.js";
import { happyPathTests } from "./connector/happy-paths.js";
import { TIME_LIMIT_MS } from "./time-limits.js";

export type { ConnectorEnd, ConnectorPair, ConnectorSuiteOptions } from "./connector/engine.js";

/**
 * Tests a connector against `SchedulerConnector` and `WorkerConnector`. A small engine on each side
 * fills free blocks with a poison byte; all data between the sides passes through JSON.
 *
 *     import { connectorSuite } from "@kv/conformance/connector";
 *     connectorSuite({ name: "mine on memory", createPair });
 */
export function connectorSuite(options: ConnectorSuiteOptions): void {
  describe(`connector ${options.name}`, { timeout: TIME_LIMIT_MS }, () => {
    const fixture = new Fixture(options);
    describe("happy paths", () => happyPathTests(fixture));
    describe("failures", () => failureTests(fixture, options));
  });
}
